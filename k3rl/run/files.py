"""Writing and reading the files of a run: whole lines, whole files, links replaced at once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from k3rl.config import ConfigError

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by text, or by bytes, so that a reader, or a crash, sees the old file or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError, with the advice, for one that is damaged or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError among them
        raise ConfigError(f"{path} is damaged ({error}); {advice}", key=str(path)) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged (no object but a {type(value).__name__}); {advice}", key=str(path))
    return value


def link_atomic(link: Path, target: str) -> None:
    """Point the relative symbolic link at `target`, replacing an older one at once."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def to_line(row: Any) -> bytes:
    """One JSON object as one line. NaN and infinities become texts: bare ones are not JSON to a browser."""
    try:
        text = _encode(row)
    except ValueError:
        text = _encode(_finite(row))
    return (text + "\n").encode("utf-8", "backslashreplace")


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def number(value: Any) -> Any:
    """The number that `to_line` wrote as a text; anything else as it is."""
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def open_for_append(path: Path) -> BinaryIO:
    """Open a file of lines for appending. A last line that a crash left unfinished is cut off.

    No reader has used that line: readers ignore a line without its newline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115 (the caller closes it)
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep:
        start = max(0, keep - 65536)
        file.seek(start)
        newline = file.read(keep - start).rfind(b"\n")
        keep = start + newline + 1 if newline >= 0 else start
        if newline >= 0:
            break
    if keep != end:
        file.truncate(keep)
    file.seek(keep)
    return file


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """(row, offset behind it) of every whole line from the byte `offset`; nothing when the file is not there yet.

    A last line without its newline is still being written and is left for the next call. An offset behind the end is
    one of a file that was written anew since, which is read from its beginning.
    Raises ValueError, with the path and offset, when a whole line is not a JSON object.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        offset = offset if offset <= os.fstat(file.fileno()).st_size else 0
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: the line at byte {offset} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}: the line at byte {offset} is not a JSON object")
            offset += len(line)
            yield row, offset
