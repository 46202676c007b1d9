"""Images of prompts inside the engine: a prompt in rows of the model, and the features of its images when needed.

A prompt with images is kept in rows: each image takes as many as the model gives it, and each of these has a negative
number drawn from the image's content. So lengths, pages, chunks and routes all count rows, an image may be cut
anywhere by a chunk, and equal numbers mean equal ids and equal pixels: groups and the prefix cache need no other key.

The tower runs when the prefill reaches an image, on that image alone (so a result does not depend on who else is
there); its rows are kept until the last of them is read. It runs again only when the prompt itself is computed again:
after a preemption, or under new weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from k3rl.data import ImagePatches, stack
from k3rl.engine.protocol import InvalidRequest
from k3rl.model import K3Config, K3ForCausalLM, check_grids

_SIGN = np.int64(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and the first of the prompt's rows that it takes."""

    start: int
    image: ImagePatches

    @property
    def stop(self) -> int:
        """The row behind its last one."""
        return self.start + self.image.rows


Placed: TypeAlias = tuple[PlacedImage, ...]
Features: TypeAlias = dict[int, Tensor]  # first row of an image -> its rows [rows, H]


def expand(prompt: np.ndarray, images: Sequence[ImagePatches], config: K3Config) -> tuple[np.ndarray, Placed]:
    """(int64 [P rows], where the images are) of a prompt's ids int64 [T] and the images of its placeholders, in order.

    Raises InvalidRequest for images that the model cannot read, for a placeholder without an image or an image without
    a placeholder. Without a vision tower every id is just a token.
    """
    if config.vision_config is None:
        if images:
            raise InvalidRequest(f"{len(images)} images were given and this model has no vision tower; send text only")
        return prompt, ()
    places = np.flatnonzero(prompt == config.media_placeholder_token_id)
    if len(places) != len(images):
        raise InvalidRequest(
            f"the prompt has {len(places)} image placeholders (id {config.media_placeholder_token_id}) and "
            f"{len(images)} images; give one image for each, in order"
        )
    if not images:
        return prompt, ()
    for number, image in enumerate(images):
        _check(number, image, config)
    pieces, placed, done, length = [], [], 0, 0
    for place, image in zip(places.tolist(), images, strict=True):
        length += place - done
        pieces += [prompt[done:place], _numbers(image)]
        placed.append(PlacedImage(length, image))
        done, length = place + 1, length + image.rows
    return np.concatenate([*pieces, prompt[done:]]), tuple(placed)


def _check(number: int, image: ImagePatches, config: K3Config) -> None:
    assert config.vision_config is not None
    pixels = image.pixels
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.float32 or len(image.grid) != 3:
        kind = getattr(pixels, "dtype", type(pixels).__name__)
        raise InvalidRequest(f"image {number} has {kind} pixels and the grid {image.grid}; wanted float32 and three")
    try:
        ((_, rows, columns),) = check_grids(torch.tensor([image.grid]), torch.from_numpy(pixels), config.vision_config)
    except ValueError as error:
        raise InvalidRequest(f"image {number}: {error}") from error
    down, right = config.vision_config.merge_kernel_size
    if image.rows != (rows // down) * (columns // right):
        raise InvalidRequest(f"image {number} says {image.rows} rows; its grid {image.grid} gives another number")
    if not np.isfinite(pixels).all():
        raise InvalidRequest(f"image {number} has pixels that are NaN or infinite")


def _numbers(image: ImagePatches) -> np.ndarray:
    """int64 [rows], all negative: 63 bits a row, drawn from the digest of the grid and the pixels."""
    return np.frombuffer(hashlib.shake_256(image.digest).digest(8 * image.rows), np.int64) | _SIGN


def image_inputs(
    model: K3ForCausalLM, pieces: Iterable[tuple[Placed, Features, int, int]]
) -> tuple[Tensor, Tensor] | None:
    """The `images` of `K3ForCausalLM.hidden` for prompt rows laid end to end: (images, features, start, stop) each.

    features are filled with what had to be computed, and emptied of what no later row needs. None without images.
    """
    rows, places, offset = [], [], 0
    for images, features, start, stop in pieces:
        for placed in images:
            first, last = max(start, placed.start), min(stop, placed.stop)
            if first < last:
                if placed.start not in features:
                    features[placed.start] = _features(model, placed.image)
                rows.append(features[placed.start][first - placed.start : last - placed.start])
                places.append(torch.arange(first - start + offset, last - start + offset))
                if last == placed.stop:
                    del features[placed.start]
        offset += stop - start
    return (torch.cat(rows), torch.cat(places).to(model.device)) if rows else None


def _features(model: K3ForCausalLM, image: ImagePatches) -> Tensor:
    pixels, grids = stack([image])
    return model.image_rows(torch.from_numpy(pixels), torch.from_numpy(grids))[0]
