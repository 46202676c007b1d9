"""Every Triton kernel under the interpreter, each case in its own process (`interpreted.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = ("kda-fixed", "kda-packed", "kda-slow", "kda-saturated", "kda-mixed", "segments")
CASES += ("kda-faults", "kda-lengths", "kda-offsets", "splits")
CASES += ("decode", "decode-deferred", "conv", "norm")
CASES += ("decode-parts",)


def interpret(*arguments: str) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE.parents[1]}:{HERE}",
    }
    run = subprocess.run(
        [sys.executable, HERE / arguments[0], *arguments[1:]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("case", CASES)
def test_kernel_agrees_with_its_reference(case):
    interpret("interpreted.py", case)


@pytest.mark.parametrize("case", ["situ", "mix"])
def test_element_wise_kernels_agree_with_their_references(case):
    interpret("interpreted_elementwise.py", case)


def test_the_largest_logits_are_those_of_every_visible_pair():
    interpret("interpreted_logits.py")
