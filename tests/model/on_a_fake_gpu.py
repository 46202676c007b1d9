"""Runs what a GPU runs on tensors that have a CUDA device, shapes and dtypes, and no values; no GPU is needed.

    python tests/model/on_a_fake_gpu.py

Tensors of two devices in one operation raise here as they would there. So does everything that makes the host wait:
without values there is nothing that `item`, `tolist` or a boolean index could give. In a process of its own, because
indexing is replaced: torch's looks for the device itself. Kernels are replaced by functions of the same shapes that
check what they are given. Not seen: strides that a kernel refuses, and the capture.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

import k3rl.model.bank_gradients
import k3rl.model.kda as kda_layer
from k3rl.engine.compute.prefill_graph import prefill as prefill_step
from k3rl.engine.paged import PagedCache
from k3rl.kernels import dispatch, limits
from k3rl.kernels.gemm import grouped_skinny, skinny, w4_grouped_skinny
from k3rl.kernels.mla import chunked_prefill, decode_attention, decode_step, heads
from k3rl.kernels.moe import decode_routing, gather_rows, load_counts, mxfp8, situ, train_routing
from k3rl.kernels.moe.add_groups import add_groups_reference
from k3rl.kernels.norm import attn_res, rms_norm
from k3rl.losses import target_logprobs
from k3rl.model import K3Config, K3ForCausalLM, LinearAttnConfig, QuantizationConfig, flash, moe_grouped
from k3rl.model.attn_res import KernelMixFunction, MixFunction
from k3rl.model.cache import StepCache
from k3rl.model.fuse import fusing
from k3rl.model.joined import JoinedParameters
from k3rl.model.layout import FixedLayout, Layout
from k3rl.model.norm import RMSNormFunction
from k3rl.model.packed import PackedExperts
from k3rl.model.situ import SiTUFunction
from k3rl.model.train_routing import WideProduct
from k3rl.optim import QuantileBalancer
from k3rl.parallel.statistics import Statistics

GPU = torch.device("cuda", 0)
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
_get, _set = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def _is_gpu(given: object) -> bool:
    return isinstance(given, torch.device) and given.type == "cuda"


class OnFakeGPU(TorchFunctionMode):
    """Tensors asked for on the GPU are fake ones, those on a CPU are what they always are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.pin_memory:  # there is no driver to ask for it
            return args[0]
        moved = any(_is_gpu(value) for value in args[1:] if not isinstance(value, torch.Tensor))
        if moved or _is_gpu(kwargs.get("device")):
            plain = [isinstance(v, torch.Tensor) and not isinstance(v, FakeTensor) for v in args]
            args = [FAKE.from_tensor(v) if real else v for v, real in zip(args, plain, strict=True)]
            with FAKE:
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _indexed(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that numbers, slices and None give, and the index tensors that are left."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is Ellipsis for item in items):
        at = next(number for number, item in enumerate(items) if item is Ellipsis)
        named = sum(item is not None for item in items) - 1
        items[at : at + 1] = [slice(None)] * (tensor.dim() - named)
    axis, left = 0, list[torch.Tensor | None]()
    for item in items:
        if item is None:
            tensor, item = tensor.unsqueeze(axis), slice(None)
        if isinstance(item, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, item.start, item.stop, item.step or 1)
            left.append(None)
        elif isinstance(item, torch.Tensor):
            if item.device != tensor.device:
                raise SystemExit(f"an index on {item.device} makes the host wait for a tensor on {tensor.device}")
            left.append(item)
        else:
            tensor = torch.ops.aten.select.int(tensor, axis, int(item))
            continue
        axis += 1
    return tensor, left


def get(self: torch.Tensor, index: Any) -> torch.Tensor:
    if self.device.type == "cpu":
        return _get(self, index)
    view, left = _indexed(self, index)
    return view if all(item is None for item in left) else torch.ops.aten.index.Tensor(view, left)


def put(self: torch.Tensor, index: Any, value: Any) -> None:
    if self.device.type == "cpu":
        _set(self, index, value)
        return
    view, left = _indexed(self, index)
    if not isinstance(value, torch.Tensor) and view.dim() == 0:
        raise SystemExit("a number given to one element is copied from the host, which waits; use fill_")
    given = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=self.dtype, device=GPU)
    if all(item is None for item in left):
        torch.ops.aten.copy_.default(view, given)
    else:
        torch.ops.aten.index_put_.default(view, left, given)


