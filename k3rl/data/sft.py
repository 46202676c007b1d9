"""Chat data sets: reading JSONL and Parquet, and encoding conversations with exact loss masks."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from k3rl.config import ConfigError
from k3rl.data.batch import TrainSequence
from k3rl.data.images import ImagePatches, conversation_images
from k3rl.tokens import Tokenizer, chat_format, xtml
from k3rl.types import Message

if TYPE_CHECKING:
    import datasets

Messages = Sequence[Message | Mapping[str, Any]]


class DatasetError(ConfigError):
    """A file or a row that is no training conversation: `path`, and `row` counted from 0 (None: the whole file)."""

    def __init__(self, path: str | os.PathLike[str], row: int | None, reason: str) -> None:
        where = f"{path}" if row is None else f"{path}, row {row}"
        super().__init__(f"{where}: {reason}", key="data", got=str(path))
        self.path = str(path)
        self.row = row
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ChatExample:
    """One conversation to learn from. `meta` is every other column of its row (task_id, family, level, ...)."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    row: int = 0


class ChatDataset(Sequence[ChatExample]):
    """The rows of one file, parsed when asked for. Indexing raises DatasetError for a bad row.

    `fingerprint` is the SHA-256 (hex) of the file, `path` the file, `rows` the Hugging Face data set underneath: one
    `text` column for JSONL, the file's columns for Parquet.
    """

    def __init__(self, path: Path, rows: datasets.Dataset, fingerprint: str) -> None:
        self.path = path
        self.rows = rows
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a data set of {len(self)} rows")
        row %= len(self)
        return _example(self.rows[row], self.path, row)

    def __iter__(self) -> Iterator[ChatExample]:
        for row in range(len(self)):
            yield self[row]


def load_chat_dataset(path: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str]) -> ChatDataset:
    """The conversations in a `.jsonl` or `.parquet` file, through Hugging Face `datasets` and without network.

    A row has `messages` (OpenAI form) and may have `tools`; in Parquet both may be JSON strings, and must be when
    arguments or schemas are objects. A JSONL file is read as lines and each line parsed here: the JSON loader would
    give every object the keys of all others, which puts arguments into tool calls that nobody wrote. `cache_dir` holds
    the Arrow files; give each run its own. Raises DatasetError for a file that cannot be read or has no row.
    """
    import datasets  # a second to import; actors that only train never need it

    path = Path(path)
    kind = {".jsonl": "text", ".json": "text", ".parquet": "parquet"}.get(path.suffix)
    if kind is None:
        raise DatasetError(path, None, f"the suffix is {path.suffix!r}; wanted .jsonl or .parquet")
    if not path.is_file():
        raise DatasetError(path, None, "there is no such file")
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        rows = datasets.load_dataset(
            kind,
            name=fingerprint,  # the cache key: by itself it goes by path and time, and gives old rows for a new file
            data_files=glob.escape(str(path)),
            split="train",
            cache_dir=str(cache_dir),
        )
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowInvalid) as error:
        raise DatasetError(path, None, f"cannot be read as {kind}: {error.__cause__ or error}") from error
    if kind == "parquet" and "messages" not in rows.column_names:
        raise DatasetError(path, None, f"has the columns {rows.column_names}; wanted messages")
    return ChatDataset(path, rows, fingerprint)


def encode_example(
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: Tokenizer,
    thinking: bool,
    *,
    thinking_effort: str | None = None,
    images: Sequence[ImagePatches] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [T], loss mask bool [T]) of a whole conversation, every assistant turn trained.

    True is exactly what the policy would sample: the assistant message after the generation prefix, END_OF_MSG
    included. Arguments that are not JSON are masked out (k3.md 10.2). `images` (`conversation_images`) get one
    placeholder id each, behind their original size; without them an image is the text of its placeholder. Raises
    ChatError or TokenizerError for a conversation that cannot be written, ChatError when it has no assistant turn.
    """
    segments, trained = chat_format(tokenizer).render_trained(
        messages,
        tools=tools,
        thinking=thinking,
        thinking_effort=thinking_effort,
        image_prompts=None if images is None else [image.prompt for image in images],
    )
    if not any(trained):
        raise xtml.XTMLError("the conversation has no assistant turn; there is nothing to train on")
    ids: list[int] = []
    mask: list[bool] = []
    for segment, train in zip(segments, trained, strict=True):
        piece = tokenizer.encode_segments([segment])
        ids += piece
        mask += [train] * len(piece)
    return np.asarray(ids, np.int64), np.asarray(mask, bool)


def sft_sequence(
    name: str, ids: np.ndarray, loss_mask: np.ndarray, images: Sequence[ImagePatches] = ()
) -> TrainSequence:
    """An encoded example as a sequence to pack: advantage 1 at its targets, and no sampler."""
    mask = np.asarray(loss_mask, bool)
    nothing = np.zeros(len(mask), np.float32)
    return TrainSequence(name, np.asarray(ids, np.int64), mask, nothing, mask.astype(np.float32), images=tuple(images))


def chat_sequence(
    name: str,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: Tokenizer,
    thinking: bool,
    *,
    thinking_effort: str | None = None,
    folder: Path | None = None,
) -> TrainSequence:
    """A conversation, with its images if it has any, as a sequence to pack.

    folder: where image files of this data set are (`conversation_images`). Raises ImageError, and as `encode_example`.
    """
    images = conversation_images(messages, folder=folder)
    ids, mask = encode_example(
        messages, tools, tokenizer, thinking, thinking_effort=thinking_effort, images=images or None
    )
    return sft_sequence(name, ids, mask, images)


def _example(row: Mapping[str, Any], path: Path, index: int) -> ChatExample:
    """The conversation in a row of either format."""
    if set(row) == {"text"}:
        row = _parsed(row["text"], "the line", path, index)
        if not isinstance(row, dict):
            raise DatasetError(path, index, f"is a JSON {type(row).__name__}; wanted an object with messages")
    else:
        for column in ("messages", "tools"):
            _refuse_structs(row.get(column), column, path, index)
    columns = {
        name: _parsed(value, name, path, index) if isinstance(value, str) and name in ("messages", "tools") else value
        for name, value in row.items()
    }
    messages, tools = columns.pop("messages", None), columns.pop("tools", None)
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise DatasetError(path, index, "has no messages; wanted a list of {role, content, ...}")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise DatasetError(path, index, f"has tools of type {type(tools).__name__}; wanted a list of declarations")
    return ChatExample(messages, tools or None, columns, index)


def _parsed(text: str, what: str, path: Path, index: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(path, index, f"{what} is not JSON: {error}") from error


def _refuse_structs(value: Any, column: str, path: Path, index: int) -> None:
    """Parquet gives every struct of a column the same keys, so an argument that is absent reads as null."""
    if not isinstance(value, list):
        return
    calls = [call for message in value if isinstance(message, dict) for call in message.get("tool_calls") or ()]
    arguments = [(call.get("function") or call).get("arguments") for call in calls if isinstance(call, dict)]
    if column == "tools" or any(isinstance(item, dict) for item in arguments):
        what = "tools" if column == "tools" else "tool call arguments"
        raise DatasetError(
            path,
            index,
            f"{what} are Parquet structs, which cannot say that a key is absent; store them as JSON strings",
        )
