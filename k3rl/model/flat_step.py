"""One new token for every row on a CPU, written flat: what `K3ForCausalLM.hidden` computes, in fewer and cheaper calls.

At some tens of rows the calls themselves cost as much as their arithmetic. So matrices that read the same input are
one, with the input axis first, as a product of few rows reads them fastest; what depends on weights alone is made once;
block sums and the running sum lie in one block of memory; and states larger than a core's cache are taken a few rows at
a time, so that the passes over them find them there.

Letters: R rows, H hidden width, h heads, D head width, E experts, k experts per token, Z latent width, S cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.linalg import vecdot, vector_norm

from k3rl.model.ablation import K3_PARTS
from k3rl.model.cache import Cache
from k3rl.model.cells import GRID_ROOM, GRID_WASTE, Cells
from k3rl.model.config import K3Config
from k3rl.model.dialect_kimi_linear import PARTS
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.kda_chunks import L2_EPS
from k3rl.model.kda_gates import log_decay
from k3rl.model.layout import HISTORY
from k3rl.model.mla import GatedMLA
from k3rl.model.moe import MLP, LatentMoE
from k3rl.model.norm import RMSNorm, wide

if TYPE_CHECKING:
    from k3rl.model.decoder import DecoderLayer, K3ForCausalLM

STATE_BYTES = 1 << 20  # of states taken at a time: they stay in a core's cache from one pass to the next

_writes = attrgetter("_version")


def _inputs_first(weights: Sequence[Tensor], copies: bool) -> Tensor:
    """Matrices [n, in] -> all of them as one [in, sum of n]; copies: laid out so, where it would be a view."""
    joined = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    return joined.t().contiguous() if copies else joined.t()


class _Norm:
    """`rms_norm` with a weight [n]."""

    def __init__(self, norm: RMSNorm) -> None:
        self.weight, self.share = norm.weight.detach(), 1 / norm.weight.shape[0]
        self.eps = torch.tensor(norm.eps, dtype=self.weight.dtype)

    def inverse(self, x: Tensor) -> Tensor:
        """1 / sqrt(mean(x^2) + eps) [..., 1]."""
        length = vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.inverse(x)).mul_(self.weight)


class _Unit:
    """SiTU-GLU of [..., 2n], gate first, with the bits of `situ_alone`."""

    def __init__(self, betas: tuple[float, float], width: int, dtype: torch.dtype) -> None:
        beta, linear_beta = betas
        inverse = torch.full((2 * width,), 1 / linear_beta, dtype=dtype)
        inverse[:width] = 1 / beta
        self.inverse, self.bound, self.width = inverse, beta * linear_beta, width

    def __call__(self, gate_up: Tensor) -> Tensor:
        caps = torch.mul(gate_up, self.inverse).tanh_()
        gate, up = caps.split(self.width, -1)
        return torch.sigmoid(gate_up.narrow(-1, 0, self.width)).mul_(gate).mul_(up).mul_(self.bound)


class _SwiGLU:
    """silu(gate) * up of [..., 2n], gate first, with the bits of `SwiGLU`."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.split(self.width, -1)
        return torch.sigmoid(gate).mul_(gate).mul_(up)


def _unit(config: K3Config, width: int, dtype: torch.dtype) -> _Unit | _SwiGLU:
    """The gated unit of a model, for outputs of this width."""
    if config.ablation.activation == "swiglu":
        return _SwiGLU(width)
    return _Unit((config.activation_situ_beta, config.activation_situ_linear_beta), width, dtype)


