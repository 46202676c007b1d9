"""Which episode runs where and when, and which groups the learner gets: the control plane of rollouts, without Ray.

`Dispatcher` is a state machine. Whoever drives it says what happened (an episode ended, a worker is gone, weights were
published) and carries out what it answers: starts, grades and aborts. It reads no clock, draws no random number and
waits for nothing, so the same code runs under real actors and under a simulation.

An episode is drawn, started, played, graded; its group is whole when all of its episodes are. The episodes of a group
start on one worker, whose engine computes their prompt once. A worker that dies or hangs may have been taken along by
any episode that ran there: these become suspects, in two cohorts, of which a worker runs one at a time. Each loss
halves its cohort until the guilty episode stands alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.schedule import Abort, Counts, Finished, Grade, Header, Mode, Schedule, Start
from k3rl.types import Failed, FailureKind, Score


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
    cohort: int | None = None  # of suspects, where it ran on a worker that was lost
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


class _Room:
    """How many more episodes each worker takes; the one with most room comes first, of equals the first."""

    def __init__(self, room: Mapping[int, int]) -> None:
        self._free = {worker: free for worker, free in room.items() if free > 0}

    def __bool__(self) -> bool:
        return bool(self._free)

    def most(self, without: Collection[int] = ()) -> int | None:
        """The worker with most room, but for those that are left out."""
        allowed = [worker for worker in self._free if worker not in without]
        return max(allowed, key=lambda worker: (self._free[worker], -worker), default=None)

    def take(self, worker: int | None) -> bool:
        """Uses room for one episode, if there is any."""
        if worker is None or worker not in self._free:
            return False
        self._free[worker] -= 1
        if not self._free[worker]:
            del self._free[worker]
        return True


class Dispatcher:
    """Starts episodes, gathers them into groups and hands whole groups to the learner, each exactly once.

    draw: number of a group -> its jobs, `group_size` of one task; asked for each number once, in order. compares:
    whether the reward of an episode depends on the others of its group, which is then graded when it is whole.
    left_out: task family -> the score of its episodes where they are not played any more. wanted: groups that the
    learner takes in all; None: without end. next_group, version: where a resumed run goes on; drawn: what `drawn` gave
    before it was stopped, which is played again.
    """

    def __init__(
        self,
        schedule: Schedule,
        draw: Callable[[int], Sequence[EpisodeJob]],
        *,
        compares: bool = False,
        left_out: Callable[[str | None], Failed | None] = lambda _: None,
        wanted: int | None = None,
        next_group: int = 0,
        version: int = 0,
        drawn: Iterable[tuple[int, Sequence[EpisodeJob]]] = (),
    ) -> None:
        self.schedule, self.version, self.next_group = schedule, version, next_group
        self.counts = Counts()
        self._draw, self._compares, self._left_out = draw, compares, left_out
        self._wanted = wanted  # groups that are still to be taken
        self._first_batch_number = next_group // schedule.groups
        self._updates = 0  # publications
        self._active: dict[str, _Active] = {}  # by id, in the order of their numbers
        self._group_of: dict[str, str] = {}  # of each episode of an active group
        self._whole: list[str] = []  # ids of whole groups, in the order in which they became so
        self._running = 0
        self._on_worker: dict[int, set[str]] = {}  # episodes that it plays
        self._suspects: dict[int, tuple[int, set[str]]] = {}  # worker -> its cohort, and who runs
        self._cohorts = 0
        self._waiting: deque[str] = deque()  # episodes of groups that have begun
        self._again: list[str] = []  # episodes that go again, before those
        self._guilty: list[tuple[EpisodeJob, Failed]] = []
        self._due: list[Grade] = []  # of groups whose last episodes are left out
        self._first_of_batch = next_group  # synchronous: number of the first group that was not taken
        self._training = 0  # groups that were taken since the last publication
        self._phase_episodes = self._phase_ended = 0  # partial: active in this phase, and how many of them have ended
        for number, jobs in drawn:
            self._begin(number, jobs)
            self.counts.replayed += len(jobs)

    # ---- what may start

    def start(self, room: Mapping[int, int]) -> list[Start]:
        """Episodes to start now. room: worker -> how many more episodes it takes.

        A group begins on the worker with most room, so that none idles while another has a queue; what it has no room
        for, and what goes again, goes to whoever has most room then.
        """
        starts: list[Start] = []
        left = _Room(room)
        self._start_again(left, starts)
        while left and not self._full():
            if not self._waiting and not self._begin_group():
                break
            family = self._member(self._waiting[0]).job.task.family
            if (score := self._left_out(family)) is not None:
                self._skip(self._waiting.popleft(), score)
                continue
            group = self._group_of[self._waiting[0]]
            if (worker := left.most()) is None:
                break
            while self._waiting and self._group_of[self._waiting[0]] == group and not self._full():
                if not left.take(worker):
                    break
                starts.append(self._start(self._waiting.popleft(), worker))
        return starts

    def _full(self) -> bool:
        """Whether no episode may start, whatever the room."""
        limit = self.schedule.in_flight
        return self.phase_over or (limit is not None and self._running >= limit)

    def _start_again(self, left: _Room, starts: list[Start]) -> None:
        """Starts what goes again, suspects only where no other cohort of them runs."""
        if self.schedule.mode is Mode.SYNCHRONOUS:
            if self._running:
                return
            self._again.sort(key=self._place_of)
        waiting, self._again = self._again, []
        for number, episode_id in enumerate(waiting):
            if self._full() or not left:
                self._again += waiting[number:]
                return
            member = self._member(episode_id)
            if (score := self._left_out(member.job.task.family)) is not None:
                self._skip(episode_id, score)
                continue
            worker = left.most() if member.cohort is None else self._worker_for(member.cohort, left)
            if worker is None or not left.take(worker):
                self._again.append(episode_id)
                continue
            starts.append(self._start(episode_id, worker))

    def _worker_for(self, cohort: int, left: _Room) -> int | None:
        """The worker that runs this cohort of suspects, or one that runs none."""
        runs = [worker for worker, (own, _) in self._suspects.items() if own == cohort]
        return runs[0] if runs else left.most(without=self._suspects)

    def _place_of(self, episode_id: str) -> tuple[int, int]:
        """Number of the group, and of the episode in it."""
        group = self._active[self._group_of[episode_id]]
        return group.number, list(group.members).index(episode_id)

    def _start(self, episode_id: str, worker: int) -> Start:
        member = self._member(episode_id)
        member.state, member.worker, member.version = _State.RUNNING, worker, self.version
        self._running += 1
        self._on_worker.setdefault(worker, set()).add(episode_id)
        if member.cohort is not None:
            self._suspects.setdefault(worker, (member.cohort, set()))[1].add(episode_id)
        self.counts.started += 1
        return Start(worker, member.job, member.attempt)

    def _stopped(self, member: _Member) -> None:
        """An episode does not run any more."""
        worker, episode_id = member.worker, member.job.episode_id
        if worker is None:
            return
        self._running -= 1
        self._on_worker[worker].discard(episode_id)
        if worker in self._suspects:
            self._suspects[worker][1].discard(episode_id)
            if not self._suspects[worker][1]:
                del self._suspects[worker]
        member.worker = None

    def _skip(self, episode_id: str, score: Failed) -> None:
        """An episode is not played."""
        self._due += self._broke(self._member(episode_id), Header(episode_id, score=score))

    def take_guilty(self) -> list[tuple[EpisodeJob, Failed]]:
        """Attempts that took their worker along, since the last call."""
        guilty, self._guilty = self._guilty, []
        return guilty

    def take_due(self) -> list[Grade]:
        """What to grade because the last `start` left episodes out."""
        due, self._due = self._due, []
        return due

    def _broke(self, member: _Member, header: Header) -> list[Grade]:
        """An episode has ended without an answer to grade; what to grade now."""
        member.header, member.state, member.broken = header, _State.DONE, True
        self._phase_ended += 1
        group = self._active[self._group_of[header.episode_id]]
        self._note_whole(group)
        return self._to_grade(group)

    def _begin_group(self) -> bool:
        """Draws the next group, if one may start."""
        if not self._may_begin():
            return False
        self._begin(self.next_group, self._draw(self.next_group))
        self.next_group += 1
        return True

    def _begin(self, number: int, jobs: Sequence[EpisodeJob]) -> None:
        if len(jobs) != self.schedule.group_size or len({job.group_id for job in jobs}) != 1:
            raise ValueError(f"group {number} has {len(jobs)} jobs; wanted {self.schedule.group_size} of one")
        group = _Active(number, jobs[0].group_id, {job.episode_id: _Member(job) for job in jobs})
        self._active[group.group_id] = group
        self._group_of |= dict.fromkeys(group.members, group.group_id)
        self._waiting.extend(group.members)
        self._phase_episodes += len(jobs)

    def _may_begin(self) -> bool:
        schedule = self.schedule
        if self._wanted is not None and len(self._active) >= self._wanted:
            return False
        match schedule.mode:
            case Mode.SYNCHRONOUS:
                batch, of_batch = divmod(self.next_group, schedule.groups)
                before_is_played = of_batch or len(self._whole) == len(self._active)
                lead = batch - self._first_batch_number
                return bool(before_is_played) and lead <= self._updates + (schedule.max_off_policy_steps or 0)
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
        self._stopped(member)
        member.cohort = None
        if isinstance(header.score, Failed):
            if self._goes_again(member, header.score):
                self._retry(member)
                return []
            left_out = self._left_out(member.job.task.family)
            return self._broke(member, header if left_out is None else replace(header, score=left_out))
        member.header, member.state = header, _State.PLAYED
        self._phase_ended += 1
        return self._to_grade(self._active[self._group_of[header.episode_id]])

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
            if isinstance(score, Failed):
                if self._goes_again(member, score):
                    self.counts.regraded += 1
                    continue
                score = self._left_out(member.job.task.family) or score
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

    def job_of(self, episode_id: str) -> EpisodeJob:
        """The job of an episode whose group is there."""
        return self._member(episode_id).job

    def lost(
        self, worker: int, guilty: str | None = None, *, kind: FailureKind = FailureKind.DIED, why: str = ""
    ) -> list[Grade]:
        """A worker died or hung; what to grade now. Its episodes start again.

        guilty: the episode that took it along, where that is known; it has used up an attempt, and without any left it
        is `Failed`. Otherwise those that ran there become suspects, or half of those who were suspects already.
        """
        grades: list[Grade] = []
        members = [self._member(name) for name in sorted(self._on_worker.pop(worker, ()), key=self._place_of)]
        cohort = self._suspects.pop(worker, None)
        suspects = [] if guilty is not None else [m for m in members if cohort is None or m.job.episode_id in cohort[1]]
        if len(suspects) == 1:
            guilty = suspects[0].job.episode_id
        else:
            for half in (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]):
                self._cohorts += 1
                for member in half:
                    member.cohort = self._cohorts
        for member in members:
            self._running -= 1
            member.worker = None
            if member.job.episode_id != guilty:
                self._restart(member)
                continue
            if member.cohort is None:  # alone from now on, so that the next loss tells at once
                self._cohorts += 1
                member.cohort = self._cohorts
            failed = Failed(why or f"worker {worker} died or hung while it played this episode", kind)
            self._guilty.append((member.job, failed))
            if self._goes_again(member, failed):
                self._retry(member)
            else:
                grades += self._broke(member, Header(guilty, score=failed))
        return grades

    def published(self, version: int) -> list[Abort]:
        """Engines serve a newer version: a new phase begins, and what is now too old is dropped or aborted."""
        if version <= self.version:
            raise ValueError(f"version {version} was published after {self.version}; versions only grow")
        self.version = version
        self._updates += 1
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
            case Mode.PARTIAL:  # what is played counts as ended, and is waited for
                return self.phase_over and all(group.whole for group in self._active.values() if group.played)
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
        if self._wanted is not None:
            self._wanted -= len(groups)
        return [
            Finished(
                group.number,
                group.group_id,
                tuple(member.header for member in group.members.values() if member.header is not None),
                tuple(member.job for member in group.members.values()),
            )
            for group in groups
        ]

    @property
    def running(self) -> int:
        """Episodes that workers play now."""
        return self._running

    def running_on(self, worker: int) -> int:
        """Episodes that this worker plays now."""
        return len(self._on_worker.get(worker, ()))

    @property
    def drawn(self) -> list[tuple[int, list[EpisodeJob]]]:
        """(number, jobs) of each group that was drawn and neither taken nor dropped."""
        return [(group.number, [m.job for m in group.members.values()]) for group in self._active.values()]

    def __str__(self) -> str:
        """What is waited for."""
        members = [member for group in self._active.values() for member in group.members.values()]
        states = Counter(str(member.state) for member in members)
        where = ", ".join(f"worker {worker}: {len(names)}" for worker, names in self._on_worker.items() if names)
        counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        whole = f"{len(self._whole)} of {len(self._active)} groups are whole"
        return f"{whole}; episodes: {counted} ({where or 'none runs'})"

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
        return member.failures <= self.schedule.retries and self._left_out(member.job.task.family) is None

    def _retry(self, member: _Member) -> None:
        self._wait_again(member)
        self.counts.retried += 1

    def _restart(self, member: _Member) -> None:
        self._wait_again(member)
        self.counts.restarted += 1

    def _wait_again(self, member: _Member) -> None:
        member.state, member.worker, member.header, member.version = _State.WAITING, None, None, None
        member.attempt += 1
        self._again.append(member.job.episode_id)

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
                self._stopped(member)
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
        gone = group.members.keys()
        if any(member.state is _State.WAITING for member in group.members.values()):
            self._waiting = deque(name for name in self._waiting if name not in gone)
            self._again = [name for name in self._again if name not in gone]
