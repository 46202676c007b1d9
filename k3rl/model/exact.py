"""Exact mode: a forward in which the bits of a row depend on the row's own prefix and on nothing else.

A matrix product gives a row other bits when it has other company: one row goes another way than five or sixteen, and
an element-wise function ends a tensor's last few values by another routine. So here a sequence is computed in blocks
of 16 rows that start at multiples of 16 of the sequence, one sequence and one block at a time, on one thread: every
call has a shape that the position alone decides, and row i of a block never reads a later row. A block that is not
full is filled up with other rows, which is why a sequence that grows by a token gets the old rows' bits again.

States are kept at block ends only. To decode, the rows since the last block end are run again (`exact_hidden`).

A KDA block is the chunk of `kda_chunks.py` with decays taken as exp(G_i - G_j) for each pair of rows: the middle of the
chunk, which that one divides by, is not known before its eighth row.

Letters: n rows, h heads, D KDA head width, Z latent width, r rope width, W keys, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from k3rl.config import K3Error
from k3rl.model.attn_res import ResidualStream
from k3rl.model.cache import Cache
from k3rl.model.decoder import DecoderLayer, K3ForCausalLM
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.kda_chunks import L2_EPS
from k3rl.model.kda_gates import log_decay
from k3rl.model.layout import CHUNK, HISTORY
from k3rl.model.mla import GatedMLA, rotate
from k3rl.model.moe import LatentMoE
from k3rl.model.norm import inverse_rms, wide

EXACT_BLOCK = CHUNK
_linear = nn.functional.linear


class ExactError(K3Error, ValueError):
    """Rows or a cache that the exact forward cannot go on from; the message says what was got and wanted."""


@contextmanager
def fixed_arithmetic() -> Iterator[None]:
    """One thread and denormals kept, as sums and roundings depend on both; what was set before comes back."""
    threads, small = torch.get_num_threads(), 2.0**-1022
    flushes = small * 0.5 == 0.0
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushes)


# ---------------------------------------------------------------------------------------------------- one block


def _kda(layer: KimiDeltaAttention, x: Tensor, cache: Cache, commit: bool) -> Tensor:
    """Normed rows [16, H] after the cached state -> [16, H]; commit: the state moves on by the block."""
    h, width, kind = layer.heads, layer.width, wide(x.dtype)
    raw = torch.cat([_linear(x, p.weight) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    rows = torch.cat([cache.conv(layer.layer)[0], raw])
    convolutions = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    taps = torch.cat([c.weight.view(-1, HISTORY + 1) for c in convolutions]).to(kind).t().contiguous()
    pre = rows[HISTORY:].to(kind) * taps[HISTORY]
    for tap in range(HISTORY):
        pre += rows[tap : tap + EXACT_BLOCK].to(kind) * taps[tap]
    mixed = nn.functional.silu(pre).to(x.dtype).to(kind)
    q, k, v = mixed.view(EXACT_BLOCK, 3, h, width).permute(1, 2, 0, 3).contiguous().unbind()  # [h, 16, D]
    q, k = (s * (s.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for s in (q, k))
    z = _linear(_linear(x, layer.f_a_proj.weight), layer.f_b_proj.weight).to(kind) + layer.dt_bias
    logit = z.view(EXACT_BLOCK, h, width).transpose(0, 1)
    beta = _linear(x, layer.b_proj.weight).to(kind).sigmoid().t().unsqueeze(-1).contiguous()
    total = log_decay(logit, layer.log_rate.to(kind).exp().view(h, 1, 1), layer.bound).cumsum(1)  # G [h, 16, D]
    o, final = _chunk(q * width**-0.5, k, v, total, beta, cache.recurrent(layer.layer)[0])
    if commit:
        cache.store_recurrent(layer.layer, final.unsqueeze(0))
        cache.store_conv(layer.layer, rows[EXACT_BLOCK:].unsqueeze(0))
    o = o.transpose(0, 1).contiguous().to(x.dtype)
    if layer.gate_rank:
        gate = _linear(_linear(x, layer.g_a_proj.weight), layer.g_b_proj.weight)
    else:
        gate = _linear(x, layer.g_proj.weight)
    gate = gate.view(EXACT_BLOCK, h, width).to(kind).sigmoid()
    normed = o.to(kind) * inverse_rms(o.to(kind), layer.eps)
    gated = (normed * layer.o_norm.weight * gate).to(x.dtype)
    return _linear(gated.view(EXACT_BLOCK, h * width), layer.o_proj.weight)


def _chunk(q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q (scaled), k, v, cumulative log decay [h, 16, D], beta [h, 16, 1], state [h, D, D] -> o [h, 16, D], state."""
    causal = torch.ones(EXACT_BLOCK, EXACT_BLOCK, dtype=torch.bool, device=q.device).tril()
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill_(~causal.unsqueeze(-1), float("-inf")).exp_()
    by_key = k.unsqueeze(1) * decay  # [h, i, j, D]
    pairs = (k.unsqueeze(2) * by_key).sum(-1).tril(-1)
    attention = (q.unsqueeze(2) * by_key).sum(-1)
    entry = total.exp()
    rest = v - torch.bmm(k * entry, state)
    solved = torch.linalg.solve_triangular(pairs * beta, rest * beta, upper=False, unitriangular=True)
    o = torch.bmm(q * entry, state) + torch.bmm(attention, solved)
    return o, state * entry[:, -1].unsqueeze(-1) + torch.bmm(by_key[:, -1].mT, solved)


