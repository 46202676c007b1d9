"""The learner's side of exact mode: logprobs of a packed batch that are the bits of an exact engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from k3rl.data import ImagePatches, TrainBatch, stack
from k3rl.model import K3ForCausalLM, exact_logprobs, fixed_arithmetic
from k3rl.packed import SamplingMasks


class ValueOf(torch.autograd.Function):
    """(x, value), each [P] -> value, with the gradient going to x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


@torch.no_grad()
def exact_target_logprobs(model: K3ForCausalLM, batch: TrainBatch, temperature: float = 1.0) -> torch.Tensor:
    """float64 [P] on the CPU: the logprob of each of the P target tokens, sequence by sequence."""
    counts = np.ones(batch.input_ids.size, np.int64)
    if batch.images is not None:
        counts = batch.rows_per_token(model.config.media_placeholder_token_id)
    bounds = np.concatenate([[0], np.cumsum(batch.row_lengths)])
    found = []
    for number, (start, stop) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        ids, own, mask = batch.input_ids[start:stop], counts[start:stop], batch.loss_mask[start:stop]
        targets = np.flatnonzero(mask)
        if not targets.size:
            continue
        shown = (ids == model.config.media_placeholder_token_id) & ~mask
        pictures = () if batch.images is None else batch.images[number]
        routes = None if batch.routes is None else batch.routes[bounds[number] : bounds[number + 1]]
        sampling_mask = None if batch.sampling_mask is None else _sets(batch.sampling_mask, start + targets)
        found.append(
            exact_logprobs(
                model,
                torch.from_numpy(np.repeat(ids, own)).to(model.device),
                torch.from_numpy((own.cumsum() - 1)[targets - 1]),
                ids[targets].tolist(),
                temperature=temperature,
                sampling_mask=sampling_mask,
                routes=None if routes is None else torch.from_numpy(routes).to(model.device),
                images=_images(model, pictures, np.repeat(shown, own)),
            )
        )
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)


def _sets(sampling_mask: SamplingMasks, places: np.ndarray) -> list[torch.Tensor | None]:
    """The set that each of these tokens was drawn from, int64, None where nothing was cut."""
    numbers = sampling_mask.which[places].tolist()
    return [None if number < 0 else torch.from_numpy(sampling_mask.set(number)).long() for number in numbers]


def _images(
    model: K3ForCausalLM, pictures: tuple[ImagePatches, ...], shown: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The `images` of `K3ForCausalLM.hidden`, each image's rows computed alone, as an engine does."""
    if not pictures:
        return None
    rows = []
    for picture in pictures:
        pixels, grids = stack([picture])
        with fixed_arithmetic():
            rows += model.image_rows(torch.from_numpy(pixels), torch.from_numpy(grids))
    return torch.cat(rows), torch.from_numpy(np.flatnonzero(shown)).to(model.device)
