"""The throttle: concurrency follows memory by itself, everybody finishes, and preemptions stay rare."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.engine import Engine, memory
from k3rl.engine.cache import MemoryPlan
from k3rl.engine.scheduler import Scheduler
from k3rl.engine.throttle import Throttle

ROWS, PAGE = 16, 4


class Run:
    """A scheduler whose requests sample until their own length, with what the engine would do at each step."""

    def __init__(self, pages: int, adaptive: bool = True) -> None:
        self.scheduler = Scheduler(ROWS, prefill_tokens=64, pages=pages, page=PAGE)
        if not adaptive:
            self.scheduler.throttle.preempted = lambda: None
        self.left: dict[int, int] = {}  # tokens still to sample
        self.ended: list[int] = []
        self.preempted: dict[int, int] = {}
        self.computed = 0
        self.most = 0

    def submit(self, number: int, prompt: int, sampled: int) -> None:
        self.left[number] = sampled
        self.scheduler.submit(number, number, prompt)

    def step(self) -> None:
        scheduler = self.scheduler
        held = [*scheduler.tokens, *(number for group in scheduler.prefilling for number in group.members)]
        victims, groups = scheduler.overcommitted()
        if victims or groups:
            assert min(held) not in victims, "the oldest goes on"
            assert not any(min(held) in group.members for group in groups)
            scheduler.preempt([(number, scheduler.tokens[number] + 1) for number in victims], groups)
            assert scheduler.fits()
            for number in victims:
                self.preempted[number] = self.preempted.get(number, 0) + 1
        plan = scheduler.plan()
        self.computed += sum(segment.stop - segment.start for segment in plan.segments) + len(plan.decode)
        used = sum(-(-tokens // PAGE) for tokens in scheduler.tokens.values())
        assert used <= scheduler.pages, "what is computed has its pages"
        self.most = max(self.most, len(scheduler.tokens))
        done = []
        for number in list(scheduler.row_of):
            self.left[number] -= 1
            if self.left[number] <= 0:
                done.append(number)
        scheduler.remove(done)
        self.ended += done

    def finish(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.ended) == len(self.left):
                return
            self.step()
        raise AssertionError(f"{len(self.left) - len(self.ended)} requests never ended")


def test_a_prompt_that_is_being_computed_makes_room_for_the_oldest_request():
    run = Run(pages=30)
    run.submit(0, prompt=8, sampled=100)
    for _ in range(12):
        run.step()
    run.submit(1, prompt=88, sampled=1)  # more than is computed in a step
    run.step()
    assert run.scheduler.prefilling
    for _ in range(3):
        run.step()
        assert 0 in run.scheduler.tokens
    run.finish(400)
    assert 0 not in run.preempted


arrivals = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(plan=arrivals, pages=st.integers(23, 120))
def test_whatever_arrives_everybody_finishes_and_preemptions_are_bounded(plan, pages):
    run = Run(pages)
    for number, (prompt, sampled, pause) in enumerate(plan):
        run.submit(number, prompt, sampled)
        for _ in range(pause):
            run.step()
    work = sum(prompt + sampled for prompt, sampled, _ in plan)
    run.finish(20 * work + 100)
    assert sorted(run.ended) == list(range(len(plan)))
    assert sum(run.preempted.values()) <= len(plan), "on average nobody is preempted more than once"
    assert run.scheduler.idle


def test_under_a_steady_load_that_outgrows_the_memory_the_throttle_saves_most_of_the_recomputing():
    spent = {}
    for adaptive in (False, True):
        run = Run(pages=60, adaptive=adaptive)
        for number in range(200):
            run.submit(number, 8, 50)  # 15 pages each at the end, 3 at the beginning
        run.finish(20_000)
        spent[adaptive] = run.computed - 200 * (8 + 50), sum(run.preempted.values())
    assert spent[True][1] < 0.5 * spent[False][1]
    assert spent[True][0] < 0.5 * spent[False][0]


def test_short_requests_use_all_rows_and_a_calm_throttle_opens_again():
    run = Run(pages=60)
    for number in range(100):
        run.submit(number, 2, 2)
    run.finish(200)
    assert run.most == ROWS
    throttle = Throttle(100)
    for _ in range(20):
        throttle.preempted()
    assert throttle.limit == 0, "one request alone is admitted by the scheduler whatever the limit"
    for _ in range(200):
        throttle.waited()
    assert throttle.limit == 100


def test_free_memory_is_the_least_of_machine_and_control_group(tmp_path, monkeypatch):
    limit, usage = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(memory, "_CGROUPS", ((str(limit), str(usage), "inactive_file"),))
    cpu = torch.device("cpu")
    whole = memory.free_bytes(cpu)
    assert 0 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit.write_text("5000000\n")
    usage.write_text("4000000\n")
    assert memory.free_bytes(cpu) == 1_000_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    assert memory.free_bytes(cpu) == 1_500_000
    limit.write_text("max\n")
    assert memory.free_bytes(cpu) > 5_000_000


def test_memory_follows_the_machine_and_leaves_room_for_the_next_version(model, monkeypatch):
    second = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(memory, "free_bytes", lambda _: second + 200_000)
    plan = MemoryPlan.when_needed(model, "auto", 64, 256, 64)
    assert plan == MemoryPlan.of(model, 100_000, 64, 256, 64), "half of what the second model leaves"
    engine = Engine(model)
    assert engine.batch.scheduler.pages == plan.pages
    monkeypatch.setattr(memory, "free_bytes", lambda _: second + 400_000)
    assert MemoryPlan.when_needed(model, "auto", 64, 256, 64, device_share=0.5) == plan, "a learner has the other half"
    assert Engine(model, device_share=0.5).batch.scheduler.pages == plan.pages
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1 << 40)
    assert MemoryPlan.when_needed(model, "auto", 64, 256, 64) is None, "all rows fit at their longest"
    assert MemoryPlan.when_needed(model, None, 64, 256, 64) is None
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match="give more, or a smaller max_context"):
        Engine(model)
