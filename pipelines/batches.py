"""From graded groups to packed batches: masking first, then baselines, then weights over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from k3rl.config import K3Error
from k3rl.data.batch import TrainBatch, from_episodes
from k3rl.losses import group_advantages
from k3rl.pipelines.configs import DistillConfig, RLConfig
from k3rl.run.metrics import Accumulator
from k3rl.types import Episode, Failed, FailureKind, Group, Invalid, Scored, StopReason


class TooManyFailures(K3Error):
    """More episodes than allowed have no reward: the infrastructure, not the policy, is at fault."""


def reward_of(episode: Episode) -> float | None:
    """The reward, 0 for a submission that tried to cheat, None when there is none."""
    match episode.score:
        case Scored(reward):
            return float(reward)
        case Invalid():
            return 0.0
        case Failed():
            return None


def check_failures(groups: Sequence[Group], limit: float) -> None:
    """Raises TooManyFailures, naming the most frequent reasons, when the share of failed episodes exceeds `limit`.

    Episodes that a circuit breaker leaves out do not count; it has spoken for them.
    """
    episodes = [e for group in groups for e in group.episodes if not _left_out(e)]
    reasons: dict[str, int] = {}
    for episode in episodes:
        if isinstance(episode.score, Failed):
            reasons[episode.score.reason] = reasons.get(episode.score.reason, 0) + 1
    failed = sum(reasons.values())
    if failed > limit * len(episodes):
        worst = sorted(reasons.items(), key=lambda item: -item[1])[:3]
        listing = "\n".join(f"  {count} x {reason}" for reason, count in worst)
        raise TooManyFailures(
            f"{failed} of {len(episodes)} episodes have no reward, more than --failure-limit {limit:g} allows:\n"
            f"{listing}\n"
            "Mend the environment or its sandbox; missing rewards are never trained on"
        )


def _left_out(episode: Episode) -> bool:
    return isinstance(episode.score, Failed) and episode.score.kind is FailureKind.TRIPPED


def shuffled(groups: Sequence[Group], seed: int, step: int) -> list[Group]:
    """The groups with all scores of the batch permuted: the control in which rewards mean nothing."""
    scores = [episode.score for group in groups for episode in group.episodes]
    order = iter(np.random.default_rng([seed, step, 1]).permutation(len(scores)))
    return [replace(g, episodes=tuple(replace(e, score=scores[next(order)]) for e in g.episodes)) for g in groups]


def policy_batches(groups: Sequence[Group], config: RLConfig) -> list[TrainBatch]:
    """One batch for each optimizer step, groups dealt round; groups whose rewards are all equal carry no signal.

    Fewer batches than asked for, or none, when too few groups have a signal.
    """
    live: list[dict[str, float]] = []
    episodes = {episode.id: episode for group in groups for episode in group.episodes}
    for group in groups:
        advantages = group_advantages([reward_of(e) for e in group.episodes], normalise=config.objective.normalise)
        known = {e.id: a for e, a in zip(group.episodes, advantages, strict=True) if a is not None and e.branches}
        if any(known.values()):
            live.append(known)
    batches = []
    for i in range(config.optimizer_steps):
        share = {name: advantage for known in live[i :: config.optimizer_steps] for name, advantage in known.items()}
        if share:
            batches.append(
                from_episodes([episodes[name] for name in share], share, mode=config.objective.token_weights)
            )
    return batches


def distill_batches(groups: Sequence[Group], config: DistillConfig) -> tuple[list[TrainBatch], list[list[str]]]:
    """Batches over all sampled tokens of whole episodes, and for each batch the task family of every sequence."""
    episodes = [e for group in groups for e in group.episodes if e.branches and not isinstance(e.score, Failed)]
    families = {f"{e.id}/{branch.id}": e.family for e in episodes for branch in e.branches}
    shares = [share for i in range(config.optimizer_steps) if (share := episodes[i :: config.optimizer_steps])]
    batches = [from_episodes(share, {episode.id: 0.0 for episode in share}) for share in shares]
    return batches, [[families[name] for name in batch.sequence_ids] for batch in batches]


def rollout_metrics(groups: Sequence[Group], env: str, version: float) -> Accumulator:
    """What the rollouts themselves say, as sums and counts; `version` is the learner's, for staleness."""
    metrics = Accumulator()
    for group in groups:
        rewards = [r for r in map(reward_of, group.episodes) if r is not None]
        metrics.add("group/frac_zero_std", float(len(set(rewards)) <= 1))
        for episode in group.episodes:
            _episode_metrics(metrics, episode, env, version)
    metrics.add("perf/sampled_tokens", sampled_tokens(groups))
    return metrics


def add_published(metrics: Accumulator, published: dict[str, float]) -> None:
    """What the publication since the last step cost, and whether engines agree after it; nothing without one.

    Takes those figures out of `published`, so that no step reports another one's.
    """
    if "canary" in published:
        metrics.add("mismatch/canary", published.pop("canary"))
        for name in ("bytes", "bytes_full", "deltas", "refused", "seconds", "transfer_seconds", "fell_back"):
            if name in published:  # a state written by an earlier version has fewer
                metrics.add(f"publish/{name}", published.pop(name))


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Tokens that the policy sampled, all turns of all episodes."""
    return sum(len(t.sampled_ids) for g in groups for e in g.episodes for b in e.branches for t in b.turns)


def _episode_metrics(metrics: Accumulator, episode: Episode, env: str, version: float) -> None:
    reward = reward_of(episode)
    metrics.add(f"env/{env}/failed", float(reward is None))
    metrics.add(f"env/{env}/invalid", float(isinstance(episode.score, Invalid)))
    metrics.add(f"env/{env}/parse_error", float(episode.stop_reason is StopReason.PARSE_ERROR))
    if reward is not None:
        metrics.add(f"reward/{env}/mean", reward)
        metrics.add(f"reward/{env}/{episode.family}", reward)
        metrics.add(f"reward/{env}/{episode.family}/level_{episode.level}", reward)
    turns = [turn for branch in episode.branches for turn in branch.turns]
    metrics.add(f"env/{env}/num_turns", len(turns))
    for turn in turns:
        metrics.add("response_length/mean", len(turn.sampled_ids))
        metrics.add("response_length/clip_ratio", float(turn.stop_reason is StopReason.LENGTH))
        metrics.add("staleness/mean", version - turn.first_version)
        metrics.maximum("staleness/max", version - turn.first_version)
