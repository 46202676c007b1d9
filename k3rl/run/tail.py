"""Follows the rollouts of a run and prints them turn by turn as plain text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from k3rl.run.directory import RunDirectory
from k3rl.run.files import number, read_lines
from k3rl.run.terminal import framed, visible


def follow_run(
    root: Path,
    write: Callable[[str], object],
    *,
    follow: bool = True,
    last: int | None = None,
    poll_s: float = 0.3,
) -> int:
    """Print the episodes recorded in the run at `root`; with `follow`, until the run ends. Returns how many.

    `last` starts with the last so many episodes that are there now, None with the first. `write` gets text with its
    newlines. Raises MissingResource when `root` is no run.
    """
    run = RunDirectory.open(root)
    stream = run.traces_dir / "stream.jsonl"
    offset = _start(run.traces_dir / "stream.index.jsonl", last)
    shown = 0
    while True:
        alive = run.refresh().status == "running" and run.is_alive()
        for row, end in read_lines(stream, offset):
            offset = end
            if text := format_row(row):
                write(text)
            shown += row.get("kind") == "episode"
        if not (follow and alive):  # read once more after the end was seen, so nothing is missed
            break
        time.sleep(poll_s)
    if follow:
        write(f"-- run {visible(run.info.name)}: {ending(run)}\n")
    return shown


def ending(run: RunDirectory) -> str:
    """How a run stands, in a word; a run whose process is gone without a word has crashed."""
    if run.info.status == "running" and not run.is_alive():
        return "crashed"
    return run.info.status


def _start(index: Path, last: int | None) -> int:
    if last is None:
        return 0
    rows = [row for row, _ in read_lines(index) if row.get("kind") == "episode"]
    if not rows:
        return 0
    return rows[-last]["offset"] if 0 < last <= len(rows) else 0 if last else rows[-1]["offset"] + rows[-1]["bytes"]


def format_row(row: Mapping[str, Any]) -> str:
    """One row of the stream as text for a terminal; "" for rows that are not shown."""
    match row.get("kind"):
        case "turn":
            return _format_turn(row)
        case "episode":
            return _format_episode(row)
        case _:
            return ""


def _format_turn(row: Mapping[str, Any]) -> str:
    first, last = row["versions"]
    version = f"v{first}" if first == last else f"v{first}-{last}"
    sampled, logprobs = row["sampled"], [number(value) for value in row["sampled"]["logprobs"]]
    mean = f"  mean logprob {sum(logprobs) / len(logprobs):.3f}" if logprobs else ""
    head = f"step {row['step']}  {row['episode']}  {row['branch']} turn {row['turn']}  {version}"
    tail = f"{len(sampled['token_ids'])} tokens  {row['stop_reason']}{mean}"
    parts = [f"{head}  {tail}", framed(_text(row["prompt"]), "  > "), framed(_text(sampled), "  < ")]
    return visible(parts[0]) + "\n" + "\n".join(parts[1:]) + "\n"


def _text(tokens: Mapping[str, Any]) -> str:
    if "pieces" in tokens:
        return "".join(tokens["pieces"])
    return f"text unavailable ({tokens.get('unavailable', 'not recorded')}), ids {tokens['token_ids']}"


def _format_episode(row: Mapping[str, Any]) -> str:
    score = row["score"]
    what = {
        "scored": lambda: f"reward {number(score['reward']):g}",
        "invalid": lambda: f"invalid: {score['hack']}",
        "failed": lambda: f"no reward: {score['reason']}",
    }[score["status"]]()
    head = f"step {row['step']}  {row['episode']}  {row['task']} ({row['family']} level {row['level']})"
    line = f"{head}  {what}  {row['turns']} turns  {row['stop_reason']}"
    return visible(line).replace("\n", "\u240a") + "\n\n"
