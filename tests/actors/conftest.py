"""One real local Ray for the actor tests that a worker has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from k3rl.actors.cluster import ClusterConfig, cluster


@pytest.fixture(scope="package")
def ray_cluster():
    config = ClusterConfig(cpus=4, object_store_mb=200, learner_threads=1, rollout_threads=1, placement_deadline_s=30)
    with cluster(config):
        yield config


@pytest.fixture(autouse=True)
def own_float_settings() -> Iterator[None]:
    """An actor that is made in this process sets it to flush denormals; what tests come after it must not see that."""
    yield
    torch.set_flush_denormal(False)
