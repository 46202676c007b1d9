"""Everything a pipeline works with while it runs: files, actors, progress, and how it ends."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3rl.actors.cluster import ClusterConfig, cluster
from k3rl.actors.fleet import Fleet, fleet
from k3rl.config import Config, to_tree
from k3rl.data.trajectories import TrajectoryWriter
from k3rl.envs import make
from k3rl.envs.sandbox import provider_named
from k3rl.pipelines.configs import EnvConfig
from k3rl.pipelines.interrupts import Interrupts
from k3rl.run import MetricsWriter, Recorder, RunDirectory, RunOptions
from k3rl.run.progress import Progress
from k3rl.run.sinks import MetricsConfig, check_sinks, open_sinks
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Message

LOG = "driver.log"
_SHOWN = 20  # changed keys


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
    tokenizer: Tokenizer
    trajectories: TrajectoryWriter
    resume: bool
    restarts: int = 0  # of all actors, in this process

    def restarted(self) -> Session:
        """The same run as its next attempt, with fresh actors, to go on from the last training state."""
        self.fleet.restart()
        self.run.next_attempt()
        self.progress.log_to(self.run.logs_dir / LOG)
        self.metrics.attempt = self.recorder.attempt = self.run.info.attempt
        fresh = _trajectories(self.run, self.tokenizer)
        return replace(self, trajectories=fresh, resume=True, restarts=self.restarts + 1)


def _trajectories(run: RunDirectory, tokenizer: Tokenizer) -> TrajectoryWriter:
    folder = run.traces_dir / "trajectories"
    return TrajectoryWriter(folder, actor=f"driver{run.info.attempt}", tokenizer_hash=tokenizer.hash)


@contextmanager
def session(
    pipeline: str,
    config: Config,
    options: RunOptions,
    *,
    env: EnvConfig,
    cluster_config: ClusterConfig,
    metrics_config: MetricsConfig,
    max_running: int,
    seed: int,
) -> Iterator[Session]:
    """Opens a run directory, starts Ray and the actors, and ends all of them with the block."""
    check_sinks(metrics_config)
    directory = options.directory(options.preset if options.preset != "default" else pipeline)
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory.create(directory, config, pipeline, options))
        progress = stack.enter_context(Progress())
        progress.log_to(run.logs_dir / LOG)
        about: dict[str, Any] = {"run_id": run.info.id, "attempt": run.info.attempt}
        sinks = open_sinks(metrics_config, run.root, tree=to_tree(config), **about)
        writer = MetricsWriter(run.metrics_path, sinks=sinks, warn=progress.note, **about)
        metrics = stack.enter_context(writer)
        recorder = stack.enter_context(Recorder(run.traces_dir, config_hash=run.info.config_hash, **about))
        interrupts = stack.enter_context(Interrupts())
        provider_named(env.sandbox).check()  # before anything is started: what is missing is said at once
        if run.changed:
            more = f" and {len(run.changed) - _SHOWN} more" if len(run.changed) > _SHOWN else ""
            progress.note(f"resumed with a changed configuration: {', '.join(run.changed[:_SHOWN])}{more}")
        progress.note("starting Ray and the actors")
        stack.enter_context(cluster(cluster_config))
        memory = stack.enter_context(MemoryWatch())
        members = stack.enter_context(
            fleet(
                cluster_config,
                env=env.name,
                env_args=env.args,
                sandbox=env.sandbox,
                max_running=max_running,
                seed=seed,
                faults=env.faults,
                canary_prompt=canary_prompt(env),
            )
        )
        tokenizer = Tokenizer.builtin()
        kept = _trajectories(run, tokenizer)
        yield Session(run, metrics, recorder, progress, interrupts, members, memory, tokenizer, kept, options.resume)


def canary_prompt(env: EnvConfig) -> list[int]:
    """A fixed prompt of the environment, scored by learner and engine after each switch of weights."""
    task = make(env.name, **env.args).source.get("train", 0, 0)
    return prompt_ids(list(task.messages), Tokenizer.builtin())


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
