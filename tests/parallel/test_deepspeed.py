"""DeepSpeed's ZeRO stages take the steps of the native AdamW, and both read each other's training states.

This file run as a script forks two gloo ranks: ADDRESS FOLDER. Both ranks run once, for all tests.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from k3rl.checkpoint import official_tensors
from k3rl.checkpoint.state_writer import StateWriter, restore
from k3rl.checkpoint.train_state import TrainState
from k3rl.config import ConfigError
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy, LossInputs, LossOutput
from k3rl.model import K3Config, K3ForCausalLM, LoraConfig, QuantizationConfig
from k3rl.parallel import (
    DeepSpeedConfig,
    LearnerConfig,
    Mesh,
    NonFiniteStep,
    Trainer,
    TrainerConfig,
    World,
    balanced_shares,
    check_backend,
    make_trainer,
)
from k3rl.parallel.backends import extensions
from k3rl.pipelines.configs import SFTConfig

STEPS, SHORT = 8, 3
ADAMW = TrainerConfig(optimizer="adamw", adamw_lr=3e-4)
DENSE = {f"zero{stage} fp32": DeepSpeedConfig(stage=stage, dtype="fp32") for stage in (1, 2, 3)}
DENSE["zero2 fp32 offload"] = DeepSpeedConfig(stage=2, dtype="fp32", offload_optimizer=True)
HALF = {"zero2 bf16": DeepSpeedConfig(stage=2), "zero3 bf16": DeepSpeedConfig(stage=3)}
EXPERTS = {
    "zero2 experts": DeepSpeedConfig(stage=2, dtype="fp32"),
    "zero3 experts": DeepSpeedConfig(stage=3, dtype="fp32"),
}


def config(experts: bool) -> K3Config:
    """Two layers, one KDA and one MLA; dense and unquantized, or with quantized experts in the second."""
    nano = K3Config.named("k3-nano")
    # Three heads: parameters of an odd length, which two ranks cannot halve.
    layers = replace(nano.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,), num_heads=3)
    small = nano.replace(num_experts=4, num_hidden_layers=2, linear_attn_config=layers)
    if experts:
        return small
    return small.replace(first_k_dense_replace=2, quantization=QuantizationConfig("none", "ceil", "none"))


def model_of(experts: bool, dtype: torch.dtype = torch.float32) -> K3ForCausalLM:
    model = K3ForCausalLM(config(experts), dtype=dtype)
    model.init_weights(3)
    return model


def batch_of(step: int, lengths: tuple[int, ...] = (16, 20, 30)) -> TrainBatch:
    """Three sequences; two ranks get different numbers of micro-batches of at most 30 tokens."""
    rng = np.random.default_rng(step)
    sequences = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= 3
        nothing = np.zeros(length, np.float32)
        sequences.append(TrainSequence(f"s{number}", rng.integers(0, 400, length), mask, nothing, nothing))
    return TrainBatch.pack(sequences)


def losses_of(trainer: Trainer, steps: range, mesh: Mesh | None = None) -> list[float]:
    """The mean loss of each step over all ranks."""
    losses = []
    for step in steps:
        whole = batch_of(step % 4)
        mine = whole if mesh is None else whole.select(balanced_shares(whole.lengths.tolist(), 2)[mesh.world.rank])
        total = torch.tensor(trainer.train(mine, CrossEntropy()).pairs()["loss/mean"], dtype=torch.float64)
        if mesh is not None:
            mesh.world.sum(total)
        losses.append(float(total[0] / total[1]))
    return losses


class Unsteady:
    """Cross entropy; on one rank NaN, in the loss or in its gradient alone."""

    def __init__(self, bad: bool, what: str) -> None:
        self._bad, self._what = bad, what

    def __call__(self, inputs: LossInputs) -> LossOutput:
        if not self._bad:
            return CrossEntropy()(inputs)
        total = inputs.logprobs.sum()
        return LossOutput(total * float("nan") if self._what == "loss" else (total * 0).sqrt(), {})


# ----------------------------------------------------------------------------------------------------- in the ranks


def _zero(mesh: Mesh, settings: DeepSpeedConfig, *, experts: bool = False) -> Trainer:
    budget = ADAMW.replace(micro_batch_tokens=30)
    return make_trainer(model_of(experts), budget, LearnerConfig(backend="deepspeed", deepspeed=settings), mesh)


def _after_a_bad_step(trainer: Trainer, rank: int, what: str) -> list[str]:
    """How a step ends on this rank in which that of rank 0 alone is NaN, and whether the masters moved."""
    before = {name: value.clone() for name, value in trainer.owned_state().items()}
    try:
        trainer.train(batch_of(9, (6, 11)).select([rank]), Unsteady(rank == 0, what))
        ended = "no error"
    except NonFiniteStep as error:
        ended = type(error).__name__
    after = trainer.owned_state()
    return [ended, *(name for name in after if not torch.equal(before[name], after[name]))]


def _rank(rank: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    mesh = Mesh(World(rank, 2, address, timeout_s=100))
    writer = StateWriter(rank, 2, timeout_s=60)
    report: dict = {"losses": {}}
    for name, settings in (DENSE | HALF).items():
        report["losses"][name] = losses_of(_zero(mesh, settings), range(STEPS), mesh)
    for name, settings in EXPERTS.items():
        trainer = _zero(mesh, settings, experts=True)
        report["losses"][name] = losses_of(trainer, range(SHORT), mesh)
        report[f"scored {name}"] = trainer.logprobs(batch_of(5)).tolist()
        heldout = trainer.evaluate(batch_of(5) if rank == 0 else None, CrossEntropy()).pairs()
        report[f"heldout {name}"] = heldout.get("loss/mean")
        report[f"memory {name}"] = trainer.memory()
        report[f"bad step {name}"] = [_after_a_bad_step(trainer, rank, what) for what in ("loss", "gradient")]
        with trainer.whole() as model:
            report[f"weights {name}"] = {n: _digest(value) for n, value in official_tensors(model)}
        writer.save(folder / name.replace(" ", "-") / "step_1", trainer.owned_state(), {}, save_id="a")
        writer.wait()
        back = _zero(mesh, settings, experts=True)
        dist.barrier()
        restore(back, TrainState(folder / "native" / "step_1"), rank)
        report[f"resumed {name}"] = losses_of(back, range(SHORT, 2 * SHORT), mesh)
    (folder / f"report{rank}.json").write_text(json.dumps(report))
    dist.barrier()


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


# -------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """(losses of the native AdamW by kind, trainer after SHORT steps with experts, folder with its state)."""
    folder = tmp_path_factory.mktemp("zero")
    trainer = Trainer(model_of(experts=True), ADAMW)
    losses = {"experts": losses_of(trainer, range(SHORT))}
    writer = StateWriter()
    writer.save(folder / "native" / "step_1", trainer.owned_state(), {}, save_id="a")
    writer.wait()
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        losses[name] = losses_of(Trainer(model_of(False, dtype), ADAMW), range(STEPS))
    return losses, trainer, folder


# What DeepSpeed's sources use of `torch/extension.h`; the rest, torch's C++ frontend, is half of their build.
HEADER = "#include <torch/types.h>\n#include <torch/library.h>\n#include <torch/csrc/utils/pybind.h>\n"


COMPILER = """#!/bin/sh
# {compiler} without optimization, with fewer headers, and with memory so that it need not tidy up.
# An object that it made of the same words in an earlier run of the tests is copied.
object=
for word; do [ "$last" = -o ] && object=$word; last=$word; done
made={kept}/$(printf '%s|' "$@" | sha256sum | cut -c1-32)-${{object##*/}}
case $object in *.o) [ -f "$made" ] && exec cp "$made" "$object" ;; esac
{compiler} -I{headers} "$@" -O0 --param ggc-min-expand=400 --param ggc-min-heapsize=2097152 || exit
case $object in *.o) cp "$object" "$made.$$.tmp" && mv "$made.$$.tmp" "$made" ;; esac
"""


def _quick_compiler(folder: Path, kept: Path) -> Path:
    """A script that stands for the C++ compiler; `kept` is a folder for objects, which outlives the tests."""
    header = folder / "include" / "torch" / "extension.h"
    header.parent.mkdir(parents=True)
    header.write_text(HEADER)
    compiler = os.environ.get("CXX", "c++")
    versions = [metadata.version(name) for name in ("deepspeed", "torch")]
    about = json.dumps([versions, HEADER, subprocess.check_output([compiler, "--version"], text=True)])
    kept = kept / hashlib.sha256(about.encode()).hexdigest()[:16]
    kept.mkdir(exist_ok=True)
    script = folder / "compiler"
    script.write_text(COMPILER.format(compiler=compiler, kept=kept, headers=folder / "include"))
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def ranks(native, pytestconfig):
    """What both ranks report. Their extensions folder is fresh but for the lock of a builder that was killed."""
    _, _, folder = native
    stale = folder / "extensions" / "deepspeed_shm_comm" / "lock"
    stale.parent.mkdir(parents=True)
    stale.touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    compiler = _quick_compiler(folder, pytestconfig.cache.mkdir("deepspeed"))
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "DS_ACCELERATOR": "cpu"}
    environment["CXX"] = str(compiler)
    with open(folder / "output", "wb") as output:
        words = [sys.executable, __file__, address, str(folder)]
        both = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status = both.wait(400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(both.pid, signal.SIGKILL)
    assert status == 0, (folder / "output").read_text()[-4000:]
    return [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(2)]


pytestmark = pytest.mark.timeout(420)  # of which the fixture builds a C++ extension


@pytest.mark.parametrize("name", DENSE)
def test_the_losses_are_those_of_the_native_optimizer(native, ranks, name):
    # summation order, and DeepSpeed's 1e-6 in the clipping factor
    np.testing.assert_allclose(ranks[0]["losses"][name], native[0]["fp32"], rtol=1e-5)


@pytest.mark.parametrize("name", HALF)
def test_the_losses_in_bf16_are_close(native, ranks, name):
    np.testing.assert_allclose(ranks[0]["losses"][name], native[0]["bf16"], rtol=1e-2)


@pytest.mark.parametrize("name", EXPERTS)
def test_quantized_experts_train_the_same_and_both_ranks_agree(native, ranks, name):
    np.testing.assert_allclose(ranks[0]["losses"][name], native[0]["experts"], rtol=1e-5)
    assert ranks[0][f"weights {name}"] == ranks[1][f"weights {name}"]


@pytest.mark.parametrize("name", EXPERTS)
def test_the_bytes_of_the_ranks_are_those_of_the_native_state(native, ranks, name):
    state = native[1].memory()["optimizer"]
    held = [report[f"memory {name}"] for report in ranks]
    # ZeRO-3 cuts each parameter for itself and fills it up to an even length, ZeRO-2 their row as a whole
    assert state <= sum(rank["optimizer"] for rank in held) <= state * 1.01
    share = 0.5 if name.startswith("zero3") else 1.0
    assert held[0]["weights"] == pytest.approx(share * native[1].memory()["weights"], rel=0.1)


@pytest.mark.parametrize("name", EXPERTS)
def test_scores_and_heldout_losses_are_the_native_ones(native, ranks, name):
    _, trainer, _ = native
    for report in ranks:
        differences = np.abs(np.array(report[f"scored {name}"]) - trainer.logprobs(batch_of(5)))
        # The weights differ in the last bits, and now and then an MXFP8 rounding of an activation falls differently.
        assert np.median(differences) < 1e-4
        assert differences.max() < 1e-2
    expected = trainer.evaluate(batch_of(5), CrossEntropy()).pairs()["loss/mean"]
    np.testing.assert_allclose(ranks[0][f"heldout {name}"], expected, rtol=1e-4)
    assert ranks[1][f"heldout {name}"] is None


@pytest.mark.parametrize("name", EXPERTS)
def test_a_nan_on_one_rank_fails_the_step_on_both_and_moves_nothing(ranks, name):
    for report in ranks:
        assert report[f"bad step {name}"] == [["NonFiniteLoss"], ["NonFiniteGradients"]]


@pytest.mark.parametrize("name", EXPERTS)
def test_two_zero_ranks_go_on_from_the_state_of_one_native_process_and_back(native, ranks, name):
    _, _, folder = native
    one = Trainer(model_of(experts=True), ADAMW)
    restore(one, TrainState(folder / "native" / "step_1"))
    straight = losses_of(one, range(SHORT, 2 * SHORT))
    np.testing.assert_allclose(ranks[0][f"resumed {name}"], straight, rtol=1e-4)
    back = Trainer(model_of(experts=True), ADAMW)
    state = TrainState(folder / name.replace(" ", "-") / "step_1")
    assert len(state.rank_extras) == 2
    restore(back, state)
    np.testing.assert_allclose(losses_of(back, range(SHORT, 2 * SHORT)), straight, rtol=1e-4)


def test_an_optimizer_that_needs_whole_matrices_is_refused_at_start_with_the_reason():
    for optimizer in ("per_head_muon", "muon_whole"):
        with pytest.raises(ConfigError, match=r"cannot run on its shards\. Add --trainer.optimizer adamw"):
            check_backend(LearnerConfig(backend="deepspeed"), TrainerConfig(optimizer=optimizer))
    with pytest.raises(ValueError, match="ZeRO lays parameters end to end"):
        SFTConfig(learner=LearnerConfig(backend="deepspeed"))
    assert SFTConfig(learner=LearnerConfig(backend="deepspeed"), trainer=ADAMW).learner.deepspeed.stage == 2
    for refused, says in (
        ({"lora": LoraConfig(rank=2)}, "ZeRO does not know of"),
        ({"capture": "on"}, "no steps of fixed shapes"),
        ({"shard_optimizer": False}, "every ZeRO stage shards the optimizer"),
    ):
        with pytest.raises(ValueError, match=says):
            SFTConfig(learner=LearnerConfig(backend="deepspeed"), trainer=ADAMW.replace(**refused))
    with pytest.raises(ValueError, match="auxiliary_loss is not there"):  # before any actor starts
        SFTConfig(learner=LearnerConfig(backend="deepspeed"), trainer=ADAMW.replace(balance_by="auxiliary_loss"))


def test_a_build_that_takes_too_long_is_ended_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(
        extensions,
        "BUILD",
        "import subprocess; subprocess.run(['sleep', '86399'])",  # as ninja runs the compiler
    )
    before = time.monotonic()
    with (
        extensions.lock_folder(tmp_path, 1) as lock,
        pytest.raises(extensions.BuildFailed, match="not built within 1 s"),
    ):
        extensions.compile_extension(1, tmp_path, lock)
    assert time.monotonic() - before < 20
    while b"sleep\x0086399\x00" in {_command(path) for path in Path("/proc").glob("[0-9]*")}:
        assert time.monotonic() - before < 20, "a process of the build lives on"
        time.sleep(0.1)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def test_a_second_builder_waits_for_the_first_and_not_for_ever(tmp_path):
    with (
        extensions.lock_folder(tmp_path, 1),
        pytest.raises(extensions.BuildFailed, match="another process has been building"),
        extensions.lock_folder(tmp_path, 0.3),
    ):
        pass
    with extensions.lock_folder(tmp_path, 0.3):
        pass


def _both(address: str, folder: Path) -> None:
    """Forks the ranks once everything that they need is imported; fails when one does."""
    for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo"):  # the first compiles as it is imported
        importlib.import_module(name)
    gc.freeze()  # DeepSpeed collects garbage again and again, which would look at all that
    ranks = {}
    for rank in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _rank(rank, address, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        if status != 0:
            sys.exit(f"rank {ranks[child]} ended with status {os.waitstatus_to_exitcode(status)}")
        del ranks[child]


if __name__ == "__main__":
    _both(sys.argv[1], Path(sys.argv[2]))
