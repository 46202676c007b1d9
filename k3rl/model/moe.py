"""Stable LatentMoE (k3.md 4): router over all experts, routed experts in a latent space, shared experts beside them.

`AblationConfig.experts` leaves out the norm on the sum, or the latent altogether, as Kimi Linear does.

The routed experts of a layer are one bank with per-expert leaf parameters and a written-out backward: tokens are
sorted by expert once, each expert does two products forward and four backward, everything else is one call for all.

Letters: N rows, E experts, k experts per token, Z latent width, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from k3rl.kernels import limits
from k3rl.kernels.gemm import PartialSums, skinny
from k3rl.kernels.moe import decode_routing as router
from k3rl.kernels.moe.decode_routing import Assignments
from k3rl.model import moe_grouped, train_routing
from k3rl.model.bank_gradients import BankGradients
from k3rl.model.cells import GRID_ROOM, GRID_WASTE, Cells
from k3rl.model.config import K3Config, QuantizationConfig
from k3rl.model.gated import GatedUnit, SiTU, gated_unit
from k3rl.model.joined import JoinedParameters, Weight
from k3rl.model.low_rank import NO_PAIRS, BankAdapter
from k3rl.model.norm import RMSNorm, wide
from k3rl.model.packed import PackedExperts
from k3rl.model.side_stream import on_side_stream
from k3rl.numerics import mx
from k3rl.types import Communicator, Exchange, ForwardObserver

RouterLoss = Callable[[int, Tensor, Tensor], None]


def _unit(config: K3Config) -> GatedUnit:
    return gated_unit(config.ablation, config.activation_situ_beta, config.activation_situ_linear_beta)


class MLP(nn.Module):
    """Gated MLP: the dense layer, and the shared experts as one MLP of their summed width."""

    def __init__(self, config: K3Config, width: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.gate_proj = Weight(width, config.hidden_size, dtype=dtype, device=device)
        self.up_proj = Weight(width, config.hidden_size, dtype=dtype, device=device)
        self.down_proj = Weight(config.hidden_size, width, dtype=dtype, device=device)
        self.unit = _unit(config)
        self._inputs = JoinedParameters.of(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        return self.down_proj.linear(self.unit(self._inputs.linear(x)))


class _Expert(nn.Module):
    def __init__(self, latent: int, width: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.w1 = Weight(width, latent, dtype=dtype, device=device)
        self.w2 = Weight(latent, width, dtype=dtype, device=device)
        self.w3 = Weight(width, latent, dtype=dtype, device=device)


class _Experts(nn.Module):
    """Experts under their official numbers, all of a layer or a run of them."""

    def __init__(self, numbers: range, latent: int, width: int, **kind: Any) -> None:
        super().__init__()
        for number in numbers:
            self.add_module(str(number), _Expert(latent, width, **kind))

    def __getitem__(self, number: int) -> _Expert:
        return self.get_submodule(str(number))  # type: ignore[return-value]

    def __iter__(self) -> Iterator[_Expert]:
        return iter(self.children())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)


class _Sorted(NamedTuple):
    """The `Exchange` of one process: assignments (token, choice) in expert order, R = N * k.

    token [R]: token of each sorted row; inverse [R]: sorted row of each assignment; counts: rows of each expert, and
    counted [E]: where they are; weights [R]: of the sorted rows.
    """

    token: Tensor
    inverse: Tensor
    counts: list[int]
    counted: Tensor
    weights: Tensor

    @property
    def ends(self) -> Tensor:
        return self.counted.cumsum(0).to(torch.int32)

    def dispatch(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.token)

    def combine(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.index_select(0, self.inverse) for part in parts)


def _sort(ids: Tensor, weights: Tensor, experts: int) -> _Sorted:
    flat = ids.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    token = torch.div(order, ids.shape[1], rounding_mode="floor")
    counted = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))  # a host waits for a bincount
    return _Sorted(token, inverse, counted.tolist(), counted, weights.reshape(-1).index_select(0, order))


def _per_expert(rows: Tensor, matrices: Tensor, counts: list[int], ends: Tensor | None = None) -> Tensor:
    """Rows in expert order [R, a] times matrices [E, a, b] -> [R, b]. ends: of the exchange."""
    if ends is not None:
        return moe_grouped.grouped_product(rows, matrices, ends)
    out = torch.empty(rows.shape[0], matrices.shape[2], dtype=rows.dtype, device=rows.device)
    for given, matrix, result in zip(rows.split(counts), matrices.unbind(), out.split(counts), strict=True):
        if given.shape[0]:
            torch.mm(given, matrix, out=result)
    return out


def _outer(left: Tensor, right: Tensor, counts: list[int], out: Tensor) -> Tensor:
    """Per expert left' right: [R, a], [R, b] in expert order -> out [E, a, b]; experts without rows are left out."""
    for a, b, result in zip(left.split(counts), right.split(counts), out.unbind(), strict=True):
        if a.shape[0]:
            torch.mm(a.t(), b, out=result)
    return out


