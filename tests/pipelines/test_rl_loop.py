"""The algorithm in one process, as a reader starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from k3rl.checkpoint import load_checkpoint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"


def test_the_example_warms_up_trains_and_saves_the_policy(tmp_path):
    words = ["--warm-steps", "2", "--steps", "2", "--groups", "2", "--group-size", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLE), *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^rl +\d  reward [\d.]+ of 4 ", done.stdout, re.MULTILINE)) == 2, "all four are graded"
    assert load_checkpoint(tmp_path / "out").config.num_hidden_layers > 0
