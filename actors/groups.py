"""The groups of episodes under way, and who plays what: what a dispatcher keeps count of."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.schedule import Grade, Header


class State(StrEnum):
    """Of an episode."""

    WAITING = "waiting"
    RUNNING = "running"
    PLAYED = "played"  # waits for its grade, or for its group to be played
    DONE = "done"


@dataclass
class Member:
    """An episode of a group."""

    job: EpisodeJob
    state: State = State.WAITING
    worker: int | None = None
    attempt: int = 0  # answers to earlier ones no longer count
    failures: int = 0  # attempts that were its own fault
    header: Header | None = None
    grading: bool = False
    broken: bool = False  # ended without an answer to grade
    cohort: int | None = None  # of suspects, where it ran on a worker that was lost
    version: int | None = None  # that was served when this attempt was started


@dataclass
class ActiveGroup:
    """A group that was drawn and is neither trained on nor dropped."""

    number: int
    group_id: str
    members: dict[str, Member]

    @property
    def whole(self) -> bool:
        return all(member.state is State.DONE for member in self.members.values())

    @property
    def played(self) -> bool:
        """Whether no episode of it runs or waits any more."""
        for member in self.members.values():  # a loop, as every event asks
            if member.state is State.RUNNING or member.state is State.WAITING:
                return False
        return True

    def oldest(self) -> int | None:
        """The version of the oldest token that there is, or may be where an episode still runs."""
        versions = [
            member.header.first_version if member.header is not None else member.version
            for member in self.members.values()
        ]
        return min((version for version in versions if version is not None), default=None)

    def ungrade(self) -> None:
        """Its grades are to be compared anew, because one of them failed."""
        for member in self.members.values():
            if member.state is State.DONE and member.header is not None and not member.broken:
                member.header = member.header.scored(None)
                member.state = State.PLAYED

    def grade_of(self, member: Member) -> list[Grade]:
        """To grade one that has ended, where grades do not depend on each other: without a look at the others."""
        if member.grading or member.header is None:
            return []
        member.grading = True
        return [Grade(self.group_id, (member.header,))]

    def to_grade(self, compares: bool) -> list[Grade]:
        """What to grade now. compares: whether its grades depend on each other."""
        if compares and not self.played:
            return []
        chosen = [m for m in self.members.values() if not m.grading and m.state is State.PLAYED]
        for member in chosen:
            member.grading = True
        headers = tuple(m.header for m in chosen if m.header is not None)
        return [Grade(self.group_id, headers)] if headers else []


class Groups:
    """The active groups, by id and in the order of their numbers. whole: ids of whole ones, as they became so.

    ungraded: ids of those that are played and not whole.
    """

    def __init__(self) -> None:
        self.active: dict[str, ActiveGroup] = {}
        self.whole: dict[str, None] = {}
        self.ungraded: set[str] = set()
        self._members: dict[str, tuple[ActiveGroup, Member]] = {}

    def add(self, group: ActiveGroup) -> None:
        self.active[group.group_id] = group
        self._members |= {name: (group, member) for name, member in group.members.items()}

    def remove(self, group: ActiveGroup) -> None:
        self.whole.pop(group.group_id, None)
        self.ungraded.discard(group.group_id)
        del self.active[group.group_id]
        for episode_id in group.members:
            del self._members[episode_id]

    def of(self, episode_id: str) -> ActiveGroup:
        """The group of an episode. Raises KeyError where it is gone."""
        return self._members[episode_id][0]

    def member(self, episode_id: str) -> Member:
        """Raises KeyError where its group is gone."""
        return self._members[episode_id][1]

    def members(self) -> Iterator[Member]:
        """Of all groups."""
        return (member for group in self.active.values() for member in group.members.values())

    def attempt_of(self, episode_id: str) -> int | None:
        """The attempt at an episode that counts; None where its group is gone."""
        found = self._members.get(episode_id)
        return None if found is None else found[1].attempt

    def place_of(self, episode_id: str) -> tuple[int, int]:
        """Number of the group, and of the episode in it."""
        group = self.of(episode_id)
        return group.number, list(group.members).index(episode_id)

    def note(self, group: ActiveGroup) -> None:
        """To be told when an episode of it is played, done, or goes again."""
        self.ungraded.discard(group.group_id)
        if not group.played:
            return
        if group.whole:
            self.whole.setdefault(group.group_id)
        else:
            self.ungraded.add(group.group_id)

    def before(self, number: int) -> list[ActiveGroup]:
        """Those of lower numbers."""
        return [group for group in self.active.values() if group.number < number]

    @property
    def drawn(self) -> list[tuple[int, list[EpisodeJob]]]:
        """(number, jobs) of each."""
        return [(group.number, [m.job for m in group.members.values()]) for group in self.active.values()]


class Room:
    """How many more episodes each worker takes; the one with most room comes first, of equals the first."""

    def __init__(self, room: Mapping[int, int]) -> None:
        self._free = {worker: free for worker, free in room.items() if free > 0}
        self._heap = [(-free, worker) for worker, free in self._free.items()]  # with stale entries, which are skipped
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._free)

    def most(self, without: Collection[int] = ()) -> int | None:
        """The worker with most room, but for those that are excluded."""
        return _first(self._heap, self._stale, without)

    def _stale(self, entry: tuple[int, int]) -> bool:
        free, worker = entry
        return self._free.get(worker) != -free

    def take(self, worker: int | None) -> bool:
        """Uses room for one episode, if there is any."""
        if worker is None or worker not in self._free:
            return False
        self._free[worker] -= 1
        if self._free[worker]:
            heapq.heappush(self._heap, (-self._free[worker], worker))
        else:
            del self._free[worker]
        return True


class Loads:
    """Workers that take any number of episodes, kept from one event to the next: `Room`, without a look at each.

    The one that plays fewest comes first, of equals the first.
    """

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # (episodes, worker), with stale entries, which are skipped

    def __bool__(self) -> bool:
        return bool(self._running)

    def open(self, worker: int, running: int) -> None:
        """A worker takes episodes from now on."""
        self._running[worker] = running
        heapq.heappush(self._heap, (running, worker))

    def close(self, worker: int) -> None:
        self._running.pop(worker, None)

    def change(self, worker: int, more: int) -> None:
        """A worker, if it is open, plays so many more."""
        if worker not in self._running:
            return
        self._running[worker] += more
        heapq.heappush(self._heap, (self._running[worker], worker))
        if len(self._heap) > 64 + 4 * len(self._running):
            self._heap = [(running, worker) for worker, running in self._running.items()]
            heapq.heapify(self._heap)

    def most(self, without: Collection[int] = ()) -> int | None:
        """See `Room.most`."""
        return _first(self._heap, lambda entry: self._running.get(entry[1]) != entry[0], without)

    def take(self, worker: int | None) -> bool:
        """Whether a worker takes one more episode; `change` counts it."""
        return worker in self._running


def _first(
    heap: list[tuple[int, int]], stale: Callable[[tuple[int, int]], bool], without: Collection[int]
) -> int | None:
    """The worker of the first entry (key, worker) that is not stale, but for those that are excluded."""
    skipped = []
    while heap and (stale(heap[0]) or heap[0][1] in without):
        entry = heapq.heappop(heap)
        if not stale(entry):
            skipped.append(entry)
    found = heap[0][1] if heap else None
    for entry in skipped:
        heapq.heappush(heap, entry)
    return found


class Assignments:
    """Which episodes each worker plays. A worker that was lost makes suspects, in cohorts, of those it played; a worker
    plays one cohort at a time."""

    def __init__(self) -> None:
        self.running = 0
        self.loads = Loads()
        self._on_worker: dict[int, set[str]] = {}
        self._suspects: dict[int, tuple[int, set[str]]] = {}  # worker -> its cohort, and who runs
        self._cohorts = 0

    def on(self, worker: int) -> int:
        """Episodes that this worker plays now."""
        return len(self._on_worker.get(worker, ()))

    def start(self, worker: int, member: Member) -> None:
        self.running += 1
        self.loads.change(worker, 1)
        member.worker = worker
        self._on_worker.setdefault(worker, set()).add(member.job.episode_id)
        if member.cohort is not None:
            self._suspects.setdefault(worker, (member.cohort, set()))[1].add(member.job.episode_id)

    def stop(self, member: Member) -> None:
        """An episode does not run any more."""
        worker, episode_id = member.worker, member.job.episode_id
        if worker is None:
            return
        self.running -= 1
        self.loads.change(worker, -1)
        self._on_worker[worker].discard(episode_id)
        if worker in self._suspects:
            self._suspects[worker][1].discard(episode_id)
            if not self._suspects[worker][1]:
                del self._suspects[worker]
        member.worker = None

    def lose(self, worker: int) -> tuple[set[str], set[str]]:
        """(episodes that a lost worker played, those of them that may have taken it along)."""
        names = self._on_worker.pop(worker, set())
        cohort = self._suspects.pop(worker, None)
        self.running -= len(names)
        self.loads.close(worker)
        return names, names if cohort is None else cohort[1]

    def suspect(self, members: Sequence[Member]) -> None:
        """Makes a cohort of them."""
        self._cohorts += 1
        for member in members:
            member.cohort = self._cohorts

    def worker_for(self, cohort: int, room: Room | Loads) -> int | None:
        """The worker that plays this cohort of suspects, or one that plays none."""
        plays = [worker for worker, (own, _) in self._suspects.items() if own == cohort]
        return plays[0] if plays else room.most(without=self._suspects)

    def __str__(self) -> str:
        where = ", ".join(f"worker {worker}: {len(names)}" for worker, names in self._on_worker.items() if names)
        return where or "none runs"
