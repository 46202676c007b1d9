"""A stored rollout scored again: every sampled token once, as the model itself scores it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3rl.checkpoint import load_checkpoint, save_checkpoint
from k3rl.config import ConfigError
from k3rl.data.trajectories import TrajectoryWriter
from k3rl.model import K3Config, K3ForCausalLM, QuantizationConfig
from k3rl.pipelines.configs import RLConfig, SamplingConfig
from k3rl.pipelines.replay import find_episode, rescore
from k3rl.run import RunDirectory
from k3rl.types import Branch, Episode, Failed, FailureKind, Group, StopReason, Turn

TEMPERATURE = 0.7


def turn(prompt: tuple[int, ...], sampled: tuple[int, ...]) -> Turn:
    logprobs = tuple(-1.0 - token / 1000 for token in sampled)
    return Turn(prompt, sampled, logprobs, StopReason.STOP, first_version=3, last_version=3)


FIRST = turn((7, 8, 9), (10, 11))
SECOND = turn((7, 8, 9, 10, 11, 12), (13, 14, 15))
BESIDE = turn((7, 8, 9, 10, 11, 20), (21,))


def episode(name: str, *branches: Branch) -> Episode:
    score = Failed("the grader died", FailureKind.DIED)
    return Episode(name, "t/0", "t", "f", 1, branches, StopReason.COMPLETED, score)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run directory, checkpoint) with one episode of two branches that share a turn, and one of none."""
    root = tmp_path_factory.mktemp("replay")
    plain = QuantizationConfig(activations="none")  # no value then falls to the other side of a rounding
    config = K3Config.named("k3-nano").replace(num_experts=4, quantization=plain)
    model = K3ForCausalLM(config, dtype=torch.float32)
    model.init_weights(0)
    save_checkpoint(model, root / "ck")
    with RunDirectory.create(root / "run", RLConfig(sampling=SamplingConfig(temperature=TEMPERATURE)), "rl") as made:
        writer = TrajectoryWriter(made.traces_dir / "trajectories", actor="driver1", tokenizer_hash="h")
        both = episode("rl-4-0-0", Branch("a", (FIRST, SECOND)), Branch("b", (FIRST, BESIDE), "a"))
        writer.write([Group("rl-4-0", "t/0", (both,)), Group("rl-4-1", "t/0", (episode("rl-4-1-0"),))], generation=4)
    return root / "run", root / "ck"


def test_each_sampled_token_is_scored_once_at_the_runs_temperature(run):
    root, checkpoint = run
    stored = find_episode(root, "rl-4-0-0")
    assert (stored.step, stored.attempt, stored.temperature) == (4, 1, TEMPERATURE)
    found = rescore(stored, checkpoint)
    model = load_checkpoint(checkpoint, torch.float32)
    assert found.logprobs.keys() == {("a", 0), ("a", 1), ("b", 1)}
    for (_, number), ours in found.logprobs.items():
        own = {0: FIRST, 1: SECOND if len(ours) == 3 else BESIDE}[number]
        ids = torch.tensor([[*own.prompt_ids, *own.sampled_ids]])
        with torch.no_grad():
            table = (model(ids).logits[0].double() / TEMPERATURE).log_softmax(-1)
        rows = range(len(own.prompt_ids) - 1, ids.shape[1] - 1)
        wanted = [table[row, token].item() for row, token in zip(rows, own.sampled_ids, strict=True)]
        # float32, packed with another sequence and alone: some 1e-6 apart
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)
    assert found.tokens == 6
    assert not found.equal
    assert [found.first_difference[key] for key in ("branch", "turn", "token")] == ["a", 0, 0]
    assert rescore(stored, checkpoint, tolerance=100.0).equal


def test_an_episode_in_which_nothing_was_sampled_has_nothing_to_score(run):
    root, checkpoint = run
    with pytest.raises(ConfigError, match="nothing was sampled"):
        rescore(find_episode(root, "rl-4-1-0"), checkpoint)
    with pytest.raises(ConfigError, match="has stored no episode"):
        find_episode(root, "rl-9-0-0")
