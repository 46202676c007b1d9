"""Which episode runs where and when, and which groups the learner gets: the control plane of rollouts, without Ray.

`Dispatcher` is a state machine. Whoever drives it says what happened (an episode ended, a worker is gone, weights were
published) and carries out what it answers: starts, grades and aborts. It reads no clock, draws no random number and
waits for nothing, so the same code runs under real actors and under a simulation.

An episode is drawn, started, played, graded; its group is whole when all of its episodes are. The modes differ in when
a group may start and when the learner may take a batch:

synchronous    Batches are played one after the other, each by one version of the weights, which lags behind the
               learner's by `max_off_policy_steps` updates at most. The learner takes a batch in the order of its draw.
partial        As many episodes are active as a batch has. A phase ends when a share of them has ended; what still runs
               goes on in the next phase, with the newer weights. The learner takes every whole group (k3.md 12.2).
asynchronous   Groups start while the learner trains, as long as no more are under way than `max_off_policy_steps`
               updates can use up. The learner takes a batch as soon as there is one. What has become older is dropped.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from k3rl.actors.jobs import EpisodeJob
from k3rl.types import Failed, FailureKind, Score


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
class Header:
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

    @property
    def first_version(self) -> int | None:
        """That of the oldest token in it."""
        return min((h.first_version for h in self.headers if h.first_version is not None), default=None)

    @property
    def tokens(self) -> int:
        return sum(header.tokens for header in self.headers)


@dataclass
class Counts:
    """What did not reach the learner, since the counts were last taken.

    by_length: of dropped and aborted episodes, by the power of two that their sampled tokens reach, so that a bias
    against long ones is seen.
    """

    started: int = 0
    retried: int = 0
    regraded: int = 0
    dropped_groups: int = 0
    dropped_episodes: int = 0
    dropped_tokens: int = 0
    aborted_episodes: int = 0
    stale_answers: int = 0
    by_length: Counter[int] = field(default_factory=Counter)


class _State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PLAYED = "played"  # waits for its grade, or for its group to be played
    DONE = "done"


@dataclass
class _Member:
    job: EpisodeJob
    state: _State = _State.WAITING
    worker: int | None = None
    attempt: int = 0  # answers to earlier ones no longer count
    failures: int = 0  # attempts that were its own fault
    header: Header | None = None
    grading: bool = False
    broken: bool = False  # ended without an answer to grade
    version: int | None = None  # that was served when this attempt was started


@dataclass
class _Active:
    """A group that was drawn and is neither trained on nor dropped."""

    number: int
    group_id: str
    members: dict[str, _Member]

    @property
    def whole(self) -> bool:
        return all(member.state is _State.DONE for member in self.members.values())

    @property
    def played(self) -> bool:
        """Whether no episode of it runs or waits any more."""
        return all(member.state in (_State.PLAYED, _State.DONE) for member in self.members.values())

    def oldest(self) -> int | None:
        """The version of the oldest token that there is, or may be where an episode still runs."""
        versions = [
            member.header.first_version if member.header is not None else member.version
            for member in self.members.values()
        ]
        return min((version for version in versions if version is not None), default=None)


class Dispatcher:
    """Starts episodes, gathers them into groups and hands whole groups to the learner, each exactly once.

    draw: number of a group -> its jobs, `group_size` of one task; asked for each number once, in order. compares:
    whether the reward of an episode depends on the others of its group, which is then graded when it is whole.
    next_group, version: where a resumed run goes on.
    """

    def __init__(
        self,
        schedule: Schedule,
        draw: Callable[[int], Sequence[EpisodeJob]],
        *,
        compares: bool = False,
        next_group: int = 0,
        version: int = 0,
    ) -> None:
        self.schedule, self.version, self.next_group = schedule, version, next_group
        self.counts = Counts()
        self._draw, self._compares = draw, compares
        self._active: dict[str, _Active] = {}  # by id, in the order of their numbers
        self._group_of: dict[str, str] = {}  # of each episode of an active group
        self._whole: list[str] = []  # ids of whole groups, in the order in which they became so
        self._running = 0
        self._waiting: list[str] = []  # episodes to start, those that go again first
        self._first_of_batch = next_group  # synchronous: number of the first group that was not taken
        self._training = 0  # groups that were taken since the last publication
        self._phase_episodes = self._phase_ended = 0  # partial: active in this phase, and how many of them have ended

    # ---- what may start

    def start(self, room: Mapping[int, int]) -> list[Start]:
        """Episodes to start now. room: worker -> how many more episodes it takes.

        The worker with most room gets the next one, so that none idles while another has a queue.
        """
        starts: list[Start] = []
        left = [(-free, worker) for worker, free in room.items() if free > 0]
        heapq.heapify(left)
        while left and not self.phase_over:
            if self.schedule.in_flight is not None and self._running >= self.schedule.in_flight:
                break
            if not self._waiting and not self._begin_group():
                break
            free, worker = left[0]
            starts.append(self._start(self._waiting.pop(0), worker))
            if free + 1:
                heapq.heapreplace(left, (free + 1, worker))
            else:
                heapq.heappop(left)
        return starts

    def _start(self, episode_id: str, worker: int) -> Start:
        member = self._member(episode_id)
        member.state, member.worker, member.version = _State.RUNNING, worker, self.version
        self._running += 1
        self.counts.started += 1
        return Start(worker, member.job, member.attempt)

    def _begin_group(self) -> bool:
        """Draws the next group, if one may start."""
        if not self._may_begin():
            return False
        self._phase_episodes += self.schedule.group_size
        jobs = self._draw(self.next_group)
        if len(jobs) != self.schedule.group_size or len({job.group_id for job in jobs}) != 1:
            raise ValueError(f"group {self.next_group} has {len(jobs)} jobs; wanted {self.schedule.group_size} of one")
        group = _Active(self.next_group, jobs[0].group_id, {job.episode_id: _Member(job) for job in jobs})
        self._active[group.group_id] = group
        self._group_of |= dict.fromkeys(group.members, group.group_id)
        self._waiting += group.members
        self.next_group += 1
        return True

    def _may_begin(self) -> bool:
        schedule = self.schedule
        match schedule.mode:
            case Mode.SYNCHRONOUS:
                batch, of_batch = divmod(self.next_group, schedule.groups)
                before_is_played = of_batch or len(self._whole) == len(self._active)
                return bool(before_is_played) and batch <= self.version + (schedule.max_off_policy_steps or 0)
            case Mode.PARTIAL:
                return self._phase_episodes + schedule.group_size <= schedule.episodes
            case _:
                most = schedule.groups * ((schedule.max_off_policy_steps or 0) + 1)
                return len(self._active) + self._training < most

    # ---- what happened

    def ended(self, header: Header, attempt: int) -> list[Grade]:
        """An episode ended on its worker; what to grade now. An answer that nobody waits for is counted, no more."""
        member = self._waits_for(header.episode_id, attempt, _State.RUNNING)
        if member is None:
            return []
        self._running -= 1
        if isinstance(header.score, Failed) and self._goes_again(member, header.score):
            self._again(member)
            return []
        member.header, member.worker = header, None
        member.broken = header.score is not None
        member.state = _State.DONE if member.broken else _State.PLAYED
        self._phase_ended += 1
        group = self._active[self._group_of[header.episode_id]]
        self._note_whole(group)
        return self._to_grade(group)

    def graded(self, scores: Mapping[str, Score], attempts: Mapping[str, int]) -> list[Grade]:
        """Scores of played episodes, by id, and the attempts that they are of; what to grade again.

        A grade that failed is asked for again, of the whole group where the reward compares its episodes.
        """
        touched: dict[str, _Active] = {}
        for episode_id, score in scores.items():
            member = self._waits_for(episode_id, attempts[episode_id], _State.PLAYED)
            if member is None or member.header is None:
                continue
            member.grading = False
            group = touched.setdefault(self._group_of[episode_id], self._active[self._group_of[episode_id]])
            if isinstance(score, Failed) and self._goes_again(member, score):
                self.counts.regraded += 1
                continue
            member.header = replace(member.header, score=score)
            member.state = _State.DONE
        again: list[Grade] = []
        for group in touched.values():
            if self._compares and any(member.state is _State.PLAYED for member in group.members.values()):
                self._ungrade(group)
            self._note_whole(group)
            again += self._to_grade(group)
        return again

    def _ungrade(self, group: _Active) -> None:
        """Grades of a group that are to be compared anew, because one of them failed."""
        for member in group.members.values():
            if member.state is _State.DONE and member.header is not None and not member.broken:
                member.header = replace(member.header, score=None)
                member.state = _State.PLAYED

    def attempt_of(self, episode_id: str) -> int | None:
        """The attempt at an episode that counts; None where its group is gone."""
        group = self._group_of.get(episode_id)
        return None if group is None else self._active[group].members[episode_id].attempt

    def lost(self, worker: int, guilty: str | None = None) -> list[Grade]:
        """A worker died or hung; what to grade now. Its episodes start again elsewhere.

        guilty: the episode that took it along; it has used up an attempt, and without any left it is `Failed`.
        """
        grades: list[Grade] = []
        for group in list(self._active.values()):
            for episode_id, member in group.members.items():
                if member.state is not _State.RUNNING or member.worker != worker:
                    continue
                self._running -= 1
                failed = Failed(f"worker {worker} died or hung while it played this episode", FailureKind.DIED)
                if episode_id != guilty or self._goes_again(member, failed):
                    self._again(member)
                    continue
                member.header, member.worker = Header(episode_id, score=failed), None
                member.state, member.broken = _State.DONE, True
                self._phase_ended += 1
                self._note_whole(group)
                grades += self._to_grade(group)
        return grades

    def published(self, version: int) -> list[Abort]:
        """Engines serve a newer version: a new phase begins, and what is now too old is dropped or aborted."""
        if version <= self.version:
            raise ValueError(f"version {version} was published after {self.version}; versions only grow")
        self.version = version
        self._training = self._phase_ended = 0
        self._phase_episodes = sum(
            member.state in (_State.WAITING, _State.RUNNING)
            for group in self._active.values()
            for member in group.members.values()
        )
        bound = self.schedule.max_off_policy_steps
        if bound is None or self.schedule.mode is Mode.SYNCHRONOUS:
            return []
        aborts: list[Abort] = []
        for group in list(self._active.values()):
            oldest = group.oldest()
            if oldest is not None and version - oldest > bound:
                aborts += self._drop(group)
        return aborts

    # ---- what the learner gets

    @property
    def ready(self) -> bool:
        """Whether `take` gives a batch."""
        match self.schedule.mode:
            case Mode.SYNCHRONOUS:
                mine = self._first_batch()
                return len(mine) == self.schedule.groups and all(group.whole for group in mine)
            case Mode.PARTIAL:
                return self.phase_over
            case _:
                return len(self._whole) >= self.schedule.groups

    def _first_batch(self) -> list[_Active]:
        """Synchronous: the drawn groups of the batch that is taken next."""
        stop = self._first_of_batch + self.schedule.groups
        return [group for group in self._active.values() if group.number < stop]

    def take(self) -> list[Finished]:
        """The next batch of whole groups, which are the learner's from now on. Raises RuntimeError before `ready`."""
        if not self.ready:
            raise RuntimeError(f"no batch is ready: {len(self._whole)} of {len(self._active)} groups are whole")
        match self.schedule.mode:
            case Mode.SYNCHRONOUS:
                groups = self._first_batch()
                self._first_of_batch += len(groups)
            case Mode.PARTIAL:
                groups = sorted((self._active[name] for name in self._whole), key=lambda group: group.number)
            case _:
                groups = [self._active[name] for name in self._whole[: self.schedule.groups]]
        for group in groups:
            self._whole.remove(group.group_id)
            self._forget(group)
        self._training += len(groups)
        return [
            Finished(g.number, g.group_id, tuple(m.header for m in g.members.values() if m.header is not None))
            for g in groups
        ]

    @property
    def running(self) -> int:
        """Episodes that workers play now."""
        return self._running

    @property
    def phase_over(self) -> bool:
        """Partial mode: enough episodes have ended; engines rest until the next version is published."""
        if self.schedule.mode is not Mode.PARTIAL or not self._whole:
            return False
        return self._phase_ended >= math.ceil(self.schedule.fraction * self._phase_episodes)

    def take_counts(self) -> Counts:
        """What has been counted since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    # ---- inside

    def _member(self, episode_id: str) -> _Member:
        return self._active[self._group_of[episode_id]].members[episode_id]

    def _waits_for(self, episode_id: str, attempt: int, state: _State) -> _Member | None:
        """The member that an answer is for, or None where it is late, doubled or of a dropped group."""
        group = self._group_of.get(episode_id)
        member = None if group is None else self._active[group].members[episode_id]
        if member is None or member.attempt != attempt or member.state is not state:
            self.counts.stale_answers += 1
            return None
        return member

    def _goes_again(self, member: _Member, failed: Failed) -> bool:
        member.failures += 1
        return failed.kind is not FailureKind.TRIPPED and member.failures <= self.schedule.retries

    def _again(self, member: _Member) -> None:
        member.state, member.worker, member.header, member.version = _State.WAITING, None, None, None
        member.attempt += 1
        self.counts.retried += 1
        self._waiting.insert(0, member.job.episode_id)

    def _to_grade(self, group: _Active) -> list[Grade]:
        if self._compares and not group.played:
            return []
        chosen = [m for m in group.members.values() if m.state is _State.PLAYED and not m.grading]
        for member in chosen:
            member.grading = True
        headers = tuple(m.header for m in chosen if m.header is not None)
        return [Grade(group.group_id, headers)] if headers else []

    def _note_whole(self, group: _Active) -> None:
        if group.whole and group.group_id not in self._whole:
            self._whole.append(group.group_id)

    def _drop(self, group: _Active) -> list[Abort]:
        """Gives a group up; what runs of it is aborted."""
        aborts = []
        for episode_id, member in group.members.items():
            if member.state is _State.RUNNING and member.worker is not None:
                aborts.append(Abort(member.worker, episode_id, member.attempt))
                self._running -= 1
                self.counts.aborted_episodes += 1
            elif member.header is not None:
                self.counts.dropped_episodes += 1
                self.counts.dropped_tokens += member.header.tokens
                self.counts.by_length[max(0, member.header.tokens).bit_length()] += 1
        self.counts.dropped_groups += 1
        if group.group_id in self._whole:
            self._whole.remove(group.group_id)
        self._forget(group)
        return aborts

    def _forget(self, group: _Active) -> None:
        del self._active[group.group_id]
        for episode_id in group.members:
            del self._group_of[episode_id]
        gone = set(group.members)
        self._waiting = [episode_id for episode_id in self._waiting if episode_id not in gone]
