"""A submission's text: which files it is."""

from __future__ import annotations

import re

from k3rl.envs.harness.workspace import files_from

MAX_CHARS = 400_000
_FENCED = re.compile(r"```[a-z+]*[ \t]*\n(.*?)```", re.DOTALL)


def files_of(answer: str, file: str) -> dict[str, str] | None:
    """The files of an answer: JSON {"files": {name: text}}, else the last fenced block or all of it as `file`.

    None when there is no `file` among them, when they are too long, or when they are no text.
    """
    if len(answer) > MAX_CHARS:
        return None
    files = files_from(answer)
    if files is None:
        blocks: list[str] = _FENCED.findall(answer)
        files = {file: blocks[-1] if blocks else answer}
    if not files.get(file, "").strip():
        return None
    try:
        "".join(files.values()).encode()
    except UnicodeEncodeError:
        return None
    return files