# ------------------------------------------------------------------------------------- in the place of the kernels


def short_conv(xs, weights, history=None, cu_seqlens=None):
    segments, channels = len(cu_seqlens) - 1, 3 * xs[0].shape[-1]
    assert cu_seqlens.dtype == torch.int32
    assert history is None or history.shape == (segments, 3, channels)
    assert all(x.stride(-1) == 1 for x in xs)
    return [x * 1 for x in xs], xs[0].new_zeros(segments, 3, channels)


def kda(q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens, context):
    shape = (len(cu_seqlens) - 1, q.shape[2], q.shape[3], v.shape[3])
    assert initial_state is None or (initial_state.shape == shape and initial_state.dtype == torch.float32)
    assert q.shape == k.shape == gate.shape
    assert beta.shape == q.shape[:3]
    return q * k * v * gate, v.new_zeros(shape, dtype=torch.float32)


def kda_decode(
    q, k, v, gate, beta, out_gate, taps, A_log, dt_bias, norm, conv, state, read, write, gate_lower_bound, norm_eps,
    pending,
):  # fmt: skip
    assert conv.is_contiguous()
    assert state.is_contiguous()
    assert state.dtype == torch.float32
    assert read.device == write.device == q.device
    assert all(x.stride(-1) == 1 for x in (q, k, v, gate, out_gate, beta))
    return q * k * v * gate * out_gate


def joined(self: JoinedParameters) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in self.parameters]).view(self.shape)


class HostCounts:
    """Of eight experts the last one has no rows."""

    def __init__(self, ends: torch.Tensor) -> None:
        pass

    def read(self) -> list[int]:
        return [1] * 7 + [0]


# ---------------------------------------------------------------------------------------------------- cases


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=GPU)


def step(model: K3ForCausalLM) -> None:
    """One decode step of fixed shapes, and its logits."""
    config, rows = model.config, 4
    heads = config.linear_attn_config.num_heads
    index = [zeros(rows, dtype=torch.int64) for _ in range(4)]
    cache = StepCache(
        {n: zeros(6, 3, 3 * heads * 128) for n in config.kda_layers},
        {n: zeros(6, heads, 128, 128, dtype=torch.float32) for n in config.kda_layers},
        {n: zeros(9, 64, config.kv_lora_rank + config.qk_rope_head_dim) for n in config.mla_layers},
        *index[:3],
        zeros(rows, 2, dtype=torch.int64),
    )
    hidden, routes = model.step(index[3], cache)
    assert hidden.shape == (rows, config.hidden_size)
    assert routes.shape == (rows, len(config.moe_layers), config.num_experts_per_token)
    assert model.logits(hidden).dtype == torch.float32


def attend_chunks(absorbed, q_r, pages, table, past, ends, scale):
    assert (len(table), ends.dtype, past.dtype) == (len(ends) - 1, torch.int32, torch.int64)
    assert absorbed.stride(-1) == q_r.stride(-1) == 1
    return absorbed * q_r.sum(-1).t().unsqueeze(-1) * pages[0, 0, 0]


def chunk(model: K3ForCausalLM) -> None:
    """New tokens of a few rows in fixed shapes."""
    cache = PagedCache(model.config, 8, 60, 64, torch.bfloat16, GPU)
    for segments in (1, 8):
        widths = {"id": 32, "past": 32, "place": 32, "slot": segments, "source": segments, "last": segments}
        widths |= {"ends": segments + 2, "pages": (segments + 1) * 5}
        given = {name: zeros(size, dtype=torch.int64) for name, size in widths.items()}
        inputs = SimpleNamespace(tokens=32, segments=segments, blocks=5, device=given)
        hidden, routes = prefill_step(model, cache, inputs)
        assert hidden.shape == (segments, model.config.hidden_size)
        assert routes.shape == (32, len(model.config.moe_layers), model.config.num_experts_per_token)


