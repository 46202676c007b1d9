"""The rollout buffer: groups that are sampled beside the learner, which takes them a batch at a time.

Filling it publishes the weights so far and lets a stream of rollouts go on with them; taking from it waits for graded
groups. A training state holds what is in it. Synchronous rollouts are waited for and written down whole, so that no
episode is run twice; otherwise a state has the jobs of all groups that were begun, which a resumed run plays again, and
what is remembered of episodes whose environment can be paused, which go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from k3rl.actors import EpisodeJob, Mode, RolloutStream, TaskRef
from k3rl.data import ManifestEntry, TrajectoryWriter, read_groups
from k3rl.envs import BrokenState, EpisodeState
from k3rl.pipelines.configs import RolloutStageConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.pipelines.evaluation import RunEvaluations
from k3rl.pipelines.layout import schedule_of
from k3rl.pipelines.rollout_metrics import publication_metrics, reward_of
from k3rl.pipelines.stage import Stage
from k3rl.pipelines.start import policy_sampling
from k3rl.run import Accumulator, write_atomic
from k3rl.types import Group


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One step's graded groups. version: of the weights that sample when they are taken. off_policy_steps: updates that
    the learner has made since."""

    groups: list[Group]
    version: float
    off_policy_steps: int


class RolloutBuffer:
    """The batch of rollouts that the learner trains on next, and the stream of those after it."""

    def __init__(
        self, stage: Stage, config: RolloutStageConfig, curriculum: Curriculum, evaluations: RunEvaluations
    ) -> None:
        self._stage = stage
        self._config = config
        self._curriculum = curriculum
        self._fleet = stage.session.fleet
        self._schedule = schedule_of(config)
        self._synchronous = self._schedule.mode is Mode.SYNCHRONOUS
        self._stream: RolloutStream | None = None
        self._published: dict[str, float] = {}
        self._told: dict[str, float] = {}  # what was published and no metric says yet
        self._groups: list[Group] | None = None  # taken from the stream, and not by the learner
        self._filled = False
        self._off_policy_steps = 0
        self._evaluations = evaluations
        self._due: int | None = None  # trained steps of the weights that are to be measured when they are published
        self._measuring: int | None = None
        self._measured: list[tuple[int, list[float | None]]] = []
        self._step_jobs: tuple[int, list[list[EpisodeJob]]] = (-1, [])
        self._resumed: tuple[int, list[tuple[int, list[EpisodeJob]]]] | None = None
        self._kept: tuple[Path, dict[str, str], int] | None = None  # folder, file by episode, version at that time
        if stage.saved_rollouts is not None:
            self._load(*stage.saved_rollouts)
        self._first_step = stage.step + (self._groups is not None)

    @property
    def empty(self) -> bool:
        """Whether nothing is there to be taken, so that the next step's rollouts have to be begun first."""
        return not self._filled

    def fill(self, off_policy_steps: int) -> None:
        """Publishes what has been learned so far and lets rollouts go on with it.

        off_policy_steps: updates that come before the learner takes what is begun, of synchronous rollouts.
        """
        self._finish_evaluation()
        with self._stage.clock("publish"):
            self._published = self._told = self._fleet.publish()
        self._off_policy_steps = off_policy_steps
        self._filled = True
        version = int(self._published["version"])
        if self._stream is not None:
            self._stream.published(version)
        else:
            self._stream = self._opened(version)
        if self._due is not None:
            params = replace(policy_sampling(self._config), temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
            params = replace(params, max_tokens=self._config.evaluation.max_tokens, return_routes=False)
            self._stream.evaluate(self._evaluations.jobs(self._due), params)
            self._measuring, self._due = self._due, None

    def _opened(self, version: int) -> RolloutStream:
        groups = self._schedule.groups
        next_group, drawn = self._resumed or (self._first_step * groups, [])
        return self._fleet.rollouts.open(
            self._schedule,
            self._jobs,
            policy_sampling(self._config),
            wanted=None if self._synchronous else (self._stage.total_steps - self._stage.step) * groups,
            next_group=next_group,
            version=version,
            drawn=drawn,
            begun=self._stage.session.begun,
            going_on=self._going_on_at(version),
            keep_s=None if self._synchronous else self._config.rollouts.keep_s,
        )

    def _going_on_at(self, version: int) -> dict[str, bytes]:
        """States of episodes that go on, with their versions counted to `version`, which is that of the saved weights.

        What is in no whole file, or of another version of k3rl, is said and played again.
        """
        if self._kept is None:
            return {}
        (folder, states, saved_version), self._kept = self._kept, None
        found, broken = {}, 0
        for name, file in states.items():
            try:
                state = EpisodeState.from_bytes((folder / file).read_bytes())
            except (OSError, BrokenState):
                broken += 1
                continue
            found[name] = state.with_versions(version - saved_version).to_bytes()
        if broken:
            self._stage.session.progress.note(
                f"{self._stage.name}: the states of {broken} episodes cannot be read; these are played again"
            )
        return found

    def take(self) -> RolloutBatch:
        """Waits for the groups of a batch."""
        groups = self._waited_for()
        self._groups = None
        self._filled = not self._synchronous
        return RolloutBatch(groups, self._published["version"], self._off_policy_steps)

    def evaluate(self, trained: int) -> None:
        """Measures the weights after `trained` steps, which are published next."""
        self._due = trained

    def take_evaluations(self, *, last: bool) -> list[tuple[int, list[float | None]]]:
        """(trained steps, reward of each episode or None) of an evaluation that is done, one at a time: a step's
        metrics have room for one. Of all that are left where this step is the `last`.
        """
        if last:
            self._finish_evaluation()
        count = len(self._measured) if last else 1
        taken, self._measured = self._measured[:count], self._measured[count:]
        return taken

    def _finish_evaluation(self) -> None:
        """Waits for an evaluation that is under way: weights must not change under it."""
        if self._measuring is None or self._stream is None:
            return
        with self._stage.clock("wait_for_evaluation"):
            episodes = [episode for group in self._stream.evaluation() for episode in group.episodes]
        self._measured.append((self._measuring, [reward_of(episode) for episode in episodes]))
        self._measuring = None

    def close(self) -> None:
        """Ends what still runs."""
        if self._stream is not None:
            self._fleet.rollouts.close()
            self._stream = None

    def take_metrics(self) -> Accumulator:
        """What the last publication cost and whether engines agreed after it, once."""
        told, self._told = self._told, {}
        return publication_metrics(told)

    def _waited_for(self) -> list[Group]:
        if self._groups is None:
            if self._stream is None or not self._filled:
                raise RuntimeError("the rollout buffer is empty; fill it first")
            self._groups = self._stream.take()
        return self._groups

    def _jobs(self, number: int) -> list[EpisodeJob]:
        """Those of a group. The curriculum draws all of a step when the first of its groups begins."""
        step, place = divmod(number, self._schedule.groups)
        if self._step_jobs[0] != step:
            self._curriculum.skip(self._fleet.rollouts.skipped_families)
            size, sampling = self._config.group_size, self._config.sampling
            drawn = self._curriculum.jobs(step, self._schedule.groups, size, self._stage.name)
            jobs = [replace(j, thinking=sampling.thinking, thinking_effort=sampling.thinking_effort) for j in drawn]
            self._step_jobs = step, [jobs[at : at + size] for at in range(0, len(jobs), size)]
        return self._step_jobs[1][place]

    # ------------------------------------------------------------------------------------------- training states

    def save(self, folder: Path, step: int, tokenizer_hash: str) -> dict[str, Any] | None:
        """JSON that restores the buffer. Synchronous: waits for the groups and writes them into `folder`, durable; and
        for an evaluation, whose weights a resumed run does not have any more.

        None from an empty buffer.
        """
        if not self._filled:
            return None
        if not self._synchronous:
            if self._stream is None:
                return None
            next_group, drawn = self._stream.drawn()
            listed = [[n, [asdict(job) for job in jobs]] for n, jobs in drawn]
            evaluating = self._due if self._measuring is None else self._measuring
            about = {"next_group": next_group, "drawn": listed, "due": evaluating, "measured": self._measured}
            return about | self._save_states(folder)
        writer = TrajectoryWriter(folder, actor="in-flight", tokenizer_hash=tokenizer_hash)
        entry = writer.write(self._waited_for(), generation=step)
        fields = {name: getattr(entry, name) for name in ManifestEntry.__slots__}
        self._finish_evaluation()
        evaluations = {"due": self._due, "measured": self._measured}
        return {"folder": folder.name, "entry": fields, "published": self._published, **evaluations}

    def _save_states(self, folder: Path) -> dict[str, Any]:
        """Writes the states of episodes that can go on, durable; where they are."""
        if self._stream is None or not (states := self._stream.states()):
            return {}
        folder.mkdir(parents=True)
        files = {name: f"{number}.episode" for number, name in enumerate(states)}
        for name, file in files.items():
            write_atomic(folder / file, states[name])
        return {"folder": folder.name, "states": files, "version": int(self._published["version"])}

    def _load(self, parent: Path, saved: Mapping[str, Any]) -> None:
        """The inverse of `save`. Raises TrajectoryError for files that are not those that were written."""
        self._due, self._measured = saved.get("due"), [(trained, got) for trained, got in saved.get("measured", ())]
        if "drawn" in saved:
            drawn = [(number, [_job(fields) for fields in jobs]) for number, jobs in saved["drawn"]]
            self._resumed = saved["next_group"], drawn
            if "states" in saved:
                self._kept = parent / saved["folder"], saved["states"], saved["version"]
            return
        entry = ManifestEntry(**saved["entry"])
        self._groups = read_groups(parent / saved["folder"], entry, routes=entry.routes_file is not None)
        self._published, self._filled = dict(saved["published"]), True
        self._off_policy_steps = self._config.max_staleness


def _job(fields: Mapping[str, Any]) -> EpisodeJob:
    return EpisodeJob(**{**fields, "task": TaskRef(**fields["task"])})
