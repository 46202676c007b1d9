"""Images as the vision tower reads them: the official preprocessing (k3.md 11) with Pillow and NumPy.

scale down to the patch limits (never up), resize bicubically, lay transparent pixels over a checkerboard, pad with
zeros to the right and below to whole merged patches, normalise, cut into patches. The prompt names the original size;
one placeholder id stands for all rows of an image and is expanded inside the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from k3rl.tokens import (
    RELEASED_IMAGES,
    ImageConfig,
    ImageError,
    image_parts,
    image_rows,
    open_image,
    part_source,
    target_size,
    url_bytes,
    xtml,
)
from k3rl.types import EncodedImage, Message

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "ImageConfig",
    "ImageError",
    "ImagePatches",
    "conversation_images",
    "image_rows",
    "preprocess",
    "preprocess_files",
    "rows_per_token",
    "stack",
    "target_size",
]


@dataclass(frozen=True)
class ImagePatches:
    """One image: pixels float32 [n, 3, p, p], patches row by row; grid (frames, rows, columns) in patches.

    width and height are the original ones; rows is how many rows of the language model the image becomes. Nobody writes
    to the pixels: `digest` is made once.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]
    width: int
    height: int
    rows: int

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the grid and the pixels: equal digests are equal images to a model."""
        content = hashlib.sha256(str(tuple(map(int, self.grid))).encode())
        content.update(np.ascontiguousarray(self.pixels).data)
        return content.digest()

    @property
    def prompt(self) -> str:
        """The media block for `image_prompts` of `xtml.render`."""
        return xtml.image_prompt(self.width, self.height)


def preprocess(image: Image.Image, config: ImageConfig = RELEASED_IMAGES) -> ImagePatches:
    """The patches of one image of any mode."""
    from PIL import Image

    size = target_size(*image.size, config)
    transparent = "A" in image.getbands() or "transparency" in image.info
    resized = image.convert("RGBA" if transparent else "RGB").resize(size, resample=Image.Resampling.BICUBIC)
    pixels = np.asarray(resized)
    if transparent:
        pixels = _over_checkerboard(pixels, config)
    cell, patch = config.patch_size * config.merge, config.patch_size
    padding = [(0, -pixels.shape[0] % cell), (0, -pixels.shape[1] % cell), (0, 0)]
    padded = np.pad(pixels, padding)
    values: np.ndarray = (padded / 255.0).astype(np.float32)
    values = (values - np.asarray(config.mean, np.float32)) * (1 / np.asarray(config.std, np.float32))
    rows, columns = padded.shape[0] // patch, padded.shape[1] // patch
    patches = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
    merged = (rows // config.merge) * (columns // config.merge)
    return ImagePatches(np.ascontiguousarray(patches, np.float32), (1, rows, columns), *image.size, merged)


def _over_checkerboard(rgba: np.ndarray, config: ImageConfig) -> np.ndarray:
    """uint8 [h, w, 4] -> uint8 [h, w, 3]: squares of white and gray behind it, white at the top left, truncated."""
    row = np.arange(rgba.shape[0])[:, None] // config.square
    column = np.arange(rgba.shape[1])[None] // config.square
    board = np.where((row + column) % 2 == 1, config.gray, config.white)[..., None]
    alpha = rgba[..., 3:].astype(np.float32) / 255.0
    return (alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.uint8)


# --------------------------------------------------------------------------------------------- conversations


def conversation_images(
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    folder: Path | None = None,
    config: ImageConfig = RELEASED_IMAGES,
) -> tuple[ImagePatches, ...]:
    """The images of a conversation in the order in which `xtml.render` asks for them (tool results are re-sorted).

    An image part is one of `k3rl.tokens.images`; X is a Pillow image, the bytes of a file, a `data:` URL with base64,
    or a path inside `folder`. Nothing is downloaded, and without `folder` no file is read. Raises ImageError, or
    XTMLError for a conversation that has no form.
    """
    return tuple(preprocess(_read(part_source(part), folder), config) for part in image_parts(messages))


def preprocess_files(
    images: Sequence[EncodedImage], made: dict[EncodedImage, ImagePatches], config: ImageConfig = RELEASED_IMAGES
) -> tuple[ImagePatches, ...]:
    """The patches of each file. What is in `made` is taken from there, and what is new put there: whoever prepares many
    conversations of one image hands all calls the same dictionary. Raises ImageError.
    """
    for image in images:
        if image not in made:
            made[image] = preprocess(open_image(image.data), config)
    return tuple(made[image] for image in images)


def _read(given: Any, folder: Path | None) -> Image.Image:
    from PIL import Image

    if isinstance(given, Image.Image):
        return given
    if isinstance(given, str):
        given = url_bytes(given) if given.startswith("data:") else _file(given, folder)
    if not isinstance(given, bytes):
        raise ImageError(f"an image part holds {type(given).__name__}; wanted a Pillow image, bytes, a URL or a path")
    return open_image(given)


def _file(name: str, folder: Path | None) -> bytes:
    if "://" in name:
        raise ImageError(
            f"{name[:80]!r} would have to be downloaded; store the image beside the data or as a data: URL"
        )
    if folder is None:
        raise ImageError(f"{name[:80]!r} is a file name, and no folder of images was given")
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ImageError(f"{name[:80]!r} leads out of the folder of images {folder}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}") from error


# ------------------------------------------------------------------------------------------------- token rows


def stack(images: Iterable[ImagePatches]) -> tuple[np.ndarray, np.ndarray]:
    """(pixel_values float32 [patches, 3, p, p], grid_thws int64 [images, 3]) of at least one image, as a model reads
    them."""
    given = list(images)
    if not given:
        raise ImageError("there are no images to stack; leave pixel_values out")
    return np.concatenate([image.pixels for image in given]), np.asarray([image.grid for image in given], np.int64)


def rows_per_token(ids: np.ndarray, images: Sequence[ImagePatches], placeholder: int) -> np.ndarray:
    """int64 [T]: rows that each of ids [T] becomes in the model, 1 except at placeholders, one a image, in order.

    Raises ImageError when there are more or fewer placeholders than images.
    """
    places = np.flatnonzero(ids == placeholder)
    if len(places) != len(images):
        raise ImageError(f"{len(places)} placeholder ids stand for {len(images)} images; wanted one for each")
    counts = np.ones(len(ids), np.int64)
    counts[places] = [image.rows for image in images]
    return counts
