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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from k3rl.actors.groups import ActiveGroup, Assignments, Groups, Loads, Member, Room, State
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.schedule import Abort, Counts, Finished, Grade, Header, Mode, Schedule, Start
from k3rl.types import Failed, FailureKind, Score


class Dispatcher:
    """Starts episodes, gathers them into groups and hands whole groups to the learner, each exactly once.

    draw: number of a group -> its jobs, `group_size` of one task; asked for each number once, in order. compares:
    whether the reward of an episode depends on the others of its group, which is then graded when it is whole.
    skipped: task family -> the score of its episodes where they are not played any more. wanted: groups that the
    learner takes in all; None: without end. next_group, version: where a resumed run goes on; drawn: what `drawn` gave
    before it was stopped, which is played again, but for episodes that go on from where they stood: `going_on` has
    these by id, with the version of their oldest token. begun: groups with lower numbers were begun by actors that were
    lost, and count as played again.
    """

    def __init__(
        self,
        schedule: Schedule,
        draw: Callable[[int], Sequence[EpisodeJob]],
        *,
        compares: bool = False,
        skipped: Callable[[str | None], Failed | None] = lambda _: None,
        wanted: int | None = None,
        next_group: int = 0,
        version: int = 0,
        drawn: Iterable[tuple[int, Sequence[EpisodeJob]]] = (),
        begun: int = 0,
        going_on: Mapping[str, int] | None = None,
    ) -> None:
        self.schedule, self.version, self.next_group = schedule, version, next_group
        self.counts = Counts()
        self._draw, self._compares, self._skipped = draw, compares, skipped
        self._wanted = wanted  # groups that are still to be taken
        self._begun_before = begun
        self._first_batch_number = next_group // schedule.groups
        self._updates = 0  # publications
        self.groups, self._assigned = Groups(), Assignments()
        self._waiting: deque[str] = deque()  # episodes of groups that have begun
        self._again: list[str] = []  # episodes that go again, before those
        self._guilty: list[tuple[EpisodeJob, Failed]] = []
        self._due: list[Grade] = []  # of groups whose last episodes are left out
        self._first_of_batch = next_group  # synchronous: number of the first group that was not taken
        self._training = 0  # groups that were taken since the last publication
        self._phase_episodes = self._phase_ended = 0  # partial: active in this phase, and how many of them have ended
        self._going_on = dict(going_on or {})
        for number, jobs in drawn:
            self._begin(number, jobs)
            continued = sum(job.episode_id in self._going_on for job in jobs)
            self.counts.continued += continued
            self.counts.replayed += len(jobs) - continued

    # ---- what may start

    def start(self, room: Mapping[int, int] | None = None) -> list[Start]:
        """Episodes to start now. room: worker -> how many more episodes it takes; None: any number, on each open one.

        A group begins on the worker with most room, so that none idles while another has a queue; what it has no room
        for, and what goes again, goes to whoever has most room then.
        """
        starts: list[Start] = []
        left = self._assigned.loads if room is None else Room(room)
        self._start_again(left, starts)
        while left and not self._full():
            if not self._waiting and not self._begin_group():
                break
            family = self.groups.member(self._waiting[0]).job.task.family
            if (score := self._skipped(family)) is not None:
                name = self._waiting.popleft()
                self._due += self._broke(self.groups.member(name), Header(name, score=score))
                continue
            group = self.groups.of(self._waiting[0])
            if (worker := left.most()) is None:
                break
            while self._waiting and self.groups.of(self._waiting[0]) is group and not self._full():
                if not left.take(worker):
                    break
                starts.append(self._start(self._waiting.popleft(), worker))
        return starts

    def open(self, worker: int) -> None:
        """A worker takes any number of episodes from now on, until it is closed or lost."""
        self._assigned.loads.open(worker, self._assigned.on(worker))

    def close(self, worker: int) -> None:
        """A worker takes no more episodes."""
        self._assigned.loads.close(worker)

    def _full(self) -> bool:
        """Whether no episode may start, whatever the room."""
        limit = self.schedule.in_flight
        return self.phase_over or (limit is not None and self._assigned.running >= limit)

    def _start_again(self, left: Room | Loads, starts: list[Start]) -> None:
        """Starts what goes again, suspects only where no other cohort of them runs."""
        if self.schedule.mode is Mode.SYNCHRONOUS:
            if self._assigned.running:
                return
            self._again.sort(key=self.groups.place_of)
        waiting, self._again = self._again, []
        for number, episode_id in enumerate(waiting):
            if self._full() or not left:
                self._again += waiting[number:]
                return
            member = self.groups.member(episode_id)
            if (score := self._skipped(member.job.task.family)) is not None:
                self._due += self._broke(member, Header(episode_id, score=score))
                continue
            worker = left.most() if member.cohort is None else self._assigned.worker_for(member.cohort, left)
            if worker is None or not left.take(worker):
                self._again.append(episode_id)
                continue
            starts.append(self._start(episode_id, worker))

    def _start(self, episode_id: str, worker: int) -> Start:
        member = self.groups.member(episode_id)
        member.state, member.version = State.RUNNING, self.version
        if (oldest := self._going_on.pop(episode_id, None)) is not None and member.attempt == 0:
            member.version = min(oldest, self.version)
        self._assigned.start(worker, member)
        self.counts.started += 1
        self.counts.most_running = max(self.counts.most_running, self._assigned.running)
        return Start(worker, member.job, member.attempt)

    def take_guilty(self) -> list[tuple[EpisodeJob, Failed]]:
        """Attempts that took their worker along, since the last call."""
        guilty, self._guilty = self._guilty, []
        return guilty

    def take_due(self) -> list[Grade]:
        """What to grade because the last `start` left episodes out."""
        due, self._due = self._due, []
        return due

    def _broke(self, member: Member, header: Header) -> list[Grade]:
        """An episode has ended without an answer to grade; what to grade now."""
        member.header, member.state, member.broken = header, State.DONE, True
        self._phase_ended += 1
        group = self.groups.of(header.episode_id)
        self.groups.note(group)
        return group.to_grade(self._compares)

    def _begin_group(self) -> bool:
        """Draws the next group, if one may start."""
        if not self._may_begin():
            return False
        self._begin(self.next_group, self._draw(self.next_group))
        if self.next_group < self._begun_before:
            self.counts.replayed += self.schedule.group_size
        self.next_group += 1
        return True

    def _begin(self, number: int, jobs: Sequence[EpisodeJob]) -> None:
        if len(jobs) != self.schedule.group_size or len({job.group_id for job in jobs}) != 1:
            raise ValueError(f"group {number} has {len(jobs)} jobs; wanted {self.schedule.group_size} of one")
        group = ActiveGroup(number, jobs[0].group_id, {job.episode_id: Member(job) for job in jobs})
        self.groups.add(group)
        self._waiting.extend(group.members)
        self._phase_episodes += len(jobs)

    def _may_begin(self) -> bool:
        schedule = self.schedule
        if self._wanted is not None and len(self.groups.active) >= self._wanted:
            return False
        match schedule.mode:
            case Mode.SYNCHRONOUS:
                batch, of_batch = divmod(self.next_group, schedule.groups)
                before_is_played = of_batch or len(self.groups.whole) == len(self.groups.active)
                lead = batch - self._first_batch_number
                return bool(before_is_played) and lead <= self._updates + (schedule.max_off_policy_steps or 0)
            case Mode.PARTIAL:
                return self._phase_episodes + schedule.group_size <= schedule.episodes
            case _:
                most = schedule.groups * ((schedule.max_off_policy_steps or 0) + 1)
                return len(self.groups.active) + self._training < most

    # ---- what happened

    def ended(self, header: Header, attempt: int) -> list[Grade]:
        """An episode ended on its worker; what to grade now. An answer that nobody waits for is counted, no more."""
        member = self._waits_for(header.episode_id, attempt, State.RUNNING)
        if member is None:
            return []
        self._assigned.stop(member)
        member.cohort = None
        if isinstance(header.score, Failed):
            if self._again_after(member):
                self._wait_again(member)
                self.counts.retried += 1
                return []
            skipped = self._skipped(member.job.task.family)
            return self._broke(member, header if skipped is None else replace(header, score=skipped))
        member.header, member.state = header, State.PLAYED
        self._phase_ended += 1
        group = self.groups.of(header.episode_id)
        self.groups.note(group)
        return group.to_grade(self._compares)

    def graded(self, scores: Mapping[str, Score], attempts: Mapping[str, int]) -> list[Grade]:
        """Scores of played episodes, by id, and the attempts that they are of; what to grade again.

        A grade that failed is asked for again, of the whole group where the reward compares its episodes.
        """
        touched: dict[str, ActiveGroup] = {}
        for episode_id, score in scores.items():
            member = self._waits_for(episode_id, attempts[episode_id], State.PLAYED)
            if member is None or member.header is None:
                continue
            member.grading = False
            group = touched.setdefault(self.groups.of(episode_id).group_id, self.groups.of(episode_id))
            if isinstance(score, Failed):
                if self._again_after(member):
                    self.counts.regraded += 1
                    continue
                score = self._skipped(member.job.task.family) or score
            member.header = replace(member.header, score=score)
            member.state = State.DONE
        again: list[Grade] = []
        for group in touched.values():
            if self._compares and any(member.state is State.PLAYED for member in group.members.values()):
                group.ungrade()
            self.groups.note(group)
            again += group.to_grade(self._compares)
        return again

    def lost(
        self, worker: int, guilty: str | None = None, *, kind: FailureKind = FailureKind.DIED, why: str = ""
    ) -> list[Grade]:
        """A worker died or hung; what to grade now. Its episodes start again.

        guilty: the episode that took it along, where that is known; it has used up an attempt, and without any left it
        is `Failed`. Otherwise those that ran there become suspects, or half of those who were suspects already.
        """
        grades: list[Grade] = []
        names, blamed = self._assigned.lose(worker)
        members = [self.groups.member(name) for name in sorted(names, key=self.groups.place_of)]
        suspects = [] if guilty is not None else [m for m in members if m.job.episode_id in blamed]
        if len(suspects) == 1:
            guilty = suspects[0].job.episode_id
        elif suspects:
            for half in (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]):
                self._assigned.suspect(half)
        for member in members:
            member.worker = None
            if member.job.episode_id != guilty:
                self._wait_again(member)
                self.counts.restarted += 1
                continue
            if member.cohort is None:  # alone from now on, so that the next loss tells at once
                self._assigned.suspect([member])
            failed = Failed(why or f"worker {worker} died or hung while it played this episode", kind)
            self._guilty.append((member.job, failed))
            if self._again_after(member):
                self._wait_again(member)
                self.counts.retried += 1
            else:
                grades += self._broke(member, Header(guilty, score=failed))
        return grades

    def gone(self, episodes: Mapping[str, int]) -> None:
        """Records of played episodes, with their attempts, are gone with the node that had them; these go again, as
        those of a lost worker do."""
        for episode_id, attempt in episodes.items():
            member = self._waits_for(episode_id, attempt, State.PLAYED)
            if member is None:
                continue
            member.grading = False
            self._phase_ended -= 1
            self._wait_again(member)
            self.counts.restarted += 1
            group = self.groups.of(episode_id)
            if self._compares:  # the others are graded with it, when it is played again
                for other in group.members.values():
                    other.grading = False
            self.groups.note(group)

    def published(self, version: int) -> list[Abort]:
        """Engines serve a newer version: a new phase begins, and what is now too old is dropped or aborted."""
        if version <= self.version:
            raise ValueError(f"version {version} was published after {self.version}; versions only grow")
        self.version = version
        self._updates += 1
        self._training = self._phase_ended = 0
        self._phase_episodes = sum(
            member.state in (State.WAITING, State.RUNNING)
            for group in self.groups.active.values()
            for member in group.members.values()
        )
        bound = self.schedule.max_off_policy_steps
        if bound is None or self.schedule.mode is Mode.SYNCHRONOUS:
            return []
        aborts: list[Abort] = []
        for group in list(self.groups.active.values()):
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
                if len(self.groups.whole) < self.schedule.groups:
                    return False
                mine = self.groups.before(self._first_of_batch + self.schedule.groups)
                return len(mine) == self.schedule.groups and all(group.whole for group in mine)
            case Mode.PARTIAL:  # what is played counts as ended, and is waited for
                return self.phase_over and not self.groups.ungraded
            case _:
                return len(self.groups.whole) >= self.schedule.groups

    def take(self) -> list[Finished]:
        """The next batch of whole groups, which are the learner's from now on. Raises RuntimeError before `ready`."""
        if not self.ready:
            raise RuntimeError(
                f"no batch is ready: {len(self.groups.whole)} of {len(self.groups.active)} groups are whole"
            )
        match self.schedule.mode:
            case Mode.SYNCHRONOUS:
                groups = self.groups.before(self._first_of_batch + self.schedule.groups)
                self._first_of_batch += len(groups)
            case Mode.PARTIAL:
                groups = sorted(
                    (self.groups.active[name] for name in self.groups.whole), key=lambda group: group.number
                )
            case _:
                chosen = list(self.groups.whole)[: self.schedule.groups]
                groups = [self.groups.active[name] for name in chosen]
        for group in groups:
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
        return self._assigned.running

    def __str__(self) -> str:
        """What is waited for."""
        states = Counter(str(member.state) for member in self.groups.members())
        counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        whole = f"{len(self.groups.whole)} of {len(self.groups.active)} groups are whole"
        return f"{whole}; episodes: {counted} ({self._assigned})"

    @property
    def phase_over(self) -> bool:
        """Partial mode: enough episodes have ended; engines rest until the next version is published."""
        if self.schedule.mode is not Mode.PARTIAL or not self.groups.whole:
            return False
        return self._phase_ended >= math.ceil(self.schedule.fraction * self._phase_episodes)

    def take_counts(self) -> Counts:
        """What has been counted since the last call."""
        counts, self.counts = self.counts, Counts(most_running=self._assigned.running)
        return counts

    # ---- inside

    def _waits_for(self, episode_id: str, attempt: int, state: State) -> Member | None:
        """The member that an answer is for, or None where it is late, doubled or of a dropped group."""
        if self.groups.attempt_of(episode_id) == attempt and (member := self.groups.member(episode_id)).state is state:
            return member
        self.counts.stale_answers += 1
        return None

    def _again_after(self, member: Member) -> bool:
        """Whether an episode that failed is played again."""
        member.failures += 1
        return member.failures <= self.schedule.retries and self._skipped(member.job.task.family) is None

    def _wait_again(self, member: Member) -> None:
        member.state, member.worker, member.header, member.version = State.WAITING, None, None, None
        member.attempt += 1
        self._again.append(member.job.episode_id)

    def _drop(self, group: ActiveGroup) -> list[Abort]:
        """Gives a group up; what runs of it is aborted."""
        aborts = []
        for episode_id, member in group.members.items():
            if member.state is State.RUNNING and member.worker is not None:
                aborts.append(Abort(member.worker, episode_id, member.attempt))
                self._assigned.stop(member)
                self.counts.aborted_episodes += 1
            elif member.header is not None:
                self.counts.dropped_episodes += 1
                self.counts.dropped_tokens += member.header.tokens
                self.counts.by_length[max(0, member.header.tokens).bit_length()] += 1
        self.counts.dropped_groups += 1
        self._forget(group)
        return aborts

    def _forget(self, group: ActiveGroup) -> None:
        self.groups.remove(group)
        gone = group.members.keys()
        if any(member.state is State.WAITING for member in group.members.values()):
            self._waiting = deque(name for name in self._waiting if name not in gone)
            self._again = [name for name in self._again if name not in gone]
