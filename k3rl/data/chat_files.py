"""Files of chat data, row by row: JSON lines, a JSON array or Parquet, whole or compressed.

A row is counted from 0 among the rows; blank lines are none. A file of lines may begin with a byte order mark. What a
file is compressed with is read off its first bytes, so that a wrong suffix does no harm.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.config import ConfigError

KINDS = (".jsonl", ".ndjson", ".json", ".parquet")
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_BOM, _WIDE = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_TRUNCATED = (EOFError, zlib.error, gzip.BadGzipFile, OSError)


class DatasetError(ConfigError):
    """A file or a row that is no training conversation.

    `path`; `row` counted from 0 (None: the whole file); `found`: the key of the row or message that is wrong, or "".
    """

    def __init__(self, path: str | os.PathLike[str], row: int | None, reason: str, found: str = "") -> None:
        where = f"{path}" if row is None else f"{path}, row {row}"
        super().__init__(f"{where}: {reason}", key="data", got=str(path))
        self.path = str(path)
        self.row = row
        self.reason = reason
        self.found = found


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a file. `text`: the bytes of its JSON; `columns`: those of a Parquet row, which has no text.

    line: of a file of lines, from 1.
    """

    row: int
    text: bytes = b""
    columns: dict[str, Any] | None = None
    line: int | None = None

    @property
    def place(self) -> str:
        """Where the row stands besides its number; "" where that is all."""
        return "" if self.line is None else f"line {self.line}"

    def value(self, path: Path) -> Any:
        """The JSON value of the row, or its columns. Raises DatasetError."""
        if self.columns is not None:
            return self.columns
        at = f" ({self.place})" if self.place else ""
        try:
            return json.loads(self.decoded(path), object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise DatasetError(path, self.row, f"the line is not JSON{at}: {error}") from error

    def decoded(self, path: Path) -> str:
        """The text of the row. Raises DatasetError for one that is not UTF-8."""
        try:
            return self.text.decode("utf-8")
        except UnicodeDecodeError as error:
            at = f" ({self.place})" if self.place else ""
            reason = f"cannot be read as text: byte {error.start} of the row{at} is not UTF-8"
            raise DatasetError(path, self.row, reason) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand there once each: of two values one would be left out without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def kind_of(path: Path) -> Literal["lines", "parquet"]:
    """How a file is read, by its suffix. Raises DatasetError for one that is not known, or a file that is not there."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    last = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in _COMPRESSED else (suffixes or [""])[-1]
    if last not in KINDS or (last == ".parquet" and suffixes[-1] != last):
        raise DatasetError(
            path, None, f"the suffix is {path.suffix!r}; wanted .jsonl, .ndjson, .json, any of them with .gz or .zst, "
            "or .parquet"
        )  # fmt: skip
    if not path.is_file():
        raise DatasetError(path, None, "there is no such file")
    return "parquet" if last == ".parquet" else "lines"


def fingerprint_of(path: Path) -> str:
    """SHA-256 (hex) of the file as it lies on the disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def raw_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a file, in order. Raises DatasetError for a file that cannot be read, or that has no row."""
    try:
        rows = _parquet_rows(path) if kind_of(path) == "parquet" else _text_rows(path)
        row = None
        for row in rows:
            yield row
    except PermissionError as error:
        raise DatasetError(
            path, None, f"may not be read by this user ({error.strerror}); give it read access"
        ) from error
    if row is None:
        raise DatasetError(path, None, "cannot be read as text: it is empty, and holds no row")


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=256) for row in batch.to_pylist())
            for number, columns in enumerate(rows):
                yield RawRow(number, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise DatasetError(path, None, f"cannot be read as parquet: {error}") from error


def _text_rows(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as plain:
        head = plain.read(4)
        plain.seek(0)
        if head.startswith(_PARQUET):
            raise DatasetError(path, None, "is a Parquet file by its first bytes; name it .parquet")
        with closing(_decompressed(plain, head)) as file:
            try:
                yield from _rows_of_lines(path, file)
            except _TRUNCATED as error:
                if isinstance(error, PermissionError):
                    raise
                raise DatasetError(path, None, f"ends too early or is damaged: {error}") from error


def _decompressed(file: IO[bytes], head: bytes) -> IO[bytes]:
    if head.startswith(_GZIP):
        return cast(IO[bytes], gzip.open(file, "rb"))
    if head.startswith(_ZSTD):
        return cast(IO[bytes], _Lines(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")))
    return file


class _Lines:
    """The lines of an Arrow stream, which has none of its own."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._held = b""

    def __iter__(self) -> Iterator[bytes]:
        while block := self._stream.read(1 << 20):
            *whole, self._held = (self._held + block).split(b"\n")
            for line in whole:
                yield line + b"\n"
        if self._held:
            yield self._held

    def close(self) -> None:
        self._stream.close()


def _rows_of_lines(path: Path, file: IO[bytes]) -> Iterator[RawRow]:
    number, lines = 0, enumerate(file, start=1)
    for line, data in lines:
        if line == 1:
            if data.startswith(_WIDE) and b"\x00" in data:
                raise DatasetError(path, None, "cannot be read as text: it is UTF-16; save it as UTF-8")
            data = data.removeprefix(_BOM)
        if not (text := data.strip()):
            continue
        if number == 0 and (text.startswith(b"[") or text == b"{"):
            yield from _rows_of_document(path, data + b"".join(more for _, more in lines))
            return
        yield RawRow(number, text, line=line)
        number += 1


def _rows_of_document(path: Path, text: bytes) -> Iterator[RawRow]:
    """The rows of a file that is one JSON value: an array of them, or a single one."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DatasetError(path, None, f"is neither JSON lines nor one JSON array: {error}") from error
    for number, row in enumerate(value if isinstance(value, list) else [value]):
        yield RawRow(number, json.dumps(row).encode())
