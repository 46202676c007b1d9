"""Groups become batches: masking before baselines, joined by id, weights over the whole batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from k3rl.data import TrainBatch, played
from k3rl.losses import Correction, LossInputs
from k3rl.pipelines.configs import SamplingConfig
from k3rl.pipelines.distill import distill_batches
from k3rl.pipelines.presets import distill, grpo, rl
from k3rl.pipelines.rl import policy_batches, shuffled
from k3rl.pipelines.rollout_metrics import (
    TooManyFailures,
    advantage_metrics,
    check_failures,
    fitting,
    replay_metrics,
    rollout_metrics,
    too_long_metrics,
)
from k3rl.types import Branch, Episode, Failed, FailureKind, Group, Invalid, Scored, StopReason, Turn


def episode(name: str, score, tokens: int = 3) -> Episode:
    turn = Turn((1, 2, 3), tuple(range(10, 10 + tokens)), (-0.25,) * tokens, StopReason.STOP, 4, 4)
    return Episode(name, "t", "env", "list", 1, (Branch(name, (turn,)),), StopReason.COMPLETED, score)


def group(name: str, *scores, tokens: int = 3) -> Group:
    return Group(name, "t", tuple(episode(f"{name}-{i}", score, tokens) for i, score in enumerate(scores)))


def advantages(batch) -> dict[str, float]:
    return {
        name.split("/")[0]: float(np.unique(batch.advantages[start:stop][batch.loss_mask[start:stop]])[0])
        for name, start, stop in zip(batch.sequence_ids, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    }


def packed(groups, config) -> list[TrainBatch]:
    """What the learner packs of these groups."""
    return [plan.pack() for plan in policy_batches(played(groups), config)]


def test_the_baseline_is_the_mean_of_the_rewards_that_exist():
    config = rl().replace(optimizer_steps=1)
    [batch] = packed([group("g", Scored(1.0), Failed("x"), Scored(0.0), Scored(0.0))], config)
    found = advantages(batch)
    assert found == pytest.approx({"g-0": 2 / 3, "g-2": -1 / 3, "g-3": -1 / 3}, rel=1e-6)  # stored as float32


def test_a_cheat_counts_as_the_worst_answer_and_stays_in_the_baseline():
    [batch] = packed([group("g", Scored(1.0), Invalid("h", "e"))], rl().replace(optimizer_steps=1))
    assert advantages(batch) == {"g-0": 0.5, "g-1": -0.5}


def test_a_step_without_any_signal_is_no_step():
    config = rl().replace(optimizer_steps=2)
    assert packed([group("a", Scored(1.0), Scored(1.0)), group("b", Failed("x"), Scored(0.3))], config) == []
    [batch] = packed([group("a", Scored(0.1), Scored(0.1)), group("b", Scored(1.0), Scored(0.0))], config)
    assert set(batch.sequence_ids) == {"a-0/a-0", "a-1/a-1", "b-0/b-0", "b-1/b-1"}


@pytest.mark.parametrize("preset", [rl, grpo])
def test_a_group_without_a_signal_counts_in_the_weights_and_has_no_advantage(preset):
    groups = [group("live", *map(Scored, [1.0] * 4 + [0.0] * 4), tokens=1)]
    groups += [group(f"flat{i}", *[Scored(1.0)] * 8, tokens=1) for i in range(9)]
    [batch] = packed(groups, preset().replace(optimizer_steps=1))
    np.testing.assert_allclose(batch.weights[batch.loss_mask], 1 / 80, rtol=1e-12)
    assert {name for name, value in advantages(batch).items() if value} == {f"live-{i}" for i in range(8)}


def test_the_regularizer_pulls_at_tokens_of_groups_without_a_signal():
    groups = [group("live", Scored(1.0), Scored(0.0)), group("flat", Scored(1.0), Scored(1.0))]
    config = rl().replace(optimizer_steps=1)
    [batch] = packed(groups, config)
    weights, places = torch.from_numpy(batch.weights), torch.from_numpy(batch.loss_mask)
    flat = torch.from_numpy(np.repeat([n.startswith("flat") for n in batch.sequence_ids], batch.lengths)) & places
    logprobs = torch.from_numpy(batch.sampler_logprobs).double().add(0.1).requires_grad_()
    inputs = LossInputs(
        logprobs, torch.from_numpy(batch.sampler_logprobs).double(), torch.from_numpy(batch.advantages), weights
    )
    config.objective.loss(Correction())(inputs).loss.backward()
    # d/dx of weight * tau * (x - sampler)^2, at a distance of 0.1 and with 12 tokens in the batch
    np.testing.assert_allclose(logprobs.grad[flat], 2 * config.objective.tau * 0.1 / 12, rtol=1e-5)


def test_episodes_weigh_the_same_for_grpo_whatever_their_branches():
    one, two = episode("g-0", Scored(1.0), 2), episode("g-1", Scored(0.0), 6)
    forked = dataclasses.replace(one, branches=(one.branches[0], dataclasses.replace(one.branches[0], id="fork")))
    [batch] = packed([Group("g", "t", (forked, two))], grpo().replace(optimizer_steps=1))
    sums = {
        name: batch.weights[a:b].sum()
        for name, a, b in zip(batch.sequence_ids, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
    }
    assert sums == pytest.approx({"g-0/g-0": 0.25, "g-0/fork": 0.25, "g-1/g-1": 0.5})


def test_token_weights_sum_to_one_for_k3_and_each_sequence_weighs_the_same_for_grpo():
    groups = [Group("g", "t", (episode("g-0", Scored(1.0), 2), episode("g-1", Scored(0.0), 6)))]
    [batch] = packed(groups, rl().replace(optimizer_steps=1))
    np.testing.assert_allclose(batch.weights[batch.loss_mask], 1 / 8)
    [batch] = packed(groups, grpo().replace(optimizer_steps=1))
    sums = [batch.weights[a:b].sum() for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    np.testing.assert_allclose(sums, [0.5, 0.5])


def test_optimizer_steps_share_the_groups_without_splitting_one():
    groups = [group(f"g{i}", Scored(1.0), Scored(0.0)) for i in range(5)]
    first, second = packed(groups, rl().replace(optimizer_steps=2))
    owners = [{name.split("-")[0] for name in batch.sequence_ids} for batch in (first, second)]
    assert owners[0].isdisjoint(owners[1])
    assert owners[0] | owners[1] == {f"g{i}" for i in range(5)}


def test_distillation_trains_on_every_sampled_token_of_whole_episodes_whatever_their_reward():
    groups = [group("g", Scored(1.0), Invalid("h", "e"), Failed("x")), group("h", Scored(0.0), Scored(0.0))]
    [plan], [domains] = distill_batches(played(groups), distill())
    assert int(plan.pack().loss_mask.sum()) == plan.target_tokens == 12
    assert domains == ["list"] * 4


def test_recorded_experts_are_in_the_batches_of_a_run_that_replays_them():
    recorded = [np.random.default_rng(n).integers(0, 8, (5, 2, 2)).astype(np.int16) for n in range(2)]
    episodes = []
    for number, routes in enumerate(recorded):
        one = episode(f"g-{number}", Scored(float(number)))
        turn = dataclasses.replace(one.branches[0].turns[0], routes=routes)
        episodes.append(dataclasses.replace(one, branches=(Branch(one.id, (turn,)),)))
    groups = [Group("g", "t", tuple(episodes))]
    for asked in (False, True):
        sampling = SamplingConfig(replay_routes=asked)
        [trained] = policy_batches(played(groups), rl().replace(optimizer_steps=1, sampling=sampling))
        [distilled], _ = distill_batches(played(groups), distill().replace(sampling=sampling))
        for plan in (trained, distilled):
            assert replay_metrics([plan]).values() == {"routes/replayed": float(asked)}
            batch = plan.pack()
            if not asked:
                assert batch.routes is None
                continue
            for own, routes in zip(np.split(batch.routes, batch.cu_seqlens[1:-1]), recorded, strict=True):
                np.testing.assert_array_equal(own[:-1], routes)


def test_shuffled_rewards_are_the_same_rewards_at_other_samples():
    groups = [group(f"g{i}", *(Scored(float((i + j) % 2)) for j in range(8))) for i in range(8)]
    mixed = shuffled(groups, seed=0, step=1)
    before = [e.score.reward for g in groups for e in g.episodes]
    after = [e.score.reward for g in mixed for e in g.episodes]
    assert sorted(before) == sorted(after)
    assert before != after
    assert [e.id for g in mixed for e in g.episodes] == [e.id for g in groups for e in g.episodes]
    assert mixed == shuffled(groups, seed=0, step=1)


def test_too_many_missing_rewards_stop_the_run_and_name_the_reason():
    groups = [group("g", Failed("sandbox died"), Failed("sandbox died"), Scored(1.0), Scored(0.0))]
    check_failures(groups, limit=0.5)
    with pytest.raises(TooManyFailures, match=r"2 of 4 .*\n.*2 x sandbox died"):
        check_failures(groups, limit=0.4)


def test_what_the_breaker_skipped_is_no_failure_of_the_batch():
    skipped = Failed("skipped", FailureKind.TRIPPED)
    check_failures([group("g", skipped, skipped, skipped, Scored(1.0))], limit=0.0)
    with pytest.raises(TooManyFailures, match="1 of 2"):  # and does not dilute those that are
        check_failures([group("g", skipped, skipped, Failed("sandbox died"), Scored(1.0))], limit=0.4)


def test_metrics_skip_missing_rewards_and_count_them():
    values = rollout_metrics(played([group("g", Scored(1.0), Failed("x"), Scored(0.0))]), "env", version=5.0).values()
    assert values["reward/env/mean"] == 0.5
    assert values["env/env/failed"] == pytest.approx(1 / 3)
    assert values["staleness/max"] == 1.0


def test_rewards_and_their_parts_have_a_spread_over_the_episodes_that_have_them():
    scores = Scored(1.0, {"tests": 1.0, "style": 0.5}), Failed("x"), Scored(0.0, {"tests": 0.5}), Invalid("h", "e")
    made = group("g", *scores)
    first = dataclasses.replace(made.episodes[0], metrics={"tool_calls": 3.0, "broken": float("nan")})
    values = rollout_metrics(
        played([dataclasses.replace(made, episodes=(first, *made.episodes[1:]))]), "env", 5.0
    ).values()
    rewards = [1.0, 0.0, 0.0]  # a cheat counts as 0, a failure not at all
    assert values["reward/env/std"] == pytest.approx(np.std(rewards), rel=1e-12)
    assert (values["reward/env/min"], values["reward/env/max"]) == (0.0, 1.0)
    parts = {name: values[f"reward/env/parts/tests/{name}"] for name in ("mean", "std", "min", "max")}
    assert parts == {"mean": 0.75, "std": 0.25, "min": 0.5, "max": 1.0}
    assert values["reward/env/parts/style/mean"] == 0.5
    assert values["env/env/metrics/tool_calls"] == 3.0
    assert "env/env/metrics/broken" not in values


def test_advantages_count_each_sequence_once_and_nothing_is_no_zero():
    config = rl().replace(optimizer_steps=1)
    groups = [group("a", Scored(1.0), Scored(0.0), tokens=2), group("b", Scored(0.5), Scored(0.5), tokens=9)]
    values = advantage_metrics(policy_batches(played(groups), config)).values()
    assert values["advantage/mean"] == 0.0
    assert values["advantage/frac_zero"] == 0.5
    assert values["advantage/std"] == pytest.approx(np.std([0.5, -0.5, 0.0, 0.0]), rel=1e-12)
    assert (values["advantage/min"], values["advantage/max"]) == (-0.5, 0.5)
    assert advantage_metrics([]).values() == {}


def test_an_episode_that_no_micro_batch_holds_is_counted_and_stays_in_the_baseline():
    long = episode("g-0", Scored(1.0), tokens=40)
    groups = played([Group("g", "t", (long, *group("g", Scored(0.0), Scored(0.0), Scored(0.0)).episodes[1:]))])
    kept, left_out = fitting(groups, budget=42)  # 3 of the prompt and 40 sampled
    assert [episode.id for episode in left_out] == [long.id]
    assert too_long_metrics(left_out).values() == {"rollout/too_long_episodes": 1.0, "rollout/too_long_tokens": 40.0}
    [batch] = packed(kept, rl().replace(optimizer_steps=1))
    assert advantages(batch) == pytest.approx({"g-1": -1 / 3, "g-2": -1 / 3}, rel=1e-6)
    assert {len(ids) for ids in np.split(batch.input_ids, batch.cu_seqlens[1:-1])} == {6}
    assert fitting(groups, budget=43) == (groups, [])
