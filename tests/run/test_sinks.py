"""Second places for metrics: what TensorBoard and W&B are given, and that neither can harm a run."""

from __future__ import annotations

import itertools
import math
import resource
import sys
import threading
import time
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.config import MissingResource
from k3rl.run import MetricsWriter, read_metrics, series
from k3rl.run.metrics import Sink
from k3rl.run.sinks import Apart, MetricsConfig, check_sinks, open_sinks

TENSORBOARD = MetricsConfig(tensorboard=True)
WANDB = MetricsConfig(wandb="online", wandb_project="mine")


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([1e300, -1e39, 2.0**40])
rows = st.dictionaries(st.sampled_from(["loss/mean", "reward/ENV/mean", "größe/µ"]), numbers, max_size=3)
attempts = st.lists(st.tuples(st.integers(0, 300), st.lists(rows, min_size=1, max_size=4)), min_size=1, max_size=4)


@settings(max_examples=25)
@given(attempts)
def test_tensorboard_shows_what_the_file_of_metrics_holds_after_any_attempts(shown_by_tensorboard, attempts):
    with TemporaryDirectory() as name:
        root = Path(name)
        for number, (first, values) in enumerate(attempts, 1):
            sinks = open_sinks(TENSORBOARD, root, run_id="r", attempt=number)
            with MetricsWriter(root / "metrics.jsonl", attempt=number, sinks=sinks) as writer:
                for step, row in enumerate(values, first):
                    writer.write(step, "rl", row)
        kept = read_metrics(root / "metrics.jsonl")
        shown = shown_by_tensorboard(root / "tensorboard" / "rl")
    names = {name for row in kept for name in row} & {"loss/mean", "reward/ENV/mean", "größe/µ"}
    assert shown.keys() == names
    for name in names:
        ours = series(kept, name)
        assert [step for step, _ in shown[name]] == [step for step, _ in ours]
        with np.errstate(over="ignore"):
            single = np.array([value for _, value in ours]).astype(np.float32)
        np.testing.assert_array_equal(np.array([value for _, value in shown[name]]), single)


def test_actors_that_start_again_in_one_process_go_over_their_last_steps(shown_by_tensorboard, tmp_path):
    sinks = open_sinks(TENSORBOARD, tmp_path, run_id="r", attempt=1)
    with MetricsWriter(tmp_path / "metrics.jsonl", sinks=sinks) as writer:
        for step, value in ((0, 1.0), (1, 2.0), (2, 3.0), (1, 4.0)):
            writer.write(step, "sft", {"loss/mean": value})
    assert shown_by_tensorboard(tmp_path / "tensorboard" / "sft") == {"loss/mean": [(0, 1.0), (1, 4.0)]}


def test_a_sink_that_fails_is_told_once_and_loses_nothing_of_the_file(tmp_path):
    notes: list[str] = []
    sinks = open_sinks(TENSORBOARD, tmp_path, run_id="r", attempt=1)
    with MetricsWriter(tmp_path / "metrics.jsonl", sinks=sinks, warn=notes.append) as writer:
        writer.write(0, "rl", {"loss/mean": 1.0})
        (tmp_path / "tensorboard" / "distill").write_text("a file where a folder should be")
        for step in range(3):
            writer.write(step, "distill", {"loss/mean": float(step)})
    (note,) = notes
    assert note.startswith("metrics no longer go to tensorboard: ")
    assert str(tmp_path / "metrics.jsonl") in note
    assert series(read_metrics(tmp_path / "metrics.jsonl"), "loss/mean", "distill") == [(0, 0.0), (1, 1.0), (2, 2.0)]


class FullDisk:
    """A sink on a disk that takes no more than `limit` bytes of a file."""

    def __init__(self, sink: Sink, limit: int) -> None:
        self.name, self._sink, self._limit = sink.name, sink, limit

    def write(self, step, source, values):
        self._limited(lambda: self._sink.write(step, source, values))

    def close(self):
        self._limited(self._sink.close)

    def _limited(self, work):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._limit, hard))
        try:
            work()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_is_one_note_and_rows_before_it_are_shown(shown_by_tensorboard, tmp_path, capfd):
    notes: list[str] = []
    (sink,) = open_sinks(TENSORBOARD, tmp_path, run_id="r", attempt=1)
    with MetricsWriter(tmp_path / "m.jsonl", sinks=[FullDisk(sink, 1000)], warn=notes.append) as writer:
        for step in range(4):
            writer.write(step, "rl", {"loss/mean": float(step)})
        at_once = shown_by_tensorboard(tmp_path / "tensorboard" / "rl")["loss/mean"]
        for step in range(4, 100):
            writer.write(step, "rl", {"loss/mean": float(step)})
    (note,) = notes
    assert note.startswith("metrics no longer go to tensorboard: OSError: ")
    assert capfd.readouterr() == ("", "")
    assert at_once == [(step, float(step)) for step in range(4)]
    shown = shown_by_tensorboard(tmp_path / "tensorboard" / "rl")["loss/mean"]
    assert 4 < len(shown) < 100
    assert shown == [(step, float(step)) for step in range(len(shown))]
    assert len(read_metrics(tmp_path / "m.jsonl")) == 100


def test_a_record_that_a_kill_cut_short_costs_nothing_but_its_own_row(shown_by_tensorboard, tmp_path):
    folder = tmp_path / "tensorboard" / "rl"
    for attempt in (1, 2):
        (sink,) = open_sinks(TENSORBOARD, tmp_path, run_id="r", attempt=attempt)
        for step in range(3):
            sink.write(3 * attempt + step, "rl", {"loss/mean": float(attempt)})
        sink.close()
        if attempt == 1:
            (path,) = folder.iterdir()
            path.write_bytes(path.read_bytes()[:-5])
    assert len(list(folder.iterdir())) == 2
    assert shown_by_tensorboard(folder) == {"loss/mean": [(3, 1.0), (4, 1.0), (6, 2.0), (7, 2.0), (8, 2.0)]}


