"""The images of a conversation: which there are, in the order of their media blocks, and what their files hold.

An image part is {"type": "image", "image": X} or {"type": "image_url", "image_url": X or {"url": X}}. Inside episodes
and requests X is a `data:` URL with base64: it needs no file and no network, and says the same wherever it is read.
What a vision tower makes of an image is `k3rl.data.images`. Pillow reads the files; no torch here.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from k3rl.tokens.xtml_normalize import normalize, order_results
from k3rl.tokens.xtml_render import image_prompt
from k3rl.types import EncodedImage, Message

if TYPE_CHECKING:
    from PIL import Image

Messages = Sequence[Message | Mapping[str, Any]]
KINDS = ("image", "image_url")
_KEPT = 32  # decoded URLs; the episodes of a group all say the same ones


class ImageError(ValueError):
    """An image that cannot be read or used; the message says what was got and wanted."""


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
            found += [part for part in content if part.get("type") in KINDS]
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
    """The image in a file's bytes, read whole. Raises ImageError, before decoding where it has too many pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data))
        if pixel_limit is not None and image.width * image.height > pixel_limit:
            raise ImageError(f"an image has {image.width} x {image.height} pixels; at most {pixel_limit} are taken")
        image.load()
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
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


@lru_cache(maxsize=_KEPT)
def _of_url(url: str) -> EncodedImage:
    return encode_image(url_bytes(url))
