"""A dispatcher of rollouts, and beside it one of an evaluation under the same weights, as one.

Episodes of an evaluation take what training leaves: in the synchronous mode they start when everything that was begun
for training is graded, so that no batch of an engine differs because of them; otherwise they fill the rows that
training does not use. They are never handed to the learner. Weights must not change before they are done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from k3rl.actors.dispatcher import Dispatcher
from k3rl.actors.groups import Member
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.schedule import Abort, Counts, Finished, Grade, Header, Mode, Schedule, Start
from k3rl.types import Failed, FailureKind, Score

_MANY = 1 << 30  # episodes that a worker takes, where nothing else bounds them


class Evaluating:
    """`Dispatcher`, with an evaluation now and then. rows: episodes that all engines decode at once."""

    def __init__(self, training: Dispatcher, rows: int) -> None:
        self.training, self.schedule = training, training.schedule
        self.evaluation: Dispatcher | None = None
        self._rows = rows
        self._workers: set[int] = set()  # that are open

    # ---- of the evaluation

    def evaluate(self, jobs: Sequence[EpisodeJob]) -> None:
        """Begins an evaluation. Raises RuntimeError while there is one."""
        if self.evaluation is not None:
            raise RuntimeError("an evaluation is under way; take it before the next one")
        schedule = Schedule(Mode.SYNCHRONOUS, len(jobs), 1, 0, retries=self.schedule.retries)
        version = self.training.version
        self.evaluation = Dispatcher(schedule, lambda number: [jobs[number]], wanted=len(jobs), version=version)

    @property
    def evaluated(self) -> bool:
        """Whether all episodes of an evaluation are graded."""
        return self.evaluation is not None and self.evaluation.ready

    def take_evaluation(self) -> list[Finished]:
        """Raises RuntimeError before it is `evaluated`."""
        if self.evaluation is None:
            raise RuntimeError("no evaluation is under way")
        taken, self.evaluation = self.evaluation.take(), None
        return taken

    def evaluates(self, episode_id: str) -> bool:
        """Whether an episode is one of the evaluation."""
        return self.evaluation is not None and self.evaluation.groups.attempt_of(episode_id) is not None

    def _room(self, workers: Collection[int]) -> dict[int, int]:
        """What training leaves of workers that take any number."""
        training, running = self.training, 0 if self.evaluation is None else self.evaluation.running
        if self.schedule.mode is Mode.SYNCHRONOUS:
            idle = training.running == 0 and all(group.whole for group in training.groups.active.values())
            return dict.fromkeys(workers, _MANY) if idle else {}
        left = max(1, self._rows - training.running) - running
        return dict.fromkeys(workers, -(-left // len(workers))) if left > 0 and workers else {}

    # ---- of both

    def _of(self, episode_id: str) -> Dispatcher:
        return self.evaluation if self.evaluation is not None and self.evaluates(episode_id) else self.training

    def _both(self) -> list[Dispatcher]:
        return [self.training] if self.evaluation is None else [self.training, self.evaluation]

    def open(self, worker: int) -> None:
        self.training.open(worker)
        self._workers.add(worker)

    def close(self, worker: int) -> None:
        self.training.close(worker)
        self._workers.discard(worker)

    def start(self) -> list[Start]:
        """Episodes of training first."""
        starts = self.training.start()
        if self.evaluation is not None and (left := self._room(self._workers)):
            starts += self.evaluation.start(left)
        return starts

    def take_due(self) -> list[Grade]:
        return [grade for each in self._both() for grade in each.take_due()]

    def take_guilty(self) -> list[tuple[EpisodeJob, Failed]]:
        return [pair for each in self._both() for pair in each.take_guilty()]

    def ended(self, header: Header, attempt: int) -> list[Grade]:
        return self._of(header.episode_id).ended(header, attempt)

    def graded(self, scores: Mapping[str, Score], attempts: Mapping[str, int]) -> list[Grade]:
        grades = []
        for each in self._both():
            own = {name: score for name, score in scores.items() if self._of(name) is each}
            grades += each.graded(own, {name: attempts[name] for name in own})
        return grades

    def gone(self, episodes: Mapping[str, int]) -> None:
        for each in self._both():
            each.gone({name: attempt for name, attempt in episodes.items() if self._of(name) is each})

    def lost(self, worker: int, *, kind: FailureKind = FailureKind.DIED, why: str = "") -> list[Grade]:
        self._workers.discard(worker)
        return [grade for each in self._both() for grade in each.lost(worker, kind=kind, why=why)]

    def attempt_of(self, episode_id: str) -> int | None:
        """The attempt at an episode that counts; None where its group is gone."""
        return self._of(episode_id).groups.attempt_of(episode_id)

    def member(self, episode_id: str) -> Member:
        """Raises KeyError where its group is gone."""
        return self._of(episode_id).groups.member(episode_id)

    @property
    def phase_over(self) -> bool:
        """Whether engines may rest: not while an evaluation needs them."""
        return self.training.phase_over and (self.evaluation is None or self.evaluated)

    # ---- of training

    @property
    def ready(self) -> bool:
        return self.training.ready

    def take(self) -> list[Finished]:
        return self.training.take()

    def published(self, version: int) -> list[Abort]:
        """Raises RuntimeError while an evaluation is not done: it is of one version."""
        if self.evaluation is not None and not self.evaluated:
            raise RuntimeError("weights were published under an evaluation; wait for it first")
        return self.training.published(version)

    def drawn(self) -> tuple[int, list[tuple[int, list[EpisodeJob]]]]:
        return self.training.next_group, self.training.groups.drawn

    def take_counts(self) -> Counts:
        return self.training.take_counts()

    def __str__(self) -> str:
        return "; evaluation: ".join(str(each) for each in self._both())
