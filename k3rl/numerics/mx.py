"""MXFP4 and MXFP8: the one definition of how k3rl rounds (k3.md 9.1, 9.2, 9.4; OCP Microscaling v1.0).

A block is 32 consecutive values of the last axis. It stores one E8M0 scale byte s, worth 2^(s-127), and 32 elements:
E2M1 nibbles {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign bit (MXFP4), or E4M3 bytes, largest value 448 (MXFP8).

Scale rules, for a block whose largest magnitude is amax and a format whose largest element is `top` (6 with emax 2, or
448 with emax 8):

    ceil    smallest e with top * 2^e >= amax; nothing saturates. MXFP4 ties go to the smaller magnitude. The default.
    floor   floor(log2 amax) - emax (OCP); elements saturate at `top`
    even    as floor, after amax is rounded half up to the element's mantissa bits (the rule of compressed-tensors)

Every other tie goes to the even code. Scale exponents are kept in [-127, 127]; a float64 beyond `top` * 2^127
saturates. An all-zero block has codes 0 and scale byte 0, except 127 for MXFP4 under ceil. A block with an inf or a NaN
gets scale byte 255 and reads back as NaN throughout, whatever its elements.

Exponents are taken from the input's own bits: float32 for bfloat16, float16 and float32, float64 for float64. All
arithmetic is exact except the one rounding, so the results do not depend on the device or the number of threads. They
hold with denormals flushed too, where blocks below 2^-126 read as zero.

Internally everything is scaled by half: with s2 = 2 * scale, both s2 and every quotient are normal numbers even for
scale byte 0, whose scale 2^-127 is itself a denormal in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

BLOCK = 32
RULES = ("ceil", "floor", "even")
_PIECE = 1 << 16  # elements rounded at a time on a CPU


class QuantizationError(ValueError):
    """The tensor, the rule or the storage format cannot be quantized as asked; the message says what to change."""


@dataclass(frozen=True)
class _Format:
    name: str
    emax: int  # exponent of the largest element
    emin: int  # exponent of the smallest normal element
    mantissa_bits: int
    top: float


_MXFP4 = _Format("MXFP4", emax=2, emin=0, mantissa_bits=1, top=6.0)
_MXFP8 = _Format("MXFP8", emax=8, emin=-6, mantissa_bits=3, top=448.0)


class _Layout(NamedTuple):
    """Bits of a float dtype: the integer dtype of its width, mantissa bits, exponent bias, exponent mask."""

    integer: torch.dtype
    mantissa: int
    bias: int
    exponent_mask: int


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, 23, 127, 0x7F800000),
    torch.float64: _Layout(torch.int64, 52, 1023, 0x7FF0000000000000),
}


class _Recipe(NamedTuple):
    """Integer constants that turn the bits of amax into the bits of 2 * scale, for one (format, rule, dtype)."""

    offset: int
    low: int
    high: int


def _recipe(fmt: _Format, rule: str, layout: _Layout) -> _Recipe:
    unit = 1 << layout.mantissa
    if rule == "ceil":  # carry into the exponent when the mantissa exceeds that of `top`
        carry = unit - round((fmt.top / 2.0**fmt.emax - 1.0) * unit) - 1
    elif rule == "floor":
        carry = 0
    elif rule == "even":  # half a unit of the element's last mantissa bit
        carry = unit >> (fmt.mantissa_bits + 1)
    else:
        raise QuantizationError(f"scale rule is {rule!r}; it must be one of {', '.join(RULES)}")
    top_exponent = min(128, layout.bias)  # float32 never needs more than 2^127: see _double_scale
    return _Recipe(carry - (fmt.emax - 1) * unit, (layout.bias - 126) * unit, (layout.bias + top_exponent) * unit)


_RECIPES = {
    (fmt.name, rule, dtype): _recipe(fmt, rule, layout)
    for fmt in (_MXFP4, _MXFP8)
    for rule in RULES
    for dtype, layout in _LAYOUTS.items()
}


def _blocks(x: Tensor, fmt: _Format) -> Tensor:
    """x [..., n] -> [..., n/32, 32] in float32 or float64."""
    if not x.is_floating_point():
        raise QuantizationError(f"{fmt.name} quantizes floating-point tensors; got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise QuantizationError(
            f"{fmt.name} needs a last axis that is a multiple of {BLOCK}; got shape {tuple(x.shape)}. "
            "Choose widths (and expert or tensor shards) that are multiples of 32; nothing is padded silently"
        )
    if x.dtype not in _LAYOUTS:
        x = x.float()
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _double_scale(amax: Tensor, fmt: _Format, rule: str) -> Tensor:
    """Largest magnitudes [..., 1] -> 2 * scale [..., 1]: normal powers of two, or NaN where amax is not finite.

    float32 cannot exceed 2^127 here, because the largest finite amax gives scale byte 253 at most.
    """
    layout = _LAYOUTS[amax.dtype]
    recipe = _RECIPES.get((fmt.name, rule, amax.dtype)) or _recipe(fmt, rule, layout)
    bits = amax.view(layout.integer) + recipe.offset
    bits.clamp_(recipe.low, recipe.high).bitwise_and_(layout.exponent_mask)
    return bits.view(amax.dtype).add_(amax, alpha=0.0)  # inf * 0 and NaN * 0 are NaN


def _round_to_even_(y2: Tensor, fmt: _Format, rule: str) -> Tensor:
    """In place: half-scaled values [...] to the nearest half-scaled element, ties to the even code.

    Adding and taking away 1.5 * 2^mantissa quanta makes the adder itself round to a whole number of quanta.
    The sign of a value that becomes zero is lost.
    """
    layout = _LAYOUTS[y2.dtype]
    power = y2.view(layout.integer).bitwise_and(layout.exponent_mask).view(y2.dtype)
    power.clamp_min_(2.0 ** (fmt.emin - 1))
    magic = 1.5 * 2.0 ** (layout.mantissa - fmt.mantissa_bits)
    y2.add_(power, alpha=magic).sub_(power, alpha=magic)
    if rule != "ceil" or y2.dtype == torch.float64:
        y2.clamp_(-fmt.top / 2, fmt.top / 2)
    return y2


def _round_half_down_(a2: Tensor) -> Tensor:
    """In place: half-scaled magnitudes [...] to the nearest half-scaled E2M1 magnitude, ties to the smaller one."""
    layout = _LAYOUTS[a2.dtype]
    power = a2.view(layout.integer).bitwise_and(layout.exponent_mask).view(a2.dtype)
    power.clamp_min_(0.5).mul_(0.5)  # the quantum, half-scaled
    a2.div_(power).sub_(0.5).ceil_().mul_(power)
    return a2.clamp_max_(_MXFP4.top / 2) if a2.dtype == torch.float64 else a2


def _mxfp4_halves(blocks: Tensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [..., 32] -> (half-scaled E2M1 magnitudes [..., 32], 2 * scale [..., 1], amax [..., 1])."""
    magnitudes = blocks.abs()
    amax = magnitudes.amax(-1, keepdim=True)
    double_scale = _double_scale(amax, _MXFP4, rule)
    magnitudes.div_(double_scale)
    if rule == "ceil":
        return _round_half_down_(magnitudes), double_scale, amax
    return _round_to_even_(magnitudes, _MXFP4, rule), double_scale, amax