def _sum_choices(rows: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Rows of the assignments [N * k, Z] -> sum over choices [N, Z], weighted by [N, k]; wide."""
    choices = rows.view(-1, k, rows.shape[-1])
    total = torch.zeros(choices.shape[0], choices.shape[2], dtype=wide(rows.dtype), device=rows.device)
    for choice in range(k):
        if weights is None:
            total += choices[:, choice]
        else:
            total.addcmul_(choices[:, choice], weights[:, choice : choice + 1])
    return total


class ExpertByExpert(torch.autograd.Function):
    """z [N, Z], weights [N, k], ids [N, k] -> sum_e p_e W2_e unit(W1_e z, W3_e z) [N, Z].

    Choices are weighted and summed where their token is, so the sum has one order in every layout. The gradient of a
    weight is formed beside the expert, from what it kept for its own backward.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weights: Tensor, ids: Tensor, bank: ExpertBank, *parameters: Tensor) -> Tensor:
        gate_up, down = bank.matrices()
        adapter, exchange = bank.adapter, bank.exchange(ids, weights)
        counts = exchange.counts
        rows = bank.dispatch(z, exchange)
        ends = exchange.ends if moe_grouped.pays(rows) else None
        hidden = _per_expert(rows, gate_up.mT, counts, ends)
        lows = adapter.first.add(hidden, rows, counts, ends)
        parts = bank.unit.parts(hidden)
        active = bank.read(bank.unit.value(parts).to(z.dtype))
        out = _per_expert(active, down.mT, counts, ends)
        lows += adapter.second.add(out, active, counts, ends)
        (result,) = exchange.combine(out)
        kept = (None, None) if bank.packed is not None else (gate_up, down)  # packed ones are decoded again
        ctx.save_for_backward(*kept, rows, *parts, active, *lows)
        ctx.bank, ctx.exchange, ctx.weights = bank, exchange, (weights.shape, weights.dtype)
        ctx.adapter, ctx.ends = adapter, ends
        return _sum_choices(result, weights, weights.shape[1]).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: recomputation makes them anew at each reading
        gate_up, down, rows, *parts, active = saved[:7]
        if gate_up is None:
            gate_up, down = ctx.bank.matrices()
        bank, exchange, kind, adapter = ctx.bank, ctx.exchange, rows.dtype, ctx.adapter
        counts, (shape, weights_kind), ends = exchange.counts, ctx.weights, ctx.ends
        spread = exchange.dispatch(grad.to(kind))
        weight = exchange.weights.view(-1, 1).to(kind)
        d_active = _per_expert(spread, down, counts, ends)
        d_second = adapter.second.back(d_active, spread, counts, ends)
        d_weight = torch.linalg.vecdot(d_active, active).view(-1, 1)
        d_hidden = bank.unit.backward(d_active.mul_(weight), tuple(parts)).to(kind)
        d_read = _per_expert(d_hidden, gate_up, counts, ends)
        d_first = adapter.first.back(d_read, d_hidden, counts, ends)
        d_rows, d_weights = exchange.combine(d_read, d_weight)
        d_z = _sum_choices(d_rows, None, shape[1]).to(kind)
        spread.mul_(weight)
        given = len(ctx.needs_input_grad) - 4 - len(adapter.leaves)
        grads: list[Tensor | None] = [None] * given
        if not any(ctx.needs_input_grad[4 : 4 + given]):
            pass
        elif bank.sums is not None and ends is not None:
            outer = moe_grouped.grouped_outer
            bank.sums.add(outer(d_hidden, rows, ends), outer(spread, active, ends), ends)
        elif bank.sums is not None:
            pieces = (part.split(counts) for part in (d_hidden, rows, spread, active))
            for number, (hidden, read, sent, seen) in enumerate(zip(*pieces, strict=True)):
                if counts[number]:
                    bank.sums.add_expert(number, (hidden, read), (sent, seen))
        else:
            d_gate_up = _outer(d_hidden, rows, counts, torch.empty_like(gate_up))
            d_down = _outer(spread, active, counts, torch.empty_like(down))
            grads = []
            for count, both, second in zip(counts, d_gate_up.unbind(), d_down.unbind(), strict=True):
                if bank.every_gradient and not count:
                    both.zero_(), second.zero_()
                grads += [*both.chunk(2), second] if count or bank.every_gradient else [None, None, None]
        low = saved[7:]
        grads += adapter.first.gradients(rows, low[: len(d_first)], d_hidden, d_first, counts, ends)
        d_second = [sent.mul_(weight) for sent in d_second]
        grads += adapter.second.gradients(active, low[len(d_first) :], spread, d_second, counts, ends)
        return d_z, d_weights.view(shape).to(weights_kind), None, None, *grads


