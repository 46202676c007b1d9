"""`sampler.sample` where the logits are: a GPU draws for rows that cut nothing, and hands out three numbers a row.

Rows with top-p, top-k, min-p, biases or constraints in the batch send all its logits to the CPU, as `sampler` does.
Sums run in another order there than here, so a draw within 1e-15 of a boundary between two tokens may fall to the other
one; its logprob is right either way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.sampling import sampler
from k3rl.engine.sampling.sampler import Allowed, Biases, Draws
from k3rl.kernels.sampling import draw


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
    return unpacked(draw(logits, *given.unbind()).cpu().numpy())


def unpacked(drawn: np.ndarray) -> Draws:
    """What `kernels.draw` gives [B, 3], on the host, as draws that own their memory."""
    none = np.empty(0, np.int64), np.empty((0, 0), bool)
    return Draws(drawn[:, 0].astype(np.int64), drawn[:, 1].copy(), drawn[:, 2] > 0, *none)