def _mla(layer: GatedMLA, x: Tensor, cache: Cache, past: int, commit: bool) -> Tensor:
    """Normed rows [16, H] after `past` cached tokens -> [16, H]; attention in latent space, over past + 16 keys."""
    h, nope, value, kind = layer.heads, layer.nope, layer.value, wide(x.dtype)
    if layer.q_rank is None:
        q = _linear(x, layer.q_proj.weight)
    else:
        q = _linear(layer.q_a_layernorm(_linear(x, layer.q_a_proj.weight)), layer.q_b_proj.weight)
    q_n, q_r = q.view(EXACT_BLOCK, h, nope + layer.rope).split([nope, layer.rope], -1)
    c, k_r = _linear(x, layer.kv_a_proj_with_mqa.weight).split([layer.latent, layer.rope], -1)
    if layer.rotates:
        position = torch.arange(past, past + EXACT_BLOCK, device=x.device)
        q_r, k_r = rotate(q_r, position), rotate(k_r, position)
    own = torch.cat([layer.kv_a_layernorm(c.contiguous()), k_r], -1)
    latent = torch.cat([cache.latent(layer.layer, past)[0], own])  # [W, Z + r]
    if commit:
        position = torch.arange(past, past + EXACT_BLOCK, device=x.device)
        cache.append_latent(layer.layer, torch.zeros_like(position), position, own)
    kv_b = layer.kv_b_proj.weight.view(h, nope + value, layer.latent)
    absorbed = torch.bmm(q_n.transpose(0, 1).contiguous(), kv_b[:, :nope])
    query = torch.cat([absorbed, q_r.transpose(0, 1)], -1).to(kind).view(h * EXACT_BLOCK, -1)
    wide_latent = latent.to(kind)
    logits = torch.mm(query, wide_latent.t()).view(h, EXACT_BLOCK, -1) * layer.scale
    later = torch.ones(EXACT_BLOCK, past + EXACT_BLOCK, dtype=torch.bool, device=x.device).triu(past + 1)
    p = logits.masked_fill_(later, float("-inf")).softmax(-1).view(h * EXACT_BLOCK, -1)
    context = torch.mm(p, wide_latent[:, : layer.latent].contiguous()).to(x.dtype).view(h, EXACT_BLOCK, -1)
    o = torch.bmm(context, kv_b[:, nope:].mT).transpose(0, 1).reshape(EXACT_BLOCK, h * value)
    if layer.gates:
        o = o * torch.sigmoid(_linear(x, layer.g_proj.weight))
    return _linear(o, layer.o_proj.weight)