def prefill(model: K3ForCausalLM, lengths: list[int], past: int) -> None:
    """Packed prompts into scattered rows of a paged cache, after `past` tokens of each."""
    rows = [3, 1]
    cache = PagedCache(model.config, 8, 60, 64, torch.bfloat16, GPU)
    view = cache.select(torch.tensor(rows))
    view.advance(torch.full((2,), past))
    cache.claim(rows, [past + length for length in lengths])
    ends = torch.tensor([0, *lengths]).cumsum(0)  # lengths are the host's business
    out = model.hidden(zeros(1, sum(lengths), dtype=torch.int64), cu_seqlens=ends, cache=view)
    assert out.hidden.device == GPU
    assert out.hidden.shape[1] == sum(lengths)


class Context:
    """What an autograd function is handed."""

    needs_input_grad = (True,) * 1000

    def set_materialize_grads(self, on: bool) -> None:
        assert not on

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def training(model: K3ForCausalLM) -> None:
    """The written-out forwards and backwards; the engine of autograd itself wants a real device."""
    context = Context()
    out = RMSNormFunction.forward(context, zeros(6, 32), zeros(32), 1e-5)
    assert [g.shape for g in RMSNormFunction.backward(context, out)[:2]] == [(6, 32), (32,)]
    context, sources = Context(), [zeros(6, 32, dtype=torch.float32) for _ in range(3)]
    out = MixFunction.forward(context, zeros(32), zeros(1, 32), [zeros(6, 1, dtype=torch.float32)] * 3, *sources)
    assert len(MixFunction.backward(context, out)) == 3 + len(sources)
    context = Context()
    out, _, *bank = KernelMixFunction.forward(context, zeros(32), zeros(1, 32), 1e-5, out.to(torch.bfloat16), *sources)
    assert all(given is row for given, row in zip(bank, sources, strict=True))
    for more in ([None] * 4, [out, None, *sources[1:]]):
        assert [g.shape for g in KernelMixFunction.backward(context, out, *more)[3:]] == [out.shape] * 4
    context = Context()
    out = SiTUFunction.forward(context, zeros(6, 32), 4.0, 25.0)
    assert SiTUFunction.backward(context, out)[0].shape == (6, 32)
    context, bank = Context(), next(iter(model.moe_parts())).bank
    width = model.config.routed_expert_hidden_size
    weights, ids = zeros(6, 2, dtype=torch.float32), zeros(6, 2, dtype=torch.int64)
    out = moe_grouped.GroupedExperts.forward(context, zeros(6, width), weights, ids, bank, *bank.leaves)
    grads = moe_grouped.GroupedExperts.backward(context, out)
    assert [g.shape for g in grads[:2]] == [(6, width), (6, 2)]
    assert sum(grad is not None for grad in grads[4:]) == len(bank.leaves) - 3, "one expert has no rows"
    bank.keep_sums(zeros(bank.experts, dtype=torch.int32))
    context = Context()
    context.needs_input_grad = (True,) * 5
    out = moe_grouped.GroupedExperts.forward(context, zeros(6, width), weights, ids, bank, bank.leaves[0])
    assert context.counts is None, "nothing is copied to the host"
    assert moe_grouped.GroupedExperts.backward(context, out)[4:] == (None,)
    assert {total.dtype for total in bank.gradients()} == {torch.bfloat16}
    context, x = Context(), zeros(6, 32)
    out = WideProduct.forward(context, x, zeros(8, 32), torch.float32)
    assert (out.shape, out.dtype) == ((6, 8), torch.float32)
    assert [(g.shape, g.dtype) for g in WideProduct.backward(context, out)[:2]] == [
        ((6, 32), x.dtype),
        ((8, 32), x.dtype),
    ]
    layout, q = Layout([4, 5], GPU), zeros(9, 2, 192)
    assert flash.attention(q, q, zeros(9, 2, 128), layout, layout, 0.1).shape == (9, 2, 128)
    assert flash.largest_logits(q, q, layout, 0.1).shape == (2,)


