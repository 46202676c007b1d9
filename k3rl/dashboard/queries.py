"""What the page asks of the episodes of a run: lists that are filtered, sorted and searched, groups, tasks, texts."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3rl.config import K3Error
from k3rl.dashboard.episodes import Bodies
from k3rl.dashboard.rows import EpisodeEntry
from k3rl.dashboard.run_reader import RunReader, UnknownRun

PAGE = 500
"""Rows of one answer, at most."""
SORTS = ("t", "step", "reward", "advantage", "sampled_tokens", "turns", "level")
BINS = 20
_SEARCH_S = 0.5  # of one answer; the next one goes on behind it
_DIFF_WORDS = 6_000


class BadQuery(K3Error):
    """A parameter of a request that cannot be meant. Says what was got and what is wanted."""


@dataclass(frozen=True)
class Filter:
    """Which episodes are listed; None takes any. reward_min and reward_max are both included. status: scored, invalid,
    failed. text: part of an episode's id, task, family or stop reason, whatever its case."""

    stage: str | None = None
    step: int | None = None
    group: str | None = None
    task: str | None = None
    env: str | None = None
    family: str | None = None
    status: str | None = None
    stop_reason: str | None = None
    level: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    text: str | None = None

    def matches(self, entry: EpisodeEntry) -> bool:
        for name in ("stage", "step", "group", "task", "env", "family", "status", "stop_reason", "level"):
            wanted = getattr(self, name)
            if wanted is not None and getattr(entry, name) != wanted:
                return False
        if self.reward_min is not None and (entry.reward is None or entry.reward < self.reward_min):
            return False
        if self.reward_max is not None and (entry.reward is None or entry.reward > self.reward_max):
            return False
        if self.text:
            words = f"{entry.id} {entry.task} {entry.family} {entry.stop_reason}".lower()
            return self.text.lower() in words
        return True


def list_episodes(
    run: RunReader, wanted: Filter, *, sort: str = "t", descending: bool = True, offset: int = 0, limit: int = PAGE
) -> dict[str, Any]:
    """{"total", "rows", "histogram", "facets"} of the matching episodes. Rows without a value for `sort` come last.

    The histogram is of the rewards of what matches but for its own bounds, so that bins can be chosen in it.
    Raises BadQuery.
    """
    if sort not in SORTS:
        raise BadQuery(f"sort is {sort!r}; wanted one of {', '.join(SORTS)}")
    every = run.episodes()
    unbounded = _without_bounds(wanted)
    near = [entry for entry in every if unbounded.matches(entry)]
    found = [entry for entry in near if wanted.matches(entry)] if unbounded != wanted else near
    if sort != "t":
        found = _sorted(run, found, sort, descending)
    elif descending:
        found = found[::-1]
    return {
        "total": len(found),
        "recorded": len(every),
        "rows": [row_of(run, entry) for entry in found[offset : offset + min(limit, PAGE)]],
        "histogram": histogram([entry.reward for entry in near if entry.reward is not None]),
        "facets": facets(every),
    }


def row_of(run: RunReader, entry: EpisodeEntry) -> dict[str, Any]:
    """An episode as a list shows it."""
    row = entry._asdict()
    del row["offset"], row["bytes"]
    return row | {"advantage": run.advantage(entry)}


def _without_bounds(wanted: Filter) -> Filter:
    return replace(wanted, reward_min=None, reward_max=None)


def _sorted(run: RunReader, entries: Sequence[EpisodeEntry], sort: str, descending: bool) -> list[EpisodeEntry]:
    keyed = [(run.advantage(e) if sort == "advantage" else getattr(e, sort), e) for e in entries]
    known = [(value, e) for value, e in keyed if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)
    return [e for _, e in known] + [e for value, e in keyed if value is None]


def histogram(rewards: Sequence[float]) -> dict[str, Any]:
    """{"edges" [b + 1], "counts" [b]}: equal bins from the smallest to the largest; empty lists without rewards.

    A bin has its lower edge and not its upper one; the last has both.
    """
    if not rewards:
        return {"edges": [], "counts": []}
    low, high = min(rewards), max(rewards)
    if low == high:
        return {"edges": [low, high], "counts": [len(rewards)]}
    width = (high - low) / BINS
    counts = [0] * BINS
    for reward in rewards:
        counts[min(BINS - 1, int((reward - low) / width))] += 1
    return {"edges": [low + width * i for i in range(BINS)] + [high], "counts": counts}


def facets(entries: Iterable[EpisodeEntry]) -> dict[str, dict[str, int]]:
    """How many episodes have each value of what a list can be narrowed by."""
    counts: dict[str, Counter[str]] = {n: Counter() for n in ("stage", "env", "family", "status", "stop_reason")}
    for entry in entries:
        for name, counter in counts.items():
            counter[getattr(entry, name)] += 1
    return {name: dict(counter.most_common(50)) for name, counter in counts.items()}


