"""An evaluation beside rollouts: when its episodes start, whom they are handed to, and what waits for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.actors import Mode
from k3rl.actors.dispatcher import Dispatcher
from k3rl.actors.evaluating import Evaluating
from k3rl.actors.jobs import EpisodeJob, TaskRef
from k3rl.actors.schedule import Header, Schedule
from k3rl.types import Scored

GROUPS, SIZE = 3, 2
WORKERS = (0, 1)


def job(name: str, group: str) -> EpisodeJob:
    return EpisodeJob(name, group, TaskRef("train", 0, 0), 0)


def drawn(number: int) -> list[EpisodeJob]:
    return [job(f"t{number}-{member}", f"t{number}") for member in range(SIZE)]


EVALUATION = [job(f"eval-{i}", f"eval-{i}") for i in range(5)]


@dataclass
class World:
    """Workers that play at once what they are told to, and graders that answer at once."""

    both: Evaluating
    started: list[str] = field(default_factory=list)
    running: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for worker in WORKERS:
            self.both.open(worker)

    def start(self) -> list[str]:
        starts = self.both.start()
        self.running += [(one.job.episode_id, one.attempt) for one in starts]
        self.started += [one.job.episode_id for one in starts]
        return [one.job.episode_id for one in starts]

    def end(self, place: int = 0) -> None:
        name, attempt = self.running.pop(place)
        for grade in self.both.ended(Header(name, 3, 0), attempt):
            for header in grade.headers:
                self.both.graded({header.episode_id: Scored(1.0)}, {header.episode_id: attempt})


def world(mode: Mode, rows: int = 4) -> World:
    bound = {Mode.SYNCHRONOUS: 0, Mode.PARTIAL: None, Mode.ASYNCHRONOUS: 1}[mode]
    return World(Evaluating(Dispatcher(Schedule(mode, GROUPS, SIZE, bound), drawn), rows))


def test_synchronous_training_is_graded_whole_before_the_first_episode_of_an_evaluation_starts():
    made = world(Mode.SYNCHRONOUS)
    made.both.evaluate(EVALUATION)
    assert len(made.start()) == GROUPS * SIZE  # training alone
    for left in range(GROUPS * SIZE, 0, -1):
        assert len(made.started) == GROUPS * SIZE, f"{left} episodes of training are not graded"
        made.end()
        made.start()
    assert made.both.ready
    assert len(made.started) == GROUPS * SIZE + len(EVALUATION)
    while made.running:
        made.end()
    batch = made.both.take()
    assert {header.episode_id[0] for group in batch for header in group.headers} == {"t"}
    assert made.both.evaluated


@pytest.mark.parametrize("mode", [Mode.ASYNCHRONOUS, Mode.PARTIAL])
def test_an_evaluation_takes_the_rows_that_training_leaves_and_at_least_one(mode):
    made = world(mode, rows=GROUPS * SIZE + 2 if mode is Mode.PARTIAL else 14)
    made.both.evaluate(EVALUATION)
    begun = made.start()
    assert sum(name.startswith("t") for name in begun) == (6 if mode is Mode.PARTIAL else 12)
    assert sum(name.startswith("eval") for name in begun) == 2
    crowded = world(mode, rows=2)
    crowded.both.evaluate(EVALUATION)
    assert sum(name.startswith("eval") for name in crowded.start()) in (1, 2)  # one for each worker at most


@given(st.sampled_from(list(Mode)), st.data())
def test_every_episode_of_an_evaluation_is_handed_out_once_and_never_to_the_learner(mode, data):
    made = world(mode)
    made.both.evaluate(EVALUATION)
    taken, evaluated = [], []
    for _ in range(60):
        made.start()
        if made.running:
            made.end(data.draw(st.integers(0, len(made.running) - 1)))
        if made.both.ready:
            taken += [header.episode_id for group in made.both.take() for header in group.headers]
        if made.both.evaluated:
            evaluated += [header.episode_id for group in made.both.take_evaluation() for header in group.headers]
            made.both.published(made.both.training.version + 1)
    assert sorted(evaluated) == sorted(one.episode_id for one in EVALUATION)
    assert all(name.startswith("t") for name in taken)
    assert len(taken) == len(set(taken))


def test_weights_are_not_published_under_an_evaluation_and_engines_do_not_rest():
    made = world(Mode.PARTIAL, rows=100)
    made.both.evaluate(EVALUATION)
    made.start()
    while any(name.startswith("t") for name, _ in made.running):
        made.end(next(i for i, (name, _) in enumerate(made.running) if name.startswith("t")))
    assert made.both.training.phase_over
    assert not made.both.phase_over
    with pytest.raises(RuntimeError, match="wait for it"):
        made.both.published(1)
    while made.running:
        made.end()
    assert made.both.phase_over
    assert len(made.both.take_evaluation()) == len(EVALUATION)
    made.both.published(1)


def test_a_lost_worker_gives_back_the_episodes_of_both():
    made = world(Mode.ASYNCHRONOUS, rows=100)
    made.both.evaluate(EVALUATION)
    first = set(made.start())
    for worker in WORKERS:
        made.both.lost(worker)
    assert not made.start(), "whoever takes their place has not come"
    for worker in WORKERS:
        made.both.open(worker)
    made.running.clear()
    assert set(made.start()) <= first
    for _ in range(80):
        if made.running:
            made.end()
        made.start()
    assert made.both.evaluated
