"""What was played, written beside the loop: an actor on the driver's node that fetches episodes by reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from k3rl.actors.calls import wait
from k3rl.actors.payloads import contents, plans_sent, sent
from k3rl.config import K3Error
from k3rl.data import AnnotationWriter, BatchPlan, EpisodeColumns, PlayedGroup, SequenceScores, TrajectoryWriter
from k3rl.run import Recorder
from k3rl.tokens import Tokenizer

_CLOSE_S = 60.0  # to write what is queued


@dataclass(frozen=True, slots=True)
class RecordingPlace:
    """Where records of a run go. traces: its folder; tokenizer: a checkpoint's or a run's directory with one."""

    traces: str
    tokenizer: str
    run_id: str = ""
    config_hash: str = ""


class RecordingActor:
    """A synchronous Ray actor without torch: the live stream of turns, and trajectory files of one attempt."""

    def __init__(self, place: RecordingPlace, attempt: int) -> None:
        self._tokenizer = Tokenizer.load(place.tokenizer)
        traces = Path(place.traces)
        about: dict[str, Any] = {"run_id": place.run_id, "config_hash": place.config_hash, "attempt": attempt}
        self._recorder = Recorder(traces, **about)
        self._trajectories = TrajectoryWriter(
            traces / "trajectories", actor=f"driver{attempt}", tokenizer_hash=self._tokenizer.hash
        )
        self._annotations = AnnotationWriter(traces / "annotations", attempt=attempt)

    def record(self, groups: Sequence[PlayedGroup], step: int, *parts: Any) -> None:
        """Queues every episode for the live stream and writes the step's trajectories, whole or not at all.

        parts: see `payloads.sent`.
        """
        whole = contents(groups, parts)
        for group in whole:
            for episode in group.episodes:
                self._recorder.episode(episode, step, self._tokenizer.pieces, group=group.id)
        self._trajectories.write(whole, generation=step)

    def annotate(
        self,
        stage: str,
        step: int,
        plans: Sequence[BatchPlan],
        scores: Mapping[str, SequenceScores],
        expert_load: np.ndarray | None,
        version: float,
        *payloads: EpisodeColumns,
    ) -> None:
        """Writes what the learner adds to episodes of a step. payloads: what the plans name."""
        batches = [plan.pack(payloads) for plan in plans]
        self._annotations.write(stage, step, batches, scores, expert_load, version)

    def close(self) -> None:
        """Writes what is queued."""
        self._recorder.close()


class Recording:
    """The recording of a run as its driver sees it: one step at a time, the actor started with the first one."""

    def __init__(self, place: RecordingPlace, attempt: int, timeout_s: float) -> None:
        """timeout_s: of writing a step."""
        self.place, self._attempt, self._timeout_s = place, attempt, timeout_s
        self._actor: Any = None
        self._under_way: list[Any] = []

    def record(self, groups: Sequence[PlayedGroup], step: int) -> None:
        """Begins to write a step when the one before is written. Raises what writing that one raised."""
        self.wait()
        if self._actor is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            made = ray.remote(RecordingActor).options(num_cpus=0, scheduling_strategy=here)
            self._actor = made.remote(self.place, self._attempt)
        moved, parts = sent(groups)
        self._under_way.append(self._actor.record.remote(moved, step, *parts))

    def annotate(
        self,
        stage: str,
        step: int,
        plans: Sequence[BatchPlan],
        scores: Mapping[str, SequenceScores],
        expert_load: np.ndarray | None,
        version: float,
    ) -> None:
        """Begins to write what the learner adds to the episodes of the step that was recorded last."""
        moved, payloads = plans_sent(plans)
        arguments = stage, step, moved, scores, expert_load, version
        self._under_way.append(self._actor.annotate.remote(*arguments, *payloads))

    def wait(self) -> None:
        """Returns when what was recorded is on the disk. Raises what writing it raised, ActorLost where episodes are
        gone with the node that had them."""
        under_way, self._under_way = self._under_way, []
        if under_way:
            wait(under_way, self._timeout_s, "recording episodes")

    def restart(self, attempt: int) -> None:
        """Ends this attempt; what it could not write any more is of steps that are taken again."""
        with suppress(K3Error):
            self.wait()
        self._end()
        self._attempt = attempt

    def close(self) -> None:
        """Writes what is left and ends the actor. Raises what writing raised."""
        try:
            self.wait()
        finally:
            self._end()

    def _end(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(K3Error):  # watching a run must not end it
                wait(actor.close.remote(), _CLOSE_S, "writing the last episodes")
            ray.kill(actor)