class ExpertBank:
    """The routed experts of one layer that this process holds: gate and up [E, 2I, Z], down [E, Z, I].

    quantization.activations "mxfp8" rounds the inputs of w1, w3 and of w2 to MXFP8, straight-through.
    communicator: reaches the experts that other ranks hold; None when all of them are here.
    every_gradient: experts without rows get zero gradients instead of none, so that all ranks have gradients of the
    same parameters.
    sums: where gradients of the experts add up over a step, at fixed addresses; None leaves that to autograd.
    adapter: what LoRA adds to each expert; its products read what the experts read, after that rounding.
    packed: the experts themselves where they are frozen and kept as stored bytes; their parameters then hold nothing.
    keeps_transposed: a second copy of the matrices as small batches on a CPU read them fastest, made again when a
    parameter was written to; for a model that samples.
    """

    def __init__(self, experts: _Experts, config: K3Config, packed: PackedExperts | None) -> None:
        self.experts = len(experts)
        self.packed = packed
        self.every_gradient = False
        self.sums: BankGradients | None = None
        self.unit = _unit(config)
        self.quantization: QuantizationConfig = config.quantization
        self.communicator: Communicator | None = None
        self.adapter: BankAdapter = NO_PAIRS
        self.keeps_transposed = False
        self._transposed: tuple[int, Tensor, Tensor, Tensor] | None = None
        latent, width = config.expert_hidden_size, config.moe_intermediate_size
        self.leaves: list[nn.Parameter] = []  # w1, w3, w2 of each expert in turn; none where they are packed
        if packed is not None:
            return
        first = [weight for e in experts for weight in (e.w1.weight, e.w3.weight)]
        second = [e.w2.weight for e in experts]
        self._gate_up = JoinedParameters(first, (self.experts, 2 * width, latent))
        self._down = JoinedParameters(second, (self.experts, latent, width))
        self.leaves = [weight for e in experts for weight in (e.w1.weight, e.w3.weight, e.w2.weight)]

    def keep_sums(self, rows: Tensor | None) -> None:
        """Gradients of the experts are added up here from now on (`sums`), in the leaves' `grad_dtype`.

        rows: int32 [E] where the bank is, for `BankGradients.rows`; None ends it. Where `every_gradient` is wanted, or
        nothing trains, autograd keeps doing it.
        """
        if self.sums is not None:
            for leaf in self.leaves:
                leaf.grad = None  # a view of what is given up here
        self.sums = None
        if rows is not None and not self.every_gradient and self.leaves and self.leaves[0].requires_grad:
            shapes = [self._gate_up.tensor().shape, self._down.tensor().shape]
            self.sums = BankGradients(self.leaves, shapes, rows)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The sums [E, 2I, Z] and [E, Z, I] that backwards add to, at fixed addresses; needs `keep_sums`."""
        if self.sums is None:
            raise ValueError("this bank leaves its gradients to autograd; call keep_sums first")
        return self.sums.gate_up, self.sums.down

    def keep(self, packed: PackedExperts) -> None:
        """Computes with these bytes instead of the parameters from now on."""
        self.packed, self.leaves, self.sums = packed, [], None
        del self._gate_up, self._down

    @property
    def leaf_bytes(self) -> int:
        """Of those parameters."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """[E, 2I, Z] and [E, Z, I]; the parameters are views of them, unless they are packed."""
        return self.gate_up(), self.down()

    def gate_up(self) -> Tensor:
        """The first of `matrices`."""
        return self._gate_up.tensor() if self.packed is None else self.packed.gate_up()

    def down(self) -> Tensor:
        """The second of `matrices`."""
        return self._down.tensor() if self.packed is None else self.packed.down()

    def inputs_first(self) -> tuple[Tensor, Tensor]:
        """[E, Z, 2I] and [E, I, Z], as rows are multiplied with them."""
        gate_up, down = self.matrices()
        if not self.keeps_transposed or not self.leaves:  # without leaves nothing tells of a write
            return gate_up.mT, down.mT
        writes, held = sum(leaf._version for leaf in self.leaves), self._transposed
        if held is None or held[0] != writes or held[1] is not gate_up:
            held = self._transposed = writes, gate_up, gate_up.mT.contiguous(), down.mT.contiguous()
        return held[2], held[3]

    def exchange(self, ids: Tensor, weights: Tensor) -> Exchange:
        """The way of rows with the experts ids [N, k] and weights [N, k] to these experts and back."""
        if self.communicator is None:
            return _sort(ids, weights, self.experts)
        return self.communicator.exchange(ids, weights)

    def read(self, x: Tensor) -> Tensor:
        """What a product sees of its input [R, n]: the values, or their MXFP8 rounding."""
        if self.quantization.computed_activations == "none":
            return x
        if x.device.type != "cpu":
            return moe_grouped.rounded(x, self.quantization.scale_rule)
        return mx.fake_quantize_mxfp8(x, self.quantization.scale_rule)

    def dispatch(self, z: Tensor, exchange: Exchange) -> Tensor:
        """z [N, Z] -> [R, Z] as the experts read them. Rounded rows travel as the bytes they are exactly."""
        if self.communicator is None or self.quantization.computed_activations == "none":
            return exchange.dispatch(self.read(z))
        elements, scale = mx.quantize_mxfp8(z, self.quantization.scale_rule)
        bytes_ = exchange.dispatch(torch.cat([elements, scale], dim=1))
        return mx.dequantize_mxfp8(bytes_[:, : z.shape[1]], bytes_[:, z.shape[1] :], z.dtype)

    def __call__(self, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """z [N, Z], weights [N, k] float32 or wider, ids [N, k] int64 -> [N, Z]."""
        if torch.is_grad_enabled() and self._is_grouped(z):
            return self.static(z, weights, ids)
        if torch.is_grad_enabled():
            return ExpertByExpert.apply(z, weights, ids, self, *self.seen, *self.adapter.leaves)
        return self._infer(z, weights, ids).to(z.dtype)

    @property
    def seen(self) -> list[nn.Parameter]:
        """What autograd sees. With sums of its own the bank gives it nothing; one leaf says whether it trains."""
        return self.leaves if self.sums is None else self.leaves[:1]

    @property
    def is_static(self) -> bool:
        """Whether grouped products compute all that these experts do: nothing is elsewhere, nothing beside them."""
        return self.communicator is None and self.adapter is NO_PAIRS

    def static(self, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Like a call, by operations of shapes that the ids do not change (`moe_grouped`)."""
        if torch.is_grad_enabled():
            return moe_grouped.GroupedExperts.apply(z, weights, ids, self, *self.seen)
        return moe_grouped.static(self, z, weights, ids)

    def _is_grouped(self, z: Tensor) -> bool:
        """Whether grouped products are the better way: on a GPU, where a launch for each expert costs the most."""
        return z.device.type == "cuda" and z.dtype == torch.bfloat16 and self.is_static

    def _infer(self, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if self._is_grouped(z):
            return self.static(z, weights, ids)
        if self.communicator is None and ids.device.type == "cpu" and ids.numel() <= GRID_ROOM * self.experts:
            cells = Cells.of(ids, self.experts)
            if cells.room <= GRID_ROOM and self.experts * cells.room <= GRID_WASTE * ids.numel():
                return self._on_grid(z, weights, cells)
        exchange = self.exchange(ids, weights)
        rows = self.dispatch(z, exchange)
        hidden = self._by_expert(rows, exchange.counts, second=False)
        self.adapter.first.add(hidden, rows, exchange.counts)
        active = self.activate(hidden)
        out = self._by_expert(active, exchange.counts, second=True)
        self.adapter.second.add(out, active, exchange.counts)
        (result,) = exchange.combine(out)
        return _sum_choices(result, weights, weights.shape[1])

    def _by_expert(self, rows: Tensor, counts: list[int], *, second: bool) -> Tensor:
        """Rows in expert order times gate and up of their experts, or, second, down."""
        packed = self.packed
        if packed is not None and packed.takes(rows, len(rows)):
            ends = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
            return packed.down_product(rows, ends) if second else packed.gate_up_product(rows, None, ends)
        return _per_expert(rows, (self.down() if second else self.gate_up()).mT, counts)

    def _on_grid(self, z: Tensor, weights: Tensor, cells: Cells) -> Tensor:
        """All experts in one batched product; what is not a product is over the assignments alone, not the cells."""
        gate_up, down = self.inputs_first()
        place, shape = cells.place, (self.experts, cells.room, -1)
        rows = self.read(z).index_select(0, cells.token).view(shape)
        hidden = torch.bmm(rows, gate_up)
        self.adapter.first.add_grid(hidden, rows)
        active = self.activate(hidden.view(-1, hidden.shape[2]).index_select(0, place))
        grid = active.new_zeros(len(cells.token), active.shape[1]).index_copy_(0, place, active).view(shape)
        out = torch.bmm(grid, down)
        self.adapter.second.add_grid(out, grid)
        return _sum_choices(out.view(-1, z.shape[1]).index_select(0, place), weights, weights.shape[1])

    def activated(self, rows: Tensor, token: Tensor, ends: Tensor) -> Tensor:
        """What w2 reads [R, I] of row token[r] of rows [N, Z], where packed experts multiply them."""
        assert self.packed is not None
        if isinstance(self.unit, SiTU):
            rule = None if self.quantization.computed_activations == "none" else self.quantization.scale_rule
            return self.packed.activated(rows, token, ends, *self.unit.betas, rule)
        return self.activate(self.packed.gate_up_product(rows, token, ends))

    def activate(self, hidden: Tensor) -> Tensor:
        """Products [..., 2I] of w1 and w3 -> what w2 reads [..., I]."""
        rounds = self.quantization.computed_activations != "none"
        if hidden.device.type != "cpu":
            return self.unit.activation(hidden, self.quantization.scale_rule if rounds else None)
        return self.read(self.unit.activation(hidden))


class WideProduct(torch.autograd.Function):
    """x [N, H] weight' [H, E] with sums in a wider dtype, on a GPU: the products of wide copies, without the copies.

    Gradients are products in the dtype of x, to which the one that arrives is rounded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        d_x = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        return d_x, torch.mm(grad.t(), x) if ctx.needs_input_grad[1] else None, None


class _Gate(nn.Module):
    """The router's matrix and its balancing bias, which is moved by quantile balancing and has no gradient."""

    def __init__(self, config: K3Config, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(config.num_experts, dtype=wide(dtype), device=device), requires_grad=False
        )


class LatentMoE(nn.Module):
    """One MoE layer. Its parameters carry the official names under `block_sparse_moe`.

    experts: the numbers of the routed experts to hold, all by default. packed: as stored bytes, frozen.
    router_loss: told (layer, scores [N, E] with gradient, ids [N, k]) in training forwards, for a loss on the router;
    None, as in K3, costs nothing.
    """

    def __init__(
        self,
        config: K3Config,
        layer: int,
        experts: range | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        # One weight divided by itself is 1: Kimi Linear does that, K3 leaves it.
        self.renormalize = config.moe_renormalize and (self.k > 1 or config.flat)
        self.groups, self.chosen_groups = config.num_expert_group, config.topk_group
        latent, width = config.expert_hidden_size, config.moe_intermediate_size
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.router_loss: RouterLoss | None = None
        self.gate = _Gate(config, **kind)
        numbers = experts or range(config.num_experts)
        self.experts = _Experts(numbers, latent, width, **(kind | ({"device": "meta"} if packed else {})))
        self.shared_experts = MLP(config, config.num_shared_experts * width, **kind)
        self.in_latent = config.ablation.experts != "full_width"
        self.norms_sum = config.ablation.experts == "latent_norm"
        if self.in_latent:
            self.routed_expert_down_proj = Weight(latent, config.hidden_size, **kind)
            if self.norms_sum:
                self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, **kind)
            self.routed_expert_up_proj = Weight(config.hidden_size, latent, **kind)
        held = PackedExperts(numbers, latent, width, device, dtype) if packed else None
        self._bank = ExpertBank(self.experts, config, held)

    @property
    def bank(self) -> ExpertBank:
        """The routed experts."""
        return self._bank

    def route(self, x: Tensor, routes: Tensor | None, observer: ForwardObserver | None) -> tuple[Tensor, Tensor]:
        """x [N, H] -> weights [N, k] in float32 or wider, expert ids [N, k] int64.

        routes [N, k] replays a recorded choice; the weights still come from the current scores.
        """
        kind = wide(x.dtype)
        one = self.groups == 1  # kernels choose among all experts
        trains = torch.is_grad_enabled()
        if one and trains and self.router_loss is None and train_routing.takes(x, self.gate.weight, self.k):
            return self._route_by_kernels(x, routes, observer)
        bias = self.gate.e_score_correction_bias
        if one and not trains and limits.SPLIT_K.takes(x, self.gate.weight):
            sums = skinny.split_k(x, self.gate.weight).sums
            return router.choose(sums, bias, self.k, self.renormalize, self.scaling, routes)
        if x.device.type == "cuda" and x.dtype != kind:
            logits = WideProduct.apply(x, self.gate.weight, kind)
        else:
            logits = nn.functional.linear(x.to(kind), self.gate.weight.to(kind))
        if one and x.device.type != "cpu" and not trains:
            return router.choose(logits, bias, self.k, self.renormalize, self.scaling, routes)
        scores = torch.sigmoid(logits)
        ids = self._choose(scores.detach(), observer if trains else None, routes)
        if self.router_loss is not None and trains:
            self.router_loss(self.layer, scores, ids)
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scaling if self.scaling != 1.0 else weights, ids

    def _route_by_kernels(
        self, x: Tensor, routes: Tensor | None, observer: ForwardObserver | None
    ) -> tuple[Tensor, Tensor]:
        """`route` in training by the kernels."""
        bias = self.gate.e_score_correction_bias
        weights, ids, scores, cutoff = train_routing.RoutedChoice.apply(
            x, self.gate.weight, bias, self.k, self.renormalize, self.scaling, routes
        )
        if observer is not None:
            observer.router(self.layer, scores, cutoff)
        return weights, ids

    def _choose(self, scores: Tensor, observer: ForwardObserver | None, routes: Tensor | None) -> Tensor:
        """Ids [N, k] of the best biased scores, or the recorded ones; tells the observer the (k + 1)-th score."""
        if routes is not None and observer is None:
            return routes.to(torch.int64)
        width = self.k if observer is None else min(self.k + 1, scores.shape[-1])
        top = torch.topk(self._among_groups(scores + self.gate.e_score_correction_bias), width, dim=-1)
        if observer is not None:
            observer.router(self.layer, scores, top.values[:, -1])
        return top.indices[:, : self.k] if routes is None else routes.to(torch.int64)

    def _among_groups(self, biased: Tensor) -> Tensor:
        """Biased scores [N, E]; -inf outside the groups whose two best experts sum to most."""
        if self.groups == 1:
            return biased
        grouped = biased.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.chosen_groups, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)

    def forward(
        self,
        x: Tensor,
        routes: Tensor | None,
        observer: ForwardObserver | None,
        static: bool = False,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [N, H] -> output [N, H] and the expert ids used [N, k] int64; static: by `ExpertBank.static`.

        padding bool [N]: rows that go where the first row goes, so that no expert has rows because of them.
        """
        if static and not torch.is_grad_enabled():
            shared, u, ids = self._static(x, routes, padding)
            return shared.addmm_(u, self.routed_expert_up_proj.weight.t()) if self.in_latent else u + shared, ids
        weights, ids = self._choice(x, routes, observer, padding)
        bank = self._bank.static if static else self._bank
        if not self.in_latent:
            return bank(x, weights, ids) + self.shared_experts(x), ids
        z = nn.functional.linear(x, self.routed_expert_down_proj.weight)
        u = bank(z, weights, ids)
        if self.norms_sum:
            u = self.routed_expert_norm(u)
        if x.device.type == "cuda":  # as `_static` does, one rounding less
            return self.shared_experts(x).addmm_(u, self.routed_expert_up_proj.weight.t()), ids
        routed = nn.functional.linear(u, self.routed_expert_up_proj.weight)
        return routed + self.shared_experts(x), ids

    def step(self, x: Tensor) -> tuple[Tensor | PartialSums, Tensor]:
        """`forward` of one new token for every row, in fixed shapes, for the residual stream."""
        shared, u, ids = self._static(x, None, None)
        return self.routed_expert_up_proj.summand(u, shared) if self.in_latent else u + shared, ids

    def _choice(
        self, x: Tensor, routes: Tensor | None, observer: ForwardObserver | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`route`, padding rows where the first row goes."""
        weights, ids = self.route(x, routes, observer)
        return weights, ids if padding is None else torch.where(padding.unsqueeze(1), ids[:1], ids)

    def _static(self, x: Tensor, routes: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`forward` without gradients, in fixed shapes; what does not wait for each other runs side by side.

        -> what the shared experts give [N, H], what is to be added to that [N, H], or projected up first [N, Z], ids.
        """

        def choose() -> tuple[Tensor, Tensor, Assignments]:
            weights, ids = self._choice(x, routes, None, padding)
            return weights, ids, router.sort_assignments(ids, self._bank.experts)

        chosen = on_side_stream(choose, 1)
        shared = on_side_stream(lambda: self.shared_experts(x))
        read = self._bank.read(skinny.product(x, self.routed_expert_down_proj.weight) if self.in_latent else x)
        weights, ids, sort = chosen()
        norm = (self.routed_expert_norm.weight, self.routed_expert_norm.eps) if self.norms_sum else None
        u = moe_grouped.static_sorted(self._bank, read, weights, sort, norm)
        return shared(), u, ids
