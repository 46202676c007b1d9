"""What a layout would leave idle is said, with a change that helps: whatever actors, groups and GPUs there are."""

from __future__ import annotations

import re
from collections import deque

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from k3rl.actors import ClusterConfig, EpisodeJob, Mode, TaskRef
from k3rl.actors.dispatcher import Dispatcher
from k3rl.actors.engine_places import EnginePlaces, home_engines
from k3rl.actors.schedule import Header
from k3rl.pipelines import RLConfig, SFTConfig
from k3rl.pipelines.layout import idle_parts, schedule_of
from k3rl.types import Scored


def jobs_of(number: int, size: int) -> list[EpisodeJob]:
    return [EpisodeJob(f"{number}-{n}", f"g{number}", TaskRef("train", number, 0), n) for n in range(size)]


def used(cluster: ClusterConfig, config: RLConfig) -> tuple[set[int], set[int]]:
    """(engines, environment workers) that play anything in two batches, whose episodes end one after the other."""
    schedule, engines = schedule_of(config), cluster.rollout_actors
    control = Dispatcher(schedule, lambda number: jobs_of(number, schedule.group_size), wanted=2 * schedule.groups)
    places = [
        EnginePlaces(home_engines(engines, worker, cluster.environment_actors), engines)
        for worker in range(cluster.environment_actors)
    ]
    for worker in range(cluster.environment_actors):
        control.open(worker)
    on_engines, on_workers, taken, version, running = set(), set(), 0, 0, deque()
    while taken < 2 * schedule.groups:
        for start in control.start():
            running.append((start, places[start.worker].begin(start.job.group_id)))
            on_engines.add(running[-1][1].engine)
            on_workers.add(start.worker)
        if control.ready:
            taken += len(control.take())
            version += 1
            control.published(version)
            continue
        start, place = running.popleft()
        name = start.job.episode_id
        control.ended(Header(name, 1, version), start.attempt)
        control.graded({name: Scored(1.0)}, {name: start.attempt})
        places[start.worker].leave(place)
    return on_engines, on_workers


@given(
    engines=st.integers(1, 9),
    workers=st.integers(1, 9),
    graders=st.integers(1, 12),
    groups=st.integers(2, 8),
    size=st.integers(2, 4),
    mode=st.sampled_from(list(Mode)),
    in_flight=st.none() | st.integers(1, 24),
)
@settings(max_examples=40)
def test_exactly_the_actors_that_get_nothing_to_do_are_said(engines, workers, graders, groups, size, mode, in_flight):
    assume(in_flight is None or mode is not Mode.SYNCHRONOUS)
    cluster = ClusterConfig(rollout_actors=engines, environment_actors=workers, reward_actors=graders)
    config = RLConfig(
        batch_size=groups * size, group_size=size, max_staleness=0, rollouts={"mode": mode, "in_flight": in_flight}
    )
    said = idle_parts(cluster, config)
    on_engines, on_workers = used(cluster, config)
    for key, busy, count in (("rollout", on_engines, engines), ("environment", on_workers, workers)):
        lines = [line for line in said if f" {key}_actors " in line]
        idle = int(lines[0].partition(" ")[0]) if lines else 0
        if in_flight is None or in_flight >= groups * size:
            assert idle == count - len(busy)
        assert idle <= count - len(busy)  # groups that in_flight cuts up may end on more workers, in another order


KEYS = re.compile(r"cluster\.(\w+) to ([\d.]+)")


@given(
    engines=st.integers(1, 9),
    share=st.sampled_from((0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)),
    learner=st.sampled_from((0.25, 0.5, 0.6, 1.0)),
    on=st.sampled_from((("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu"))),
)
@settings(max_examples=40)
def test_gpus_that_nobody_asks_for_are_said_and_each_change_that_is_named_leaves_less(engines, share, learner, on):
    def cluster(**change):
        fields = {"rollout_actors": engines, "rollout_gpus": share, "learner_gpus": learner, "learner_actors": 1}
        return ClusterConfig(
            **fields | {"learner_device": on[0], "rollout_device": on[1], "environment_actors": 1} | change
        )

    def idle(found: ClusterConfig) -> float:
        texts = [text for text in idle_parts(found, RLConfig(batch_size=64)) if "GPUs is asked for by nobody" in text]
        return float(texts[0].split(" ")[0]) if texts else 0.0  # two digits

    texts = [text for text in idle_parts(cluster(), RLConfig(batch_size=64)) if "GPUs" in text]
    asked = engines * share * (on[1] == "cuda") + (learner if on[0] == "cuda" else 0.0)
    if not texts:
        assert abs(asked - round(asked)) <= 0.01 * max(1, asked) + 1e-6
        return
    changes = KEYS.findall(texts[0])
    assert changes or "set shares that add up to 1" in texts[0]
    for key, value in changes:
        assert idle(cluster(**{key: int(value) if key == "rollout_actors" else float(value)})) < idle(cluster()), key


def test_an_engine_that_asks_for_more_than_the_gpu_it_computes_on_is_refused():
    with pytest.raises(ValidationError, match="rollout_gpus"):
        ClusterConfig(rollout_device="cuda", rollout_gpus=2.0)


def test_ranks_that_no_sequence_is_left_for_are_said():
    cluster = ClusterConfig(learner_actors=8)
    [text] = idle_parts(cluster, SFTConfig(batch_size=6))
    assert text.startswith("2 of 8 learner_actors")
    assert "set cluster.learner_actors to 6" in text
    assert idle_parts(cluster, SFTConfig(batch_size=6, trainer={"context_parallel": 2})) == []
    [text] = idle_parts(cluster, RLConfig(batch_size=8, group_size=2, optimizer_steps=2))
    assert text.startswith("4 of 8 learner_actors")
