"""The learner's benchmark says what it measured: one JSON object, and a peer that computes the same function."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "learner.py"
KEYS = {"name", "shape", "regime", "peer", "ours_ms", "peer_ms", "ratio", "floor_ms", "share_of_floor"}


@pytest.fixture(scope="module")
def report() -> dict:
    words = ["--models", "k3-nano", "--tokens", "256", "--length", "64", "--repeats", "1", "--json"]
    words += ["--parts", "step", "eager", "memory", "--variants", "plain", "recompute"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=110, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_report_has_the_keys_of_every_benchmark(report) -> None:
    assert {"machine", "versions", "gpu", "results"} <= report.keys()
    assert all(report["results"][n].keys() >= KEYS for n in range(len(report["results"])))
    assert [row["name"] for row in report["results"]] == [
        *("step", "step", "passes against eager", "step against eager", "memory", "memory")
    ]


def test_parts_of_a_step_are_no_more_than_the_step(report) -> None:
    for row in report["results"][:2]:
        assert row["parts_ms"]["optimizer"] > 0
        assert row["parts_ms"]["backward"] > 0


def test_plain_eager_code_computes_the_same_loss_and_keeps_more(report) -> None:
    row = report["results"][2]
    assert row["loss_difference"] < 1e-3  # float32; a rounding to MXFP8 may fall differently
    assert row["peak_bytes"] < row["peer_peak_bytes"]
    assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"], rel=0.01)


def test_memory_is_within_15_percent_of_the_plan(report) -> None:
    for row in report["results"][4:]:
        assert row["planned_over_measured"] == pytest.approx(1, abs=0.15), row["shape"]
