"""Where actors compute: what they reserve, and what is said where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from k3rl.actors import ClusterConfig, FleetConfig, LearnerActor, RolloutConfig
from k3rl.cli import main
from k3rl.config import MissingResource
from k3rl.model import K3Config
from k3rl.model.device import place_of
from k3rl.parallel import TrainerConfig
from k3rl.pipelines import EnvConfig


def gpus(config: ClusterConfig) -> dict[str, float]:
    return {name.split()[0]: bundle.get("GPU", 0.0) for name, bundle in FleetConfig(config, EnvConfig()).roles()}


def test_on_a_cpu_nobody_asks_for_a_gpu():
    assert set(gpus(ClusterConfig()).values()) == {0.0}


def test_with_cuda_rollout_actors_ask_for_their_share():
    found = gpus(ClusterConfig(rollout_device="cuda", rollout_gpus=0.25))
    assert found == {"learner": 0.0, "rollout": 0.25, "environment": 0.0, "reward": 0.0}


def test_an_actor_in_front_of_a_server_asks_for_none():
    server = RolloutConfig(backend="vllm", url=("http://a:1", "http://b:1"))
    assert gpus(ClusterConfig(rollout_device="cuda", rollout=server))["rollout"] == 0.0


def test_a_device_that_is_not_there_is_a_missing_resource(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place_of("cpu") == (torch.device("cpu"), torch.float32)
    with pytest.raises(MissingResource, match="sees no GPU"):
        place_of("cuda")


def test_a_learner_whose_torch_sees_no_gpu_says_so_before_it_meets_others_or_makes_a_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # this process goes on with other tests
    learner = LearnerActor(torch.get_num_threads(), "cuda")
    with pytest.raises(MissingResource, match="sees no GPU"):
        learner.join("127.0.0.1:1", 0, 2, 1.0)
    with pytest.raises(MissingResource, match="sees no GPU"):
        learner.create(K3Config.named("k3-nano").to_dict(), TrainerConfig(), 0)


def test_serving_on_a_device_that_is_not_there_ends_with_exit_code_3(monkeypatch, tmp_path, capsys):
    from k3rl.checkpoint import save_checkpoint
    from k3rl.model import K3ForCausalLM
    from k3rl.tokens import Tokenizer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = K3ForCausalLM(K3Config.named("k3-nano"))
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "nano", tokenizer=Tokenizer.builtin())
    threads = torch.get_num_threads()
    assert main(["serve", str(tmp_path / "nano"), "--device", "cuda", "--threads", str(threads)]) == 3
    assert "device cpu" in capsys.readouterr().err