class _Stream:
    """`ResidualStream` of R rows whose block sums and running sum are one tensor [blocks + 1, R, H].

    Without blocks it is a plain sum.
    """

    def __init__(self, blocks: int, rows: int, norm: _Norm) -> None:
        width, dtype = norm.weight.shape[0], norm.weight.dtype
        sources = torch.empty(blocks + 1, rows, width, dtype=dtype)
        inverses = torch.empty(blocks + 1, rows, 1, dtype=dtype)
        self.source, self.inverse = sources.unbind(), inverses.unbind()
        self._flat = [sources[: n + 1].view(-1, width) for n in range(blocks + 1)]
        self._inverses = [inverses[: n + 1] for n in range(blocks + 1)]
        self._norm, self.blocks, self.is_new = norm, 0, True

    def begin(self, table: Tensor, ids: Tensor) -> None:
        """The running sum becomes the embeddings of ids [R]."""
        self.blocks, self.is_new = 0, False
        torch.index_select(table, 0, ids, out=self.source[0])

    def read(self, query: Tensor | None) -> Tensor:
        """The mix for a pseudo-query [H, 1], which a plain sum has none of."""
        n = self.blocks
        if n == 0 or query is None:
            return self.source[n]
        self._measure()
        scores = torch.mm(self._flat[n], query).view(n + 1, -1, 1).mul_(self._inverses[n])
        p = scores.softmax(0).unbind()
        mix = self.source[0] * p[0]
        for source, weight in zip(self.source[1 : n + 1], p[1:], strict=True):
            mix.addcmul_(source, weight)
        return mix

    def _measure(self) -> None:
        last = self.source[self.blocks]
        length = vector_norm(last, dim=-1, keepdim=True)
        out = self.inverse[self.blocks]
        torch.addcmul(self._norm.eps, length, length, value=self._norm.share, out=out).rsqrt_()

    def push(self) -> None:
        """Ends a block, right after a read."""
        if self.blocks == 0:  # where nothing was measured
            self._measure()
        self.blocks, self.is_new = self.blocks + 1, True

    def add_product(self, x: Tensor, matrix: Tensor) -> None:
        """Adds x [R, n] matrix [n, H] to the running sum."""
        target = self.source[self.blocks]
        if self.is_new:
            torch.mm(x, matrix, out=target)
            self.is_new = False
        else:
            target.add_(torch.mm(x, matrix))

    def add(self, output: Tensor) -> None:
        """Adds output [R, H] to the running sum."""
        target = self.source[self.blocks]
        if self.is_new:
            target.copy_(output)
            self.is_new = False
        else:
            target.add_(output)


