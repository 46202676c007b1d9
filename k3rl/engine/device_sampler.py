"""`sampler.sample` where the logits are: a GPU draws for rows that cut nothing, and hands out three numbers a row.

Rows with top-p, top-k, min-p, biases or constraints in the batch send all its logits to the CPU, as `sampler` does.
Sums run in another order there than here, so a draw within 1e-15 of a boundary between two tokens may fall to the other
one; its logprob is right either way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.engine import sampler
from k3rl.engine.sampler import Allowed, Biases, Draws


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
    sampled = temperature > 0
    cuts = (top_p < 1) | ((top_k > 0) & (top_k < logits.shape[-1])) | (min_p > 0)
    if logits.device.type == "cpu" or biases is not None or allowed is not None or (cuts & sampled).any():
        return sampler.sample(logits, temperature, top_p, top_k, uniform, min_p, biases, allowed)
    return sample_uncut(logits, temperature, uniform)


def sample_uncut(logits: Tensor, temperature: np.ndarray, uniform: np.ndarray) -> Draws:
    """`sample` for rows that keep every token, on the device of the logits; one copy there and one back."""
    given = torch.from_numpy(np.stack([temperature, uniform]))
    if logits.device.type == "cuda":
        given = given.pin_memory().to(logits.device, non_blocking=True)
    heat, u = given.unsqueeze(-1).unbind()
    z = logits.to(torch.float64, copy=True)
    finite = z.sum(-1, keepdim=True).isfinite()
    z.masked_fill_(~finite, 0.0)
    z -= z.amax(-1, keepdim=True)
    greedy = heat == 0
    z /= heat.masked_fill(greedy, 1.0)
    cumulative = z.exp().cumsum(-1)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, u * total, right=True).clamp_(max=logits.shape[-1] - 1)
    ids = torch.where(greedy, z.argmax(-1, keepdim=True), ids)
    logprobs = z.gather(-1, ids) - total.log()
    back = torch.cat([ids.to(torch.float64), logprobs, finite.to(torch.float64)], 1).cpu().numpy()
    none = np.empty(0, np.int64), np.empty((0, logits.shape[-1]), bool)
    return Draws(back[:, 0].astype(np.int64), back[:, 1].copy(), back[:, 2] > 0, *none)
