"""The MX quantizer against golden vectors, a slow exact definition, and the properties a reader relies on."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from k3rl.numerics import mx, project

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "mx" / "mx.safetensors")
E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m) * Fraction(2) ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]
FORMATS = {
    "mxfp4": (mx.quantize_mxfp4, mx.dequantize_mxfp4, mx.fake_quantize_mxfp4),
    "mxfp8": (mx.quantize_mxfp8, mx.dequantize_mxfp8, mx.fake_quantize_mxfp8),
}
every_format = pytest.mark.parametrize("name", FORMATS)
every_rule = pytest.mark.parametrize("rule", mx.RULES)

finite_f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Values with few mantissa bits hit rounding boundaries often; plain floats almost never do.
boundary = st.builds(
    lambda m, e, s: s * m * 2.0**e, st.integers(0, 64), st.integers(-12, 4), st.sampled_from([1.0, -1.0])
)
block_values = st.lists(st.one_of(finite_f32, boundary), min_size=32, max_size=32)


def tensor(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def exact_exponent(amax: Fraction, grid: list[Fraction], rule: str) -> int:
    """The scale exponent by its definition, in exact arithmetic."""
    top, emax, mantissa_bits = (grid[-1], 2, 1) if len(grid) == 8 else (grid[-1], 8, 3)
    if amax == 0:
        return 0 if (rule == "ceil" and len(grid) == 8) else -127
    exponent = -400
    while amax >= Fraction(2) ** (exponent + 1):
        exponent += 1
    if rule == "ceil":
        result = exponent - emax - 2
        while top * Fraction(2) ** result < amax:
            result += 1
    else:
        result = exponent - emax
        if rule == "even" and amax / Fraction(2) ** exponent >= 2 - Fraction(1, 2 ** (mantissa_bits + 1)):
            result += 1
    return min(max(result, -127), 127)


def exact_block(values: list[float], grid: list[Fraction], rule: str) -> tuple[int, list[Fraction]]:
    """(scale byte, decoded values) by searching the grid for the nearest element of every value."""
    exact = [Fraction(v) for v in values]
    exponent = exact_exponent(max(abs(v) for v in exact), grid, rule)
    scale = Fraction(2) ** exponent
    decoded = []
    for value in exact:
        y = abs(value) / scale
        above = min(bisect.bisect_left(grid, y), len(grid) - 1)
        below = max(above - 1, 0)
        to_below, to_above = abs(y - grid[below]), abs(y - grid[above])
        tie_down = (rule == "ceil" and len(grid) == 8) or below % 2 == 0
        down = to_below < to_above or (to_below == to_above and tie_down)
        index = below if down else above
        decoded.append(math.copysign(1, value) * grid[index] * scale)
    return exponent + 127, decoded


@pytest.mark.parametrize(("key", "dtype"), [("f64", torch.float64), ("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_every_byte_under_scales_0_to_254_decodes_exactly(key: str, dtype: torch.dtype) -> None:
    got = mx.dequantize_mxfp4(GOLDEN["dequant.packed"], GOLDEN["dequant.scale"], dtype)
    assert torch.equal(got, GOLDEN[f"dequant.{key}"])
    assert torch.equal(got.signbit(), GOLDEN[f"dequant.{key}"].signbit())


def test_several_scales_a_row_decode_exactly() -> None:
    got = mx.dequantize_mxfp4(GOLDEN["dequant2.packed"], GOLDEN["dequant2.scale"])
    assert torch.equal(got, GOLDEN["dequant2.f32"])


def test_scale_byte_255_decodes_to_nan_and_nothing_finite() -> None:
    assert mx.dequantize_mxfp4(GOLDEN["dequant255.packed"], GOLDEN["dequant255.scale"]).isnan().all()
    scale = torch.full((1, 1), 255, dtype=torch.uint8)
    assert mx.dequantize_mxfp8(torch.zeros(1, 32, dtype=torch.uint8), scale).isnan().all()


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 254])
def test_scale_bytes_are_biased_exponents_not_factors(byte: int) -> None:
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)  # every element is 1
    scale = torch.full((1, 1), byte, dtype=torch.uint8)
    expected = math.ldexp(1.0, byte - 127)
    assert mx.dequantize_mxfp4(packed, scale, torch.float64).unique().tolist() == [expected]
    assert mx.dequantize_mxfp4(packed, scale, torch.float32).unique().tolist() == [expected]


def test_the_example_block_of_the_format_note_decodes() -> None:
    packed = torch.tensor([[0x21, 0xF7, 0x9A, 0x3C] + [0] * 12], dtype=torch.uint8)
    got = mx.dequantize_mxfp4(packed, torch.tensor([[125]], dtype=torch.uint8))
    assert got[0, :8].tolist() == [0.125, 0.25, 1.5, -1.5, -0.25, -0.125, -0.5, 0.375]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_rule
def test_mxfp4_bytes_equal_the_golden_bytes(rule: str, dtype: torch.dtype) -> None:
    packed, scale = mx.quantize_mxfp4(GOLDEN["quant.x"].to(dtype), rule)
    assert torch.equal(packed, GOLDEN[f"quant.{rule}.packed"])
    assert torch.equal(scale, GOLDEN[f"quant.{rule}.scale"])
    fake = mx.fake_quantize_mxfp4(GOLDEN["quant.x"].to(dtype), rule).float()
    assert torch.equal(fake, GOLDEN[f"quant.{rule}.dequant"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_mxfp8_bytes_equal_the_golden_bytes(rule: str, dtype: torch.dtype) -> None:
    elements, scale = mx.quantize_mxfp8(GOLDEN["quant.x"].to(dtype), rule)
    assert torch.equal(elements, GOLDEN[f"mxfp8.{rule}.elem_bytes"])
    assert torch.equal(scale, GOLDEN[f"mxfp8.{rule}.scale"])
    fake = mx.fake_quantize_mxfp8(GOLDEN["quant.x"].to(dtype), rule).float()
    assert torch.equal(fake, GOLDEN[f"mxfp8.{rule}.dequant"])


@every_format
@every_rule
@settings(max_examples=60, deadline=None)
@given(values=block_values)
def test_any_block_equals_the_exact_search(name: str, rule: str, values: list[float]) -> None:
    quantize, dequantize, fake = FORMATS[name]
    x = tensor(values)
    byte, decoded = exact_block(x.tolist(), E2M1 if name == "mxfp4" else E4M3, rule)
    elements, scale = quantize(x, rule)
    assert scale.tolist() == [byte]
    got = dequantize(elements, scale, torch.float64)
    assert [Fraction(v) for v in got.tolist()] == decoded
    assert torch.equal(fake(x, rule), dequantize(elements, scale, torch.float32))


@every_format
@every_rule
@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.one_of(st.floats(-1e45, 1e45), boundary), min_size=32, max_size=32))
def test_float64_blocks_are_rounded_once(name: str, rule: str, values: list[float]) -> None:
    """A float64 just above a tie must not be rounded to the tie first, as a cast through float32 would do."""
    quantize, dequantize, fake = FORMATS[name]
    x = torch.tensor(values, dtype=torch.float64)
    byte, decoded = exact_block(values, E2M1 if name == "mxfp4" else E4M3, rule)
    elements, scale = quantize(x, rule)
    assert scale.tolist() == [byte]
    assert [Fraction(v) for v in dequantize(elements, scale, torch.float64).tolist()] == decoded
    assert [Fraction(v) for v in fake(x, rule).tolist()] == decoded


def test_float64_just_above_a_tie_goes_up() -> None:
    x = torch.zeros(32, dtype=torch.float64)
    x[0], x[1], x[2] = 6.0, 0.25, math.nextafter(0.25, 1)
    assert mx.fake_quantize_mxfp4(x)[:3].tolist() == [6.0, 0.0, 0.5]
    x[0], x[1], x[2] = 448.0, 17.0, math.nextafter(17.0, 18)
    assert mx.fake_quantize_mxfp8(x)[:3].tolist() == [448.0, 16.0, 18.0]


@every_format
@every_rule
@settings(max_examples=40, deadline=None)
@given(values=block_values)
def test_fake_quantization_is_idempotent_in_value(name: str, rule: str, values: list[float]) -> None:
    fake = FORMATS[name][2]
    once = fake(tensor(values), rule)
    if once.isfinite().all():  # a block near the top of float32 may decode above its range
        assert torch.equal(fake(once, rule), once)


@every_format
@every_rule
def test_decoded_bytes_quantize_to_the_same_values(name: str, rule: str) -> None:
    quantize, dequantize, _ = FORMATS[name]
    generator = torch.Generator().manual_seed(3)
    width = 16 if name == "mxfp4" else 32
    elements = torch.randint(0, 256, (512, width), generator=generator, dtype=torch.uint8)
    if name == "mxfp8":
        elements[(elements & 0x7F) == 0x7F] = 0
        if rule != "ceil":  # a block whose largest element is 240 or 480 / 2^k would saturate at 448 / 2^k
            elements[:, 0] = 0x7E
    scale = torch.randint(0, 255, (512, 1), generator=generator, dtype=torch.uint8)
    values = dequantize(elements, scale, torch.float64)
    assert torch.equal(dequantize(*quantize(values, rule), torch.float64), values)


@every_format
@every_rule
@settings(max_examples=40, deadline=None)
@given(values=block_values)
def test_rounding_is_monotonic_within_a_block(name: str, rule: str, values: list[float]) -> None:
    x, order = tensor(values).sort()
    assert order.numel() == 32
    y = FORMATS[name][2](x, rule)
    assert (y[1:] >= y[:-1]).all()


@every_format
@every_rule
def test_blocks_do_not_see_each_other(name: str, rule: str) -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 32:64] = 1e30
    fake = FORMATS[name][2]
    kept = [*range(32), *range(64, 96)]
    assert torch.equal(fake(x, rule)[:, kept], fake(changed, rule)[:, kept])


@every_format
@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_non_finite_value_makes_its_block_nan_and_no_other(name: str, rule: str, bad: float) -> None:
    quantize, dequantize, fake = FORMATS[name]
    x = torch.ones(2, 64)
    x[0, 40] = bad
    elements, scale = quantize(x, rule)
    assert scale.flatten().tolist().count(255) == 1
    assert scale[0, 1] == 255
    for y in (fake(x, rule), dequantize(elements, scale)):
        assert y[0, 32:].isnan().all()
        assert torch.equal(y[0, :32], torch.ones(32))
        assert torch.equal(y[1], torch.ones(64))


@every_format
def test_a_nan_with_a_full_payload_is_still_nan(name: str) -> None:
    x = torch.full((32,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    quantize, _, fake = FORMATS[name]
    assert fake(x).isnan().all()
    assert quantize(x)[1].item() == 255


@every_format
@every_rule
def test_zero_blocks_stay_zero(name: str, rule: str) -> None:
    quantize, dequantize, fake = FORMATS[name]
    x = torch.zeros(3, 64)
    x[1] = -0.0
    elements, scale = quantize(x, rule)
    assert (scale < 255).all()
    assert torch.equal(dequantize(elements, scale), torch.zeros(3, 64))
    assert torch.equal(fake(x, rule), torch.zeros(3, 64))


@every_format
def test_flushed_denormals_leave_zero_and_tiny_blocks_finite(name: str) -> None:
    """Scale byte 0 is worth 2^-127, a float32 denormal; with denormals flushed it must not become 0 * inf."""
    x = torch.stack([torch.zeros(32), torch.full((32,), 1e-37), torch.ones(32), torch.full((32,), 3e38)])
    plain = FORMATS[name][2](x)
    assert torch.set_flush_denormal(True)
    try:
        flushed = FORMATS[name][2](x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoding_does_not_depend_on_how_denormals_were_treated_when_it_was_first_done(dtype: torch.dtype) -> None:
    mx.scale_table.cache_clear()
    assert torch.set_flush_denormal(True)
    try:
        mx.scale_table(dtype, torch.device("cpu"))
    finally:
        torch.set_flush_denormal(False)
    worth = mx.scale_table(dtype, torch.device("cpu")).tolist()
    assert worth[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(worth[255])


@every_format
@every_rule
def test_gradient_is_the_incoming_gradient(name: str, rule: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 64, generator=generator).requires_grad_()
    weight = torch.randn(4, 64, generator=generator)
    y = FORMATS[name][2](x, rule)
    assert y.requires_grad
    (y * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)
    assert torch.equal(y.detach(), FORMATS[name][2](x.detach(), rule))


@every_format
def test_expanded_and_strided_gradients_pass_through(name: str) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    FORMATS[name][2](x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 64))


@every_format
@pytest.mark.parametrize("shape", [(0,), (0, 64), (5, 0), (2, 0, 32)])
def test_empty_tensors_are_fine(name: str, shape: tuple[int, ...]) -> None:
    quantize, dequantize, fake = FORMATS[name]
    x = torch.zeros(shape)
    elements, scale = quantize(x)
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    assert dequantize(elements, scale).shape == shape
    assert fake(x).shape == shape


@every_format
def test_leading_dimensions_and_strides_do_not_matter(name: str) -> None:
    quantize, dequantize, fake = FORMATS[name]
    x = torch.randn(3, 5, 2, 64, generator=torch.Generator().manual_seed(2))
    flat = fake(x.reshape(-1, 64)).view(x.shape)
    assert torch.equal(fake(x), flat)
    for strided in (x.transpose(0, 1), torch.randn(64, 7, generator=torch.Generator().manual_seed(2)).t()):
        dense = strided.contiguous()
        assert torch.equal(fake(strided), fake(dense))
        assert torch.equal(dequantize(*quantize(strided)), fake(dense))
        assert torch.equal(quantize(strided)[0], quantize(dense)[0])
    row = torch.randn(1, 32, generator=torch.Generator().manual_seed(2)).expand(4, 32)
    assert torch.equal(fake(row), fake(row.contiguous()))


@every_format
def test_large_tensors_are_rounded_like_their_rows(name: str) -> None:
    """Above 131072 elements a CPU works piece by piece; the last piece here is a short one."""
    x = torch.randn(3, 1400, 64, generator=torch.Generator().manual_seed(8)).requires_grad_()
    fake = FORMATS[name][2]
    y = fake(x)
    assert torch.equal(y.detach(), torch.stack([torch.cat([fake(r) for r in rows.split(350)]) for rows in x.detach()]))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(fake(x.detach().transpose(0, 1)), y.detach().transpose(0, 1))


@every_format
def test_bfloat16_and_float16_round_as_their_float32_values(name: str) -> None:
    quantize, _, fake = FORMATS[name]
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.to(dtype)
        y = fake(narrow)
        assert y.dtype == dtype
        assert torch.equal(y.float(), fake(narrow.float()))
        for got, wanted in zip(quantize(narrow), quantize(narrow.float()), strict=True):
            assert torch.equal(got, wanted)


def test_the_exponent_is_not_taken_from_a_bfloat16_amax() -> None:
    """5.99 * 2^k rounds up to 6 in bfloat16, and 6.01 rounds down to it; only the second needs the larger scale."""
    below, above = torch.full((32,), 5.999), torch.full((32,), 6.001)
    assert mx.quantize_mxfp4(below)[1].item() == 127
    assert mx.quantize_mxfp4(above)[1].item() == 128


def test_the_input_is_left_unchanged() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    before = x.clone()
    for quantize, _, fake in FORMATS.values():
        for rule in mx.RULES:
            quantize(x, rule)
            fake(x, rule)
    assert torch.equal(x, before)


@every_format
def test_a_width_that_is_not_a_multiple_of_32_is_refused(name: str) -> None:
    quantize, _, fake = FORMATS[name]
    for function in (quantize, fake):
        with pytest.raises(mx.QuantizationError, match=r"multiple of 32.*\(2, 40\)"):
            function(torch.zeros(2, 40))
        with pytest.raises(mx.QuantizationError, match="multiple of 32"):
            function(torch.tensor(1.0))
        with pytest.raises(mx.QuantizationError, match="floating-point"):
            function(torch.zeros(32, dtype=torch.int32))


@every_format
def test_an_unknown_rule_is_refused_with_the_known_ones(name: str) -> None:
    for function in (FORMATS[name][0], FORMATS[name][2]):
        with pytest.raises(mx.QuantizationError, match="ceil, floor, even"):
            function(torch.zeros(32), "round")


def test_scales_that_do_not_belong_to_the_elements_are_refused() -> None:
    with pytest.raises(mx.QuantizationError, match=r"need scales \(4, 2\)"):
        mx.dequantize_mxfp4(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8))
    with pytest.raises(mx.QuantizationError, match=r"need scales \(4, 1\)"):
        mx.dequantize_mxfp8(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8))
    with pytest.raises(mx.QuantizationError, match="uint8"):
        mx.dequantize_mxfp4(torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 1))


def test_values_and_scales_are_exact_in_bfloat16() -> None:
    """The bf16 product of fake-quantized values equals the packed product: every decoded value is a bf16 number."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(6))
    for _, _, fake in FORMATS.values():
        y = fake(x)
        assert torch.equal(y.bfloat16().float(), y)


def test_project_gives_what_each_storage_format_decodes_to() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        master = x.to(dtype).requires_grad_()
        quantized = project(master, "mxfp4")
        assert torch.equal(quantized, mx.dequantize_mxfp4(*mx.quantize_mxfp4(master), dtype))
        assert not quantized.requires_grad
        assert torch.equal(project(master, "mxfp4", "floor"), mx.fake_quantize_mxfp4(master.detach(), "floor"))
        assert torch.equal(project(master, "bf16"), master.detach().bfloat16().to(dtype))
        assert torch.equal(project(master, "fp32"), master.detach().float().to(dtype))
        assert {project(master, word).dtype for word in ("mxfp4", "bf16", "fp32")} == {dtype}
    with pytest.raises(mx.QuantizationError, match="mxfp4, bf16, fp32"):
        project(x, "fp8")
