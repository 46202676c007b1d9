"""`k3rl export --step`: a training state becomes what its run would have written at that step."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from k3rl.actors.learner import LearnerActor
from k3rl.checkpoint import load_checkpoint
from k3rl.checkpoint.train_state import TrainState, commit, write_shard
from k3rl.cli import main
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, LoraConfig
from k3rl.numerics import mx
from k3rl.parallel import TrainerConfig

TINY = K3Config.named("k3-nano").replace(num_experts=4)


def _batch(seed: int) -> TrainBatch:
    rng, mask = np.random.default_rng(seed), np.arange(12) > 3
    return TrainBatch.pack([TrainSequence("s", rng.integers(0, 400, 12), mask, np.zeros(12, "f4"), mask.astype("f4"))])


def _learner(run: Path, **config) -> tuple[LearnerActor, Path]:
    """A learner that saved its state after two steps, wrote its export then, and went on."""
    learner = LearnerActor(1)
    learner.create(TINY.to_dict(), TrainerConfig(micro_batch_tokens=64, **config), seed=5)
    for step in range(3):
        learner.train([_batch(step)], CrossEntropy())
        if step == 1:
            learner.save_state(str(run / "checkpoints" / "sft" / "step_2"), {"step": 2}, "a")
            learner.state_saved()
            if learner.trainer.model.adapter is None:
                learner.save_checkpoint(str(run / "then"), {"stage": "sft", "steps": 2})
            else:
                learner.save_adapter(str(run / "then"), str(run / "base"), {"stage": "sft", "steps": 2})
    return learner, run / "then"


def _stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder, and `then`, its export at step 2."""
    folder = tmp_path_factory.mktemp("run")
    _learner(folder)
    return folder


def test_a_state_is_exported_as_the_run_wrote_it_at_that_step(run, tmp_path, capsys):
    words = [str(run), str(tmp_path / "out"), "--step", "latest", "--stage", "sft", "--json"]
    assert main(["export", *words]) == 0
    assert '"tensors":' in capsys.readouterr().out
    assert _stored(tmp_path / "out") == _stored(run / "then")
    assert (tmp_path / "out" / "config.json").read_bytes() == (run / "then" / "config.json").read_bytes()


def test_blocks_that_training_left_alone_keep_the_bytes_of_the_start(tmp_path):
    """The start stores some experts by scales that are twice as large as ours, with elements of 0, 1 and 2 alone."""
    base = LearnerActor(1)
    base.create(TINY.to_dict(), TrainerConfig(), seed=5)
    base.save_checkpoint(str(tmp_path / "start"), {})
    codes, rng = torch.tensor([0, 2, 4, 10, 12], dtype=torch.uint8), torch.Generator().manual_seed(0)
    foreign = {}
    for file in (tmp_path / "start").glob("*.safetensors"):
        tensors = load_file(file)
        for name in [key for key in tensors if key.endswith("experts.1.w2.weight_packed")]:
            low, high = (codes[torch.randint(5, tensors[name].shape, generator=rng)] for _ in range(2))
            tensors[name] = foreign[name] = low | high << 4
        save_file(tensors, file)
    learner = LearnerActor(1)
    learner.load(str(tmp_path / "start"), TrainerConfig(micro_batch_tokens=64, muon_lr=1e-9, adamw_lr=1e-9))
    learner.train([_batch(0)], CrossEntropy())
    learner.save_state(str(tmp_path / "sft" / "step_1"), {"step": 1}, "a")
    learner.state_saved()
    learner.save_checkpoint(str(tmp_path / "then"), {"stage": "sft", "steps": 1})
    words = ["export", str(tmp_path / "sft" / "step_1")]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert _stored(tmp_path / "out") == _stored(tmp_path / "then")
    stored = {n: t for file in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    assert foreign
    assert all(torch.equal(stored[name], packed) for name, packed in foreign.items())
    shutil.rmtree(tmp_path / "start")
    with pytest.warns(UserWarning, match="from which the weights came, is gone"):
        assert main([*words, str(tmp_path / "without")]) == 0
    assert _stored(tmp_path / "without") != _stored(tmp_path / "out")


def test_masters_that_were_rounded_before_they_were_stored_are_exported_so(tmp_path):
    """As DeepSpeed in bf16 does it: expected are the values of the state's masters, taken through bf16 first."""
    learner = LearnerActor(1)
    learner.create(TINY.to_dict(), TrainerConfig(micro_batch_tokens=64), seed=5)
    learner.train([_batch(0)], CrossEntropy())
    learner.save_state(str(tmp_path / "plain" / "step_1"), {"step": 1}, "a")
    learner.state_saved()
    state = TrainState(tmp_path / "plain" / "step_1")
    extra = {**state.extra, "learner": {**state.extra["learner"], "rounded_to": "bfloat16"}}
    write_shard(tmp_path / "step_1", 0, state.tensors(), extra, save_id="b")
    commit(tmp_path / "step_1", 1, save_id="b", timeout_s=5)
    assert main(["export", str(tmp_path / "step_1"), str(tmp_path / "out")]) == 0
    masters = TrainState(tmp_path / "step_1")
    stored = {n: t for file in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    moved = 0
    for name in (key.removesuffix("_packed") for key in stored if key.endswith("w1.weight_packed")):
        master = masters.tensor(f"optimizer.{name}/master")
        value = mx.dequantize_mxfp4(stored[f"{name}_packed"], stored[f"{name}_scale"], torch.float32)
        assert torch.equal(value, mx.fake_quantize_mxfp4(master.bfloat16().float()))
        moved += int((value != mx.fake_quantize_mxfp4(master)).sum())
    assert moved  # somewhere the first rounding decides the second
    bias = "language_model.model.layers.0.self_attn.dt_bias"
    assert torch.equal(stored[bias], masters.tensor(f"optimizer.{bias}/master").bfloat16().float())


def test_an_adapters_state_is_exported_alone_with_its_weights_or_merged(tmp_path):
    _, then = _learner(tmp_path, lora=LoraConfig(rank=2, alpha=4.0), adamw_lr=0.05)
    words = ["export", str(tmp_path)]
    assert main([*words, str(tmp_path / "out"), "--step", "2"]) == 0
    assert _stored(tmp_path / "out") == _stored(then)
    assert _stored(tmp_path / "out-base") == _stored(tmp_path / "base")
    assert main([*words, str(tmp_path / "merged"), "--step", "2", "--merge"]) == 0
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "again"), "--merge"]) == 0
    assert _stored(tmp_path / "merged") == _stored(tmp_path / "again")
    assert load_checkpoint(tmp_path / "merged").adapter is None


def test_what_has_no_such_state_is_refused(run, tmp_path, capsys):
    for words, code, says in (
        (["--step", "7"], 3, "holds no state 'step_7'; there is step_2"),
        (["--step", "x"], 2, "wanted a number of steps, or latest"),
        (["--step", "2", "--stage", "rl"], 2, "has no stage 'rl'; it has sft"),
        ([], 3, "--step latest takes the newest"),
    ):
        assert main(["export", str(run), str(tmp_path / "out"), *words]) == code
        assert says in capsys.readouterr().err
    state = tmp_path / "step_2"  # a state by its own path, one bit of it wrong
    shutil.copytree(run / "checkpoints" / "sft" / "step_2", state)
    shard = state / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["export", str(state), str(tmp_path / "out")]) == 3
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
