"""`k3rl submit` runs the same words as a Ray job on a cluster that is up, with token authentication."""

from __future__ import annotations

import json
import secrets

import pytest

pytestmark = pytest.mark.timeout(400)  # a fixture is several runs of the command


def test_the_job_runs_to_its_end_and_its_output_is_followed(submitted):
    done, run = submitted
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["steps"] == 8


def test_the_token_is_nowhere_in_the_run(submitted, head):
    _, run = submitted
    token = head[1]["RAY_AUTH_TOKEN"].encode()
    assert [path for path in run.rglob("*") if path.is_file() and token in path.read_bytes()] == []


def test_a_wrong_token_is_a_clear_refusal_and_bad_words_are_refused_before_they_leave(submit, tmp_path):
    done = submit(tmp_path, "sft", "--max-steps", "2", RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert done.returncode == 3, done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
    done = submit(tmp_path, "sft", "--max-stepz", "2")
    assert done.returncode == 2
    assert "max-steps" in done.stderr or "max_steps" in done.stderr
