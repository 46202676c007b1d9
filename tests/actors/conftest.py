"""One real local Ray for the actor tests."""

from __future__ import annotations

import pytest

from k3rl.actors.cluster import ClusterConfig, cluster


@pytest.fixture(scope="module")
def ray_cluster():
    config = ClusterConfig(cpus=4, object_store_mb=200, learner_threads=1, rollout_threads=1, placement_deadline_s=30)
    with cluster(config):
        yield config
