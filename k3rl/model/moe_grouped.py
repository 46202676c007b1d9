"""The routed experts as grouped products whose group ends stay on the device: no launch per expert, no host that waits.

`static` is one decode step or prefill, without gradients and with shapes that the ids do not change.
`GroupedExperts` is training. Both sort assignments by expert, multiply each run of rows with its expert's matrices in
one call, and sum choices where their token is, as the path of `moe.py` does; results differ in the order of sums inside
a product.

Letters: N rows, E experts, k experts per token, R = N * k assignments, Z latent width, I expert width.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from k3rl.kernels import limits
from k3rl.kernels.gemm import grouped_skinny
from k3rl.kernels.moe import decode_routing, gather_rows, mxfp8, train_routing
from k3rl.model.fuse import fused, widened
from k3rl.numerics import mx

if TYPE_CHECKING:
    from k3rl.model.moe import ExpertBank


# A public name from torch 2.10 on.
_grouped_mm = getattr(nn.functional, "grouped_mm", None) or torch._grouped_mm


class SortedIds(NamedTuple):
    """Assignments in expert order, on the device: order and inverse int64 [R], ends int32 [E] of each expert, token
    int64 [R] of each sorted row, and its weight [R] where a kernel has put it there."""

    order: Tensor
    inverse: Tensor
    ends: Tensor
    token: Tensor
    weight: Tensor | None = None


def sort_by_expert(ids: Tensor, experts: int, weights: Tensor | None = None) -> SortedIds:
    """ids [N, k], weights [N, k] -> their order; nothing is read by the host."""
    if ids.device.type != "cpu" and limits.TRAIN_ROUTING.takes_sort(ids, experts):
        own = weights if weights is not None and weights.dtype == torch.float32 else None
        order, inverse, token, ends, routed = train_routing.sort_many(ids, experts, own)
        return SortedIds(order, inverse, ends, token, routed)
    short = torch.int16 if experts < 1 << 15 else torch.int32  # a sort goes over the keys byte by byte
    found, order = torch.sort(ids.reshape(-1).to(short), stable=True)
    number = torch.arange(max(len(order), experts), device=order.device)
    ends = torch.searchsorted(found, number[:experts].to(short), right=True, out_int32=True)
    inverse = torch.empty_like(order).scatter_(0, order, number[: len(order)])
    return SortedIds(order, inverse, ends, order // ids.shape[1])


def _is_grouped(x: Tensor) -> bool:
    """Whether torch has a grouped product for it; elsewhere every matrix meets every row, which is right and slow."""
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.device.type == "cpu")


def pays(rows: Tensor) -> bool:
    """Whether grouped products are the better way for rows in expert order [R, n].

    On a GPU, where a launch for each expert costs the most, and where the product takes their width.
    """
    return rows.device.type == "cuda" and rows.dtype == torch.bfloat16 and len(rows) > 0 and rows.shape[1] % 8 == 0


def _expert_of(rows: Tensor, ends: Tensor) -> Tensor:
    """[R] expert of each sorted row."""
    number = torch.arange(len(rows), dtype=ends.dtype, device=rows.device)
    return torch.searchsorted(ends, number, right=True)


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows in expert order [R, a] times matrices [E, a, b] -> [R, b]; ends int32 [E] on the device."""
    if _is_grouped(rows):
        return _grouped_mm(rows, matrices, offs=ends)
    every = torch.matmul(rows, matrices)
    mine = _expert_of(rows, ends).view(1, -1, 1).expand(1, -1, every.shape[2])
    return every.gather(0, mine).squeeze(0)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Per expert left' right: [R, a], [R, b] in expert order -> [E, a, b]. Those without rows: undefined."""
    if _is_grouped(left):
        return _grouped_mm(left.t(), right, offs=ends)
    mine = (_expert_of(left, ends).unsqueeze(1) == torch.arange(len(ends), device=left.device)).to(left.dtype)
    return torch.einsum("re,ra,rb->eab", mine, left, right)


