"""Images of stored episodes: each file once, and references where episodes and messages show it.

A `data:` URL of a message whose bytes are among the images that its episode's prompts had is stored with
`sha256:HEX` in place of its base64; nothing else of a message changes, and reading gives the URL back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from k3rl.tokens import IMAGE_KINDS, data_url
from k3rl.types import EncodedImage, Episode, Group

IMAGE_SCHEMA = pa.schema(
    [
        ("sha256", pa.string()),
        ("data", pa.binary()),  # the file as it was said: PNG, JPEG, ...
        ("width", pa.int32()),
        ("height", pa.int32()),
    ]
)
_REFERENCE = "sha256:"


def image_rows(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Columns of IMAGE_SCHEMA: one row per distinct image that a prompt of these episodes had."""
    columns: dict[str, list[Any]] = {name: [] for name in IMAGE_SCHEMA.names}
    found: dict[str, EncodedImage] = {}
    for group in groups:
        for episode in group.episodes:
            found |= episode_images(episode)
    for name, image in found.items():
        for column, value in zip(columns.values(), (name, image.data, image.width, image.height), strict=True):
            column.append(value)
    return columns


def episode_images(episode: Episode) -> dict[str, EncodedImage]:
    """SHA-256 -> image, of all that the prompts of an episode had."""
    distinct = {image for branch in episode.branches for turn in branch.turns for image in turn.images}
    return {image.sha256: image for image in sorted(distinct, key=lambda image: image.sha256)}


def images_by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, EncodedImage]:
    """SHA-256 -> image, from the rows of an image file."""
    return {row["sha256"]: EncodedImage(row["data"], row["width"], row["height"]) for row in rows}


def referring(content: Any, images: Mapping[str, EncodedImage]) -> Any:
    """A message's content with references in place of the bytes of these images."""
    urls = {data_url(image.data, ""): name for name, image in images.items()}  # `data:;base64,BODY`

    def refer(url: str) -> str:
        head, _, body = url.partition(",")
        name = urls.get(f"data:;base64,{body}") if head.endswith(";base64") else None
        return url if name is None else f"{head},{_REFERENCE}{name}"

    return _with_urls(content, refer) if images else content


def restored(content: Any, images: Mapping[str, EncodedImage]) -> Any:
    """The inverse of `referring`. Raises KeyError for an image that is not there."""

    def restore(url: str) -> str:
        head, _, body = url.partition(",")
        if not (head.startswith("data:") and body.startswith(_REFERENCE)):
            return url
        return f"{head},{data_url(images[body.removeprefix(_REFERENCE)].data).partition(',')[2]}"

    return _with_urls(content, restore)


def _with_urls(content: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(content, list | tuple):
        return content
    return [_part(part, change) for part in content]


def _part(part: Any, change: Callable[[str], str]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in IMAGE_KINDS:
        return part
    given = part.get(kind)
    if isinstance(given, Mapping) and isinstance(given.get("url"), str):
        return {**part, kind: {**given, "url": change(given["url"])}}
    return {**part, kind: change(given)} if isinstance(given, str) else part
