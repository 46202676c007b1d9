"""Runs of the real command, small: a real Ray, real sandboxes, real files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = """
[metrics]
tensorboard = true
[cluster]
object_store_mb = 200
rollout_actors = 1
environment_actors = 1
reward_actors = 1
[sft]
max_steps = 6
check_every = 2
decay_steps = 2
batch_size = 16
demonstrations = 400
heldout_examples = 16
save_every = 2
[rl]
steps = 2
batch_size = 16
group_size = 4
[rl.trainer]
expert_parallel = 2
[distill]
steps = 2
batch_size = 8
[distill.trainer]
shard_frozen = 2
[distill.trainer.lora]
rank = 4
[evaluation]
n = 16
n_family = 4
"""

SMALL_SFT = (
    *("sft", "--max-steps", "8", "--decay-steps", "0", "--batch-size", "16", "--demonstrations", "200"),
    *("--cluster.rollout-actors", "1", "--cluster.environment-actors", "1", "--cluster.reward-actors", "1"),
    *("--heldout-examples", "8", "--check-every", "4", "--evaluation.n", "4", "--evaluation.n-family", "0"),
)


class Command:
    """The `k3rl` command in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        self.environment.pop("RAY_ADDRESS", None)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "k3rl", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0, timeout: float = 240) -> tuple[str, str]:
        """(standard output, standard error) of a command that must end with `code`."""
        process = self.start(*words)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == code, f"exit {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
        return out, err

    def json(self, *words: str) -> dict:
        out, _ = self.run(*words, "--json")
        return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A TOML file that makes the quickstart small."""
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def command(tmp_path_factory) -> Command:
    return Command(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def small_sft() -> tuple[str, ...]:
    """The words of a short SFT run."""
    return SMALL_SFT


def _descendants(parent: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                    int(entry.name)
                )
            except OSError:
                continue
    found: set[int] = set()
    waiting = [parent]
    while waiting:
        fresh = set(children.get(waiting.pop(), ())) - found
        found |= fresh
        waiting += fresh
    return found


@pytest.fixture(scope="session")
def descendants() -> Callable[[int], set[int]]:
    """A function from a process id to the ids of all processes below it."""
    return _descendants
