"""Sampling: temperature, min-p, top-k, top-p, biases, and random numbers that depend on nothing but (seed, position).

A request's draws come from a counter-based hash, so that they do not change with the batch it runs in, its row,
or the order of arrival. A token is drawn by inverting the cumulative distribution in id order.

Rules: biases are added to the logits first; -inf takes a token out, and so does a constraint. Temperature 0 takes the
largest logit (the lowest id among equals), ignores min-p, top-k and top-p, and reports logprobs at temperature 1.
Otherwise min-p keeps what has at least that share of the largest probability, top-k the k largest logits of those, then
top-p the smallest set of the rest whose renormalized mass reaches p; among equal logits the lower id goes first. The
logprob is that of the renormalized sampling mask at the request's temperature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3rl.types import SamplingParams

_RANKED = 1024  # logits of a row that are put in order at first
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, SplitMix64's increment


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer, a bijection of 64-bit words (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _words(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return _mix(_mix(seeds + _STRIDE) + (positions.astype(np.uint64) + np.uint64(1)) * _STRIDE)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [B] in [0, 1), a pure function of each row's seed (uint64 [B]) and position (int64 [B])."""
    return (_words(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seed(seed: int | None, engine_seed: int, request: int) -> int:
    """The 64-bit seed of a request: its own, or one derived from the engine's seed and the request's number."""
    if seed is not None:
        return seed & 0xFFFFFFFFFFFFFFFF
    word = _words(np.array([engine_seed & 0xFFFFFFFFFFFFFFFF], np.uint64), np.array([request], np.int64))
    return int(word[0])


def request_samples(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Parameters of n samples of one prompt: each its own seed, the first one the request's, so that n = 1 changes
    nothing. Without a seed all are alike: the engine gives each request its own."""
    if n < 1:
        raise ValueError(f"n is {n}; it must be at least 1")
    if params.seed is None:
        return [params] * n
    own = np.full(n, params.seed & 0xFFFFFFFFFFFFFFFF, np.uint64)
    seeds = [params.seed, *_words(own, np.arange(n))[1:].tolist()]
    return [dataclasses.replace(params, seed=seed) for seed in seeds]


@dataclass(frozen=True, slots=True)
class Biases:
    """Numbers to add to logits: entry i adds values[i] (float64) at row rows[i], token ids[i] (int64 each).

    forbids bool [B]: rows that have a -inf among theirs.
    """

    rows: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    forbids: np.ndarray


@dataclass(frozen=True, slots=True)
class Allowed:
    """Tokens that constraints leave: rows [C] (int64) may sample what mask bool [C, V] says, at least one each."""

    rows: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, slots=True)
class Kept:
    """The ids that were left to C rows: ids int32, ascending in a row, row after row; ends int64 [C]."""

    ids: np.ndarray
    ends: np.ndarray
    vocabulary: int

    @classmethod
    def none(cls, vocabulary: int = 0) -> Kept:
        """No rows."""
        return cls(np.empty(0, np.int32), np.empty(0, np.int64), vocabulary)

    @classmethod
    def of(cls, mask: np.ndarray) -> Kept:
        """What a mask bool [C, V] says."""
        ids = (np.flatnonzero(mask) % mask.shape[1]).astype(np.int32)
        return cls(ids, np.cumsum(np.count_nonzero(mask, axis=1)), mask.shape[1])

    @classmethod
    def join(cls, parts: Sequence[Kept]) -> Kept:
        """The rows of all parts, which have one vocabulary."""
        offsets = np.cumsum([0, *(len(part.ids) for part in parts)])
        ends = [part.ends + offset for part, offset in zip(parts, offsets, strict=False)]
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate(ends), parts[0].vocabulary)

    @property
    def rows(self) -> list[np.ndarray]:
        """The ids of each row."""
        return np.split(self.ids, self.ends[:-1]) if len(self.ends) else []

    @property
    def mask(self) -> np.ndarray:
        """bool [C, V]."""
        found = np.zeros((len(self.ends), self.vocabulary), bool)
        found[np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0)), self.ids] = True
        return found


@dataclass(frozen=True, slots=True)
class Draws:
    """One token per row.

    ids int64 [B]; logprobs float64 [B]; finite bool [B]: False where a logit was NaN or infinite (that row's id
    and logprob mean nothing). cut_rows int64 [C] are the rows for which is recorded what was left, `kept`.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finite: np.ndarray
    cut_rows: np.ndarray
    kept: Kept

    @property
    def sampling_mask(self) -> np.ndarray:
        """bool [C, V]: what was left to `cut_rows`."""
        return self.kept.mask


def sample(
    logits: Tensor,
    temperature: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    uniform: np.ndarray,
    min_p: np.ndarray | None = None,
    biases: Biases | None = None,
    allowed: Allowed | None = None,
) -> Draws:
    """Draws one token per row of logits [B, V] with each row's own parameters ([B] each; uniform in [0, 1)).

    Computes in float64 on the CPU whatever the logits' dtype and device. Every row must have a token that is not
    forbidden.
    """
    z = logits.to("cpu", torch.float64, copy=True)
    finite = z.sum(-1).isfinite()  # a sum is finite exactly when no term is NaN or infinite (logits are far from 1e308)
    if not finite.all():
        z[~finite] = 0.0
    if biases is not None:
        entries = (torch.from_numpy(biases.rows), torch.from_numpy(biases.ids))
        z.index_put_(entries, torch.from_numpy(biases.values), accumulate=True)
    if allowed is not None:
        places = torch.from_numpy(allowed.rows)
        z[places] = z[places].masked_fill_(torch.from_numpy(~allowed.mask), -torch.inf)
    greedy = temperature == 0
    z -= z.amax(-1, keepdim=True)
    if not np.all(greedy | (temperature == 1)):
        z /= torch.from_numpy(np.where(greedy, 1.0, temperature))[:, None]
    mass = z.exp()

    cuts = (top_p < 1) | ((top_k > 0) & (top_k < z.shape[-1]))
    if min_p is not None:
        cuts |= min_p > 0
    cuts &= ~greedy
    if biases is not None:
        cuts |= biases.forbids
    if allowed is not None:
        cuts[allowed.rows] = True
    cut_rows = np.flatnonzero(cuts)
    kept = Kept.none(z.shape[-1])
    if cut_rows.size:
        rows = slice(None) if cut_rows.size == len(z) else torch.from_numpy(cut_rows)
        keep = _keep(z[rows], mass[rows], *_limits(cut_rows, greedy, top_p, top_k, min_p))
        mass[rows] *= keep
        kept = Kept.of(keep.numpy())

    cumulative = torch.cumsum(mass, -1, out=mass)
    total = cumulative[:, -1:]
    # The first id whose cumulative mass exceeds the target has mass itself; u < 1 keeps the target below the total.
    ids = torch.searchsorted(cumulative, torch.from_numpy(uniform)[:, None] * total, right=True)
    if greedy.any():
        ids = torch.where(torch.from_numpy(greedy)[:, None], z.argmax(-1, keepdim=True), ids)
    logprobs = z.gather(-1, ids) - total.log()
    return Draws(ids[:, 0].numpy(), logprobs[:, 0].numpy(), finite.numpy(), cut_rows, kept)


def _limits(
    rows: np.ndarray, greedy: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, min_p: np.ndarray | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(top_p, top_k, log of min_p) of some rows [C]; at temperature 0 nothing but forbidden tokens is cut."""
    free = greedy[rows]
    share = np.zeros(len(rows)) if min_p is None else np.where(free, 0.0, min_p[rows])
    return (
        torch.from_numpy(np.where(free, 1.0, top_p[rows])),
        torch.from_numpy(np.where(free, 0, top_k[rows])),
        torch.from_numpy(share).log(),
    )


def _keep(z: Tensor, mass: Tensor, top_p: Tensor, top_k: Tensor, least: Tensor) -> Tensor:
    """bool [C, V]: what min-p, then top-k, then top-p leave of z [C, V], logits less the largest, so that masses are
    exp(z). least [C]: the smallest z that min-p keeps; -inf where it is off. A z of -inf is never kept.

    Only the largest logits of a row are put in order, more of them where they do not reach.
    """
    size = z.shape[-1]
    keep = (z >= least[:, None]) & (z > float("-inf"))
    enough = keep.sum(-1)
    limit = torch.where(top_k > 0, top_k.clamp(max=size), size).minimum(enough)
    total = (mass * keep).sum(-1)
    rows = torch.nonzero((top_p < 1) | (limit < enough))[:, 0]
    count = _RANKED
    while len(rows):
        count = min(size, max(count, int(limit[rows][top_k[rows] > 0].amax()) if (top_k[rows] > 0).any() else 0))
        kept, settled = _keep_ranked(z[rows], count, total[rows], top_p[rows], limit[rows], enough[rows])
        keep[rows[settled]] &= kept[settled]
        rows, count = rows[~settled], 16 * count
    return keep


def _keep_ranked(
    z: Tensor, count: int, total: Tensor, top_p: Tensor, limit: Tensor, enough: Tensor
) -> tuple[Tensor, Tensor]:
    """(kept bool [C, V], whether that is settled bool [C]) by the `count` largest of z [C, V]. total [C]: the mass of
    the `enough` that min-p leaves, `limit` of which may stay.

    A row's set is everything above its last kept value and the lowest ids among those equal to it.
    """
    size = z.shape[-1]
    found = z.numpy() if count == size else np.partition(z.numpy(), size - count, -1)[:, size - count :]
    ranked = torch.from_numpy(np.sort(found, -1)).flip(-1)
    mass = torch.where(torch.arange(count) < limit[:, None], ranked.exp(), 0.0)
    mass = torch.cumsum(mass, -1, out=mass)
    target = top_p * torch.where(limit < enough, mass[:, -1], total)
    reached = torch.searchsorted(mass, target[:, None])[:, 0] + 1  # fewest ids whose mass is at least p
    last = torch.where(top_p < 1, torch.minimum(reached, limit), limit)[:, None]
    settled = (last[:, 0] <= count) & ((reached <= count) | (limit <= count))
    value = ranked.gather(-1, (last - 1).clamp(max=count - 1))
    keep = z >= value
    if (keep.sum(-1, keepdim=True) > last).any():
        equal = z == value
        above = (z > value).sum(-1, keepdim=True)
        keep &= ~equal | (equal.cumsum(-1) <= last - above)
    return keep, settled
