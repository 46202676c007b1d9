"""Ranks that share a batch take the step that one process takes, and a failing rank fails all of them.

This file run as a script is one rank: RANK SIZE ADDRESS FOLDER.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy, LossInputs, LossOutput
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import DataParallel, PeerFailed, Trainer, TrainerConfig, deal

STEPS = 2


def _batch(step: int) -> TrainBatch:
    rng = np.random.default_rng(step)
    sequences = []
    for number, length in enumerate((9, 17, 30)):
        mask = np.arange(length) >= 3
        nothing = np.zeros(length, np.float32)
        sequences.append(TrainSequence(f"s{number}", rng.integers(0, 400, length), mask, nothing, mask.astype("f4")))
    return TrainBatch.pack(sequences)


def _trainer(group: DataParallel | None) -> Trainer:
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4), dtype=torch.float64)
    model.init_weights(3)
    return Trainer(model, TrainerConfig(), group)


def _failing(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.logprobs.sum() * float("inf"), {})


def _rank(rank: int, size: int, address: str, folder: str) -> None:
    """Two good steps, then one in which only rank 0's loss fails; leaves its state and how the last step ended."""
    torch.set_num_threads(1)
    group = DataParallel(rank, size, address, timeout_s=60)
    trainer = _trainer(group)
    for step in range(STEPS):
        whole = _batch(step)
        members = deal(whole.lengths.tolist(), size)[rank]
        trainer.train(whole.select(members) if members else None, CrossEntropy())
    save_file(trainer.state_tensors(), f"{folder}/rank{rank}.safetensors")
    try:
        whole = _batch(9)
        trainer.train(whole.select([rank % 3]), _failing if rank == 0 else CrossEntropy())
        outcome = "no error"
    except Exception as error:
        outcome = type(error).__name__
    Path(folder, f"rank{rank}.txt").write_text(outcome)
    group.close()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [str(request.param), address, str(folder)]
    workers = [subprocess.Popen([sys.executable, __file__, str(rank), *words]) for rank in range(request.param)]
    assert [worker.wait(100) for worker in workers] == [0] * request.param
    return request.param, folder


def test_ranks_hold_the_state_that_one_process_reaches(ranks):
    size, folder = ranks
    alone = _trainer(None)
    for step in range(STEPS):
        alone.train(_batch(step), CrossEntropy())
    expected = alone.state_tensors()
    states = [load_file(folder / f"rank{rank}.safetensors") for rank in range(size)]
    for name, value in expected.items():
        for state in states:
            assert torch.equal(state[name], states[0][name]), name  # ranks never drift apart
        if value.is_floating_point():
            # float64 sums in another order, amplified by Newton-Schulz on small gradients
            torch.testing.assert_close(states[0][name], value, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(states[0][name], value), name


def test_a_rank_that_fails_fails_the_step_on_every_rank(ranks):
    size, folder = ranks
    outcomes = [(folder / f"rank{rank}.txt").read_text() for rank in range(size)]
    assert outcomes == ["NonFiniteLoss"] + [PeerFailed.__name__] * (size - 1)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
