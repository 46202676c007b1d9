"""The scheduler against a shadow of the rows that only knows what a plan says was done to each."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.engine.scheduler import GATHER_FROM, RunningTokens, Scheduler, Segment, portions

PARKED = "parked"


class Shadow:
    """Row contents as (prompt key, tokens computed), moved, copied and grown exactly as the plans say."""

    def __init__(self, rows: int, budget: int, dense: bool = True) -> None:
        self.scheduler, self.budget, self.dense = Scheduler(rows, budget, dense=dense), budget, dense
        self.state: dict[int | str, tuple[int, int] | None] = {}
        self.prompt: dict[int, tuple[int, int]] = {}  # request -> (key, length)
        self.started: list[int] = []
        self.prefills: list[int] = []  # keys, one per prompt computed from its first token

    def submit(self, request: int, key: int) -> None:
        self.prompt[request] = (key, 3 + 2 * key)
        self.scheduler.submit(request, key, 3 + 2 * key)

    def step(self, admit: bool = True) -> None:
        running = set(self.scheduler.row_of)
        plan = self.scheduler.plan(admit)
        assert {self.scheduler.occupants[row] for row in plan.decode} == running
        assert admit or not plan.from_parked
        for request, row in plan.from_parked:
            self.state[row] = self.state[PARKED]
            self._start(request, row)
        assert sum(segment.stop - segment.start for segment in plan.segments) <= self.budget
        for segment in plan.segments:
            key, length = self.prompt[segment.leader]
            if segment.start == 0:
                self.state[segment.row] = (key, 0)
                self.prefills.append(key)
            assert self.state[segment.row] == (key, segment.start)
            self.state[segment.row] = (key, segment.stop)
            assert bool(segment.starts) == (segment.stop == length)
            for request, row in segment.starts:
                self.state[row] = self.state[segment.row]
                self._start(request, row)
            if segment.parks:
                self.state[PARKED] = self.state[segment.row]

    def remove(self, requests: list[int]) -> None:
        for source, target in self.scheduler.remove(requests):
            assert self.dense
            self.state[target] = self.state.pop(source, None)  # a reserved row has none yet
        for row in self.scheduler.freed:
            self.state.pop(row, None)
        for request in requests:
            del self.prompt[request]

    def _start(self, request: int, row: int) -> None:
        assert self.state[row] == self.prompt[request], "a request starts only on its own, whole prompt"
        assert self.scheduler.row_of[request] == row
        self.started.append(request)

    def check(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.occupants) <= scheduler.rows
        assert all(scheduler.occupants[row] == request for request, row in scheduler.row_of.items())
        groups = [*scheduler.waiting.values(), *scheduler.prefilling, *([scheduler.parked] if scheduler.parked else [])]
        members = [request for group in groups for request in group.members] + list(scheduler.row_of)
        assert sorted(members) == sorted(self.prompt), "every request is in exactly one place"
        for group in scheduler.prefilling:
            assert all(scheduler.occupants[row] is group for row in group.rows)
        assert sum(len(group.rows) < len(group.members) for group in scheduler.prefilling) <= 1
        assert all(not group.rows for group in scheduler.waiting.values())
        held = [row for row, occupant in enumerate(scheduler.occupants) if occupant is not None]
        assert not held or held[-1] == scheduler.num_rows - 1
        assert not self.dense or len(held) == scheduler.num_rows
        for request, row in scheduler.row_of.items():
            assert self.state[row][0] == self.prompt[request][0]


@st.composite
def schedules(draw):
    actions = st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 4), st.integers(1, 4)),
        st.tuples(st.just("step"), st.booleans(), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 50), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    )
    return draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.lists(actions, max_size=40))


@settings(max_examples=200, deadline=None)
@given(schedules(), st.booleans())
def test_every_request_starts_once_on_its_own_whole_prompt_and_rows_stay_dense_or_where_they_are(schedule, dense):
    rows, budget, actions = schedule
    shadow, number = Shadow(rows, budget, dense), 0
    for action, a, b in actions:
        if action == "submit":
            for _ in range(b):
                shadow.submit(number, a)
                number += 1
        elif action == "step":
            shadow.step(admit=a or b > 0)
        elif action == "remove" and shadow.prompt:
            present = sorted(shadow.prompt)
            shadow.remove(sorted({present[(a + i) % len(present)] for i in range(b)}))
        elif action == "restart":
            shadow.scheduler.restart()
        shadow.check()
    for _ in range(500):  # then everything runs to its end, one step of decode each
        if not shadow.prompt:
            break
        shadow.step()
        shadow.check()
        shadow.remove(list(shadow.scheduler.row_of))
        shadow.check()
    assert not shadow.prompt
    assert shadow.scheduler.idle
    assert shadow.scheduler.num_waiting == 0
    assert len(shadow.started) == len(set(shadow.started))


def test_a_group_larger_than_the_rows_is_prefilled_once():
    shadow = Shadow(rows=3, budget=100)
    for request in range(8):
        shadow.submit(request, key=1)
    while shadow.prompt:
        shadow.step()
        shadow.remove(list(shadow.scheduler.row_of))
    assert shadow.started == list(range(8))
    assert shadow.prefills == [1]


def test_a_stream_of_equal_prompts_does_not_starve_another_prompt():
    shadow = Shadow(rows=1, budget=100)
    shadow.submit(0, key=1)
    shadow.step()
    shadow.submit(1, key=2)
    number = 2
    while 1 not in shadow.started:
        shadow.submit(number, key=1)
        number += 1
        shadow.remove(list(shadow.scheduler.row_of))
        shadow.step()
        assert number < 5


def test_first_come_first_served_by_group():
    shadow = Shadow(rows=2, budget=100)
    for request, key in enumerate([3, 1, 3, 2]):
        shadow.submit(request, key)
    while shadow.prompt:
        shadow.step()
        shadow.remove(list(shadow.scheduler.row_of))
    assert shadow.started == [0, 2, 1, 3]


def test_a_long_prompt_is_cut_by_the_budget_and_a_short_one_behind_it_waits_its_turn():
    scheduler = Scheduler(rows=2, prefill_tokens=4)
    scheduler.submit(0, "long", 9)
    scheduler.submit(1, "short", 2)
    cuts = [[(s.leader, s.start, s.stop) for s in scheduler.plan().segments] for _ in range(3)]
    assert cuts == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9), (1, 0, 2)]]


def test_a_started_group_that_lacks_rows_gets_the_next_free_one_before_a_new_group():
    scheduler = Scheduler(rows=2, prefill_tokens=4)
    scheduler.submit(0, "running", 4)
    scheduler.plan()
    for request, key in [(1, "long"), (2, "long"), (3, "new")]:
        scheduler.submit(request, key, 10)
    scheduler.plan()  # "long" has one of the two rows that it wants
    scheduler.remove([0])
    assert scheduler.plan().segments[0].stop == 8
    (segment,) = scheduler.plan().segments
    assert [request for request, _ in segment.starts] == [1, 2]
    assert not segment.parks


def test_removing_the_prefilling_leader_hands_its_row_to_the_next_member():
    scheduler = Scheduler(rows=2, prefill_tokens=4)
    for request in range(3):
        scheduler.submit(request, "p", 6)
    scheduler.plan()
    assert scheduler.remove([0]) == []
    (segment,) = scheduler.plan().segments
    assert (segment.members, segment.row, segment.start, segment.starts, segment.parks) == (
        (1, 2),
        0,
        4,
        ((1, 0), (2, 1)),
        False,
    )


@pytest.mark.parametrize("prompts", [1, 20_000])
def test_requests_that_wait_cost_a_step_nothing_and_their_end_is_linear(prompts):
    def times(count: int) -> tuple[float, float]:
        """Seconds of 200 steps while so many wait, and of their end."""
        scheduler = Scheduler(rows=1, prefill_tokens=8, pages=10_000, page=4)
        scheduler.submit(-1, "first", 3)
        scheduler.plan()
        for request in range(count):
            scheduler.submit(request, request % prompts, 3)
        began = time.process_time()
        for _ in range(200):
            assert scheduler.num_waiting == count
            scheduler.overcommitted()
            scheduler.plan()
        stepped = time.process_time()
        scheduler.remove(range(count - 1, -1, -1))
        assert scheduler.num_waiting == 0
        return stepped - began, time.process_time() - stepped

    few, many = times(2_000), times(20_000)
    assert many[0] < 3 * few[0] + 0.01
    assert many[1] < 30 * few[1] + 0.05  # ten times as many


def test_an_unknown_request_cannot_be_removed():
    with pytest.raises(KeyError):
        Scheduler(rows=1, prefill_tokens=1).remove([7])


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 0)])
def test_impossible_sizes_are_refused(rows, tokens):
    with pytest.raises(ValueError, match="must be at least 1"):
        Scheduler(rows, tokens)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12))
def test_portions_keep_the_order_and_hold_more_than_they_may_only_in_one_segment(lengths, tokens):
    segments = [Segment((number,), number, 0, length) for number, length in enumerate(lengths)]
    runs = portions(segments, tokens)
    assert [segment for run in runs for segment in run] == segments
    assert all(len(run) == 1 or sum(segment.stop for segment in run) <= tokens for run in runs)
    assert all(sum(s.stop for s in a) + b[0].stop > tokens for a, b in pairwise(runs))
    assert portions(segments, None) == ([segments] if segments else [])


def test_an_urgent_request_goes_before_all_others_and_takes_the_row_of_the_youngest():
    scheduler = Scheduler(rows=2, prefill_tokens=8)
    for request, key in ((1, "a"), (2, "b"), (3, "c")):
        scheduler.submit(request, key, 4)
    scheduler.plan()
    assert set(scheduler.row_of) == {1, 2}
    scheduler.submit(9, "d", 2, urgent=True)
    excess = scheduler.overcommitted()
    assert excess.requests == [2]
    scheduler.preempt([(2, 5)])
    plan = scheduler.plan()
    assert [segment.members for segment in plan.segments] == [(9,)]
    assert set(scheduler.row_of) == {1, 9}
    assert not scheduler.overcommitted(), "it waits no more"
    scheduler.remove([9])
    scheduler.plan()
    assert set(scheduler.row_of) == {1, 2}, "who gave its row is next, before those that never ran"
    scheduler.submit(10, "e", 2, urgent=True)
    scheduler.remove([10])
    assert scheduler.num_waiting == 1


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["start", "stop", "step"]), st.integers(0, 20)), max_size=60),
)
def test_pages_of_running_requests_are_those_counted_one_by_one(page, actions):
    tokens, naive = RunningTokens(page), dict[int, int]()
    for number, (action, value) in enumerate(actions):
        if action == "start":
            tokens.start(number, value)
            naive[number] = value
        elif action == "stop" and naive:
            gone = sorted(naive)[value % len(naive)]
            tokens.stop(gone)
            del naive[gone]
        else:
            tokens.step()
            naive = {request: count + 1 for request, count in naive.items()}
        assert dict(tokens) == naive
        assert tokens.pages == sum(-(-(count + 1) // page) for count in naive.values())


def test_beside_many_decoding_rows_new_groups_wait_for_company_or_for_a_few_steps():
    scheduler = Scheduler(rows=2 * GATHER_FROM, prefill_tokens=10**6)
    for number in range(GATHER_FROM):
        scheduler.submit(number, 0, 5)
    assert len(scheduler.plan().segments) == 1
    scheduler.submit(1000, 1, 5)
    waited = 0
    while not scheduler.plan().segments:
        waited += 1
    assert waited == 4, "a single one waits for so many steps"
    for number in range(GATHER_FROM // 8 + 1):
        scheduler.submit(2000 + number, 2 + number, 5)
    assert len(scheduler.plan().segments) == GATHER_FROM // 8 + 1, "many begin at once"
    scheduler.remove(list(range(GATHER_FROM)))
    scheduler.submit(3000, -1, 5)
    assert scheduler.plan().segments, "nobody waits beside few rows"
