"""Keeps a step's rollouts: the live stream that `k3rl tail` follows, and whole Parquet files."""

from __future__ import annotations

from collections.abc import Sequence

from k3rl.pipelines.session import Session
from k3rl.types import Group


def record(session: Session, groups: Sequence[Group], step: int) -> None:
    """Queues every episode for the stream and writes the step's trajectories, whole or not at all."""
    for group in groups:
        for episode in group.episodes:
            session.recorder.episode(episode, step, session.tokenizer.pieces)
    session.trajectories.write(groups, generation=step)
