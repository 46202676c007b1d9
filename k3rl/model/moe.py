"""Stable LatentMoE (k3.md 4): router over all experts, routed experts in a latent space, shared experts beside them.

The routed experts of a layer are one bank with per-expert leaf parameters and a written-out backward: tokens are
sorted by expert once, each expert does two products forward and four backward, everything else is one call for all.

Letters: N rows, E experts, k experts per token, Z latent width, I expert width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from k3rl.model.config import K3Config, QuantizationConfig
from k3rl.model.fused import Fused, Weight
from k3rl.model.norm import RMSNorm, wide
from k3rl.model.situ import situ, situ_backward, situ_from_parts, situ_parts
from k3rl.numerics import mx
from k3rl.types import ForwardObserver


class MLP(nn.Module):
    """SiTU-GLU MLP: the dense layer, and the shared experts as one MLP of their summed width."""

    def __init__(self, config: K3Config, width: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.gate_proj = Weight(width, config.hidden_size, dtype=dtype, device=device)
        self.up_proj = Weight(width, config.hidden_size, dtype=dtype, device=device)
        self.down_proj = Weight(config.hidden_size, width, dtype=dtype, device=device)
        self._betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self._inputs = Fused([self.gate_proj.weight, self.up_proj.weight])

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        return nn.functional.linear(situ(self._inputs.linear(x), *self._betas), self.down_proj.weight)


class _Expert(nn.Module):
    def __init__(self, latent: int, width: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.w1 = Weight(width, latent, dtype=dtype, device=device)
        self.w2 = Weight(latent, width, dtype=dtype, device=device)
        self.w3 = Weight(width, latent, dtype=dtype, device=device)


class _Sorted(NamedTuple):
    """Assignments (token, choice) ordered by expert. order [N * k]; inverse [N * k]; counts: rows of each expert."""

    order: Tensor
    inverse: Tensor
    counts: list[int]


def _sort(ids: Tensor, experts: int) -> _Sorted:
    flat = ids.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return _Sorted(order, inverse, torch.bincount(flat, minlength=experts).tolist())


def _per_expert(rows: Tensor, matrices: Tensor, counts: list[int], width: int) -> Tensor:
    """Rows sorted by expert [R, a] times matrices [E, a, width] -> [R, width]."""
    out = torch.empty(rows.shape[0], width, dtype=rows.dtype, device=rows.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(rows[start : start + count], matrices[expert], out=out[start : start + count])
            start += count
    return out


def _sum_choices(rows: Tensor, sort: _Sorted, weights: Tensor | None, k: int) -> Tensor:
    """Sorted rows [N * k, Z] -> sum over each token's choices [N, Z], weighted by [N, k]; float32 or wider."""
    choices = rows.index_select(0, sort.inverse).view(-1, k, rows.shape[-1])
    total = torch.zeros(choices.shape[0], choices.shape[2], dtype=wide(rows.dtype), device=rows.device)
    for choice in range(k):
        if weights is None:
            total += choices[:, choice]
        else:
            total.addcmul_(choices[:, choice], weights[:, choice : choice + 1])
    return total