def step_outline(run: RunReader, stage: str, step: int) -> dict[str, Any]:
    """{"groups": [...], "best", "worst", "metrics"} of one step.

    Each group with its episodes, the best and the worst episode, and the step's values by name.
    """
    entries = [e for e in run.episodes() if e.stage == stage and e.step == step]
    groups: dict[str, list[EpisodeEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    scored = [e for e in entries if e.reward is not None]
    key = lambda entry: entry.reward  # noqa: E731 (twice the same)
    return {
        "groups": [
            {"group": name, "task": own[0].task, "family": own[0].family, "level": own[0].level}
            | {"rows": [row_of(run, entry) for entry in own]}
            for name, own in groups.items()
        ],
        "best": row_of(run, max(scored, key=key)) if scored else None,
        "worst": row_of(run, min(scored, key=key)) if scored else None,
        "metrics": run.step_metrics(stage, step),
    }


def group_outline(run: RunReader, bodies: Bodies, group: str, text_limit: int = 20_000) -> dict[str, Any]:
    """A group side by side: each episode with its score, its advantage and what it sampled, cut at `text_limit`.

    Raises UnknownRun when there is no such group.
    """
    entries = [entry for entry in run.episodes() if entry.group == group]
    if not entries:
        raise UnknownRun(f"run {run.name} has no group {group!r}")
    shown = []
    for entry in entries[:PAGE]:
        body = bodies.body(run, entry.id, entry.attempt)
        text = body.text(1)
        about = {"score": body.row.get("score"), "text": text[:text_limit], "cut": max(0, len(text) - text_limit)}
        shown.append(row_of(run, entry) | about)
    first = bodies.body(run, entries[0].id, entries[0].attempt)
    prompt = next((columns.text(0) for columns in first.branches.values()), "")
    about = {"group": group, "task": entries[0].task, "stage": entries[0].stage, "step": entries[0].step}
    return about | {"prompt": prompt[:text_limit], "rows": shown}


def task_history(run: RunReader, task: str) -> list[dict[str, Any]]:
    """The episodes of one task, in order of recording: what successive policies did with it."""
    found = [entry for entry in run.episodes() if entry.task == task]
    return [row_of(run, entry) for entry in found[-PAGE:]]


def text_diff(run: RunReader, bodies: Bodies, first: str, second: str) -> dict[str, Any]:
    """{"parts": [[kind, text], ...]} from what the first episode sampled to what the second did, word by word.

    kind: "=" both, "-" the first alone, "+" the second alone. "cut" counts words behind the limit of 6,000.
    """
    a, b = (_words(bodies.body(run, name).text(1)) for name in (first, second))
    cut = max(0, len(a) - _DIFF_WORDS) + max(0, len(b) - _DIFF_WORDS)
    a, b = a[:_DIFF_WORDS], b[:_DIFF_WORDS]
    parts: list[list[str]] = []
    for kind, start_a, stop_a, start_b, stop_b in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(["=", "".join(a[start_a:stop_a])])
            continue
        parts += [["-", "".join(a[start_a:stop_a])]] if stop_a > start_a else []
        parts += [["+", "".join(b[start_b:stop_b])]] if stop_b > start_b else []
    return {"parts": parts, "cut": cut}


def _words(text: str) -> list[str]:
    """Runs of letters and digits, and every other character alone: joined they are the text."""
    words: list[str] = []
    for character in text:
        if words and character.isalnum() and words[-1][-1].isalnum():
            words[-1] += character
        else:
            words.append(character)
    return words


def search_texts(run: RunReader, wanted: Filter, text: str, *, after: int = 0, limit: int = 50) -> dict[str, Any]:
    """Episodes in whose prompts or sampled tokens `text` occurs, whatever its case, newest first.

    {"rows": [{..., "excerpt": [before, match, after], "turn"}], "next": where to go on or None, "searched", "of"}. An
    answer takes half a second at most, so that a large run is searched in several. `after` is the `next` before.
    """
    needle = text.lower()
    entries = [entry for entry in reversed(run.episodes()) if wanted.matches(entry)]
    rows: list[dict[str, Any]] = []
    began, place = time.monotonic(), after
    while place < len(entries) and len(rows) < limit and time.monotonic() - began < _SEARCH_S:
        entry = entries[place]
        place += 1
        try:
            found = _occurrence(run.piece(entry), needle)
        except UnknownRun:  # its record was cut off; the list shows it, the search has nothing to look into
            continue
        if found is not None:
            rows.append(row_of(run, entry) | found)
    return {"rows": rows, "next": place if place < len(entries) else None, "searched": place, "of": len(entries)}


def _occurrence(rows: Sequence[Mapping[str, Any]], needle: str, margin: int = 60) -> dict[str, Any] | None:
    for row in rows:
        if row.get("kind") != "turn":
            continue
        text = "".join("".join(row[side].get("pieces") or ()) for side in ("prompt", "sampled"))
        place = text.lower().find(needle)
        if place >= 0:
            stop = place + len(needle)
            parts = [text[max(0, place - margin) : place], text[place:stop], text[stop : stop + margin]]
            return {"excerpt": parts, "turn": row["turn"], "branch": row["branch"]}
    return None
