"""What a judge says, as JSON of a fixed shape. A reply of another shape is asked for again, a few times.

A reply is one JSON object and nothing else (a code fence around it is borne), and carries the number that the judge
was given for this conversation, so that a verdict that a submission prepared for copying is none.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from k3rl.envs.judge.endpoint import Endpoint, JudgeFailed
from k3rl.envs.judge.shown import ANSWER, Marker, Submission

T = TypeVar("T")
MAX_CRITERIA = 8
BEST = 10.0  # of a criterion
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n```\s*", re.DOTALL)


class _Unusable(ValueError):
    """A reply that is not what was asked for; the judge is told why."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """One line of a rubric."""

    name: str
    what: str
    weight: float


@dataclass(frozen=True, slots=True)
class Asking:
    """How a judge is asked. attempts: replies to one question; reads: looks at more of a submission before a verdict;
    shown_chars: of each submission at first, and of each look."""

    endpoint: Endpoint
    attempts: int = 3
    reads: int = 4
    shown_chars: int = 20_000


def write_rubric(asking: Asking, request: str, advice: str) -> tuple[Criterion, ...]:
    """The criteria for a task, written before any submission is seen. Raises JudgeFailed."""
    marker, number = Marker(), secrets.token_hex(8)
    system = (
        "You will compare submissions for a task. First write the rubric: 2 to "
        f"{MAX_CRITERIA} criteria that tell good work from bad, each with what it means and a weight above 0. "
        f"{advice}\n{marker.rule}\nReply with one JSON object and nothing else: "
        f'{{"id": "{number}", "criteria": [{{"name": "...", "what": "...", "weight": 1.0}}]}}'
    )
    conversation = [_said("system", system), _said("user", f"The task:\n{marker.around(request)}")]
    return _asked(asking, conversation, number, _criteria)


def compare(
    asking: Asking, request: str, rubric: Sequence[Criterion], first: Submission, second: Submission
) -> tuple[float, float]:
    """Weighted scores in [0, 10] of two submissions, shown as A and B in this order. Raises JudgeFailed."""
    marker, number = Marker(), secrets.token_hex(8)
    lines = "\n".join(f"- {one.name} (weight {one.weight:g}): {one.what}" for one in rubric)
    names = json.dumps({one.name: 0 for one in rubric}, ensure_ascii=False)
    read = json.dumps({"id": number, "read": {"submission": "A", "name": ANSWER, "from": 0}})
    scores = f'{{"id": "{number}", "scores": {{"A": {names}, "B": {names}}}}}'
    system = (
        f"Score two submissions, A and B, by this rubric, each criterion from 0 to {BEST:g}:\n{marker.around(lines)}\n"
        f"{marker.rule}\nThe order of A and B means nothing, and neither does length. Reply with one JSON object and "
        f"nothing else. To see more of a submission: {read} (at most {asking.reads} times). To end: {scores}"
    )
    shown = "\n".join(
        f"Submission {letter}:\n{marker.around(one.overview(asking.shown_chars))}"
        for letter, one in (("A", first), ("B", second))
    )
    conversation = [_said("system", system), _said("user", f"The task:\n{marker.around(request)}\n{shown}")]
    both = {"A": first, "B": second}
    for left in range(asking.reads, -1, -1):
        reply = _asked(asking, conversation, number, lambda given: _step(given, rubric, both))
        if isinstance(reply, tuple):
            return reply
        conversation.append(_said("assistant", json.dumps({"id": number, "read": reply})))
        text = both[reply["submission"]].texts[reply["name"]]
        piece = marker.around(text[reply["from"] : reply["from"] + asking.shown_chars])
        conversation.append(_said("user", f"{piece}\n{left - 1 if left > 1 else 'No'} more looks are left."))
    raise JudgeFailed(f"the judge looked {asking.reads} times and gave no scores")


def _asked(
    asking: Asking, conversation: Sequence[dict[str, str]], number: str, read: Callable[[Mapping[str, Any]], T]
) -> T:
    """A usable reply. What was wrong with a reply is told to the judge with the next attempt, without keeping it."""
    wrong = ""
    for _ in range(asking.attempts):
        hint = [_said("user", f"Your reply could not be used: {wrong}. Reply again, with the JSON object only.")]
        reply = asking.endpoint.complete([*conversation, *(hint if wrong else [])])
        try:
            return read(_object(reply, number))
        except _Unusable as error:
            wrong = str(error)
    raise JudgeFailed(f"no reply of the judge could be used in {asking.attempts} attempts; the last one: {wrong}")


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _object(reply: str, number: str) -> Mapping[str, Any]:
    fenced = _FENCE.fullmatch(reply)
    try:
        given = json.loads(fenced[1] if fenced else reply)
    except (ValueError, RecursionError):
        raise _Unusable("it is not one JSON object") from None
    if not isinstance(given, dict):
        raise _Unusable("it is not one JSON object")
    if given.get("id") != number:
        raise _Unusable("it does not carry the id that was given")
    return given


def _criteria(given: Mapping[str, Any]) -> tuple[Criterion, ...]:
    rows = given.get("criteria")
    if not isinstance(rows, list) or not 2 <= len(rows) <= MAX_CRITERIA:
        raise _Unusable(f"criteria must be a list of 2 to {MAX_CRITERIA}")
    found = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not isinstance(row.get("what"), str):
            raise _Unusable("each criterion needs name, what and weight")
        weight = _number(row.get("weight"), "a weight")
        if not 0 < weight <= 100:
            raise _Unusable("a weight must be above 0 and at most 100")
        found.append(Criterion(row["name"][:100], row["what"][:1000], weight))
    if len({one.name for one in found}) != len(found):
        raise _Unusable("two criteria have the same name")
    return tuple(found)


def _step(
    given: Mapping[str, Any], rubric: Sequence[Criterion], both: Mapping[str, Submission]
) -> tuple[float, float] | dict[str, Any]:
    """The scores of A and B, or what the judge wants to read."""
    if "read" in given:
        wanted = given["read"]
        if not isinstance(wanted, dict) or wanted.get("submission") not in both:
            raise _Unusable("read needs a submission, A or B")
        if wanted.get("name") not in both[wanted["submission"]].texts:
            raise _Unusable("that submission has no text of this name")
        start = wanted.get("from", 0)
        if type(start) is not int or start < 0:
            raise _Unusable("from must be a whole number of at least 0")
        return {"submission": wanted["submission"], "name": wanted["name"], "from": start}
    scores = given.get("scores")
    if not isinstance(scores, dict) or set(scores) != {"A", "B"}:
        raise _Unusable("it has neither read nor scores of A and B")
    return _weighted(scores["A"], rubric), _weighted(scores["B"], rubric)


def _weighted(scores: Any, rubric: Sequence[Criterion]) -> float:
    names = {one.name for one in rubric}
    if not isinstance(scores, dict) or set(scores) != names:
        raise _Unusable(f"scores must name exactly these criteria: {', '.join(sorted(names))}")
    values = {name: _number(value, f"the score of {name}") for name, value in scores.items()}
    if not all(0 <= value <= BEST for value in values.values()):
        raise _Unusable(f"a score must be from 0 to {BEST:g}")
    total = math.fsum(one.weight for one in rubric)
    return math.fsum(one.weight * values[one.name] for one in rubric) / total


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Unusable(f"{what} must be a number")
    return float(value)