def _mxfp8_halves(blocks: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Blocks [..., 32] -> (half-scaled E4M3 values [..., 32], 2 * scale [..., 1])."""
    magnitudes = blocks.abs()
    double_scale = _double_scale(magnitudes.amax(-1, keepdim=True), _MXFP8, rule)
    halves = torch.mul(blocks, double_scale.reciprocal(), out=magnitudes)
    return _round_to_even_(halves, _MXFP8, rule), double_scale


def _scale_bytes(double_scale: Tensor) -> Tensor:
    """2 * scale [..., 1] -> scale bytes uint8 [...]."""
    layout = _LAYOUTS[double_scale.dtype]
    exponent = (double_scale.view(layout.integer) >> layout.mantissa) - (layout.bias - 126)
    exponent.masked_fill_(double_scale.isnan(), 255)
    return exponent.squeeze(-1).to(torch.uint8)


def quantize_mxfp4(x: Tensor, rule: str = "ceil") -> tuple[Tensor, Tensor]:
    """x [..., n] -> (packed uint8 [..., n/2], scale uint8 [..., n/32]). Element 2i sits in the low nibble of byte i.

    The sign bit follows k3.md 9.4: under ceil -0.0 has code 0 and a negative that rounds to zero code 8; under the
    other rules both keep the sign. Raises QuantizationError when n is not a multiple of 32.
    """
    blocks = _blocks(x.detach(), _MXFP4)
    halves, double_scale, amax = _mxfp4_halves(blocks, rule)
    values = halves.mul_(2).float()
    # A normal element's exponent and mantissa bit are its code, up to a constant; 0 and 0.5 have twice themselves.
    code = (values.view(torch.int32) >> 22).sub_(252)
    torch.maximum(code, values.mul_(2).clamp_max_(2).to(torch.int32), out=code)
    code = code.to(torch.uint8)
    negative = blocks < 0 if rule == "ceil" else torch.signbit(blocks)
    code |= negative.view(torch.uint8) << 3
    code.masked_fill_(double_scale.isnan(), 0)
    code = code.reshape(x.shape)
    scale = _scale_bytes(double_scale)
    if rule == "ceil":
        scale.masked_fill_((amax == 0).squeeze(-1), 127)
    return code[..., 0::2] | code[..., 1::2] << 4, scale


def quantize_mxfp8(x: Tensor, rule: str = "ceil") -> tuple[Tensor, Tensor]:
    """x [..., n] -> (E4M3 bytes uint8 [..., n], scale uint8 [..., n/32]).

    A block with an inf or NaN has element bytes 0x7F (NaN) and scale byte 255.
    Raises QuantizationError when n is not a multiple of 32.
    """
    blocks = _blocks(x.detach(), _MXFP8)
    halves, double_scale = _mxfp8_halves(blocks, rule)
    values = torch.copysign(halves, blocks).mul_(2).float()  # on the E4M3 grid already: the cast below is exact
    elements = values.to(torch.float8_e4m3fn).view(torch.uint8)
    elements.masked_fill_(double_scale.isnan(), 0x7F)
    return elements.reshape(x.shape), _scale_bytes(double_scale)


def _check_bytes(elements: Tensor, scale: Tensor, per_byte: int, fmt: _Format) -> None:
    if elements.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise QuantizationError(
            f"{fmt.name} elements and scales are uint8; got {elements.dtype} and {scale.dtype}. "
            "Scales are E8M0 bytes: neither linear factors nor signed exponents"
        )
    wanted = (*elements.shape[:-1], elements.shape[-1] * per_byte // BLOCK) if elements.dim() else ()
    if elements.dim() == 0 or elements.shape[-1] * per_byte % BLOCK or tuple(scale.shape) != wanted:
        raise QuantizationError(
            f"{fmt.name} elements {tuple(elements.shape)} need scales {wanted}, one per {BLOCK} values of a last axis "
            f"that is a multiple of {BLOCK} values; got scales {tuple(scale.shape)}"
        )


@cache
@torch.inference_mode(False)
def scale_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each E8M0 byte is worth, [256]; made once, since an expert's bytes are read in less time.

    Made of bits: arithmetic would lose 2^-127 in float32 for ever, had the first caller set denormals to be flushed.
    """
    layout = _LAYOUTS[dtype]
    exponent = torch.arange(256, dtype=layout.integer) - 127 + layout.bias
    bits = torch.where(exponent > 0, exponent << layout.mantissa, 1 << (layout.mantissa - 1))
    bits[255] = layout.exponent_mask | 1 << (layout.mantissa - 1)
    return bits.view(dtype).to(device)


def _scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 bytes [...] -> 2^(s-127) in `dtype`; byte 0 is 2^-127, byte 255 is NaN."""
    return scale_table(dtype, scale.device)[scale.long()]


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@cache
@torch.inference_mode(False)
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two E2M1 values of each byte, [256, 2]."""
    return torch.tensor([[_E2M1[b & 15], _E2M1[b >> 4]] for b in range(256)], dtype=dtype, device=device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype a product is formed in before it is rounded once to `dtype`."""
    return dtype if dtype in _LAYOUTS else torch.float32


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(packed uint8 [..., n/2], scale uint8 [..., n/32]) -> values [..., n], rounded once to `dtype`.

    Exact in float64; float32 and bfloat16 overflow to inf only above their range. Scale byte 255 gives NaN.
    Raises QuantizationError when the shapes do not belong together.
    """
    _check_bytes(packed, scale, 2, _MXFP4)
    table = _pair_table(_wide(dtype), packed.device)
    values = table.index_select(0, packed.reshape(-1).int()).view(*scale.shape, BLOCK)
    values.mul_(_scale_values(scale, values.dtype).unsqueeze(-1))
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2).to(dtype)


def dequantize_mxfp8(elements: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(E4M3 bytes uint8 [..., n], scale uint8 [..., n/32]) -> values [..., n], rounded once to `dtype`.

    Element bytes 0x7F and 0xFF and scale byte 255 give NaN. Raises QuantizationError when the shapes do not belong
    together.
    """
    _check_bytes(elements, scale, 1, _MXFP8)
    values = elements.view(torch.float8_e4m3fn).to(_wide(dtype)).reshape(*scale.shape, BLOCK)
    values = values * _scale_values(scale, values.dtype).unsqueeze(-1)
    return values.view(elements.shape).to(dtype)


def _decoded4(blocks: Tensor, rule: str) -> Tensor:
    halves, double_scale, _ = _mxfp4_halves(blocks, rule)
    return halves.mul_(double_scale).copysign_(blocks)


def _decoded8(blocks: Tensor, rule: str) -> Tensor:
    halves, double_scale = _mxfp8_halves(blocks, rule)
    return halves.mul_(double_scale)


def _fake(x: Tensor, fmt: _Format, rule: str) -> Tensor:
    """x [..., n] -> its rounded values. On a CPU large tensors go piece by piece, so that temporaries stay in cache."""
    decoded = _decoded4 if fmt is _MXFP4 else _decoded8
    blocks = _blocks(x, fmt)
    if x.device.type != "cpu" or blocks.numel() <= 2 * _PIECE:
        return decoded(blocks, rule).reshape(x.shape).to(x.dtype)
    rows = blocks.reshape(-1, BLOCK)
    values = torch.empty(rows.shape, dtype=rows.dtype)
    for piece, target in zip(rows.split(_PIECE // BLOCK), values.split(_PIECE // BLOCK), strict=True):
        target.copy_(decoded(piece, rule))
    return values.view(x.shape).to(x.dtype)


class _StraightThrough4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, rule: str) -> Tensor:
        return _fake(x, _MXFP4, rule)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _StraightThrough8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, rule: str) -> Tensor:
        return _fake(x, _MXFP8, rule)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fake_quantize_mxfp4(x: Tensor, rule: str = "ceil") -> Tensor:
    """x [..., n] -> the values that `dequantize_mxfp4(*quantize_mxfp4(x, rule), x.dtype)` gives, same shape and dtype.

    The gradient passes straight through: grad_x is grad_out, saturated elements included. Signs of zeros may differ
    from the decoded bytes. Raises QuantizationError when n is not a multiple of 32.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _StraightThrough4.apply(x, rule))
    return _fake(x, _MXFP4, rule)


def fake_quantize_mxfp8(x: Tensor, rule: str = "ceil") -> Tensor:
    """x [..., n] -> the values that `dequantize_mxfp8(*quantize_mxfp8(x, rule), x.dtype)` gives, same shape and dtype.

    The gradient passes straight through, as in `fake_quantize_mxfp4`. Raises QuantizationError when n is not a
    multiple of 32.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _StraightThrough8.apply(x, rule))
    return _fake(x, _MXFP8, rule)


@torch.no_grad()
def project(tensor: Tensor, stored: str, scale_rule: str = "ceil") -> Tensor:
    """A master tensor [...] -> the values its checkpoint entry decodes to, in the master's own dtype.

    stored: "mxfp4" (blocks along the last axis), "bf16" or "fp32". A float32 master stored as fp32 is returned as it
    is, without a copy. Raises QuantizationError for another word or a last axis that is not a multiple of 32.
    """
    if stored == "mxfp4":
        return _fake(tensor, _MXFP4, scale_rule)
    if stored == "bf16":
        return tensor.to(torch.bfloat16).to(tensor.dtype)
    if stored == "fp32":
        return tensor.to(torch.float32).to(tensor.dtype)
    raise QuantizationError(f"stored format is {stored!r}; it must be one of mxfp4, bf16, fp32")
