"""Keys whose effect is a number: what a run does with another value of each."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from k3rl.actors import ClusterConfig, FleetConfig
from k3rl.actors.cluster import EngineConfig
from k3rl.actors.engines import _prefix_cache
from k3rl.envs import EnvConfig
from k3rl.losses import LossInputs
from k3rl.pipelines import DistillConfig, RLConfig, SFTConfig
from k3rl.pipelines.policy import algorithm_of
from k3rl.pipelines.stage import Stage
from k3rl.types import Episode, Group, Scored, StopReason

RATIOS = (0.55, 0.75, 1.0, 1.25, 1.9)  # of learner to sampler, a token each


def gradient(config) -> list[float]:
    """Of the loss that a stage with this configuration trains by, for tokens at RATIOS with advantages of 1 or -1."""
    logprobs = torch.log(torch.tensor(RATIOS, dtype=torch.float64)).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        weights=torch.ones(5, dtype=torch.float64),
        sampler_logprobs=torch.zeros(5, dtype=torch.float64),
        advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
        teacher_logprobs=torch.tensor([-2.0, -1.0, 0.5, 1.0, 3.0], dtype=torch.float64),
    )
    algorithm_of(config).loss(inputs).loss.backward()
    return logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("config", "key", "value", "moved"),
    [
        (RLConfig(), "objective.ratio_low", 0.6, [0]),
        (RLConfig(), "objective.ratio_high", 1.2, [3, 4]),
        (RLConfig(objective={"type": "grpo"}), "objective.clip_low", 0.3, [1]),
        (RLConfig(objective={"type": "grpo"}), "objective.clip_high", 0.2, [3]),
        (DistillConfig(), "ratio_low", 0.6, [0]),
        (DistillConfig(), "ratio_high", 1.2, [3, 4]),
        (DistillConfig(), "reward_max", 1.2, [0, 4]),
    ],
)
def test_a_bound_of_an_objective_moves_the_gradients_of_the_tokens_beyond_it_and_of_no_other(config, key, value, moved):
    tree = config.model_dump()
    *parents, name = key.split(".")
    within = tree
    for parent in parents:
        within = within[parent]
    within[name] = value
    before, after = gradient(config), gradient(type(config).model_validate(tree))
    assert [place for place in range(5) if before[place] != pytest.approx(after[place], rel=1e-12)] == moved


def groups_of(rewards) -> list[Group]:
    def episode(number: int, reward: float) -> Episode:
        return Episode(f"e{number}", "t", "x", "f", 1, (), StopReason.ENV_DONE, Scored(reward))

    return [Group("g", "t", tuple(episode(number, reward) for number, reward in enumerate(rewards)))]


def test_shuffled_rewards_are_the_same_ones_on_other_episodes():
    groups = groups_of(np.arange(12.0))
    plain, control = (algorithm_of(RLConfig(shuffle_rewards=on)) for on in (False, True))
    assert plain.regraded(groups, 3) == groups
    [group] = control.regraded(groups, 3)
    found = [episode.score.reward for episode in group.episodes]
    assert sorted(found) == list(range(12))
    assert found != list(range(12))
    assert control.regraded(groups, 3) == [group]
    assert control.regraded(groups, 4) != [group]


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_states_are_kept(tmp_path, keep):
    run = SimpleNamespace(checkpoints_dir=tmp_path, root=tmp_path)
    stage = Stage(SimpleNamespace(run=run), "sft", SFTConfig(keep_states=keep), 9)
    for step in range(1, 6):
        folder = tmp_path / "sft" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({}))
        (tmp_path / "sft" / "latest").write_text(folder.name)
        (tmp_path / "sft" / f"in_flight-step_{step}-ab").mkdir()
        stage.step = step
        stage._prune()
    wanted = {f"step_{step}" for step in range(6 - keep, 6)}
    left = {path.name for path in (tmp_path / "sft").iterdir() if path.is_dir()}
    assert left == wanted | {f"in_flight-{name}-ab" for name in wanted}


def test_actors_ask_for_the_cpus_that_their_keys_say():
    fields = {"learner_cpus": 3.0, "rollout_cpus": 2.5, "environment_cpus": 1.5, "reward_cpus": 0.75}
    roles = dict(FleetConfig(ClusterConfig(**fields), EnvConfig()).roles())
    for role in ("learner", "rollout", "environment", "reward"):
        assert roles[f"{role} 1"] == {"CPU": fields[f"{role}_cpus"]}


def test_what_leaves_the_first_tier_goes_where_the_keys_say(tmp_path):
    more = {"prefix_disk_mb": 3, "prefix_directory": str(tmp_path)}
    chosen = EngineConfig(prefix_cache_mb=1, prefix_host_mb=2, **more)
    tiers = [
        [type(tier).__name__ for tier in _prefix_cache(ClusterConfig(engine=engine), torch.device("cpu")).tiers]
        for engine in (EngineConfig(prefix_cache_mb=1), chosen)
    ]
    assert tiers == [["MemoryTier"], ["MemoryTier", "MemoryTier", "DiskTier"]]
