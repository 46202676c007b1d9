"""Environment, rollout and reward actors as one: jobs in, graded groups out, with patience for what misbehaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from k3rl.actors.calls import wait
from k3rl.actors.dispatcher import Dispatcher
from k3rl.actors.evaluating import Evaluating
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.rollout_actors import Actors
from k3rl.actors.rollout_stream import RolloutStream
from k3rl.actors.schedule import Mode, Schedule
from k3rl.actors.worker_pool import WorkerPool
from k3rl.envs import Breaker, EpisodeState, FaultConfig
from k3rl.run import Accumulator
from k3rl.types import FailureKind, Group, SamplingParams


class RolloutWorkers:
    """`open` a stream of rollouts, or `run` jobs that are there already; one at a time.

    An episode that gets no reward is run again within `faults.retries`; a worker that hangs or dies is replaced, and
    the episodes that ran there are halved until the guilty one stands alone.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        environments: WorkerPool,
        rewards: WorkerPool,
        *,
        env: str = "environment",
        faults: FaultConfig | None = None,
        compares: bool = False,
        timeout_s: float,
        rows: int = 1,
        lost_nodes: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        """engines: rollout actors, which decode `rows` episodes at once, all together. env: the environment's own name;
        a run may have found it by a path. compares: whether rewards depend on the other episodes of a group. timeout_s:
        of a call. lost_nodes: which nodes that had actors of the run answer no more, and what they had."""
        self.engines = list(engines)
        self.env = env
        """The name under which metrics stand."""
        self._environments, self._rewards = environments, rewards
        self._faults = faults or FaultConfig(retries=0)
        self._compares = compares
        self._timeout_s, self._rows, self._lost_nodes = timeout_s, rows, lost_nodes
        self._breaker = Breaker(self._faults, env)
        self._checkpoint: str | None = None
        self._counts: Counter[str] = Counter()
        self._stream: RolloutStream | None = None

    def load(self, checkpoint: str, quantization: Mapping[str, str] | None = None) -> None:
        """Every engine serves this checkpoint, and environments use its tokenizer.

        quantization: what experts are computed with instead of what the checkpoint says (`load_checkpoint`).
        """
        self.loaded(self.start_loading(checkpoint, quantization))

    def start_loading(self, checkpoint: str, quantization: Mapping[str, str] | None = None) -> list[Any]:
        """Begins `load`; `loaded` waits for it."""
        self.close()
        self._checkpoint = checkpoint
        return [actor.load.remote(checkpoint, quantization) for actor in self.engines]

    def loaded(self, started: list[Any]) -> None:
        wait(started, self._timeout_s, "loading a checkpoint into the engines")

    def slow_paths(self) -> list[str]:
        """What of the engines' GPUs runs without kernels, each sentence once."""
        every = wait([actor.slow_paths.remote() for actor in self.engines], self._timeout_s, "asking the engines")
        return list(dict.fromkeys(text for texts in every for text in texts))

    @property
    def skipped_families(self) -> frozenset[str]:
        """Families that are not run any more, because most of their last attempts failed."""
        return frozenset(part for part in self._breaker.open if part is not None)

    def run(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> list[Group]:
        """The graded groups of these jobs, equal in size, in their order. Raises EnvironmentTripped."""
        groups: dict[str, list[EpisodeJob]] = {}
        for job in jobs:
            groups.setdefault(job.group_id, []).append(job)
        if not groups:
            return []
        listed = list(groups.values())
        schedule = Schedule(Mode.SYNCHRONOUS, len(listed), len(listed[0]), retries=self._faults.retries)
        stream = self.open(schedule, listed.__getitem__, sampling, wanted=len(listed))
        try:
            return stream.take()
        finally:
            self.close()

    def open(
        self,
        schedule: Schedule,
        draw: Callable[[int], Sequence[EpisodeJob]],
        sampling: SamplingParams,
        *,
        wanted: int | None = None,
        next_group: int = 0,
        version: int = 0,
        drawn: Iterable[tuple[int, Sequence[EpisodeJob]]] = (),
        begun: int = 0,
        going_on: Mapping[str, bytes] | None = None,
        keep_s: float | None = None,
    ) -> RolloutStream:
        """Begins a stream; see `Dispatcher` for what it is given. Ends the one before.

        going_on: states of episodes of `drawn` that go on from there, by id; keep_s: how often such a state of each
        episode is kept, None for never.
        """
        self.close()
        dispatcher = Dispatcher(
            schedule,
            draw,
            compares=self._compares,
            skipped=lambda family: self._breaker.tripped(family) if family in self._breaker.open else None,
            wanted=wanted,
            next_group=next_group,
            version=version,
            drawn=drawn,
            begun=begun,
            going_on={name: _oldest(state, version) for name, state in (going_on or {}).items()},
        )
        actors = Actors(
            self.engines,
            self._environments,
            self._rewards,
            self.env,
            self._faults,
            timeout_s=self._timeout_s,
            lost_nodes=self._lost_nodes,
        )
        both = Evaluating(dispatcher, self._rows)
        self._stream = RolloutStream(
            actors, both, sampling, self._breaker, self._counts, self._prepare, going_on=going_on, keep_s=keep_s
        )
        return self._stream

    @property
    def begun(self) -> int:
        """Groups with lower numbers than this were begun in the stream that is open; 0 without one."""
        return 0 if self._stream is None else self._stream.drawn()[0]

    def close(self) -> None:
        """Ends the stream, if there is one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def take_metrics(self) -> Accumulator:
        """What went wrong since the last call, counted: retries, replaced actors, attempts without a reward by kind,
        what did not reach the learner, and what engines did."""
        metrics = Accumulator()
        calls = [actor.take_counts.remote() for actor in self.engines]
        engines = wait(calls, self._timeout_s, "asking engines what they did")
        for name in {name for counts in engines for name in counts}:
            metrics.add(f"engine/{name}", sum(counts.get(name, 0) for counts in engines))
        replaced = self._environments.replaced + self._rewards.replaced
        self._environments.replaced = self._rewards.replaced = 0
        lost = self._stream.take_counts() if self._stream is not None else {}
        for name in ("retried", *(f"failed_{kind}" for kind in FailureKind)):
            if self._counts[name] or name == "retried":
                metrics.add(f"env/{self.env}/{name}_attempts", self._counts[name])
        metrics.add(f"env/{self.env}/replaced_actors", replaced)
        metrics.add(f"env/{self.env}/parts_left_out", len(self._breaker.open))
        for name, value in lost.items():
            metrics.add(f"rollout/{name}", value)
        self._counts.clear()
        return metrics

    def _prepare(self, worker: Any) -> Any:
        """What a worker is told before it plays."""
        return None if self._checkpoint is None else worker.set_tokenizer.remote(self._checkpoint)


def _oldest(state: bytes, version: int) -> int:
    """The version of an episode's oldest token, or the one that is served where it has none."""
    oldest = EpisodeState.from_bytes(state).first_version
    return version if oldest is None else oldest
