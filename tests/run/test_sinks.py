"""Optional sinks: a missing package names its extra, values arrive by source."""

from __future__ import annotations

import sys
import types

import pytest

from k3rl.config import MissingResource
from k3rl.run import MetricsWriter
from k3rl.run.sinks import open_sinks


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}[name], None)
    with pytest.raises(MissingResource, match=rf"k3rl\[{name}\]"):
        open_sinks([name], "run", tmp_path)


def test_values_go_to_wandb_under_their_source_with_the_step_as_a_value(monkeypatch, tmp_path):
    logged, started = [], {}
    module = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))
    module.init = lambda **words: started.update(words) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    with MetricsWriter(tmp_path / "m.jsonl", sinks=open_sinks(["wandb"], "mine", tmp_path)) as writer:
        writer.write(3, "learner", {"loss/mean": 0.5})
    assert started["name"] == "mine"
    assert logged == [{"learner/loss/mean": 0.5, "learner/step": 3}, "finished"]
