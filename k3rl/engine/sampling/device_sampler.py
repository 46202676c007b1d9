"""`sampler.sample` where the logits are: a GPU draws, and hands out three numbers a row, and the ids that were left.

Rows with biases or constraints in the batch send all its logits to the CPU, as `sampler` does; those with top-p, top-k
or min-p do not.
Sums run in another order there than here, so a draw within 1e-15 of a boundary between two tokens may fall to the other
one; its logprob is right either way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.sampling import sampler
from k3rl.engine.sampling.sampler import Allowed, Biases, Draws, Kept
from k3rl.kernels.sampling import Cuts, draw, draw_cut


def sample(
    logits: Tensor,
    temperature: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    uniform: np.ndarray,
    min_p: np.ndarray,
    biases: Biases | None,
    allowed: Allowed | None,
) -> Draws:
    """One token per row of logits [B, V], as `sampler.sample` draws it."""
    if logits.device.type == "cpu" or biases is not None or allowed is not None:
        return sampler.sample(logits, temperature, top_p, top_k, uniform, min_p, biases, allowed)
    ranks = (top_k > 0) & (top_k < logits.shape[-1])
    cuts = (temperature > 0) & ((top_p < 1) | ranks | (min_p > 0))
    if not cuts.any():
        return sample_uncut(logits, temperature, uniform)
    return sample_cut(logits, temperature, uniform, top_p, np.where(ranks, top_k, 0), min_p, np.flatnonzero(cuts))


def sample_cut(
    logits: Tensor,
    temperature: np.ndarray,
    uniform: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    min_p: np.ndarray,
    rows: np.ndarray,
) -> Draws:
    """`sample` on the device of the logits, where `rows` cut something: what is left of those comes to the host as ids,
    and nothing else of the size of the vocabulary does."""
    reals = torch.from_numpy(np.stack([temperature, uniform, top_p, min_p]))
    ranks = torch.from_numpy(top_k.astype(np.int64))
    if logits.device.type == "cuda":
        reals = reals.pin_memory().to(logits.device, non_blocking=True)
        ranks = ranks.pin_memory().to(logits.device, non_blocking=True)
    given = Cuts(reals[0], reals[1], reals[2], reals[3], ranks)
    found = draw_cut(logits, given, by_rank=bool((top_k > 0).any()), by_mass=bool((top_p < 1).any()))
    drawn = unpacked(found.drawn.cpu().numpy())
    wanted = torch.zeros(len(logits), dtype=torch.bool)
    wanted[torch.from_numpy(rows)] = True
    count = torch.where(wanted, found.kept.cpu(), 0)
    ids = found.ids(count).cpu().numpy()
    kept = Kept(ids, np.cumsum(count.numpy()[rows]), logits.shape[-1])
    return Draws(drawn.ids, drawn.logprobs, drawn.finite, rows, kept)


def sample_uncut(logits: Tensor, temperature: np.ndarray, uniform: np.ndarray) -> Draws:
    """`sample` for rows that keep every token, on the device of the logits; one copy there and one back."""
    given = torch.from_numpy(np.stack([temperature, uniform]))
    if logits.device.type == "cuda":
        given = given.pin_memory().to(logits.device, non_blocking=True)
    return unpacked(draw(logits, *given.unbind()).cpu().numpy())


def unpacked(drawn: np.ndarray) -> Draws:
    """What `kernels.draw` gives [B, 3], on the host, as draws that own their memory."""
    none = np.empty(0, np.int64), Kept.none()
    return Draws(drawn[:, 0].astype(np.int64), drawn[:, 1].copy(), drawn[:, 2] > 0, *none)
