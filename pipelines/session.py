"""A session: one attempt at a run with its files, actors and progress, its next attempt after a loss, and its end."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from k3rl.actors import ActorLost, ClusterConfig, Fleet, FleetConfig, start_fleet, start_ray
from k3rl.actors.weight_sync import Canary
from k3rl.config import to_tree
from k3rl.data import AnnotationWriter, SequenceScores, TrainBatch, TrajectoryWriter
from k3rl.envs import make
from k3rl.envs.sandbox import provider_named
from k3rl.parallel import PeerFailed
from k3rl.pipelines.background import Background
from k3rl.pipelines.configs import EnvConfig, QuickstartConfig, StageConfig
from k3rl.pipelines.interrupts import Interrupts
from k3rl.pipelines.kernel_watch import KernelWatch
from k3rl.pipelines.layout import idle_parts
from k3rl.pipelines.start import tokenizer_of
from k3rl.run import MetricsWriter, Progress, Recorder, RunDirectory, RunOptions, check_sinks, open_sinks
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Group, Message

LOG = "driver.log"
_SHOWN = 20  # changed keys
Result = TypeVar("Result")


@dataclass(frozen=True)
class Session:
    """One attempt at a run, open."""

    run: RunDirectory
    metrics: MetricsWriter
    recorder: Recorder
    progress: Progress
    interrupts: Interrupts
    fleet: Fleet
    memory: MemoryWatch
    cluster: ClusterConfig
    tokenizer: Tokenizer
    trajectories: TrajectoryWriter
    background: Background  # writes them
    resume: bool
    restarts: int = 0  # of all actors, in this process
    kernels: KernelWatch | None = None  # on GPUs
    begun: int = 0  # groups with lower numbers were begun by actors that were lost

    def record(self, groups: Sequence[Group], step: int) -> None:
        """Queues every episode for the live stream and begins to write the step's trajectories, whole or not at all.

        Raises what writing those of the step before raised.
        """
        for group in groups:
            for episode in group.episodes:
                self.recorder.episode(episode, step, self.tokenizer.pieces, group=group.id)
        self.background.start(partial(self.trajectories.write, groups, generation=step))

    def annotate(
        self,
        stage: str,
        step: int,
        batches: Sequence[TrainBatch],
        scores: Mapping[str, SequenceScores],
        expert_load: np.ndarray | None,
        version: float,
    ) -> None:
        """Begins to write what the learner adds to the step's episodes. Raises what writing before it raised.

        version: of the weights that the step began with, as `staleness/mean` counts.
        """
        writer = AnnotationWriter(self.run.traces_dir / "annotations", attempt=self.run.info.attempt)
        self.background.start(partial(writer.write, stage, step, batches, scores, expert_load, version))

    def recorded(self) -> None:
        """Returns when what was recorded is on the disk. Raises what writing it raised."""
        self.background.wait()

    def restarted(self) -> Session:
        """The same run as its next attempt, with fresh actors, to go on from the last training state.

        Raises ActorLost where one of these is lost at once; this session may be asked again then.
        """
        self.recorded()
        self.fleet.restart()
        self.run.next_attempt()
        self.progress.log_to(self.run.logs_dir / LOG)
        self.metrics.attempt = self.recorder.attempt = self.run.info.attempt
        fresh = _trajectories(self.run, self.tokenizer)
        return replace(self, trajectories=fresh, resume=True, restarts=self.restarts + 1)


def with_restarts(session: Session, train: Callable[[Session], Result]) -> Result:
    """`train(session)`, again from the newest state after each lost actor, `cluster.restarts` times in a run at most.

    Only lost processes are worth another try: an error that an actor raised would come again, and comes through.
    """
    again = False
    while True:
        try:
            session = session.restarted() if again else session
            return train(session)
        except (ActorLost, PeerFailed) as error:
            if session.fleet.restarts_left == 0:
                raise
            lost = "; ".join(session.fleet.lost_nodes()) or str(error).partition("\n")[0].rstrip(":")
        left = session.fleet.restarts_left - 1
        session.progress.note(f"{lost}; all actors start again and go on from the last state ({left} restarts left)")
        session, again = replace(session, begun=max(session.begun, session.fleet.begun)), True


def _trajectories(run: RunDirectory, tokenizer: Tokenizer) -> TrajectoryWriter:
    folder = run.traces_dir / "trajectories"
    return TrajectoryWriter(folder, actor=f"driver{run.info.attempt}", tokenizer_hash=tokenizer.hash)


@contextmanager
def open_session(pipeline: str, config: StageConfig | QuickstartConfig, options: RunOptions) -> Iterator[Session]:
    """Opens a run directory, starts Ray and the actors, and ends all of them with the block."""
    env = config.rl.env if isinstance(config, QuickstartConfig) else config.env
    check_sinks(config.metrics)
    directory = options.directory(options.preset if options.preset != "default" else pipeline)
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory.create(directory, config, pipeline, options))
        progress = stack.enter_context(Progress())
        progress.log_to(run.logs_dir / LOG)
        about: dict[str, Any] = {"run_id": run.info.id, "attempt": run.info.attempt}
        sinks = open_sinks(config.metrics, run.root, tree=to_tree(config), **about)
        writer = MetricsWriter(run.metrics_path, sinks=sinks, warn=progress.note, **about)
        metrics = stack.enter_context(writer)
        recorder = stack.enter_context(Recorder(run.traces_dir, config_hash=run.info.config_hash, **about))
        beside = stack.enter_context(Background("trajectories"))
        interrupts = stack.enter_context(Interrupts())
        provider_named(
            env.sandbox, **env.sandbox_args
        ).check()  # before anything is started: what is missing is said at once
        if run.changed:
            more = f" and {len(run.changed) - _SHOWN} more" if len(run.changed) > _SHOWN else ""
            progress.note(f"resumed with a changed configuration: {', '.join(run.changed[:_SHOWN])}{more}")
        stages = [config.sft, config.rl, config.distill] if isinstance(config, QuickstartConfig) else [config]
        for text in idle_parts(config.cluster, *stages):
            progress.note(text)
            run.add_note(text)
        progress.note("starting Ray and the actors")
        watch: KernelWatch | None = None
        if "cuda" in (config.cluster.learner_device, config.cluster.rollout_device):
            watch = stack.enter_context(KernelWatch(progress.note))
        stack.enter_context(start_ray(config.cluster))
        memory = stack.enter_context(MemoryWatch())
        first = config.sft if isinstance(config, QuickstartConfig) else config
        tokenizer = tokenizer_of(first.model.start)
        tokenizer.save(run.tokenizer_dir)
        canary = Canary(canary_prompt(env, tokenizer), config.cluster.canary_tolerance)
        max_running = config.evaluation.max_running
        members = stack.enter_context(start_fleet(FleetConfig(config.cluster, env, max_running, config.seed, canary)))
        kept = _trajectories(run, tokenizer)
        opened = Session(
            run,
            metrics,
            recorder,
            progress,
            interrupts,
            members,
            memory,
            config.cluster,
            tokenizer,
            kept,
            beside,
            options.resume,
        )
        yield replace(opened, kernels=watch)


def canary_prompt(env: EnvConfig, tokenizer: Tokenizer) -> list[int]:
    """A fixed prompt of the environment, scored by learner and engine after each switch of weights."""
    task = make(env.name, **env.args).source.get("train", 0, 0)
    return prompt_ids(list(task.messages), tokenizer)


def prompt_ids(messages: list[Message], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation up to and including the generation prefix, without the think channel."""
    return tokenizer.encode_segments(xtml.render(messages, thinking=False))


class MemoryWatch:
    """Samples the resident memory of this process and all its descendants (Ray's daemons and workers)."""

    def __init__(self, every_s: float = 2.0) -> None:
        self.peak_mb = 0.0
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak_mb = max(self.peak_mb, tree_rss_mb())


def tree_rss_mb() -> float:
    """Resident memory of this process and its descendants, in MiB; pages shared between them count once each."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    page = resource.getpagesize()
    total, waiting = 0, [int(Path("/proc/self").resolve().name)]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        except OSError:
            continue
    return total / 2**20
