"""The control plane of rollouts: whatever happens in any order, groups reach the learner once, whole and in time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.actors.dispatcher import Dispatcher
from k3rl.actors.groups import Loads
from k3rl.actors.jobs import EpisodeJob, TaskRef
from k3rl.actors.schedule import Finished, Header, Mode, Schedule
from k3rl.types import Failed, FailureKind, Scored


def jobs_of(number: int, size: int) -> list[EpisodeJob]:
    task = TaskRef("train", number, 0)
    return [EpisodeJob(f"{number}-{k}", f"g{number}", task, 100 * number + k) for k in range(size)]


def dispatcher(mode: Mode, groups: int = 2, size: int = 2, **changes) -> Dispatcher:
    compares, next_group = changes.pop("compares", False), changes.pop("next_group", 0)
    schedule = Schedule(mode, groups, size, **changes)
    return Dispatcher(schedule, lambda n: jobs_of(n, size), compares=compares, next_group=next_group)


@dataclass
class World:
    """Workers, a grader and a learner that take their time, by a seeded order of events."""

    dispatcher: Dispatcher
    seed: int
    workers: int = 3
    room: int = 2
    trouble: float = 0.0  # share of answers that are failures, lost workers and repeated answers
    steps: int = 5
    rng: random.Random = field(init=False)
    running: list = field(default_factory=list)
    grading: list = field(default_factory=list)
    late: list = field(default_factory=list)  # answers that are given again
    aborted: set = field(default_factory=set)
    batches: list[list[Finished]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the learner when it took each batch
    most_running: int = 0
    training: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def play(self) -> None:
        """Until the learner has taken `steps` batches. Fails when nothing can happen any more."""
        for _ in range(200_000):
            if len(self.batches) == self.steps and not self.training:
                return
            self._start()
            events = [self._end] * bool(self.running) + [self._grade] * bool(self.grading)
            events += [self._train] * (self.dispatcher.ready and not self.training and len(self.batches) < self.steps)
            events += [self._publish] * self.training + [self._repeat] * bool(self.late)
            if self.running and self.rng.random() < self.trouble:
                events.append(self._lose)
            assert events, "nothing can happen any more"
            self.rng.choice(events)()
        raise AssertionError("no end")

    def _start(self) -> None:
        room = Counter(start.worker for start in self.running)
        free = {worker: self.room - room[worker] for worker in range(self.workers)}
        self.running += self.dispatcher.start(free)
        self.most_running = max(self.most_running, len(self.running))
        assert max(Counter(start.worker for start in self.running).values(), default=0) <= self.room
        ids = [start.job.episode_id for start in self.running]
        assert len(ids) == len(set(ids)), "an episode runs once"

    def _end(self) -> None:
        start = self.running.pop(self.rng.randrange(len(self.running)))
        score = Failed("broken", FailureKind.RAISED) if self.rng.random() < self.trouble else None
        version = self.rng.randint(start_version(start), self.dispatcher.version)
        header = Header(start.job.episode_id, self.rng.randint(1, 9), version, score, (start.job.episode_id,))
        self.grading += self.dispatcher.ended(header, start.attempt)
        if self.rng.random() < self.trouble:
            self.late.append((header, start.attempt))

    def _repeat(self) -> None:
        before = self.dispatcher.counts.stale_answers
        assert self.dispatcher.ended(*self.late.pop()) == []
        assert self.dispatcher.counts.stale_answers == before + 1

    def _grade(self) -> None:
        grade = self.grading.pop(self.rng.randrange(len(self.grading)))
        scores, attempts = {}, {}
        for header in grade.headers:
            attempt = self.dispatcher.groups.attempt_of(header.episode_id)
            attempts[header.episode_id] = -1 if attempt is None else attempt
            failed = self.rng.random() < self.trouble
            scores[header.episode_id] = Failed("grader", FailureKind.RAISED) if failed else Scored(1.0)
        self.grading += self.dispatcher.graded(scores, attempts)

    def _lose(self) -> None:
        worker = self.rng.choice(self.running).worker
        mine = [start for start in self.running if start.worker == worker]
        self.running = [start for start in self.running if start.worker != worker]
        guilty = self.rng.choice(mine).job.episode_id if self.rng.random() < 0.5 else None
        self.grading += self.dispatcher.lost(worker, guilty)

    def _train(self) -> None:
        self.versions.append(self.dispatcher.version)
        self.batches.append(self.dispatcher.take())
        self.training = True

    def _publish(self) -> None:
        if self.dispatcher.schedule.mode is Mode.SYNCHRONOUS and self.running:
            return self._end()  # a synchronous run publishes when nothing runs
        self.training = False
        ends = {(a.worker, a.episode_id, a.attempt) for a in self.dispatcher.published(self.dispatcher.version + 1)}
        self.running = [s for s in self.running if (s.worker, s.job.episode_id, s.attempt) not in ends]
        return None


SERVED: dict[tuple[str, int], int] = {}


def start_version(start) -> int:
    return SERVED.setdefault((start.job.episode_id, start.attempt), 0)


@pytest.fixture(autouse=True)
def versions_at_start(monkeypatch):
    """Remembers which version each start was given."""
    SERVED.clear()
    start = Dispatcher._start

    def remembered(self, episode_id, worker):
        found = start(self, episode_id, worker)
        SERVED[episode_id, found.attempt] = self.version
        return found

    monkeypatch.setattr(Dispatcher, "_start", remembered)


schedules = st.one_of(
    st.builds(Schedule, st.just(Mode.SYNCHRONOUS), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)),
    st.builds(
        Schedule,
        st.just(Mode.PARTIAL),
        st.integers(1, 4),
        st.integers(1, 4),
        st.sampled_from([None, 2]),
        st.sampled_from([0.25, 0.5, 1.0]),
    ),
    st.builds(Schedule, st.just(Mode.ASYNCHRONOUS), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
)


@settings(max_examples=150)
@given(schedules, st.booleans(), st.sampled_from([0.0, 0.1, 0.3]), st.integers(0, 1 << 30))
def test_every_group_reaches_the_learner_once_or_is_counted(schedule, compares, trouble, seed):
    size = schedule.group_size
    drawn: list[int] = []

    def draw(number: int) -> list[EpisodeJob]:
        drawn.append(number)
        return jobs_of(number, size)

    SERVED.clear()
    world = World(Dispatcher(schedule, draw, compares=compares), seed, trouble=trouble)
    world.play()
    assert drawn == list(range(len(drawn))), "every number is drawn once, in order"
    taken = [group.number for batch in world.batches for group in batch]
    assert len(taken) == len(set(taken)), "no group is trained on twice"
    dropped, active = world.dispatcher.counts.dropped_groups, len(world.dispatcher.groups.active)
    assert len(drawn) == len(taken) + dropped + active, "none is lost without a count"
    for batch, version in zip(world.batches, world.versions, strict=True):
        for group in batch:
            assert [h.episode_id for h in group.headers] == [job.episode_id for job in jobs_of(group.number, size)]
            assert all(header.score is not None for header in group.headers)
            if schedule.max_off_policy_steps is not None and group.first_version is not None:
                assert version - group.first_version <= schedule.max_off_policy_steps
    if schedule.mode is not Mode.PARTIAL:
        assert all(len(batch) == schedule.groups for batch in world.batches)


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_synchronous_batches_do_not_depend_on_the_order_of_events(lag, one, other):
    found = []
    for seed in (one, other):
        world = World(dispatcher(Mode.SYNCHRONOUS, 3, 2, max_off_policy_steps=lag), seed)
        world.play()
        found.append([[(g.number, [h.episode_id for h in g.headers]) for g in batch] for batch in world.batches])
    assert found[0] == found[1]
    assert [number for batch in found[0] for number, _ in batch] == list(range(15))


def test_asynchronous_groups_start_while_the_learner_trains_up_to_the_bound():
    control = dispatcher(Mode.ASYNCHRONOUS, groups=2, size=1, max_off_policy_steps=1)
    starts = control.start({0: 100})
    assert len(starts) == 4, "two batches of two may be under way"
    for start in starts[:2]:
        (grade,) = control.ended(Header(start.job.episode_id, 5, 0), 0)
        control.graded({h.episode_id: Scored(1.0) for h in grade.headers}, {start.job.episode_id: 0})
    assert control.ready
    assert len(control.take()) == 2
    assert control.start({0: 100}) == [], "what trains counts until it is published"
    control.published(1)
    assert len(control.start({0: 100})) == 2


def test_what_becomes_too_old_is_dropped_or_aborted_and_counted_by_length():
    control = dispatcher(Mode.ASYNCHRONOUS, groups=1, size=2, max_off_policy_steps=1)
    slow, fast = control.start({0: 2}), control.start({1: 2})
    control.ended(Header(slow[0].job.episode_id, 300, 0), 0)
    for version in (1, 2):
        for start in fast if version == 1 else control.start({1: 2}):
            for grade in control.ended(Header(start.job.episode_id, 5, version - 1), 0):
                control.graded({h.episode_id: Scored(0.0) for h in grade.headers}, {start.job.episode_id: 0})
        control.take()
        aborts = control.published(version)
    assert [(a.worker, a.episode_id) for a in aborts] == [(0, slow[1].job.episode_id)]
    counts = control.take_counts()
    assert (counts.dropped_groups, counts.dropped_episodes, counts.dropped_tokens) == (1, 1, 300)
    assert counts.aborted_episodes == 1
    assert counts.by_length == {9: 1}


def test_a_partial_phase_ends_at_its_fraction_and_the_rest_goes_on_with_newer_weights():
    control = dispatcher(Mode.PARTIAL, groups=4, size=1, max_off_policy_steps=None, fraction=0.5)
    starts = control.start({0: 9})
    assert len(starts) == 4
    for start in starts[:2]:
        assert not control.ready
        (grade,) = control.ended(Header(start.job.episode_id, 5, 0), 0)
        control.graded({h.episode_id: Scored(1.0) for h in grade.headers}, {start.job.episode_id: 0})
    assert control.phase_over
    assert control.start({0: 9}) == [], "nothing starts while engines rest"
    assert [group.number for group in control.take()] == [0, 1]
    assert control.published(1) == []
    assert len(control.start({0: 9})) == 2, "two go on, two begin"
    assert control.running == 4


def test_a_reward_that_compares_is_asked_for_once_the_group_is_played_retried_episodes_included():
    control = dispatcher(Mode.SYNCHRONOUS, groups=1, size=3, compares=True)
    first, second, third = control.start({0: 3})
    assert control.ended(Header(first.job.episode_id, 1, 0), 0) == []
    failed = Header(second.job.episode_id, score=Failed("x", FailureKind.RAISED))
    assert control.ended(failed, 0) == []
    assert control.ended(Header(third.job.episode_id, 1, 0), 0) == []
    (again,) = control.start({0: 3})
    assert (again.job, again.attempt) == (second.job, 1)
    (grade,) = control.ended(Header(second.job.episode_id, 1, 0), 1)
    assert len(grade.headers) == 3
    attempts = {first.job.episode_id: 0, second.job.episode_id: 1, third.job.episode_id: 0}
    scores = dict.fromkeys(attempts, Scored(1.0)) | {third.job.episode_id: Failed("judge", FailureKind.RAISED)}
    (anew,) = control.graded(scores, attempts)
    assert len(anew.headers) == 3, "all are compared anew"
    assert control.graded(dict.fromkeys(attempts, Scored(0.5)), attempts) == []
    assert [header.score for header in control.take()[0].headers] == [Scored(0.5)] * 3


def test_episodes_of_a_lost_worker_start_again_and_only_the_guilty_one_uses_up_its_attempts():
    control = dispatcher(Mode.SYNCHRONOUS, groups=1, size=2, retries=1)
    starts = control.start({0: 2})
    guilty = starts[0].job.episode_id
    for _ in range(4):
        control.lost(0, guilty)
        starts = control.start({0: 2})
    assert [start.job.episode_id for start in starts] == ["0-1"], "the innocent one goes on however often"
    (grade,) = control.ended(Header("0-1", 3, 0), starts[0].attempt)
    control.graded({"0-1": Scored(1.0)}, {"0-1": starts[0].attempt})
    (group,) = control.take()
    assert isinstance(group.headers[0].score, Failed)
    assert group.headers[0].score.kind is FailureKind.DIED
    assert group.headers[1].score == Scored(1.0)
    assert [header.episode_id for header in grade.headers] == ["0-1"]


@pytest.mark.parametrize("compares", [False, True])
def test_episodes_whose_records_are_gone_before_they_are_graded_are_played_again_at_no_cost(compares):
    control = dispatcher(Mode.SYNCHRONOUS, groups=1, size=2, retries=0, compares=compares)
    names = [start.job.episode_id for start in control.start({0: 2})]
    grades = [grade for name in names for grade in control.ended(Header(name, 1, 0), 0)]
    assert sum(len(grade.headers) for grade in grades) == 2
    control.gone({names[0]: 0})
    assert not control.ready
    (again,) = control.start({0: 2})
    assert (again.job.episode_id, again.attempt) == (names[0], 1)
    (grade,) = control.ended(Header(names[0], 1, 0), 1)
    assert [header.episode_id for header in grade.headers] == (names if compares else names[:1])
    control.graded(dict.fromkeys(names, Scored(1.0)), {names[0]: 1, names[1]: 0})
    assert [header.score for header in control.take()[0].headers] == [Scored(1.0)] * 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "close", "start", "stop"]), st.integers(0, 5)), max_size=400))
def test_the_open_worker_that_plays_fewest_comes_first(events):
    loads, running, opened = Loads(), Counter(), set()
    for event, worker in events:
        if event == "open" and worker not in opened:
            opened.add(worker)
            loads.open(worker, running[worker])
        elif event == "close":
            opened.discard(worker)
            loads.close(worker)
        elif event in ("start", "stop") and running[worker] + (event == "start") > 0:
            running[worker] += 1 if event == "start" else -1
            loads.change(worker, 1 if event == "start" else -1)
        for without in ((), (0, 3)):
            wanted = min(opened - set(without), key=lambda own: (running[own], own), default=None)
            assert loads.most(without) == wanted
        assert bool(loads) == bool(opened)


def test_open_workers_share_the_episodes_until_they_are_closed_or_lost():
    control = dispatcher(Mode.ASYNCHRONOUS, groups=3, max_off_policy_steps=1)
    for worker in (2, 1, 0):
        control.open(worker)
    control.close(1)
    starts = control.start()
    assert Counter(start.worker for start in starts) == {0: 6, 2: 6}
    control.lost(0)
    control.open(1)
    assert {start.worker for start in control.start()} == {1, 2}, "a half of the lost one's each"


def test_a_group_begins_on_the_worker_with_most_room_and_stays_there_while_it_fits():
    control = dispatcher(Mode.SYNCHRONOUS, groups=4, size=2)
    starts = control.start({0: 1, 1: 4, 2: 0, 3: 2})
    assert [(start.job.group_id, start.worker) for start in starts] == [
        *[("g0", 1)] * 2,
        *[("g1", 1)] * 2,
        *[("g2", 3)] * 2,
        ("g3", 0),
    ]


def test_a_synchronous_batch_is_assigned_by_its_jobs_and_goes_again_when_nothing_runs():
    control = dispatcher(Mode.SYNCHRONOUS, groups=2, size=2)
    first, second, third, fourth = control.start({0: 9, 1: 9})
    assert [start.worker for start in (first, second, third, fourth)] == [0, 0, 1, 1]
    for start in (third, second):
        control.ended(Header(start.job.episode_id, score=Failed("x", FailureKind.RAISED)), 0)
    assert control.start({0: 9, 1: 9}) == []
    for start in (first, fourth):
        control.ended(Header(start.job.episode_id, 1, 0), 0)
    again = control.start({0: 9, 1: 9})
    assert [start.job for start in again] == [second.job, third.job], "in the order of their draw"


def test_an_unknown_culprit_is_found_by_halving_and_no_worker_runs_two_cohorts():
    control = dispatcher(Mode.ASYNCHRONOUS, groups=2, size=4, max_off_policy_steps=1, retries=0)
    room = dict.fromkeys(range(4), 99)
    culprit, lost, where = "0-2", 0, {}
    for start in control.start({0: 8}):
        where[start.job.episode_id] = start.worker
    while culprit in where and lost < 20:
        worker = where.pop(culprit)
        control.lost(worker)
        lost += 1
        where = {name: at for name, at in where.items() if at != worker}
        for start in control.start(room):
            where[start.job.episode_id] = start.worker
        cohorts = [{control.groups.member(name).cohort for name, at in where.items() if at == w} - {None} for w in room]
        assert all(len(own) <= 1 for own in cohorts)
    assert lost == 4, "eight, four, two, one"
    member = control.groups.member(culprit)
    assert isinstance(member.header.score, Failed)
    assert member.header.score.kind is FailureKind.DIED
    for name in ("0-0", "0-1", "0-3"):
        assert control.groups.member(name).failures == 0


def test_only_suspects_are_halved_when_others_ran_beside_them():
    control = dispatcher(Mode.ASYNCHRONOUS, groups=1, size=4, max_off_policy_steps=1, retries=0, in_flight=6)
    control.start({0: 4})
    control.lost(0)
    control.start({0: 99})  # a cohort of two, and two of the next group
    beside = {m.job.episode_id for m in control.groups.members() if m.worker == 0 and m.cohort is None}
    suspects = {m.job.episode_id for m in control.groups.members() if m.worker == 0} - beside
    assert (len(suspects), len(beside)) == (2, 4)
    control.lost(0)
    assert {control.groups.member(name).cohort for name in beside} == {None}
    assert len({control.groups.member(name).cohort for name in suspects}) == 2


def test_a_family_that_is_skipped_is_not_played():
    tripped = Failed("left out", FailureKind.TRIPPED)
    open_ = set()
    schedule = Schedule(Mode.SYNCHRONOUS, 2, 2)
    control = Dispatcher(schedule, lambda n: jobs_of(n, 2), skipped=lambda family: tripped if family in open_ else None)
    starts = control.start({0: 3})
    assert len(starts) == 3
    open_.add(None)
    control.ended(Header("0-0", score=Failed("x", FailureKind.RAISED)), 0)
    for start in starts[1:]:
        for grade in control.ended(Header(start.job.episode_id, 1, 0), 0):
            control.graded({h.episode_id: Scored(1.0) for h in grade.headers}, {start.job.episode_id: 0})
    assert control.start({0: 3}) == []
    one, two = control.take()
    assert [header.score for header in one.headers + two.headers] == [tripped, Scored(1.0), Scored(1.0), tripped]


def test_what_was_drawn_and_not_taken_is_played_again_by_a_resumed_run():
    control = dispatcher(Mode.ASYNCHRONOUS, groups=1, size=2, max_off_policy_steps=1)
    control.start({0: 9})
    schedule = control.schedule
    resumed = Dispatcher(schedule, lambda n: jobs_of(n, 2), next_group=control.next_group, drawn=control.groups.drawn)
    assert [start.job.episode_id for start in resumed.start({0: 9})] == ["0-0", "0-1", "1-0", "1-1"]
    assert (resumed.counts.replayed, resumed.next_group) == (4, 2)


def test_no_more_groups_begin_than_the_learner_takes():
    schedule = Schedule(Mode.ASYNCHRONOUS, 2, 1, max_off_policy_steps=3)
    control = Dispatcher(schedule, lambda n: jobs_of(n, 1), wanted=3)
    assert len(control.start({0: 99})) == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"groups": 0}, "at least 1"),
        ({"fraction": 0.0}, "fraction"),
        ({"mode": Mode.ASYNCHRONOUS, "max_off_policy_steps": 0}, "needs at least 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes, says):
    given = {"mode": Mode.SYNCHRONOUS, "groups": 1, "group_size": 1} | changes
    with pytest.raises(ValueError, match=says):
        Schedule(**given)


def test_a_version_that_does_not_grow_and_a_batch_that_is_not_there_are_refused():
    control = dispatcher(Mode.SYNCHRONOUS)
    with pytest.raises(ValueError, match="versions only grow"):
        control.published(0)
    with pytest.raises(RuntimeError, match="no batch is ready"):
        control.take()


def test_no_more_episodes_run_at_once_than_in_flight_allows():
    free = dispatcher(Mode.ASYNCHRONOUS, groups=2, size=2, max_off_policy_steps=1)
    assert len(free.start({0: 99})) == 8
    bounded = dispatcher(Mode.ASYNCHRONOUS, groups=2, size=2, max_off_policy_steps=1, in_flight=3)
    first, *others = bounded.start({0: 99})
    assert len(others) == 2
    assert bounded.start({0: 99}) == []
    bounded.ended(Header(first.job.episode_id, 1, 0), 0)
    assert len(bounded.start({0: 99})) == 1