def fixed(model: K3ForCausalLM) -> None:
    """The forward of training over rows whose documents only the device knows, with statistics and logprobs.

    Nothing requires a gradient: a graph of autograd wants a real device.
    """
    model.requires_grad_(False)
    statistics = Statistics(model, QuantileBalancer(8, 2, len(model.config.moe_layers), device=GPU))
    statistics.counted = zeros(12, dtype=torch.bool)
    layout = FixedLayout(zeros(5, dtype=torch.int32), 12, 8, zeros(12, dtype=torch.bool))
    model.observer = statistics
    routes = zeros(12, len(model.config.moe_layers), 2, dtype=torch.int16)
    with torch.enable_grad():
        hidden = model.rows(zeros(12, dtype=torch.int64), layout, routes)
        head, targets = model.language_model.lm_head.weight, zeros(6, dtype=torch.int64)
        logprobs, entropy = target_logprobs(hidden.index_select(0, targets), head, targets)
    model.observer = None
    assert logprobs.shape == entropy.shape == (6,)
    assert statistics.largest.shape == (len(model.config.mla_layers), model.config.num_attention_heads)


def mix(last, bank, norm, proj, eps, weight=None, norm_eps=0.0, save=False):
    for row in bank:
        assert row.shape == last.shape
        assert row.dtype in (torch.float32, torch.float32 if save else last.dtype)
    out = attn_res.mix_reference(last, bank, norm, proj, eps)
    if weight is not None:
        out = rms_norm.rms_norm_reference(out, weight, norm_eps)[0]
    return out, last.new_empty(2 * len(bank) + 4, len(last), dtype=torch.float32) if save else None


def mix_sum(last, added, *given):
    added = skinny.as_tensor(added)
    total = added if last is None else last + added
    return mix(total, *given)[0], total


def mix_gradient(grad, last, bank, norm, proj, state, added, added_bank):
    assert (grad.shape, grad.dtype, len(state)) == (last.shape, last.dtype, 2 * len(bank) + 4)
    assert added is None or (added.shape, added.dtype) == (last.shape, last.dtype)
    for row in added_bank or ():
        assert (row.shape, row.dtype) == (last.shape, torch.float32)
    return norm * 2, proj * 2, last * 2, [row * 2 for row in bank]


def count(scores, cutoff, bias, valid, sums):
    assert (scores.shape, cutoff.shape) == ((len(cutoff), len(bias)), (len(valid),))
    assert sums.counts.shape[:1] == sums.loads.shape == sums.bias.shape == bias.shape
    assert [flag.shape for flag in (sums.seen, sums.changed, sums.nan)] == [(1,)] * 3


def elementwise() -> None:
    """The functions that define the element-wise kernels in their place."""
    attn_res.mix, attn_res.mix_sum, attn_res.mix_gradient = mix, mix_sum, mix_gradient
    mxfp8.mxfp8, gather_rows.gather_rows = mxfp8.mxfp8_reference, gather_rows.gather_rows_reference
    rms_norm.rms_norm, rms_norm.rms_norm_gradient = rms_norm.rms_norm_reference, rms_norm.rms_norm_gradient_reference
    situ.situ, situ.situ_gradient = situ.situ_reference, situ.situ_gradient_reference


def control() -> None:
    """What must not go unnoticed: a number that the host waits for, and tensors of two devices in one operation."""
    for name, call in (("item", lambda: zeros(1).item()), ("two devices", lambda: zeros(2) + torch.zeros(2))):
        try:
            call()
        except (DataDependentOutputException, RuntimeError):
            continue
        raise SystemExit(f"{name}: nothing was said")