class _KDA:
    """`KimiDeltaAttention._step`."""

    def __init__(self, part: KimiDeltaAttention, copies: bool) -> None:
        self.layer, self.heads, self.width, self.bound = part.layer, part.heads, part.width, part.bound
        gate = part.g_a_proj if part.gate_rank else part.g_proj
        names = (part.q_proj, part.k_proj, part.v_proj, gate, part.f_a_proj, part.b_proj)
        self.inputs = _inputs_first([name.weight for name in names], copies)
        inner = self.heads * self.width
        self.split = [3 * inner, part.gate_rank or inner, self.width, self.heads]
        self.g_b = _inputs_first([part.g_b_proj.weight], copies) if part.gate_rank else None
        self.f_b = _inputs_first([part.f_b_proj.weight], copies)
        self.output = _inputs_first([part.o_proj.weight], copies)
        taps = [part.q_conv1d.weight, part.k_conv1d.weight, part.v_conv1d.weight]
        self.taps = torch.cat([tap.detach().view(inner, -1) for tap in taps]).t().contiguous().unbind()
        self.dt_bias, self.rate = part.dt_bias.detach(), part.log_rate.detach().exp().view(self.heads, 1)
        self.norm, self.eps = part.o_norm.weight.detach(), torch.tensor(part.eps, dtype=part.o_norm.weight.dtype)

    def __call__(self, x: Tensor, cache: Cache) -> Tensor:
        """Normed rows [R, H] -> gated values [R, h * D]; the layer's states move on by one token."""
        rows, h, width = x.shape[0], self.heads, self.width
        raw, gate, f_a, b = torch.mm(x, self.inputs).split(self.split, -1)
        q, k, v = self._convolved(raw, cache).view(rows, 3, h, width).unbind(1)
        unit = torch.stack((q, k), 2)  # [R, h, 2, D], as the states are read
        unit *= vector_norm(unit, dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()
        logit = torch.mm(f_a, self.f_b).add_(self.dt_bias).view(rows, h, width)
        alpha = log_decay(logit, self.rate, self.bound).exp_().unsqueeze(-1)
        beta = torch.sigmoid(b).unsqueeze(-1)
        state = cache.recurrent(self.layer)
        step = max(1, STATE_BYTES // (state[0].nbytes))
        pieces = [
            self._recur(*given) for given in zip(*(t.split(step) for t in (state, alpha, unit, v, beta)), strict=True)
        ]
        o = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        cache.store_recurrent(self.layer, state)
        length = vector_norm(o, dim=-1, keepdim=True)
        o *= torch.addcmul(self.eps, length, length, value=1 / width).rsqrt_()
        if self.g_b is not None:
            gate = torch.mm(gate, self.g_b)
        return o.mul_(self.norm).view(rows, -1).mul_(torch.sigmoid(gate))

    def _convolved(self, raw: Tensor, cache: Cache) -> Tensor:
        past = cache.conv(self.layer)
        before = past.unbind(1)
        out = raw * self.taps[HISTORY]
        for rows, tap in zip(before, self.taps[:HISTORY], strict=True):
            out.addcmul_(rows, tap)
        for older, newer in zip(before, (*before[1:], raw), strict=True):
            older.copy_(newer)
        cache.store_conv(self.layer, past)
        return nn.functional.silu(out, inplace=True)

    def _recur(self, state: Tensor, alpha: Tensor, unit: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """Some rows of `__call__`: state [r, h, D, D] in place -> what they read [r, h, D]."""
        width = self.width
        flat, pairs = state.mul_(alpha).view(-1, width, width), unit.view(-1, 2, width)
        read = torch.bmm(pairs, flat)
        seen_by_q, seen_by_k = read.view(-1, self.heads, 2, width).unbind(2)
        change = (v - seen_by_k).mul_(beta)
        overlap = vecdot(*unit.unbind(2)).unsqueeze(-1)
        out = torch.addcmul(seen_by_q, overlap, change).mul_(width**-0.5)
        flat.baddbmm_(pairs[:, 1].unsqueeze(-1), change.view(-1, 1, width))
        return out


class _Reads:
    """What the MLA layers of one step share: tokens S with the new ones, where those go, a mask of the rest."""

    def __init__(self, cache: Cache, dtype: torch.dtype) -> None:
        past = cache.lengths
        self.tokens = int(past.max()) + 1
        self.places = cache.next_places()
        self.mask: Tensor | None = None
        if int(past.min()) + 1 != self.tokens:
            later = torch.arange(self.tokens) > past.view(-1, 1, 1)
            self.mask = torch.zeros(later.shape, dtype=dtype).masked_fill_(later, float("-inf"))


class _MLA:
    """`GatedMLA` of one token."""

    def __init__(self, part: GatedMLA, copies: bool) -> None:
        self.layer, self.heads, self.scale = part.layer, part.heads, part.scale
        self.latent, self.parts = part.latent, [part.nope, part.rope]
        self.low_rank, self.gates = part.q_rank is not None, part.gates
        names = [part.q_a_proj if self.low_rank else part.q_proj, part.kv_a_proj_with_mqa]
        names += [part.g_proj] if self.gates else []
        self.inputs = _inputs_first([name.weight for name in names], copies)
        width = part.heads * part.value if self.gates else 0
        self.split, self.norm = [len(names[0].weight), part.latent, part.rope, width], _Norm(part.kv_a_layernorm)
        if self.low_rank:
            self.q_norm, self.q_b = _Norm(part.q_a_layernorm), _inputs_first([part.q_b_proj.weight], copies)
        kv_b = part.kv_b_proj.weight.detach().view(part.heads, part.nope + part.value, part.latent)
        self.keys, self.values = kv_b[:, : part.nope], kv_b[:, part.nope :].mT
        self.output = _inputs_first([part.o_proj.weight], copies)

    def __call__(self, x: Tensor, cache: Cache, reads: _Reads) -> Tensor:
        """Normed rows [R, H] -> gated values [R, h * V]; the layer's latents grow by one token."""
        rows = x.shape[0]
        q_a, c, k_r, gate = torch.mm(x, self.inputs).split(self.split, -1)
        cache.put_latent(self.layer, reads.places, torch.cat([self.norm(c), k_r], -1))
        q = (torch.mm(self.q_norm(q_a), self.q_b) if self.low_rank else q_a).reshape(rows, self.heads, -1)
        q_n, q_r = q.split(self.parts, -1)
        query = torch.cat([torch.bmm(q_n.transpose(0, 1), self.keys).transpose(0, 1), q_r], -1)
        latent = cache.latent(self.layer, reads.tokens)
        step = max(1, STATE_BYTES // (latent[0].numel() * latent.element_size()))
        masks = [None] * rows if reads.mask is None else reads.mask.split(step)
        pieces = [self._attend(*given) for given in zip(query.split(step), latent.split(step), masks, strict=False)]
        context = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        o = torch.bmm(context.transpose(0, 1), self.values).transpose(0, 1)
        o = o.reshape(rows, -1)
        return o.mul_(torch.sigmoid(gate)) if self.gates else o

    def _attend(self, query: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """Some rows: query [r, h, Z + r] over latents [r, S, Z + r] -> sums of latents [r, h, Z]."""
        if mask is None:
            logits = torch.bmm(query, latent.mT).mul_(self.scale)
        else:
            logits = torch.baddbmm(mask, query, latent.mT, alpha=self.scale)
        return torch.bmm(logits.softmax(-1), latent[..., : self.latent])


class _Dense:
    """`MLP`."""

    def __init__(self, part: MLP, config: K3Config, copies: bool) -> None:
        width = part.gate_proj.weight.shape[0]
        self.inputs = _inputs_first([part.gate_proj.weight, part.up_proj.weight], copies)
        self.output, self.unit = _inputs_first([part.down_proj.weight], copies), _unit(config, width, self.inputs.dtype)

    def __call__(self, x: Tensor, stream: _Stream) -> None:
        stream.add_product(self.unit(torch.mm(x, self.inputs)), self.output)


class _MoE:
    """`LatentMoE`."""

    def __init__(self, part: LatentMoE, config: K3Config, copies: bool) -> None:
        self.part, self.bank, self.k = part, part.bank, part.k
        shared, dtype = part.shared_experts, part.gate.weight.dtype
        width = shared.gate_proj.weight.shape[0]
        first, latent = [part.gate.weight, shared.gate_proj.weight, shared.up_proj.weight], 0
        if part.in_latent:
            first.append(part.routed_expert_down_proj.weight)
            latent = len(first[-1])
            self.norm = _Norm(part.routed_expert_norm)
            self.up = _inputs_first([part.routed_expert_up_proj.weight], copies)
        self.inputs = _inputs_first(first, copies)
        self.split = [len(part.gate.weight), 2 * width, latent]
        self.shared_unit, self.shared_output = (
            _unit(config, width, dtype),
            _inputs_first([shared.down_proj.weight], copies),
        )
        self.bias = part.gate.e_score_correction_bias.detach()
        self.first, self.second = self.bank.inputs_first()
        self.unit = _unit(config, self.second.shape[1], dtype)

    def __call__(self, x: Tensor, stream: _Stream) -> Tensor:
        """Adds to the stream what normed rows [R, H] give; -> the experts [R, k]."""
        logits, gate_up, z = torch.mm(x, self.inputs).split(self.split, -1)
        scores = logits.contiguous().sigmoid_()  # row by row, its last values would have other bits
        ids = torch.topk(scores + self.bias, self.k, -1).indices
        weights = scores.gather(1, ids)
        if self.part.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.part.scaling != 1.0:
            weights = weights * self.part.scaling
        shared = torch.mm(self.shared_unit(gate_up), self.shared_output)
        if self.part.in_latent:
            stream.add(shared.addmm_(self.norm(self._experts(z, weights, ids)), self.up))
        else:
            stream.add(shared.add_(self._experts(x, weights, ids)))
        return ids

    def _experts(self, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        experts = self.bank.experts
        if ids.numel() > GRID_ROOM * experts:
            return self.bank(z, weights, ids)
        cells = Cells.of(ids, experts)
        if cells.room > GRID_ROOM or experts * cells.room > GRID_WASTE * ids.numel():
            return self.bank(z, weights, ids)
        rows = self.bank.read(z).index_select(0, cells.token).view(experts, cells.room, -1)
        hidden = torch.bmm(rows, self.first)
        active = self.unit(hidden.view(-1, hidden.shape[2]).index_select(0, cells.place))
        active = self.bank.read(active)
        grid = active.new_zeros(len(cells.token), active.shape[1]).index_copy_(0, cells.place, active)
        out = torch.bmm(grid.view(experts, cells.room, -1), self.second)
        choices = out.view(-1, z.shape[1]).index_select(0, cells.place).view(len(z), self.k, -1).unbind(1)
        shares = weights.unsqueeze(-1).unbind(1)
        total = choices[0] * shares[0]
        for choice, share in zip(choices[1:], shares[1:], strict=True):
            total.addcmul_(choice, share)
        return total


class _Layer:
    def __init__(self, layer: DecoderLayer, config: K3Config, copies: bool) -> None:
        self.norms = [_Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)]
        self.queries: list[Tensor | None] = [] if layer.mixes else [None, None]
        for site in ("self_attention", "mlp") if layer.mixes else ():
            norm, proj = getattr(layer, f"{site}_res_norm").weight, getattr(layer, f"{site}_res_proj").weight
            self.queries.append((norm.detach() * proj.detach()[0]).unsqueeze(-1))
        self.kda = _KDA(layer.self_attn, copies) if isinstance(layer.self_attn, KimiDeltaAttention) else None
        self.mla = _MLA(layer.self_attn, copies) if isinstance(layer.self_attn, GatedMLA) else None
        self.moe = _MoE(layer.block_sparse_moe, config, copies) if layer.is_moe else None
        self.dense = None if layer.is_moe else _Dense(layer.mlp, config, copies)
        self.starts_block = layer.starts_block

    def __call__(self, stream: _Stream, cache: Cache, reads: _Reads | None) -> Tensor | None:
        """Reads and extends the stream; -> the experts [R, k], None for a dense layer."""
        seen = self.norms[0](stream.read(self.queries[0]))
        if self.kda is not None:
            attended, matrix = self.kda(seen, cache), self.kda.output
        else:
            assert self.mla is not None
            assert reads is not None
            attended, matrix = self.mla(seen, cache, reads), self.mla.output
        if self.starts_block:
            stream.push()
        stream.add_product(attended, matrix)
        seen = self.norms[1](stream.read(self.queries[1]))
        if self.moe is not None:
            return self.moe(seen, stream)
        assert self.dense is not None
        self.dense(seen, stream)
        return None


class FlatStep:
    """The next token of every row by a model on a CPU; `takes` says which. It makes what it holds of weights again when
    one was written to.

    copies: matrices may be held a second time, input axis first; without them the step is a little slower.
    """

    def __init__(self, model: K3ForCausalLM, copies: bool) -> None:
        self.model, self._copies = model, copies
        self._parameters = list(model.parameters())
        self._writes = -1
        self._stream: tuple[int, _Stream] | None = None

    @staticmethod
    def takes(model: K3ForCausalLM) -> bool:
        """Whether it computes this model: a family's own parts, all of them here, on a CPU in float32 or wider."""
        config = model.config
        own = config.ablation == (PARTS if config.flat else K3_PARTS) and config.num_expert_group == 1
        own = own and model.holds_all and model.slices is None and not model.packed
        held = list(model.parameters())
        same = all(p.dtype == model.dtype and p.device.type == "cpu" and not p.is_inference() for p in held)
        return own and same and wide(model.dtype) == model.dtype

    def _refresh(self) -> None:
        writes = sum(map(_writes, self._parameters))
        if writes == self._writes:
            return
        stack, config, copies = self.model.language_model.model, self.model.config, self._copies
        self._layers = [_Layer(layer, config, copies) for layer in stack.layers]  # type: ignore[arg-type]
        self._reads_latents = any(layer.mla is not None for layer in self._layers)
        self._blocks = sum(layer.starts_block for layer in self._layers)
        self._table, self._norm = stack.embed_tokens.weight.detach(), _Norm(stack.norm)
        self._query: Tensor | None = None
        if stack.mixes:
            norm, proj = stack.output_attn_res_norm.weight, stack.output_attn_res_proj.weight
            self._query = (norm.detach() * proj.detach()[0]).unsqueeze(-1)
        self._writes, self._stream = writes, None

    def hidden(self, ids: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """ids int64 [R], the next tokens of the cache's rows, in inference mode -> rows after the final norm [R, H],
        routes int16 [R, M, k]; the cache moves on by one token."""
        self._refresh()
        rows = len(ids)
        if self._stream is None or self._stream[0] != rows:
            self._stream = rows, _Stream(self._blocks, rows, self._norm)
        stream, lengths = self._stream[1], cache.lengths
        cache.reserve(int(lengths.max()) + 1)
        reads = _Reads(cache, self.model.dtype) if self._reads_latents else None
        stream.begin(self._table, ids)
        used = [chosen for layer in self._layers if (chosen := layer(stream, cache, reads)) is not None]
        cache.advance(torch.ones_like(lengths))
        out = self._norm(stream.read(self._query))
        if not used:
            return out, torch.empty(rows, 0, self.model.config.num_experts_per_token, dtype=torch.int16)
        return out, torch.stack(used, 1).to(torch.int16)
