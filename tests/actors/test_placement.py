"""Placement either comes about or says what is missing, within its deadline."""

from __future__ import annotations

import time

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from k3rl.actors import ClusterConfig, FleetConfig, reserve, shortage, start_fleet
from k3rl.config import MissingResource


def test_an_impossible_request_fails_within_its_deadline_with_a_table(ray_cluster):
    began = time.monotonic()
    with pytest.raises(MissingResource) as error:
        reserve([("learner", {"CPU": 1}), ("rollout 0", {"CPU": 63, "GPU": 2})], deadline_s=2)
    assert time.monotonic() - began < 10
    text = str(error.value)
    assert "learner" in text
    assert "rollout 0" in text
    assert [line.split() for line in text.splitlines() if line.strip().startswith("GPU")] == [["GPU", "2", "0", "0"]]
    assert "too small in CPU, GPU" in text
    assert error.value.exit_code == 3


def test_nothing_stays_reserved_after_a_failure(ray_cluster):
    with pytest.raises(MissingResource):
        reserve([("a", {"CPU": 1}), ("b", {"CPU": 64})], deadline_s=1)
    group = reserve([("all", {"CPU": ray_cluster.cpus})], deadline_s=20)  # fits only if the failed one let go
    assert ray.available_resources().get("CPU", 0) == 0
    remove_placement_group(group)


def test_a_busy_cluster_is_told_from_a_small_one():
    text = shortage([("a", {"CPU": 2.0})], {"CPU": 4.0}, {"CPU": 1.0}, 5.0)
    assert "busy" in text
    assert "too small" not in text


def test_ranks_on_gpus_ask_for_one_each_and_say_where_there_is_none(ray_cluster):
    config = ClusterConfig(learner_device="cuda", learner_actors=2, placement_deadline_s=1)
    with pytest.raises(MissingResource) as error, start_fleet(FleetConfig(config)):
        pass
    lines = [line.split() for line in str(error.value).splitlines() if line.strip().startswith("GPU")]
    assert lines == [["GPU", "2", "0", "0"]]
