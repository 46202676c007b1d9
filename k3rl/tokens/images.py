"""The images of a conversation: which there are, in the order of their media blocks, and what their files hold.

An image part is {"type": "image", "image": X} or {"type": "image_url", "image_url": X or {"url": X}}. Inside episodes
and requests X is a `data:` URL with base64: it needs no file and no network, and says the same wherever it is read.
How many rows an image takes in the model follows from its size; the pixels of those are `k3rl.data.images`. Pillow
reads the files; no torch here.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from k3rl.tokens.xtml_normalize import normalize, order_results
from k3rl.tokens.xtml_render import image_prompt
from k3rl.types import EncodedImage, Message

if TYPE_CHECKING:
    from PIL import Image

Messages = Sequence[Message | Mapping[str, Any]]
_BOARD = "transparent_bg_config"
IMAGE_KINDS = ("image", "image_url")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # no others: some readers start programs
_CACHED_URLS = 32  # decoded URLs; the episodes of a group all say the same ones


class ImageError(ValueError):
    """An image that cannot be read or used; the message says what was got and wanted."""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The released preprocessor's numbers. `square`, `white` and `gray` are those of the checkerboard.

    patch_limit: patches of an image before merging, at most; side_limit: patches along one side, at most.
    """

    patch_size: int = 14
    merge: int = 2
    patch_limit: int = 65536
    side_limit: int = 512
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    square: int = 8
    white: int = 255
    gray: int = 180

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ImageConfig:
        """From the official `preprocessor_config.json`. Raises ImageError for another way to treat transparency."""
        values = given.get("media_proc_cfg", given)
        board = values.get(_BOARD) or {}
        if board.get("pattern") != "chessboard" or values.get("transparent_bg_fill_stage") != "after_resize":
            raise ImageError(f"{_BOARD} must be a chessboard that is filled after_resize; got {board}")
        if not board.get("chessboard_square_on_top_left", True):
            raise ImageError("chessboard_square_on_top_left must be true: the top left square is white")
        return cls(
            patch_size=values["patch_size"],
            merge=values["merge_kernel_size"],
            patch_limit=values["in_patch_limit"],
            side_limit=values["patch_limit_on_one_side"],
            mean=tuple(values["image_mean"]),
            std=tuple(values["image_std"]),
            square=board["chessboard_square_size"],
            white=board["chessboard_white_value"],
            gray=board["chessboard_gray_value"],
        )

    def to_dict(self) -> dict[str, Any]:
        """The official `preprocessor_config.json`."""
        return {
            "media_proc_cfg": {
                "in_patch_limit": self.patch_limit,
                "patch_size": self.patch_size,
                "image_mean": list(self.mean),
                "image_std": list(self.std),
                "merge_kernel_size": self.merge,
                "fixed_output_tokens": None,
                "patch_limit_on_one_side": self.side_limit,
                _BOARD: {
                    "pattern": "chessboard",
                    "chessboard_square_size": self.square,
                    "chessboard_square_on_top_left": True,
                    "chessboard_white_value": self.white,
                    "chessboard_gray_value": self.gray,
                },
                "transparent_bg_fill_stage": "after_resize",
            }
        }


RELEASED_IMAGES = ImageConfig()


def target_size(width: int, height: int, config: ImageConfig = RELEASED_IMAGES) -> tuple[int, int]:
    """(width, height) in pixels after scaling, before padding: at most the limits, at least 1, never enlarged.

    Raises ImageError for an image without pixels.
    """
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width} x {height} pixels has no pixels")
    patch, longest = config.patch_size, config.side_limit * config.patch_size
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(config.patch_limit / patches), longest / width, longest / height)
    return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)


