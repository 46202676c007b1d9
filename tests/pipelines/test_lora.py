"""Runs that train adapters: what is refused before anything starts, and what rollouts are asked for."""

from __future__ import annotations

import pytest

from k3rl.actors import ClusterConfig, RolloutConfig
from k3rl.checkpoint import save_adapter, save_checkpoint
from k3rl.config import ConfigError
from k3rl.model import Adapter, K3Config, K3ForCausalLM, LoraConfig
from k3rl.parallel import TrainerConfig
from k3rl.pipelines.configs import ModelConfig, RLConfig
from k3rl.pipelines.start import check_start, policy_sampling

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "w1"))


def config(start: str, lora: LoraConfig | None, **changes) -> RLConfig:
    return RLConfig(model=ModelConfig(start=start), trainer=TrainerConfig(lora=lora), **changes)


@pytest.fixture
def adapter(tmp_path) -> str:
    """The directory of an adapter."""
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "base")
    save_adapter(dict(Adapter(model, LORA).stored_tensors()), LORA, tmp_path / "adapter", base=tmp_path / "base")
    return str(tmp_path / "adapter")


def test_a_stage_goes_on_training_the_adapter_it_starts_from_or_is_refused(adapter):
    check_start(config(adapter, LORA.replace(seed=3)))
    for lora in (None, LORA.replace(rank=4), LORA.replace(targets=("w1",))):
        with pytest.raises(ConfigError, match=r"--trainer.lora.rank 2 .*--merge") as caught:
            check_start(config(adapter, lora))
        assert caught.value.key == "trainer.lora"


def test_servers_that_serve_no_adapters_are_refused(adapter):
    servers = ClusterConfig(rollout=RolloutConfig(backend="vllm", url=("http://127.0.0.1:1",)), rollout_actors=1)
    with pytest.raises(ConfigError, match="backend to k3rl"):
        check_start(config(adapter, LORA, cluster=servers))


def test_rollouts_name_the_adapter_that_is_trained():
    assert policy_sampling(config("x", LORA)).adapter == "policy"
    assert policy_sampling(config("x", None)).adapter == ""
