"""The data of supervised fine-tuning as the learner reads it: tokens with their loss mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3rl.dashboard.run_reader import RunReader, UnknownRun
from k3rl.data import encode_example
from k3rl.tokens import Tokenizer

PAGE = 20
_MOST_TOKENS = 20_000  # of one page, all conversations together


def data_files(run: RunReader) -> list[str]:
    """Names of the JSONL files of conversations that the run wrote, by name."""
    return sorted(path.name for path in (run.root / "data").glob("*.jsonl") if path.is_file())


def conversations(run: RunReader, file: str, offset: int, limit: int = PAGE) -> dict[str, Any]:
    """Conversations from the byte `offset` of a data file: {"rows": [{row, ids, pieces, mask, problem}], "next"}.

    A row that cannot be encoded has `problem` in place of tokens. Raises UnknownRun for a file that is not there.
    """
    if file not in data_files(run):
        raise UnknownRun(f"run {run.name} has no data file {file!r}; it has {', '.join(data_files(run)) or 'none'}")
    if (tokenizer := run.tokenizer()) is None:
        raise UnknownRun(f"run {run.name} has no tokenizer that can be read, so its data has no tokens")
    config = run.about().get("config") or {}
    thinking = _stage_config(config).get("thinking") == "on"
    rows: list[dict[str, Any]] = []
    with open(Path(run.root / "data" / file), "rb") as lines:
        lines.seek(offset)
        if offset:  # in the middle of a line unless it is the `next` of an answer
            lines.seek(offset - 1)
            lines.readline()
        spent = 0
        while len(rows) < min(limit, PAGE) and spent < _MOST_TOKENS:
            start = lines.tell()
            line = lines.readline()
            if not line.endswith(b"\n"):
                return {"rows": rows, "next": None}
            rows.append({"at": start} | _encoded(line, tokenizer, thinking))
            spent += len(rows[-1].get("ids", ()))
        return {"rows": rows, "next": lines.tell()}


def _stage_config(config: dict[str, Any]) -> dict[str, Any]:
    stage = config.get("sft", config)
    return stage if isinstance(stage, dict) else {}


def _encoded(line: bytes, tokenizer: Tokenizer, thinking: bool) -> dict[str, Any]:
    try:
        row = json.loads(line)
        messages = row["messages"]
        wants = thinking or any(isinstance(m, dict) and m.get("reasoning_content") for m in messages)
        ids, mask = encode_example(messages, row.get("tools"), tokenizer, wants)
    except Exception as error:  # a row of any shape: what is wrong with it is what the page shows
        return {"problem": f"{type(error).__name__}: {error}"}
    names = {key: value for key, value in row.items() if key not in ("messages", "tools")}
    meta = {key: value for key, value in names.items() if isinstance(value, str | int | float)}
    tokens = [int(token) for token in ids]
    return {"ids": tokens, "pieces": tokenizer.pieces(tokens), "mask": [bool(m) for m in mask], "meta": meta}
