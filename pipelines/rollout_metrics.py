"""What a batch of rollouts says before anything is trained on it: rewards, failures, and metrics as sums and counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from k3rl.config import K3Error
from k3rl.data import BatchPlan, EpisodeHeader, PlayedGroup
from k3rl.run import Accumulator
from k3rl.types import Episode, Failed, FailureKind, Invalid, Scored, StopReason


class TooManyFailures(K3Error):
    """More episodes than allowed have no reward: the infrastructure, not the policy, is at fault."""


def reward_of(episode: Episode | EpisodeHeader) -> float | None:
    """The reward, 0 for a submission that tried to cheat, None when there is none."""
    match episode.score:
        case Scored(reward):
            return float(reward)
        case Invalid():
            return 0.0
        case Failed():
            return None


def check_failures(groups: Sequence[PlayedGroup], limit: float) -> None:
    """Raises TooManyFailures, naming the most frequent reasons, when the share of failed episodes exceeds `limit`.

    Episodes that a circuit breaker skipped do not count; it has spoken for them.
    """
    episodes = [e for group in groups for e in group.episodes if not _skipped(e)]
    reasons: dict[str, int] = {}
    for episode in episodes:
        if isinstance(episode.score, Failed):
            reasons[episode.score.reason] = reasons.get(episode.score.reason, 0) + 1
    failed = sum(reasons.values())
    if failed > limit * len(episodes):
        worst = sorted(reasons.items(), key=lambda item: -item[1])[:3]
        listing = "\n".join(f"  {count} x {reason}" for reason, count in worst)
        kinds = [e.score.kind for e in episodes if isinstance(e.score, Failed)]
        to_mend = "the environment or its sandbox"
        if 2 * kinds.count(FailureKind.ENGINE) > failed:
            to_mend = "the engines, which gave no tokens (the rollout actors' logs say why)"
        raise TooManyFailures(
            f"{failed} of {len(episodes)} episodes have no reward, more than --failure-limit {limit:g} allows:\n"
            f"{listing}\n"
            f"Mend {to_mend}; missing rewards are never trained on"
        )


def _skipped(episode: EpisodeHeader) -> bool:
    return isinstance(episode.score, Failed) and episode.score.kind is FailureKind.TRIPPED


def rollout_metrics(groups: Sequence[PlayedGroup], env: str, version: float) -> Accumulator:
    """Of the rollouts themselves. version: the learner's when it takes them, for staleness."""
    metrics = Accumulator()
    episodes = [episode for group in groups for episode in group.episodes]
    for group in groups:
        rewards = {reward for reward in map(reward_of, group.episodes) if reward is not None}
        metrics.add("group/frac_zero_std", float(len(rewards) <= 1))
    count = len(episodes)
    metrics.add(f"env/{env}/failed", sum(isinstance(e.score, Failed) for e in episodes), count)
    metrics.add(f"env/{env}/invalid", sum(isinstance(e.score, Invalid) for e in episodes), count)
    metrics.add(f"env/{env}/parse_error", sum(e.stop_reason is StopReason.PARSE_ERROR for e in episodes), count)
    _add_rewards(metrics, episodes, env)
    turns = sum(e.turns for e in episodes)
    metrics.add(f"env/{env}/num_turns", turns, count)
    versions = [e.versions for e in episodes if e.versions is not None]
    if versions:
        metrics.add("response_length/mean", sampled_tokens(groups), turns)
        metrics.add("response_length/clip_ratio", sum(e.clipped for e in episodes), turns)
        metrics.add("staleness/mean", turns * version - sum(own[1] for own in versions), turns)
        metrics.maximum("staleness/max", version - min(own[0] for own in versions))
    metrics.add("perf/sampled_tokens", sampled_tokens(groups))
    rewards_seen = [reward for reward in map(reward_of, episodes) if reward is not None]
    _spread(metrics, f"reward/{env}", rewards_seen)
    for part, values in _by_name(e.score.parts for e in episodes if isinstance(e.score, Scored)).items():
        metrics.add(f"reward/{env}/parts/{part}/mean", sum(values), len(values))
        _spread(metrics, f"reward/{env}/parts/{part}", values)
    for name, values in _by_name(e.metrics for e in episodes).items():
        metrics.add(f"env/{env}/metrics/{name}", sum(values), len(values))
    return metrics


