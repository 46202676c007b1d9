"""What other rooms import: every name is there, and configurations come without Ray."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["k3rl.actors", "k3rl.actors.weight_sync", "k3rl.pipelines"])
def test_every_name_of_a_facade_is_there(package):
    facade = importlib.import_module(package)
    assert len(set(facade.__all__)) == len(facade.__all__) > 10
    for name in facade.__all__:
        assert getattr(facade, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = facade.nothing


def test_configurations_are_imported_without_ray_and_set_what_ray_reads():
    program = (
        "import os, sys; from k3rl.pipelines import RLConfig, presets; from k3rl.actors import ClusterConfig;"
        "assert RLConfig().cluster == ClusterConfig(); assert 'ray' not in sys.modules;"
        "assert os.environ['RAY_AUTH_MODE'] == 'token'; assert os.environ['PYTHONSAFEPATH']"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_worker_is_imported_without_torch():
    program = "import sys; from k3rl.actors import EnvironmentWorker, RewardWorker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
