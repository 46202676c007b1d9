"""The exact mode of the engine: every row through `k3rl.model.exact`, every draw by itself.

States stand at multiples of 16 tokens. What a row has read since then is computed again with the next token, so a
request's bits do not depend on the batch, on chunk sizes, on preemption or on prefix hits, and they are the learner's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.cache import StatePool
from k3rl.engine.images import Features, Placed, image_inputs
from k3rl.engine.rows import RowTable
from k3rl.engine.sampling import sampler
from k3rl.engine.sampling.sampler import Allowed, Biases, Draws, Kept
from k3rl.model import EXACT_BLOCK, K3ForCausalLM, exact_hidden, exact_logits, exact_logprob, fixed_arithmetic


def whole_blocks(tokens: int) -> int:
    """How many of these tokens are in whole blocks: where the state of a row stands that has read so many."""
    return tokens // EXACT_BLOCK * EXACT_BLOCK


def compute(
    model: K3ForCausalLM, pool: StatePool, row: int, ids: np.ndarray, start: int, images: Placed, features: Features
) -> tuple[Tensor, np.ndarray]:
    """Reads tokens `start`.. of ids int64 [T], the row having read those before -> the last one's row after the final
    norm [1, H], routes int16 [T - start, M, k]."""
    begin = whole_blocks(start)
    pool.claim([row], [len(ids) - begin])
    own = torch.from_numpy(ids[begin:].clip(0)).to(model.device)
    with fixed_arithmetic():
        seen = image_inputs(model, [(images, features, begin, len(ids))])
    hidden, routes = exact_hidden(model, own, pool.view([row]), images=seen)
    return hidden[-1:], routes[start - begin :].cpu().numpy()


def logits(model: K3ForCausalLM, hidden: list[Tensor], lengths: list[int]) -> Tensor:
    """Rows [1, H] that are the last ones of `lengths` tokens -> [rows, V]."""
    rows = [exact_logits(model, row, length - 1) for row, length in zip(hidden, lengths, strict=True)]
    return torch.cat(rows) if rows else torch.empty(0, model.config.vocab_size, device=model.device)


def decode(model: K3ForCausalLM, pool: StatePool, table: RowTable, rows: Sequence[int]) -> tuple[Tensor, np.ndarray]:
    """Feeds running rows their last sampled token -> logits [rows, V] and its routes int16 [rows, M, k]."""
    hidden, routes, lengths = [], [], []
    for row in rows:
        running = table.running[row]
        ids = np.concatenate([running.prompt, table.sampled(row)])
        last, chosen = compute(model, pool, row, ids, len(ids) - 1, running.images, {})
        hidden.append(last)
        routes.append(chosen)
        lengths.append(len(ids))
    return logits(model, hidden, lengths), np.concatenate(routes)


def sample(
    scores: Tensor,
    temperature: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    uniform: np.ndarray,
    min_p: np.ndarray,
    biases: Biases | None,
    allowed: Allowed | None,
) -> Draws:
    """`sampler.sample`, one row at a time; the logprob is `exact_logprob` of what was sampled from."""
    if not len(scores):
        return sampler.sample(scores, temperature, top_p, top_k, uniform, min_p, biases, allowed)
    draws = []
    for row in range(len(scores)):
        here = slice(row, row + 1)
        bias = None if biases is None else _biases_of(biases, row)
        may = None if allowed is None else _allowed_of(allowed, row)
        drawn = sampler.sample(
            scores[here], temperature[here], top_p[here], top_k[here], uniform[here], min_p[here], bias, may
        )
        if drawn.finite[0]:
            z = scores[row].to("cpu", torch.float64, copy=True)
            if bias is not None:
                z.index_add_(0, torch.from_numpy(bias.ids), torch.from_numpy(bias.values))
            sampling_mask = torch.from_numpy(drawn.sampling_mask[0]) if len(drawn.cut_rows) else None
            value = exact_logprob(z, int(drawn.ids[0]), float(temperature[row]), sampling_mask)
            drawn = dataclasses.replace(drawn, logprobs=np.array([value]))
        draws.append(dataclasses.replace(drawn, cut_rows=drawn.cut_rows + row))
    names = ("ids", "logprobs", "finite", "cut_rows")
    columns = {name: np.concatenate([getattr(drawn, name) for drawn in draws]) for name in names}
    return Draws(**columns, kept=Kept.join([drawn.kept for drawn in draws]))


def _biases_of(biases: Biases, row: int) -> Biases | None:
    mine = biases.rows == row
    if not mine.any():
        return None
    return Biases(np.zeros(mine.sum(), np.int64), biases.ids[mine], biases.values[mine], biases.forbids[row : row + 1])


def _allowed_of(allowed: Allowed, row: int) -> Allowed | None:
    mine = allowed.rows == row
    return Allowed(np.zeros(1, np.int64), allowed.mask[mine]) if mine.any() else None