@fused
def weighted_sum(choices: Tensor, weights: Tensor | None) -> Tensor:
    """choices [N, k, b], weights [N, k] or None -> their sum over k [N, b], float32 or wider."""
    values = widened(choices)
    return values.sum(1) if weights is None else (values * weights.unsqueeze(-1)).sum(1)


def sum_of_choices(rows: Tensor, sort: SortedIds, weights: Tensor | None, k: int) -> Tensor:
    """Sorted rows [R, b] -> sum over choices [N, b], weighted by [N, k]; float32 or wider, their dtype by a kernel."""
    if rows.device.type != "cpu" and limits.DECODE_ROUTING.takes_sum(rows):
        own = torch.ones(len(rows) // k, k, device=rows.device) if weights is None else weights
        return decode_routing.sum_choices(rows, sort.inverse, own, rows.dtype)
    return weighted_sum(rows.index_select(0, sort.inverse).view(-1, k, rows.shape[1]), weights)


@fused
def scaled(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [R, b] times weight [R, 1], in the dtype of the rows."""
    return rows * weight.to(rows.dtype)


@fused
def dots(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """Row sums of left * right [R, b] -> [R], in the dtype of the weights."""
    return (left.to(weight.dtype) * right.to(weight.dtype)).sum(-1)


@fused
def compiled_mxfp8(x: Tensor, rule: str) -> Tensor:
    """`mx.fake_quantize_mxfp8`, compiled on a GPU."""
    return mx.fake_quantize_mxfp8(x, rule)


@functools.cache
def rounds_exactly(device: torch.device, rule: str) -> bool:
    """Whether `compiled_mxfp8` gives the bits of its definition on a device, which is tried once."""
    trial = rounding_trial(device)
    found, wanted = compiled_mxfp8(trial, rule), mx.fake_quantize_mxfp8(trial, rule)
    return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


def rounding_trial(device: torch.device) -> Tensor:
    """bf16 [n, 32 * 8]: every bit pattern, each several times beside others of its size and beside larger ones."""
    every = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    shuffled = every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0)).to(device)]
    return torch.cat([every, every.view(256, 256).t().reshape(-1), shuffled]).view(-1, 256)


def rounded(x: Tensor, rule: str) -> Tensor:
    """x [R, n] rounded to MXFP8: `mx.fake_quantize_mxfp8`, by a kernel, or compiled where that gives its bits."""
    if x.device.type != "cpu" and limits.MXFP8.takes(x):
        return mxfp8.mxfp8(x, rule)
    return compiled_mxfp8(x, rule) if rounds_exactly(x.device, rule) else mx.fake_quantize_mxfp8(x, rule)


def static(bank: ExpertBank, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """z [N, Z], weights [N, k], ids [N, k] -> [N, Z]; can be captured in a CUDA graph."""
    return static_sorted(bank, bank.read(z), weights, decode_routing.sort_assignments(ids, bank.experts)).to(z.dtype)


def static_sorted(
    bank: ExpertBank,
    read: Tensor,
    weights: Tensor,
    sort: decode_routing.Assignments,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """`static` of rows [N, Z] as the experts read them, whose assignments are sorted; norm: see `sum_choices`."""
    count, packed = sort.token.numel(), bank.packed
    if packed is not None and packed.takes(read, count):
        out = packed.down_product(bank.activated(read, sort.token, sort.ends), sort.ends)
    elif packed is None and all(limits.GROUPED_SKINNY.takes(read, count, matrices) for matrices in bank.matrices()):
        active = bank.activate(grouped_skinny.product(read, sort.token, bank.gate_up(), sort.ends))
        out = grouped_skinny.product(active, None, bank.down(), sort.ends)
    else:  # packed ones are decoded here, one stack at a time
        active = bank.activate(grouped_product(read.index_select(0, sort.token), bank.gate_up().mT, sort.ends))
        out = grouped_product(active, bank.down().mT, sort.ends)
    return decode_routing.sum_choices(out, sort.inverse, weights, read.dtype, norm)


class HostCounts:
    """Rows of each expert on the host: the copy starts now and is waited for when somebody asks."""

    def __init__(self, ends: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if ends.device.type == "cuda":
            self._ends = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=True).copy_(ends, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._ends = ends

    def read(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        ends = [0, *self._ends.tolist()]
        return [last - first for first, last in pairwise(ends)]


class GroupedExperts(torch.autograd.Function):
    """z [N, Z], weights [N, k], ids [N, k] -> sum_e p_e W2_e unit(W1_e z, W3_e z) [N, Z], with all gradients.

    Keeps, per assignment, the products before the unit and what the second matrices read; rows are gathered again.
    Gradients of experts are added to the bank's sums. Without those they go to autograd, by leaf; experts without rows
    have none then, which the host knows when the backward asks.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weights: Tensor, ids: Tensor, bank: ExpertBank, *leaves: Tensor) -> Tensor:
        gate_up, down = bank.matrices()
        k = ids.shape[1]
        sort = sort_by_expert(ids, bank.experts, weights)
        read = bank.read(z)
        hidden = grouped_product(gather_rows.gather_rows(read, sort.token)[0], gate_up.mT, sort.ends)
        active = bank.activate(hidden)
        out = grouped_product(active, down.mT, sort.ends)
        ctx.save_for_backward(gate_up, down, read, weights, *sort, hidden, active)
        ctx.bank = bank
        by_leaf = any(ctx.needs_input_grad[4:]) and bank.sums is None and not bank.every_gradient
        ctx.counts = HostCounts(sort.ends) if by_leaf else None
        return sum_of_choices(out, sort, weights, k).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down, read, weights, *sorts, hidden, active = ctx.saved_tensors
        bank, sort, kind, k = ctx.bank, SortedIds(*sorts), read.dtype, weights.shape[1]
        token = sort.token
        trains = any(ctx.needs_input_grad[4:])
        routed = sort.weight
        if routed is None:
            routed = weights.reshape(-1).index_select(0, sort.order)
        weight = routed.unsqueeze(-1)
        spread, weighted = gather_rows.gather_rows(grad.to(kind), token, weight if trains else None)
        d_active = grouped_product(spread, down, sort.ends)
        d_hidden, sums = bank.unit.routed_gradient(d_active, hidden, weight, active)
        d_weight = sums.index_select(0, sort.inverse)
        grads: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 4)
        if trains and weighted is not None:
            outer = lambda: (  # noqa: E731
                grouped_outer(d_hidden, gather_rows.gather_rows(read, token)[0], sort.ends),
                grouped_outer(weighted, active, sort.ends),
            )
            if bank.sums is not None:
                bank.sums.add(*outer(), sort.ends)
            else:
                grads = _by_leaf(*outer(), ctx.counts, sort.ends)
        d_rows = grouped_product(d_hidden, gate_up, sort.ends)
        d_z = sum_of_choices(d_rows, sort, None, k).to(kind)
        return d_z, d_weight.view(weights.shape).to(weights.dtype), None, None, *grads


def _by_leaf(gate_up: Tensor, down: Tensor, counts: HostCounts | None, ends: Tensor) -> list[Tensor | None]:
    """Gradients of w1, w3, w2 of each expert; of those without rows None, or zeros where nobody counted."""
    if counts is None:
        empty = (torch.diff(ends, prepend=ends.new_zeros(1)) == 0).view(-1, 1, 1)
        gate_up, down = gate_up.masked_fill(empty, 0), down.masked_fill(empty, 0)
    rows = [1] * len(ends) if counts is None else counts.read()
    grads: list[Tensor | None] = []
    for count, both, second in zip(rows, gate_up.unbind(), down.unbind(), strict=True):
        grads += [*both.chunk(2), second] if count else [None, None, None]
    return grads