class _ExpertBank(torch.autograd.Function):
    """z [N, Z], weights [N, k], ids [N, k] -> sum_e p_e W2_e SiTU(W1_e z, W3_e z) [N, Z]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weights: Tensor, ids: Tensor, bank: ExpertBank, *parameters: Tensor) -> Tensor:
        gate_up, down = bank.matrices()
        sort = _sort(ids, bank.experts)
        out, saved = bank.compute(z, weights, sort, gate_up, down)
        ctx.save_for_backward(weights, sort.order, sort.inverse, gate_up, down, *saved)
        ctx.bank, ctx.counts, ctx.dtype = bank, sort.counts, z.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, order, inverse, gate_up, down, rows, sigma_gate, sigma, sigma_up, active = ctx.saved_tensors
        bank: ExpertBank = ctx.bank
        sort, k, kind = _Sorted(order, inverse, ctx.counts), weights.shape[1], ctx.dtype
        spread = grad.to(kind).index_select(0, order // k)
        weight = weights.reshape(-1, 1).index_select(0, order).to(kind)
        d_active = _per_expert(spread, down, sort.counts, active.shape[1])
        d_weights = torch.linalg.vecdot(d_active, active).index_select(0, inverse).view_as(weights)
        spread *= weight
        d_active *= weight
        parts = (sigma_gate, sigma, sigma_up)
        d_hidden = situ_backward(d_active, parts, *bank.betas).to(kind)
        d_rows = _per_expert(d_hidden, gate_up, sort.counts, rows.shape[1])
        d_z = _sum_choices(d_rows, sort, None, k).to(kind)
        grads: list[Tensor | None] = []
        start, width = 0, active.shape[1]
        joined = torch.empty_like(gate_up)
        second = torch.empty_like(down)
        for expert, count in enumerate(sort.counts):
            if count == 0:
                grads += [None, None, None]
                continue
            here = slice(start, start + count)
            torch.mm(d_hidden[here].t(), rows[here], out=joined[expert])
            torch.mm(spread[here].t(), active[here], out=second[expert])
            grads += [joined[expert, :width], joined[expert, width:], second[expert]]
            start += count
        return d_z, d_weights.to(weights.dtype), None, None, *grads


class ExpertBank:
    """The routed experts of one layer as two tensors: gate and up [E, 2I, Z], down [E, Z, I].

    quantization.activations "mxfp8" rounds the inputs of w1, w3 and of w2 to MXFP8, straight-through.
    """

    def __init__(self, experts: nn.ModuleList, config: K3Config) -> None:
        self.experts = len(experts)
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.quantization: QuantizationConfig = config.quantization
        latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
        first = [weight for e in experts for weight in (e.w1.weight, e.w3.weight)]  # type: ignore[union-attr]
        second = [e.w2.weight for e in experts]  # type: ignore[union-attr]
        self._gate_up = Fused(first, (self.experts, 2 * width, latent))  # type: ignore[arg-type]
        self._down = Fused(second, (self.experts, latent, width))  # type: ignore[arg-type]
        self._leaves = [
            weight
            for e in experts
            for weight in (e.w1.weight, e.w3.weight, e.w2.weight)  # type: ignore[union-attr]
        ]

    def matrices(self) -> tuple[Tensor, Tensor]:
        """[E, 2I, Z] and [E, Z, I]; the parameters are views of them."""
        return self._gate_up.tensor(), self._down.tensor()

    def _read(self, x: Tensor) -> Tensor:
        if self.quantization.activations == "none":
            return x
        return mx.fake_quantize_mxfp8(x, self.quantization.scale_rule)

    def compute(
        self, z: Tensor, weights: Tensor, sort: _Sorted, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> weighted sums [N, Z] in z's dtype; (rows, tanh gate, sigmoid gate, tanh up, active) in expert order."""
        k = weights.shape[1]
        rows = self._read(z).index_select(0, sort.order // k)
        hidden = _per_expert(rows, gate_up.mT, sort.counts, gate_up.shape[1])
        parts = situ_parts(hidden, *self.betas)
        active = self._read(situ_from_parts(parts, *self.betas).to(z.dtype))
        result = _per_expert(active, down.mT, sort.counts, down.shape[1])
        return _sum_choices(result, sort, weights, k).to(z.dtype), (rows, *parts, active)

    def __call__(self, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """z [N, Z], weights [N, k] float32 or wider, ids [N, k] int64 -> [N, Z]."""
        if torch.is_grad_enabled():
            return _ExpertBank.apply(z, weights, ids, self, *self._leaves)
        return self.compute(z, weights, _sort(ids, self.experts), *self.matrices())[0]


class _Gate(nn.Module):
    """The router's matrix and its balancing bias, which is moved by quantile balancing and has no gradient."""

    def __init__(self, config: K3Config, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(config.num_experts, dtype=wide(dtype), device=device), requires_grad=False
        )


class LatentMoE(nn.Module):
    """One MoE layer. Its parameters carry the official names under `block_sparse_moe`."""

    def __init__(self, config: K3Config, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layer = layer
        self.k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.renormalize = config.moe_renormalize and self.k > 1
        latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate = _Gate(config, **kind)
        self.experts = nn.ModuleList(_Expert(latent, width, **kind) for _ in range(config.num_experts))
        self.shared_experts = MLP(config, config.num_shared_experts * width, **kind)
        self.routed_expert_down_proj = Weight(latent, config.hidden_size, **kind)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, **kind)
        self.routed_expert_up_proj = Weight(config.hidden_size, latent, **kind)
        self._bank = ExpertBank(self.experts, config)

    def route(self, x: Tensor, routes: Tensor | None, observer: ForwardObserver | None) -> tuple[Tensor, Tensor]:
        """x [N, H] -> weights [N, k] in float32 or wider, expert ids [N, k] int64.

        routes [N, k] replays a recorded choice; the weights still come from the current scores.
        """
        kind = wide(x.dtype)
        scores = torch.sigmoid(nn.functional.linear(x.to(kind), self.gate.weight.to(kind)))
        watch = observer is not None and torch.is_grad_enabled()
        if routes is None or watch:
            biased = scores.detach() + self.gate.e_score_correction_bias
            top = torch.topk(biased, min(self.k + watch, biased.shape[-1]), dim=-1)
            if watch and observer is not None:
                observer.router(self.layer, scores.detach(), top.values[:, -1])
        ids = top.indices[:, : self.k] if routes is None else routes.to(torch.int64)
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scaling if self.scaling != 1.0 else weights, ids

    def forward(self, x: Tensor, routes: Tensor | None, observer: ForwardObserver | None) -> tuple[Tensor, Tensor]:
        """x [N, H] -> output [N, H] and the expert ids used [N, k] int64."""
        weights, ids = self.route(x, routes, observer)
        z = nn.functional.linear(x, self.routed_expert_down_proj.weight)
        u = self.routed_expert_norm(self._bank(z, weights, ids))
        routed = nn.functional.linear(u, self.routed_expert_up_proj.weight)
        return routed + self.shared_experts(x), ids
