"""What a driver knows of an episode and its group: everything but the tokens, which stay behind a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from k3rl.data.batch import shared_turns
from k3rl.packed import Record
from k3rl.tokens import image_rows
from k3rl.types import Branch, Episode, Score, StopReason


class Payload(NamedTuple):
    """Where the contents of some episodes are: references, or the things themselves.

    tokens: an `EpisodeColumns`; words: the same episodes without branches, in the same order.
    """

    tokens: Any
    words: Any


class SequenceHeader(NamedTuple):
    """A branch that is trained. branch: its number in the episode; tokens; rows: in the model, images expanded;
    targets: sampled tokens that are trained in it."""

    branch: int
    tokens: int
    rows: int
    targets: int


@dataclass(frozen=True, slots=True)
class EpisodeHeader(Record):
    """An episode without its contents, of which `place` is the number in its `payload`; None where nothing was played.

    turns, tokens: of all branches, a turn that several of them have counted in each; tokens are sampled ones. clipped:
    turns that ended at their length. versions: (oldest that sampled, sum over turns of the first one, newest), None
    without turns. branches: how many there are. sequences: those that are trained, with their own turns.
    masked: whether any turn says which tokens it was drawn from. metrics: the environment's own.
    """

    id: str
    task_id: str
    env: str
    family: str
    level: int
    stop_reason: StopReason
    score: Score
    turns: int = 0
    tokens: int = 0
    clipped: int = 0
    versions: tuple[int, int, int] | None = None
    branches: int = 0
    sequences: tuple[SequenceHeader, ...] = ()
    masked: bool = False
    payload: Payload | None = None
    place: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlayedGroup(Record):
    """The episodes of one task, as headers."""

    id: str
    task_id: str
    episodes: tuple[EpisodeHeader, ...]


def header_of(episode: Episode, payload: Payload | None = None, place: int = 0) -> EpisodeHeader:
    """The header of an episode that is here."""
    turns = [turn for branch in episode.branches for turn in branch.turns]
    versions = None
    if turns:
        first = [turn.first_version for turn in turns]
        versions = min(first), sum(first), max(turn.last_version for turn in turns)
    return EpisodeHeader(
        id=episode.id,
        task_id=episode.task_id,
        env=episode.env,
        family=episode.family,
        level=episode.level,
        stop_reason=episode.stop_reason,
        score=episode.score,
        turns=len(turns),
        tokens=sum(len(turn.sampled_ids) for turn in turns),
        clipped=sum(turn.stop_reason is StopReason.LENGTH for turn in turns),
        versions=versions,
        branches=len(episode.branches),
        sequences=_sequences(episode.branches),
        masked=any(turn.sampling_mask is not None for turn in turns),
        payload=payload,
        place=place,
        metrics=dict(episode.metrics),
    )


def _sequences(branches: Sequence[Branch]) -> tuple[SequenceHeader, ...]:
    """Those of the branches that have turns of their own."""
    by_id = {branch.id: branch for branch in branches}
    found = []
    for number, branch in enumerate(branches):
        if (shared := shared_turns(branch, by_id)) == len(branch.turns):
            continue
        last = branch.turns[-1]
        tokens = len(last.prompt_ids) + len(last.sampled_ids)
        shown = sum(image_rows(image.width, image.height) - 1 for image in last.images)
        targets = sum(len(turn.sampled_ids) for turn in branch.turns[shared:])
        found.append(SequenceHeader(number, tokens, tokens + shown, targets))
    return tuple(found)
