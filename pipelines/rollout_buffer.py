"""The rollout buffer: groups that are sampled ahead of the learner, which takes them a batch at a time.

Filling it publishes the weights so far and has the curriculum's jobs run; taking from it waits for the
graded groups. A training state holds what is in it, so that no episode is run twice. It holds one batch at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rl.data import ManifestEntry, TrajectoryWriter, read_groups
from k3rl.pipelines.configs import RolloutStageConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.pipelines.rollout_metrics import publication_metrics
from k3rl.pipelines.stage import Stage
from k3rl.pipelines.start import policy_sampling
from k3rl.run import Accumulator
from k3rl.types import Group


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One step's graded groups. version: of the weights that sampled them. off_policy_steps: updates since then."""

    groups: list[Group]
    version: float
    off_policy_steps: int


class _Rollouts:
    """One step's rollouts, under way or done. published: what `Fleet.publish` said of their weights."""

    def __init__(
        self, collect: Callable[[], list[Group]], published: Mapping[str, float], off_policy_steps: int
    ) -> None:
        self._collect = collect
        self._groups: list[Group] | None = None
        self.published = dict(published)
        self.off_policy_steps = off_policy_steps

    def groups(self) -> list[Group]:
        """The graded groups; waits for them the first time."""
        if self._groups is None:
            self._groups = self._collect()
        return self._groups


class RolloutBuffer:
    """The batch of rollouts that the learner trains on next; a restored stage brings its own."""

    def __init__(self, stage: Stage, config: RolloutStageConfig, curriculum: Curriculum) -> None:
        self._stage = stage
        self._config = config
        self._curriculum = curriculum
        self._fleet = stage.session.fleet
        self._sampling = policy_sampling(config)
        self._published: dict[str, float] = {}
        self._rollouts: _Rollouts | None = None
        if stage.saved_rollouts is not None:
            self._rollouts = self._load(*stage.saved_rollouts)

    @property
    def empty(self) -> bool:
        """Whether nothing is there to be taken, so that the next step's rollouts have to be begun first."""
        return self._rollouts is None

    def fill(self, step: int, off_policy_steps: int) -> None:
        """Publishes what has been learned so far and begins the rollouts of `step` with it.

        off_policy_steps: updates that come before the learner takes them.
        """
        with self._stage.clock("publish"):
            self._published = self._fleet.publish()
        workers, config = self._fleet.rollouts, self._config
        self._curriculum.skip(workers.skipped_families)
        groups = config.batch_size // config.group_size
        jobs = self._curriculum.jobs(step, groups, config.group_size, self._stage.name)
        started = workers.start(jobs, self._sampling)
        self._rollouts = _Rollouts(lambda: workers.result(started), self._published, off_policy_steps)

    def take(self) -> RolloutBatch:
        """Waits for the groups and empties the buffer."""
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is None:
            raise RuntimeError("the rollout buffer is empty; fill it first")
        return RolloutBatch(rollouts.groups(), rollouts.published["version"], rollouts.off_policy_steps)

    def take_metrics(self) -> Accumulator:
        """What the last publication cost and whether engines agreed after it, once."""
        published, self._published = self._published, {}
        return publication_metrics(published)

    # ------------------------------------------------------------------------------------------- training states

    def save(self, folder: Path, step: int, tokenizer_hash: str) -> dict[str, Any] | None:
        """Waits for the groups and writes them into `folder`, durable; gives JSON that restores the buffer.

        None from an empty buffer.
        """
        if self._rollouts is None:
            return None
        writer = TrajectoryWriter(folder, actor="in-flight", tokenizer_hash=tokenizer_hash)
        entry = writer.write(self._rollouts.groups(), generation=step)
        fields = {name: getattr(entry, name) for name in ManifestEntry.__slots__}
        return {"folder": folder.name, "entry": fields, "published": self._rollouts.published}

    def _load(self, parent: Path, saved: Mapping[str, Any]) -> _Rollouts:
        """The inverse of `save`. Raises TrajectoryError for files that are not those that were written."""
        entry = ManifestEntry(**saved["entry"])
        groups = read_groups(parent / saved["folder"], entry, routes=entry.routes_file is not None)
        return _Rollouts(lambda: groups, saved["published"], self._config.max_staleness)