@pytest.mark.parametrize(("config", "extra"), [(TENSORBOARD, "tensorboard"), (WANDB, "wandb")])
def test_a_missing_package_names_the_extra_before_anything_is_begun(config, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    check_sinks(MetricsConfig())
    with pytest.raises(MissingResource, match=rf"k3rl\[{extra}\]"):
        check_sinks(config)


def test_a_tensorboard_that_does_not_import_names_the_extra_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingResource, match=r"event_pb2.*k3rl\[tensorboard\]"):
        open_sinks(TENSORBOARD, tmp_path, run_id="r", attempt=1)


# ------------------------------------------------------------------------------------------------- W&B


class FakeRun:
    """What `wandb.init` gives, as far as a sink calls it."""

    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[tuple] = []
        self._fails_at = fails_at

    def _called(self, name: str, *values: object) -> None:
        self.calls.append((name, *values))
        if name == self._fails_at:
            raise ConnectionError("no route")

    def define_metric(self, name: str, step_metric: str | None = None, *, hidden: bool | None = None) -> None:
        self._called("define_metric", name, step_metric, hidden)

    def log(self, data: dict, step: int | None = None, commit: bool | None = None) -> None:
        self._called("log", data)

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self._called("finish")


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package: `init` takes what W&B's takes, `run` is what it gives, `given` what it was told."""
    module = types.ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.run = FakeRun()

    def init(*, entity=None, project=None, dir=None, id=None, name=None, config=None, mode=None, resume=None,
             settings=None):  # fmt: skip
        module.given = dict(locals())
        if isinstance(module.run, Exception):
            raise module.run
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_values_by_source_with_the_step_as_a_value(wandb, tmp_path):
    sinks = open_sinks(WANDB, tmp_path / "quick", run_id="abc", attempt=2)
    with MetricsWriter(tmp_path / "m.jsonl", sinks=sinks) as writer:
        writer.write(3, "rl", {"loss/mean": 0.5})
        writer.write(4, "rl", {"loss/mean": 0.25})
    assert wandb.run.calls == [
        ("define_metric", "rl/step", None, True),
        ("define_metric", "rl/*", "rl/step", None),
        ("log", {"rl/loss/mean": 0.5, "rl/step": 3}),
        ("log", {"rl/loss/mean": 0.25, "rl/step": 4}),
        ("finish",),
    ]
    given = wandb.given
    assert (given["project"], given["name"], given["id"], given["resume"]) == ("mine", "quick", "abc", "allow")
    open_sinks(WANDB.replace(wandb="offline"), tmp_path, run_id="abc", attempt=2)[0].close()
    assert (wandb.given["mode"], wandb.given["id"], wandb.given["resume"]) == ("offline", "abc-2", None)


def test_wandb_is_not_told_secrets_code_or_command(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("HUB_API_KEY", "canary-secret-17")
    tree = {"env": {"args": {"url": "https://me:pw@host", "key": "canary-secret-17"}}}
    open_sinks(WANDB, tmp_path, run_id="abc", attempt=1, tree=tree)[0].close()
    assert wandb.given["config"] == {"env": {"args": {"url": "https://***@host", "key": "***"}}}
    assert {"disable_code": True, "disable_git": True, "x_disable_meta": True}.items() <= wandb.given[
        "settings"
    ].items()


def test_a_wandb_that_does_not_start_says_what_to_do(wandb, tmp_path):
    wandb.run = RuntimeError("No API key configured. Use `wandb login` to log in.")
    with pytest.raises(MissingResource, match=r"No API key configured.*--metrics\.wandb offline"):
        open_sinks(WANDB, tmp_path, run_id="abc", attempt=1)


@pytest.mark.parametrize(("fails_at", "said"), [("log", "no longer go to wandb"), ("finish", "ending wandb failed")])
def test_a_wandb_that_is_lost_is_told_once_and_training_goes_on(wandb, fails_at, said, tmp_path):
    wandb.run, notes = FakeRun(fails_at), []
    sinks = open_sinks(WANDB, tmp_path, run_id="abc", attempt=1)
    with MetricsWriter(tmp_path / "m.jsonl", sinks=sinks, warn=notes.append) as writer:
        for step in itertools.count():
            writer.write(step, "rl", {"loss/mean": 0.5})
            if notes or step == 100:
                break
            time.sleep(0.01 if fails_at == "log" else 0)
        last = step
    (note,) = notes
    assert said in note
    assert "ConnectionError: no route" in note
    assert len(read_metrics(tmp_path / "m.jsonl")) == last + 1
    assert wandb.run.calls[-1] == ("finish",)


class Stuck:
    """A service that does not answer."""

    name = "stuck"

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def write(self, step, source, values):
        self.go_on.wait(20)

    def close(self):
        pass


def test_a_service_that_hangs_holds_up_neither_a_step_nor_the_end(tmp_path):
    stuck, notes = Stuck(), []
    sink = Apart(stuck, capacity=4, end_s=0.2)
    began = time.monotonic()
    with MetricsWriter(tmp_path / "m.jsonl", sinks=[sink], warn=notes.append) as writer:
        for step in range(50):
            writer.write(step, "rl", {"loss/mean": math.pi})
    assert time.monotonic() - began < 10  # of the 20 s that it would hang; the end waits 0.2 s
    stuck.go_on.set()
    (note,) = notes
    assert "did not end within 0.2 s" in note
    assert len(read_metrics(tmp_path / "m.jsonl")) == 50