def image_rows(width: int, height: int, config: ImageConfig = RELEASED_IMAGES) -> int:
    """Rows of the language model that an image of this original size becomes."""
    cell = config.patch_size * config.merge
    across, down = target_size(width, height, config)
    return -(-across // cell) * -(-down // cell)


def image_parts(messages: Messages, history: Messages = ()) -> list[Mapping[str, Any]]:
    """The image parts of `messages` in the order in which `xtml.render` asks for them (tool results are re-sorted).

    history: the conversation before them, as `xtml.continuation` takes it. Raises XTMLError for messages without form.
    """
    said_before = list(history[-1:])
    everything = [*said_before, *messages]
    turns = normalize(everything)
    number = {id(said.parts): place for place, said in enumerate(turns)}  # `order_results` keeps the tuples
    found: list[Mapping[str, Any]] = []
    for said in order_results(turns)[len(said_before) :]:
        if any(part.text is None for part in said.parts):
            message = everything[number[id(said.parts)]]
            content = message.content if isinstance(message, Message) else message["content"]
            found += [part for part in content if part.get("type") in IMAGE_KINDS]
    return found


def part_source(part: Mapping[str, Any]) -> Any:
    """What an image part holds: its X."""
    given: Any = part.get(part["type"])
    return given.get("url") if isinstance(given, Mapping) else given


def encoded_images(messages: Messages, history: Messages = ()) -> tuple[EncodedImage, ...]:
    """The images of `messages`, which must all be `data:` URLs, in the order of `image_parts`. Raises ImageError."""
    return tuple(_encoded(part_source(part)) for part in image_parts(messages, history))


def image_prompts(images: Sequence[EncodedImage]) -> list[str] | None:
    """`image_prompts` of `xtml.render` for these images; None without any."""
    return [image_prompt(image.width, image.height) for image in images] or None


def shown_text(content: Any) -> str:
    """A message's content for a reader: its texts, and for each image a word with its size."""
    if not isinstance(content, list | tuple):
        return str(content)
    lines = []
    for part in content:
        if part.get("type") in IMAGE_KINDS:
            image = _encoded(part_source(part))
            lines.append(f"[image {image.width}x{image.height}]")
        else:
            lines.append(str(part.get("text", "")))
    return "\n".join(lines)


def data_url(data: bytes, kind: str = "image/png") -> str:
    """The `data:` URL of a file's bytes; `kind` is its media type."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def url_bytes(url: str) -> bytes:
    """The bytes that a `data:` URL holds. Raises ImageError for any other URL."""
    head, comma, body = url.partition(",")
    if not head.startswith("data:"):
        raise ImageError(
            f"the image {url[:60]!r} would have to be downloaded or read from a disk; "
            "send its bytes as data:image/...;base64,..."
        )
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"the image URL {url[:40]!r} is not `data:image/...;base64,...`")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the image URL {url[:40]!r} holds no base64: {error}") from error


def open_image(data: bytes, pixel_limit: int | None = None) -> Image.Image:
    """The image in a file's bytes (one of `FORMATS`), read whole.

    Raises ImageError, before decoding where it has too many pixels.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if pixel_limit is not None and image.width * image.height > pixel_limit:
            raise ImageError(f"an image has {image.width} x {image.height} pixels; at most {pixel_limit} are taken")
        image.load()
    except ImageError:
        raise
    except Exception as error:  # Pillow's readers raise whatever a damaged file makes them trip over
        raise ImageError(f"an image of {len(data)} bytes cannot be read: {error}") from error
    return image


def encode_image(data: bytes, pixel_limit: int | None = None) -> EncodedImage:
    """A file's bytes with their size in pixels. Raises ImageError when they are no image that can be read."""
    return EncodedImage(data, *open_image(data, pixel_limit).size)


def _encoded(source: Any) -> EncodedImage:
    if not isinstance(source, str):
        raise ImageError(
            f"an image part of an episode holds {type(source).__name__}; wanted a data: URL, "
            "which k3rl.tokens.images.data_url makes of a file's bytes"
        )
    return _of_url(source)


@lru_cache(maxsize=_CACHED_URLS)
def _of_url(url: str) -> EncodedImage:
    return encode_image(url_bytes(url))