def advantage_metrics(batches: Sequence[BatchPlan]) -> Accumulator:
    """Of the advantages of the sequences that are trained on, each sequence once; nothing where there are none."""
    metrics = Accumulator()
    values = [value for batch in batches for value in batch.advantages[batch.targets > 0].tolist()]
    if values:
        metrics.add("advantage/mean", sum(values), len(values))
        metrics.add("advantage/frac_zero", sum(value == 0 for value in values), len(values))
        _spread(metrics, "advantage", values)
    return metrics


def _by_name(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The finite values of each name, over rows that may lack some."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if math.isfinite(value):
                found.setdefault(name, []).append(float(value))
    return found


def _spread(metrics: Accumulator, name: str, values: Sequence[float]) -> None:
    """Standard deviation (of these values, not an estimate), smallest and largest; nothing without values."""
    if values:
        metrics.add(f"{name}/std", float(np.std(values)))
        metrics.add(f"{name}/min", min(values))
        metrics.add(f"{name}/max", max(values))


def _add_rewards(metrics: Accumulator, episodes: Sequence[EpisodeHeader], env: str) -> None:
    """Means of the rewards there are, of all and of each family and level, added up in the order of the episodes."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        if (reward := reward_of(episode)) is not None:
            family = f"reward/{env}/{episode.family}"
            for name in (f"reward/{env}/mean", family, f"{family}/level_{episode.level}"):
                found.setdefault(name, []).append(reward)
    for name, rewards in found.items():
        total = 0.0
        for reward in rewards:  # one after the other, so that every version of Python rounds alike
            total += reward
        metrics.add(name, total, len(rewards))


def fitting(groups: Sequence[PlayedGroup], budget: int) -> tuple[list[PlayedGroup], list[EpisodeHeader]]:
    """The groups as they can be trained on, and the episodes that cannot be: those with a branch of more rows than
    `budget`, which is what one micro-batch holds. They keep their reward, for the baseline, and lose their branches."""
    kept, long = [], []
    for group in groups:
        beyond = {e.id for e in group.episodes if any(each.rows > budget for each in e.sequences)}
        if not beyond:
            kept.append(group)
            continue
        long += [e for e in group.episodes if e.id in beyond]
        cut = tuple(replace(e, branches=0, sequences=()) if e.id in beyond else e for e in group.episodes)
        kept.append(replace(group, episodes=cut))
    return kept, long


def too_long_metrics(long: Sequence[EpisodeHeader]) -> Accumulator:
    """How much `fitting` left out, by episodes and by sampled tokens."""
    metrics = Accumulator()
    metrics.add("rollout/too_long_episodes", len(long))
    metrics.add("rollout/too_long_tokens", sum(episode.tokens for episode in long))
    return metrics


def replay_metrics(batches: Sequence[BatchPlan]) -> Accumulator:
    """Share of trained tokens that go to the experts that computed them when they were sampled."""
    metrics = Accumulator()
    for batch in batches:
        metrics.add("routes/replayed", batch.target_tokens * batch.routes, batch.target_tokens)
    return metrics


def publication_metrics(published: Mapping[str, float]) -> Accumulator:
    """What a publication cost, and whether engines agree after it; nothing without one. See `Fleet.publish`."""
    metrics = Accumulator()
    if published:
        metrics.add("mismatch/canary", published["canary"])
        for name in ("bytes", "bytes_full", "deltas", "refused", "seconds", "transfer_seconds", "fell_back"):
            metrics.add(f"publish/{name}", published[name])
        for name in ("gather_seconds", "digest_seconds", "receive_seconds", "verify_seconds"):
            if name in published:  # of flat buffers alone
                metrics.add(f"publish/{name}", published[name])
        metrics.add("time/engine_paused", published["engine_paused"])
    return metrics


def sampled_tokens(groups: Sequence[PlayedGroup]) -> int:
    """Tokens that the policy sampled, all turns of all episodes."""
    return sum(episode.tokens for group in groups for episode in group.episodes)
