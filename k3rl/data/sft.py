"""Chat data sets: rows at hand in any order, and conversations encoded with exact loss masks."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from k3rl.data.batch import TrainSequence
from k3rl.data.chat_files import DatasetError, RawRow, fingerprint_of, kind_of, raw_rows
from k3rl.data.chat_forms import ChatExample, Messages, example_of
from k3rl.data.images import ImagePatches, conversation_images
from k3rl.tokens import Tokenizer, xtml

if TYPE_CHECKING:
    import datasets

_ROWS_A_BATCH = 512


class ChatDataset(Sequence[ChatExample]):
    """The rows of one file, parsed when asked for. Indexing raises DatasetError for a bad row.

    `fingerprint` is the SHA-256 (hex) of the file, `path` the file, `rows` the Hugging Face data set underneath: `text`
    and `line` for files of JSON, the file's columns for Parquet.
    """

    def __init__(self, path: Path, rows: datasets.Dataset, fingerprint: str) -> None:
        self.path = path
        self.rows = rows
        self.fingerprint = fingerprint
        self._parquet = kind_of(path) == "parquet"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a data set of {len(self)} rows")
        row %= len(self)
        columns = self.rows[row]
        raw = RawRow(row, columns=columns) if self._parquet else RawRow(row, columns["text"], line=columns["line"])
        return example_of(raw, self.path)

    def __iter__(self) -> Iterator[ChatExample]:
        for row in range(len(self)):
            yield self[row]

    def digests(self) -> np.ndarray:
        """uint64 [rows]: a digest of each row's own bytes, by which rows of another version of the file are told."""
        found = np.empty(len(self), np.uint64)
        for row, columns in enumerate(self.rows):
            own = json.dumps(columns, sort_keys=True, default=str).encode() if self._parquet else columns["text"]
            found[row] = int.from_bytes(hashlib.blake2b(own, digest_size=8).digest(), "little")
        return found


def load_chat_dataset(path: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str]) -> ChatDataset:
    """The conversations in a file of `k3rl.data.chat_files`, in the forms of `k3rl.data.chat_forms`, for random access.

    In Parquet `messages` and `tools` may be JSON strings, and must be when arguments or schemas are objects. JSON is
    kept as lines and each line parsed when asked for: a JSON loader of tables would give every object the keys of all
    others, which puts arguments into tool calls that nobody wrote. `cache_dir` holds the Arrow files, which are mapped
    into memory; give each run its own. Raises DatasetError for a file that cannot be read or has no row.
    """
    import datasets  # a second to import; actors that only train never need it

    path = Path(path)
    kind, fingerprint = kind_of(path), fingerprint_of(path)
    if kind == "parquet":
        return ChatDataset(path, _parquet_table(path, fingerprint, cache_dir), fingerprint)
    kept = Path(cache_dir) / f"{fingerprint}.arrow"  # of the content: by path and time an old file could be taken
    if not kept.is_file():
        _write_lines(path, kept)
    return ChatDataset(path, datasets.Dataset.from_file(str(kept)), fingerprint)


def _batched(rows: Iterable[RawRow], size: int) -> Iterator[list[RawRow]]:
    left = iter(rows)
    while batch := list(islice(left, size)):
        yield batch


def _write_lines(path: Path, kept: Path) -> None:
    """The rows of a file of JSON as an Arrow file, whole or not at all."""
    schema = pa.schema([("text", pa.large_binary()), ("line", pa.int64())])
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(f"{kept.name}.{os.getpid()}.tmp")
    with part.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for rows in _batched(raw_rows(path), _ROWS_A_BATCH):
            for row in rows:
                row.decoded(
                    path
                )  # what is no text at all is said at once, a row that is no conversation when asked for
            columns = [[row.text for row in rows], [row.line for row in rows]]
            writer.write_batch(
                pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)
            )
    part.replace(kept)


def _parquet_table(path: Path, fingerprint: str, cache_dir: str | os.PathLike[str]) -> datasets.Dataset:
    import datasets

    try:
        rows = datasets.load_dataset(
            "parquet",
            name=fingerprint,  # the cache key: by itself it goes by path and time, and gives old rows for a new file
            data_files=glob.escape(str(path)),
            split="train",
            cache_dir=str(cache_dir),
        )
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowInvalid) as error:
        raise DatasetError(path, None, f"cannot be read as parquet: {error.__cause__ or error}") from error
    if not {"messages", "conversations", "conversation", "prompt", "instruction"} & set(rows.column_names):
        raise DatasetError(path, None, f"has the columns {rows.column_names}; wanted messages")
    if not len(rows):
        raise DatasetError(path, None, "is empty: it holds no row")
    return rows


def encode_example(
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: Tokenizer,
    thinking: bool,
    *,
    thinking_effort: str | None = None,
    images: Sequence[ImagePatches] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [T], loss mask bool [T]) of a whole conversation, every assistant turn trained that does not say no.

    True is exactly what the policy would sample: the assistant message after the generation prefix, END_OF_MSG
    included. Arguments that are not JSON are masked out (k3.md 10.2). `images` (`conversation_images`) get one
    placeholder id each, behind their original size; without them an image is the text of its placeholder. Raises
    XTMLError or TokenizerError for a conversation that cannot be written, XTMLError when it has no assistant turn.
    """
    segments, trained = xtml.render_trained(
        messages,
        tools=tools,
        thinking=thinking,
        thinking_effort=thinking_effort,
        add_generation_prompt=False,
        image_prompts=None if images is None else [image.prompt for image in images],
    )
    if not any(trained):
        none = "no assistant turn that is trained" if _answers(messages) else "no assistant turn"
        raise xtml.XTMLError(f"the conversation has {none}; there is nothing to train on")
    ids: list[int] = []
    mask: list[bool] = []
    for segment, train in zip(segments, trained, strict=True):
        piece = tokenizer.encode_segments([segment])
        ids += piece
        mask += [train] * len(piece)
    return np.asarray(ids, np.int64), np.asarray(mask, bool)


def _answers(messages: Messages) -> bool:
    return any((said.get("role") if isinstance(said, Mapping) else said.role) == "assistant" for said in messages)


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
