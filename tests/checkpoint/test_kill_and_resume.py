"""Runs killed with SIGKILL at any point, writes included, go on to the end of a run that nobody killed.

This file run as a script is a server that has imported everything and forks a process for each run: one JSON line in
(ranks, steps, when to kill, folder), one line out (how each rank ended).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import k3rl.checkpoint.replace as replace_module
import k3rl.checkpoint.train_state as train_state
from k3rl.checkpoint.state_writer import StateWriter, restore
from k3rl.checkpoint.train_state import TrainState, clear_unfinished, latest_train_state
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import Mesh, Trainer, TrainerConfig, World, balanced_shares

STEPS, SAVE_EVERY, KILLS = 40, 2, 10
FILE_CALLS = 16  # of one save: flushes, renames and the shard itself


def tiny() -> K3Config:
    nano = K3Config.named("k3-nano")
    layers = replace(nano.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,))
    return nano.replace(num_experts=4, num_hidden_layers=2, linear_attn_config=layers)


def batch_of(step: int) -> TrainBatch:
    rng = np.random.default_rng(step)
    sequences = []
    for number, length in enumerate((6, 11)):
        mask = np.arange(length) >= 3
        nothing = np.zeros(length, np.float32)
        sequences.append(TrainSequence(f"s{number}", rng.integers(0, 400, length), mask, nothing, mask.astype("f4")))
    return TrainBatch.pack(sequences)


class Killer:
    """Ends its process with SIGKILL at the n-th step or the n-th file call, whichever it was told to count."""

    def __init__(self, what: str, number: int) -> None:
        self._what, self._left = what, number
        for module, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (train_state, "save_file")):
            setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call):
        def counted(*args):
            self.happens("file call")
            return call(*args)

        return counted

    def happens(self, what: str) -> None:
        self._left -= what == self._what
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, order: dict) -> None:
    """One rank of one run, from its newest state to the last step."""
    torch.set_num_threads(1)
    mesh = Mesh(World(rank, order["ranks"], order["address"], timeout_s=60))
    model = K3ForCausalLM(tiny(), dtype=getattr(torch, order["dtype"]))
    model.init_weights(3)
    trainer = Trainer(model, TrainerConfig(), mesh)
    folder, done = Path(order["folder"]), 0
    if (newest := latest_train_state(folder)) is not None:
        done = restore(trainer, TrainState(newest), rank)["step"]
    writer = StateWriter(rank, order["ranks"], timeout_s=60)
    killer = Killer(*order["kill"]) if order["kill"] else None
    for step in range(done, order["steps"]):
        whole = batch_of(step)
        members = balanced_shares(whole.lengths.tolist(), order["ranks"])[rank]
        trainer.train(whole.select(members) if members else None, CrossEntropy())
        if killer:
            killer.happens("step")
        writer.check()
        if (step + 1) % SAVE_EVERY == 0 and (order["save"] or step + 1 == order["steps"]):
            name = f"step_{step + 1}"
            writer.save(folder / name, trainer.owned_state(), {"step": step + 1}, save_id=order["save_id"])
    writer.wait()


def serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for rank in range(order["ranks"]):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    train(rank, order)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


class Runs:
    """The server, and how to give it orders."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._count = 0

    def run(self, folder: Path, steps: int, *, ranks: int = 1, kill=None, save=True, dtype="float32") -> list[int]:
        folder.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._count += 1
        order = {"folder": str(folder), "steps": steps, "ranks": ranks, "kill": kill, "save": save, "dtype": dtype}
        order |= {"address": address, "save_id": str(self._count)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def runs():
    server = Runs()
    yield server
    server.close()


def final(folder: Path) -> dict[str, torch.Tensor]:
    state = TrainState(latest_train_state(folder))
    return {name: value for name, value in state.tensors().items() if not name.startswith("rng/")}


@pytest.fixture(scope="module")
def uninterrupted(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert runs.run(folder, STEPS, save=False) == [0]
    return final(folder)


def test_a_run_killed_ten_times_ends_with_the_bits_of_one_that_was_not(runs, uninterrupted, tmp_path):
    draw = random.Random(6)
    kills = [("step", draw.randint(3, 6)) for _ in range(4)]
    kills += [("file call", draw.randint(1, 2 * FILE_CALLS)) for _ in range(KILLS - len(kills))]
    draw.shuffle(kills)
    torn = 0
    for kill in kills:
        before = latest_train_state(tmp_path)
        assert runs.run(tmp_path, STEPS, kill=kill) == [-signal.SIGKILL]
        torn += bool(list(tmp_path.glob(".step_*.writing")))
        newest = latest_train_state(tmp_path)
        if newest is None:
            assert before is None
            continue
        TrainState(newest).verify()  # whatever is the latest is whole, at once and without a repair
    assert torn, "no kill fell into a write"
    clear_unfinished(tmp_path)
    assert runs.run(tmp_path, STEPS) == [0]
    got = final(tmp_path)
    assert got.keys() == uninterrupted.keys()
    assert [name for name in got if not torch.equal(got[name], uninterrupted[name])] == []


@pytest.mark.parametrize(("first", "then"), [(3, 1), (1, 2)])
def test_a_run_that_was_killed_goes_on_with_another_number_of_ranks(runs, tmp_path, first, then):
    assert runs.run(tmp_path / "alone", 6, save=False, dtype="float64") == [0]
    assert runs.run(tmp_path / "moved", 6, ranks=first, kill=("step", 5), dtype="float64") == [-signal.SIGKILL] * first
    assert len(TrainState(latest_train_state(tmp_path / "moved")).rank_extras) == first
    clear_unfinished(tmp_path / "moved")
    assert runs.run(tmp_path / "moved", 6, ranks=then, dtype="float64") == [0] * then
    alone, moved = final(tmp_path / "alone"), final(tmp_path / "moved")
    assert alone.keys() == moved.keys()
    for name, value in alone.items():
        # float64 sums in another order, amplified by Newton-Schulz on small gradients
        torch.testing.assert_close(moved[name], value, rtol=1e-6, atol=1e-8)


def test_the_file_calls_of_a_save_are_counted_where_the_writer_makes_them():
    assert replace_module.os is os
    assert train_state.os is os


if __name__ == "__main__":
    serve()
