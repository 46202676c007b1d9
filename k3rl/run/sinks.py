"""Second places for metrics, beside metrics.jsonl: TensorBoard's event files and Weights & Biases."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from k3rl.config import Config, K3Error, MissingResource
from k3rl.run.metrics import Sink
from k3rl.run.redact import redact

_INIT_S, _END_S = 30, 60
_QUEUE = 1024


class MetricsConfig(Config):
    """Where metrics go beside metrics.jsonl, which holds all of them in any case."""

    tensorboard: bool = False
    """Write event files into tensorboard/ of the run directory, a folder for each stage (extra: tensorboard)."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send them to Weights & Biases (extra: wandb), with the key of `wandb login` or WANDB_API_KEY; `offline` keeps
    them in wandb/ of the run directory, for `wandb sync`."""
    wandb_project: str = "k3rl"
    wandb_entity: str | None = None
    """The team or user; None is the default of the key."""


class SinkError(K3Error):
    """Rows did not reach a sink. metrics.jsonl has them."""


def check_sinks(config: MetricsConfig) -> None:
    """Raises MissingResource, naming the extra, when a package is not installed. Imports nothing."""
    for name, asked in (("tensorboard", config.tensorboard), ("wandb", config.wandb != "off")):
        if asked and find_spec(name) is None:
            raise MissingResource(f"metrics.{name} needs a package that is not installed: pip install 'k3rl[{name}]'")


def open_sinks(
    config: MetricsConfig, folder: Path, *, run_id: str, attempt: int, tree: Mapping[str, Any] | None = None
) -> list[Sink]:
    """The sinks that are switched on, for an attempt at the run in `folder`. tree: the run's resolved configuration.

    Raises MissingResource when a package is missing or a service cannot be reached.
    """
    check_sinks(config)
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if config.wandb != "off":
        sinks.append(Apart(WandbSink(config, folder, run_id=run_id, attempt=attempt, tree=tree or {})))
    return sinks


class TensorBoardSink:
    """Event files in a folder for each source. An attempt's rows replace earlier ones from its first step on.

    A row is in its file when `write` returns, values in single precision. Raises MissingResource when the package does
    not import.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary

            # Its EventFileWriter has a thread: a full disk would print that thread's traceback over the progress, and
            # files begun within one second would be read in the wrong order.
            from tensorboard.summary.writer.record_writer import RecordWriter
        except Exception as error:  # of many kinds: a part that is missing, a protobuf of another version
            raise MissingResource(
                f"metrics.tensorboard needs TensorBoard, which does not import: {type(error).__name__}: {error}; "
                "pip install 'k3rl[tensorboard]'"
            ) from None
        self._event, self._session, self._summary, self._writer = Event, SessionLog, Summary, RecordWriter
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._last: dict[str, int] = {}

    def write(self, step: int, source: str, values: Mapping[str, float]) -> None:
        if source not in self._files:
            self._open(source)
        if step <= self._last.get(source, step):
            # Readers drop what they have from this step on, of earlier files too.
            self._append(source, step=step, session_log=self._session(status=self._session.START))
        row = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(source, step=step, summary=self._summary(value=row))
        self._files[source].flush()
        self._last[source] = step

    def close(self) -> None:
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def _open(self, source: str) -> None:
        folder = self._folder / source
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a folder in the order of their names, and look for `tfevents`.
        seconds, rest = divmod(time.time_ns(), 10**9)
        file = open(folder / f"events.out.tfevents.{seconds:010d}.{rest:09d}.k3rl", "xb")  # noqa: SIM115 (see `close`)
        self._files[source] = self._writer(file)
        self._append(source, file_version="brain.Event:2")

    def _append(self, source: str, **content: Any) -> None:
        self._files[source].write(self._event(wall_time=time.time(), **content).SerializeToString())


class WandbSink:
    """One W&B run with the name of the run directory, gone on with by later attempts.

    It is given the metrics and the configuration, and neither code, command line nor console. Offline each attempt is a
    run of its own, since a run that was not sent cannot be gone on with.
    """

    name = "wandb"

    def __init__(
        self, config: MetricsConfig, folder: Path, *, run_id: str, attempt: int, tree: Mapping[str, Any]
    ) -> None:
        online = config.wandb == "online"
        try:
            import wandb

            self._run: Any = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_entity,
                name=folder.resolve().name,
                id=run_id if online else f"{run_id}-{attempt}",
                resume="allow" if online else None,
                mode=config.wandb,
                dir=str(folder),
                config=json.loads(redact(json.dumps(tree))),
                settings={
                    "console": "off",
                    "disable_code": True,
                    "disable_git": True,
                    "init_timeout": _INIT_S,
                    "login_timeout": _INIT_S,
                    "silent": True,
                    "x_disable_meta": True,
                    "x_save_requirements": False,
                },
            )
        except Exception as error:  # of many kinds: no key, no network, a wrong project, a package it needs
            said = redact(str(error)).strip() or type(error).__name__
            remedy = "`wandb login`, or --metrics.wandb offline and `wandb sync` later"
            raise MissingResource(
                f"metrics.wandb is {config.wandb!r} and W&B does not start: {said}; {remedy}"
            ) from None
        self._sources: set[str] = set()

    def write(self, step: int, source: str, values: Mapping[str, float]) -> None:
        if source not in self._sources:
            # Sources report the same step at different times, so the step is a value and not W&B's rising counter.
            self._run.define_metric(f"{source}/step", hidden=True)
            self._run.define_metric(f"{source}/*", step_metric=f"{source}/step")
            self._sources.add(source)
        self._run.log({f"{source}/{name}": value for name, value in values.items()} | {f"{source}/step": step})

    def close(self) -> None:
        self._run.finish()


class Apart:
    """A sink with a bounded queue and a thread of its own, so that a slow service holds nothing up.

    What the sink raises is raised by the next `write`, or by `close`.
    """

    def __init__(self, sink: Sink, *, capacity: int = _QUEUE, end_s: float = _END_S) -> None:
        self.name = sink.name
        self._sink, self._end_s = sink, end_s
        self._queue: queue.Queue[tuple[int, str, dict[str, float]]] = queue.Queue(capacity)
        self._dropped = 0
        self._error: Exception | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"metrics-{sink.name}", daemon=True)
        self._thread.start()

    def write(self, step: int, source: str, values: Mapping[str, float]) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._queue.put_nowait((step, source, dict(values)))
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Waits for what is queued, for `end_s` at most. Raises SinkError for rows that were not taken."""
        self._ending.set()
        self._thread.join(self._end_s)
        if self._thread.is_alive():
            raise SinkError(
                f"it did not end within {self._end_s:g} s; {self._queue.qsize() + self._dropped} rows are left"
            )
        if self._error is not None:
            raise self._error
        if self._dropped:
            raise SinkError(f"it was too slow for {self._dropped} rows")

    def _work(self) -> None:
        try:
            while True:
                try:
                    row = self._queue.get(timeout=0.1)
                except queue.Empty:
                    if self._ending.is_set():
                        break
                    continue
                self._sink.write(*row)
        except Exception as error:  # whatever a service's client raises, training goes on without it
            self._error = error
        try:
            self._sink.close()
        except Exception as error:
            self._error = self._error or error