def _moe(moe: LatentMoE, x: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows [16, H] -> [16, H] and expert ids [16, k]; an expert that any row chose computes all 16."""
    weights, ids = moe.route(x, routes, None)
    z = _linear(x, moe.routed_expert_down_proj.weight) if moe.in_latent else x
    bank = moe.bank
    gate_up, down = bank.matrices()
    read = bank.read(z)
    used, place = ids.unique(return_inverse=True)
    experts = used.tolist()
    hidden = torch.stack([_linear(read, gate_up[e]) for e in experts])  # [used, 16, 2I]
    active = bank.read(bank.unit.value(bank.unit.parts(hidden)).to(hidden.dtype))
    results = torch.stack([_linear(rows, down[e]) for rows, e in zip(active, experts, strict=True)])
    total = torch.zeros(z.shape, dtype=wide(z.dtype), device=z.device)
    row = torch.arange(EXACT_BLOCK, device=z.device)
    for choice in range(ids.shape[1]):
        total += results[place[:, choice], row].to(total.dtype) * weights[:, choice : choice + 1]
    u = total.to(z.dtype)
    if moe.in_latent:
        u = _linear(moe.routed_expert_norm(u) if moe.norms_sum else u, moe.routed_expert_up_proj.weight)
    return u + moe.shared_experts(x), ids


def _read(stream: ResidualStream, owner: nn.Module, site: str) -> Tensor:
    if not owner.mixes:
        return stream.total()
    return stream.read(getattr(owner, f"{site}_res_norm").weight, getattr(owner, f"{site}_res_proj").weight)


def _block(
    model: K3ForCausalLM, x: Tensor, cache: Cache, past: int, commit: bool, routes: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Embedded rows [16, H] -> rows after the final norm [16, H], expert ids [16, k] of each MoE layer."""
    stack = model.language_model.model
    stream, used = ResidualStream(x, stack.eps), list[Tensor]()
    for layer in stack.layers:
        assert isinstance(layer, DecoderLayer)
        normed = layer.input_layernorm(_read(stream, layer, "self_attention"))
        if layer.starts_block:
            stream.push()
        attention = layer.self_attn
        if isinstance(attention, KimiDeltaAttention):
            stream.add(_kda(attention, normed, cache, commit))
        else:
            stream.add(_mla(attention, normed, cache, past, commit))
        normed = layer.post_attention_layernorm(_read(stream, layer, "mlp"))
        if layer.is_moe:
            out, ids = _moe(layer.block_sparse_moe, normed, None if routes is None else routes[:, len(used)])
            used.append(ids)
            stream.add(out)
        else:
            stream.add(layer.mlp(normed))
    return stack.norm(_read(stream, stack, "output_attn")), used


# ---------------------------------------------------------------------------------------------------- sequences


def _padded(rows: Tensor) -> Tensor:
    """Rows [n, ...] -> [16, ...], filled up with the first one."""
    missing = EXACT_BLOCK - len(rows)
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows


@torch.no_grad()
def exact_hidden(
    model: K3ForCausalLM,
    ids: Tensor,
    cache: Cache,
    *,
    routes: Tensor | None = None,
    images: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The next rows of one sequence: ids int64 [n] -> rows after the final norm [n, H], routes int16 [n, M, k].

    cache: one row, whose length is a multiple of 16. It moves on by whole blocks; rows behind the last of them leave no
    trace and are given again next time. routes [n, M, k]: experts to use. images: as in `K3ForCausalLM.hidden`; for
    equal bits each image's rows are computed alone. Raises ExactError.
    """
    if not model.holds_all:
        raise ExactError(f"this model holds experts {model.experts} of {model.config.num_experts}; wanted all of them")
    past = int(cache.lengths[0])
    if cache.batch != 1 or past % EXACT_BLOCK or not len(ids):
        raise ExactError(
            f"got {len(ids)} ids and a cache of {cache.batch} rows, the first with {past} tokens; wanted some ids and "
            f"one row at a multiple of {EXACT_BLOCK}"
        )
    embedded = nn.functional.embedding(ids, model.language_model.model.embed_tokens.weight)
    if images is not None:
        embedded = embedded.index_copy(0, images[1], images[0].to(embedded.dtype))
    hidden, used = [], []
    cache.reserve(past + len(ids))
    shape = (len(model.config.moe_layers), model.config.num_experts_per_token)
    with fixed_arithmetic():
        for start in range(0, len(ids), EXACT_BLOCK):
            x = embedded[start : start + EXACT_BLOCK]
            replay = None if routes is None else _padded(routes[start : start + EXACT_BLOCK])
            commit = len(x) == EXACT_BLOCK
            out, chosen = _block(model, _padded(x).contiguous(), cache, past + start, commit, replay)
            hidden.append(out[: len(x)])
            ids_used = torch.stack(chosen, 1) if chosen else torch.empty(EXACT_BLOCK, *shape, device=out.device)
            used.append(ids_used[: len(x)].to(torch.int16))
            if commit:
                cache.advance(torch.tensor([EXACT_BLOCK]))
    return torch.cat(hidden), torch.cat(used)


@torch.no_grad()
def exact_logits(model: K3ForCausalLM, hidden: Tensor, start: int) -> Tensor:
    """Rows after the final norm [n, H], the first at position `start` of its sequence -> logits [n, V]."""
    ahead = start % EXACT_BLOCK
    rows = torch.cat([hidden.new_zeros(ahead, hidden.shape[1]), hidden])
    with fixed_arithmetic():
        pieces = [model.logits(_padded(piece).contiguous()) for piece in rows.split(EXACT_BLOCK)]
    return torch.cat(pieces)[ahead : len(rows)]


@torch.no_grad()
def exact_logprob(logits: Tensor, token: int, temperature: float = 1.0, sampling_mask: Tensor | None = None) -> float:
    """The logprob of one token under one row of logits [V], computed in float64; at temperature 0 that at 1.

    sampling_mask: ids int64, or a mask bool [V], of the set that was sampled from; None for all.
    """
    z = logits.to("cpu", torch.float64, copy=True)
    with fixed_arithmetic():
        if sampling_mask is not None:
            if sampling_mask.dtype != torch.bool:
                sampling_mask = torch.zeros(z.shape, dtype=torch.bool).index_fill_(0, sampling_mask, True)
            z.masked_fill_(~sampling_mask, float("-inf"))
        z -= z.amax()
        if temperature not in (0.0, 1.0):
            z /= temperature
        return float(z[token] - z.exp().sum().log())


@torch.no_grad()
def exact_logprobs(
    model: K3ForCausalLM,
    ids: Tensor,
    places: Tensor,
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    sampling_mask: Sequence[Tensor | None] | None = None,
    routes: Tensor | None = None,
    images: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Logprobs float64 [P] of tokens [P] that follow the rows `places` int64 [P] of one sequence ids int64 [T].

    sampling_mask: the set that each token was sampled from. The rest as in `exact_hidden`.
    """
    hidden, _ = exact_hidden(model, ids, model.new_cache(1), routes=routes, images=images)
    logits = exact_logits(model, hidden, 0)
    sets = [None] * len(tokens) if sampling_mask is None else sampling_mask
    given = zip(places.tolist(), tokens, sets, strict=True)
    return torch.tensor([exact_logprob(logits[p], t, temperature, own) for p, t, own in given], dtype=torch.float64)