def main() -> None:
    torch.Tensor.__getitem__, torch.Tensor.__setitem__ = get, put
    JoinedParameters.join = JoinedParameters.tensor = joined
    kda_layer.short_conv, kda_layer.kda, kda_layer.kda_decode = short_conv, kda, kda_decode
    kda_layer.gated_norm = lambda x, gate, weight, eps: x * gate * weight.to(x.dtype)
    dispatch.use_kernel = lambda *_, **__: True
    elementwise()
    decode_routing.choose, decode_routing.sort_assignments = (
        decode_routing.choose_reference,
        decode_routing.sort_reference,
    )
    load_counts.count = count
    heads.spread, heads.collect, heads.resized = (
        heads.spread_reference,
        heads.collect_reference,
        heads.resized_reference,
    )
    train_routing.choose, train_routing.sort_many = train_routing.chosen_reference, train_routing.sort_many_reference
    decode_routing.sum_choices, grouped_skinny.product = decode_routing.sum_reference, grouped_skinny.product_reference
    for name in ("product", "activated", "decode"):
        setattr(w4_grouped_skinny, name, getattr(w4_grouped_skinny, f"{name}_reference"))
    PackedExperts.in_range = True
    decode_attention.attend = decode_attention.attend_reference
    decode_step.queries, decode_step.attend = decode_step.queries_reference, decode_step.attend_reference
    skinny.split_k, limits.SkinnyLimits.takes = skinny.split_k_reference, lambda *_: False
    k3rl.model.bank_gradients.add_groups = add_groups_reference
    flash.kernel.largest_logits = flash.kernel.largest_logits_reference
    moe_grouped.rounds_exactly = lambda device, rule: True
    moe_grouped.HostCounts = HostCounts
    chunked_prefill.attend = attend_chunks
    linear = LinearAttnConfig(num_heads=1, head_dim=128, kda_layers=(1, 2, 4), full_attn_layers=(3, 5))
    config = K3Config.named("k3-nano").replace(num_experts=8, linear_attn_config=linear)
    off = dataclasses.replace(linear, use_full_rank_gate=False, gate_lower_bound=None)
    flat = K3Config.named("kimi-linear-nano").replace(num_experts=8, linear_attn_config=off)
    stored = QuantizationConfig(weights="mxfp4")
    with OnFakeGPU(), fusing(False):
        model = K3ForCausalLM(config, dtype=torch.bfloat16, device=GPU)
        tiled = config.replace(routed_expert_hidden_size=128, moe_intermediate_size=128)
        packed = K3ForCausalLM(tiled, dtype=torch.bfloat16, device=GPU, packed=True)
        other = K3ForCausalLM(flat, dtype=torch.bfloat16, device=GPU)
        tiled = flat.replace(hidden_size=128, routed_expert_hidden_size=128, moe_intermediate_size=128)
        bytes_ = K3ForCausalLM(tiled.replace(quantization=stored), dtype=torch.bfloat16, device=GPU, packed=True)
        assert all(bank.tiled for own in (packed, bytes_) for bank in own.packed_banks.values())
        cases: dict[str, Callable[[], None]] = {
            "control": control,
            "a decode step": lambda: step(model),
            "a chunk of new tokens": lambda: chunk(model),
            "fresh prompts": lambda: prefill(model, [5, 6], 0),
            "few tokens behind cached ones": lambda: prefill(model, [5, 6], 70),
            "many tokens behind cached ones": lambda: prefill(model, [50, 6], 70),
            "a decode step with packed experts": lambda: step(packed),
            "prompts too long for packed products": lambda: prefill(packed, [2000, 60], 0),
            "the pieces of training": lambda: training(model),
            "training rows of fixed shapes": lambda: fixed(model),
            "Kimi Linear: a decode step": lambda: step(other),
            "Kimi Linear: a chunk of new tokens": lambda: chunk(other),
            "Kimi Linear: fresh prompts": lambda: prefill(other, [5, 6], 0),
            "Kimi Linear: tokens behind cached ones": lambda: prefill(other, [50, 6], 70),
            "Kimi Linear: a decode step with packed experts": lambda: step(bytes_),
            "Kimi Linear: training rows of fixed shapes": lambda: fixed(other),
        }
        for name, case in cases.items():
            if name.startswith("Kimi") != (sys.argv[1] == "kimi-linear"):
                continue
            with torch.inference_mode() if "training" not in name else torch.no_grad():
                case()
            print(name)


if __name__ == "__main__":
    main()
