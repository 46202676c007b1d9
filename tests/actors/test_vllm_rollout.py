"""A rollout actor whose engine is a vLLM server: weights in two phases, and what a run's configuration says."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save

from k3rl.actors import ClusterConfig, RolloutActor, RolloutConfig
from k3rl.actors.weight_sync import Payload
from k3rl.checkpoint import load_checkpoint, manifest_of, official_tensors, save_checkpoint
from k3rl.engine import Engine, InvalidRequest, WeightUpdateError
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.tokens import Tokenizer
from k3rl.types import SamplingParams


def load_fake() -> Any:
    if "fake_vllm" not in sys.modules:
        place = Path(__file__).parents[1] / "engine" / "fake_vllm.py"
        spec = importlib.util.spec_from_file_location("fake_vllm", place)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["fake_vllm"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["fake_vllm"])
    return sys.modules["fake_vllm"]


def checkpoint(folder: Path, seed: int) -> Path:
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4), dtype=torch.float32)
    model.init_weights(seed)
    save_checkpoint(model, folder, tokenizer=Tokenizer.builtin())
    return folder


def test_an_actor_gives_its_server_weights_in_two_phases(tmp_path) -> None:
    first, second = checkpoint(tmp_path / "first", 0), checkpoint(tmp_path / "second", 1)
    learned = load_checkpoint(second, dtype=torch.float32)
    tensors = dict(official_tensors(learned))
    manifest, message = manifest_of(tensors.items()), save(tensors)
    prompt = Tokenizer.builtin().encode("hello")
    greedy = SamplingParams(temperature=0.0, max_tokens=4)

    def whole() -> Payload:
        bucket: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        bucket.set_result(message)
        return Payload("whole", b"", (bucket,), len(message))

    def server(url: str) -> RolloutConfig:
        return RolloutConfig(backend="vllm", url=(url,))

    async def work(url: str) -> list[Any]:
        actor = RolloutActor(ClusterConfig(rollout_actors=1, rollout=server(url)), max_running=4)
        seen: list[Any] = [await actor.load(str(first))]
        seen += await actor.generate([(prompt, greedy), ([10**6], greedy)])
        seen.append(await actor.served())
        await actor.prepare(1, manifest, whole())
        seen += await actor.generate([(prompt, greedy)])
        await actor.rollback()
        await actor.prepare(2, manifest, whole())
        assert await actor.commit(2) > 0, "seconds without a step"
        seen.append(actor.engine.version)
        seen += await actor.generate([(prompt, greedy)])
        with pytest.raises(WeightUpdateError, match="not the one that was prepared"):  # noqa: PT012
            await actor.prepare(3, manifest, whole())
            await actor.commit(4)
        seen.append(await actor.load(str(first)))
        seen += await actor.generate([(prompt, greedy)])
        with pytest.raises(WeightUpdateError, match="takes whole versions"):
            await actor.prepare(1, {}, Payload("delta", b"", (), 0))
        actor.engine.close()
        return seen

    started = load_checkpoint(second, dtype=torch.float32)  # a server that begins with other weights
    with load_fake().serving(lambda: Engine(started, max_running=4)) as (url, fake):
        fake.config["model_config"]["return_sampling_mask"] = False  # nothing is cut
        loaded, one, refused, served, still, committed, two, again, third = asyncio.run(work(url))
    assert (loaded, served, committed, again) == (0, (0, ""), 2, 0)
    assert isinstance(refused, InvalidRequest)
    assert [done.weight_version for done in (one, still, two, third)] == [0, 0, 2, 0]
    for done, folder in ((one, first), (still, first), (two, second), (third, first)):
        (wanted,) = Engine(load_checkpoint(folder, dtype=torch.float32)).generate([prompt], greedy)
        assert done.token_ids == wanted.token_ids
        np.testing.assert_allclose(done.logprobs, wanted.logprobs, rtol=0, atol=1e-5)  # float32, another batch
    assert one.token_ids != two.token_ids


def test_a_configuration_gives_every_actor_a_server_of_its_own() -> None:
    urls = ("http://a:8000", "http://b:8000")
    config = ClusterConfig(rollout_actors=2, rollout=RolloutConfig(backend="vllm", url=urls))
    assert config.rollout.url == urls
    for wrong in (
        dict(rollout_actors=3, rollout=RolloutConfig(backend="vllm", url=urls)),
        dict(rollout_actors=2, rollout=RolloutConfig(backend="vllm", url=(urls[0],) * 2)),
        dict(rollout_actors=1, rollout=RolloutConfig(backend="vllm")),
        dict(rollout_actors=2, rollout=RolloutConfig(url=urls)),
    ):
        with pytest.raises(ValidationError, match=r"rollout\.url"):
            ClusterConfig(**wrong)
