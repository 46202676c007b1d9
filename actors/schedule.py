"""When rollouts start and what the learner gets: the modes, and the words that `dispatcher` and its driver exchange.

The modes differ in when a group may start and when the learner may take a batch:

synchronous    Batches are played one after the other, each by one version of the weights, which lags behind the
               learner's by `max_off_policy_steps` updates at most. The learner takes a batch in the order of its draw.
               What goes again starts when nothing runs, so that which episodes share an engine's batch is always the
               same.
partial        As many episodes are active as a batch has. A phase ends when a share of them has ended; what still runs
               goes on in the next phase, with the newer weights. The learner takes every whole group (k3.md 12.2).
asynchronous   Groups start while the learner trains, as long as no more are under way than `max_off_policy_steps`
               updates can use up. The learner takes a batch as soon as there is one. What has become older is dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from k3rl.actors.jobs import EpisodeJob
from k3rl.packed import Record
from k3rl.types import Score


class Mode(StrEnum):
    """When rollouts and training take turns; see the module."""

    SYNCHRONOUS = "synchronous"
    PARTIAL = "partial"
    ASYNCHRONOUS = "asynchronous"


@dataclass(frozen=True)
class Schedule:
    """How rollouts are handed out and taken.

    groups: of a batch; group_size: episodes of a group. max_off_policy_steps: updates that may lie between the oldest
    token of a group and the update it is trained in; a group beyond is dropped. None in the partial mode: no bound.
    fraction: share of the active episodes that ends a partial phase. in_flight: episodes that run at once, at most;
    None: no bound of its own. retries: how often an episode that got no reward is played again.
    """

    mode: Mode
    groups: int
    group_size: int
    max_off_policy_steps: int | None = 0
    fraction: float = 1.0
    in_flight: int | None = None
    retries: int = 1

    def __post_init__(self) -> None:
        if self.groups < 1 or self.group_size < 1:
            raise ValueError(f"groups is {self.groups} and group_size is {self.group_size}; both must be at least 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}; it must be above 0 and at most 1")
        if self.mode is Mode.ASYNCHRONOUS and not (self.max_off_policy_steps or 0) >= 1:
            raise ValueError(
                f"max_off_policy_steps is {self.max_off_policy_steps}; an asynchronous schedule needs at least 1"
            )

    @property
    def episodes(self) -> int:
        """Of a batch."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class Header(Record):
    """What the driver knows of a played episode; everything else stays behind `payload`, a reference.

    tokens: that the policy sampled. first_version: of the oldest of them, None where there is none.
    score: NOT graded yet where it is None; `Failed` where the episode broke.
    """

    episode_id: str
    tokens: int = 0
    first_version: int | None = None
    score: Score | None = None
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Start:
    """Play this job on this worker. attempt: counted from 0; answers to an earlier one no longer count."""

    worker: int
    job: EpisodeJob
    attempt: int


@dataclass(frozen=True, slots=True)
class Grade:
    """Grade these played episodes, which are all of their group where the reward compares them."""

    group_id: str
    headers: tuple[Header, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End this episode on its worker; nobody wants it any more."""

    worker: int
    episode_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole group: headers in the order of its jobs, each with its score."""

    number: int
    group_id: str
    headers: tuple[Header, ...]
    jobs: tuple[EpisodeJob, ...] = ()

    @property
    def first_version(self) -> int | None:
        """That of the oldest token in it."""
        return min((h.first_version for h in self.headers if h.first_version is not None), default=None)

    @property
    def tokens(self) -> int:
        return sum(header.tokens for header in self.headers)


@dataclass
class Counts:
    """What became of attempts since the counts were last taken.

    by_length: of dropped and aborted episodes, by the power of two that their sampled tokens reach, so that a bias
    against long ones is seen.
    """

    started: int = 0
    most_running: int = 0  # at once
    retried: int = 0  # after a failure of their own
    restarted: int = 0  # after a worker was lost with them
    replayed: int = 0  # after the run was resumed, or all actors were lost
    continued: int = 0  # from where they stood when the run was saved
    regraded: int = 0
    dropped_groups: int = 0
    dropped_episodes: int = 0
    dropped_tokens: int = 0
    aborted_episodes: int = 0
    stale_answers: int = 0
    by_length: Counter[int] = field(default_factory=Counter)
