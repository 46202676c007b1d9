"""What a batch of rollouts says before anything is trained on it: rewards, failures, and metrics as sums and counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from k3rl.config import K3Error
from k3rl.data import TrainBatch
from k3rl.envs import prompt_rows
from k3rl.run import Accumulator
from k3rl.types import Branch, Episode, Failed, FailureKind, Group, Invalid, Scored, StopReason


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


def _skipped(episode: Episode) -> bool:
    return isinstance(episode.score, Failed) and episode.score.kind is FailureKind.TRIPPED


def rollout_metrics(groups: Sequence[Group], env: str, version: float) -> Accumulator:
    """Of the rollouts themselves. version: the learner's when it takes them, for staleness."""
    metrics = Accumulator()
    for group in groups:
        rewards = [r for r in map(reward_of, group.episodes) if r is not None]
        metrics.add("group/frac_zero_std", float(len(set(rewards)) <= 1))
        for episode in group.episodes:
            _episode_metrics(metrics, episode, env, version)
    metrics.add("perf/sampled_tokens", sampled_tokens(groups))
    episodes = [episode for group in groups for episode in group.episodes]
    rewards_seen = [reward for reward in map(reward_of, episodes) if reward is not None]
    _spread(metrics, f"reward/{env}", rewards_seen)
    for part, values in _by_name(e.score.parts for e in episodes if isinstance(e.score, Scored)).items():
        metrics.add(f"reward/{env}/parts/{part}/mean", sum(values), len(values))
        _spread(metrics, f"reward/{env}/parts/{part}", values)
    for name, values in _by_name(e.metrics for e in episodes).items():
        metrics.add(f"env/{env}/metrics/{name}", sum(values), len(values))
    return metrics


def advantage_metrics(batches: Sequence[TrainBatch]) -> Accumulator:
    """Of the advantages of the sequences that are trained on, each sequence once; nothing where there are none."""
    metrics = Accumulator()
    values = [
        float(advantages[mask][0])
        for batch in batches
        for advantages, mask in zip(*(np.split(a, batch.cu_seqlens[1:-1]) for a in _masked(batch)), strict=True)
        if mask.any()
    ]
    if values:
        metrics.add("advantage/mean", sum(values), len(values))
        metrics.add("advantage/frac_zero", sum(value == 0 for value in values), len(values))
        _spread(metrics, "advantage", values)
    return metrics


def _masked(batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    return batch.advantages, batch.loss_mask


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


def fitting(groups: Sequence[Group], budget: int) -> tuple[list[Group], list[Episode]]:
    """The groups as they can be trained on, and the episodes that cannot be: those with a branch of more rows than
    `budget`, which is what one micro-batch holds. They keep their reward, for the baseline, and lose their branches."""
    long = [e for group in groups for e in group.episodes if any(_rows(branch) > budget for branch in e.branches)]
    names = {episode.id for episode in long}
    kept = [
        replace(g, episodes=tuple(replace(e, branches=()) if e.id in names else e for e in g.episodes)) for g in groups
    ]
    return kept, long


def too_long_metrics(long: Sequence[Episode]) -> Accumulator:
    """How much `fitting` left out, by episodes and by sampled tokens."""
    metrics = Accumulator()
    metrics.add("rollout/too_long_episodes", len(long))
    metrics.add("rollout/too_long_tokens", sum(map(_sampled, long)))
    return metrics


def _rows(branch: Branch) -> int:
    """Rows of the model that a branch takes."""
    return prompt_rows(branch.turns[-1]) + len(branch.turns[-1].sampled_ids) if branch.turns else 0


def _sampled(episode: Episode) -> int:
    return sum(len(turn.sampled_ids) for branch in episode.branches for turn in branch.turns)


def replay_metrics(batches: Sequence[TrainBatch]) -> Accumulator:
    """Share of trained tokens that go to the experts that computed them when they were sampled."""
    metrics = Accumulator()
    for batch in batches:
        metrics.add("routes/replayed", batch.target_tokens * (batch.routes is not None), batch.target_tokens)
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


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Tokens that the policy sampled, all turns of all episodes."""
    return sum(_sampled(episode) for group in groups for episode in group.episodes)


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
