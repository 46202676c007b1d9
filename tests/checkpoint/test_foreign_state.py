"""A training state goes on with the model that it is of, and with nothing else of the same shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3rl.actors.learner import LearnerActor
from k3rl.checkpoint import save_checkpoint
from k3rl.checkpoint.fingerprint import weights_fingerprint
from k3rl.checkpoint.train_state import TrainStateError
from k3rl.cli import main
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM, LoraConfig
from k3rl.parallel import TrainerConfig
from k3rl.tokens import Tokenizer

NANO = K3Config.named("k3-nano")
LAYERS = replace(NANO.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,))
TINY = NANO.replace(num_experts=4, num_hidden_layers=2, linear_attn_config=LAYERS)
LORA = TrainerConfig(micro_batch_tokens=64, adamw_lr=0.05, lora=LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "w2")))
PLAIN = TrainerConfig(micro_batch_tokens=64)


def _base(folder: Path, seed: int) -> Path:
    model = K3ForCausalLM(TINY)
    model.init_weights(seed)
    save_checkpoint(model, folder, tokenizer=Tokenizer.builtin())
    return folder


def _batch() -> TrainBatch:
    mask = np.arange(12) > 3
    ids = np.random.default_rng(0).integers(0, 400, 12)
    return TrainBatch.pack([TrainSequence("s", ids, mask, np.zeros(12, "f4"), mask.astype("f4"))])


def _loaded(base: Path, trainer: TrainerConfig) -> LearnerActor:
    learner = LearnerActor(1)
    learner.load(str(base), trainer)
    return learner


def _loss(learner: LearnerActor) -> float:
    return learner.evaluate(_batch(), CrossEntropy()).values()["loss/mean"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> tuple[Path, Path, float]:
    """(base, state of an adapter that was trained beside it, its loss)."""
    folder = tmp_path_factory.mktemp("adapted")
    learner = _loaded(_base(folder / "base", 0), LORA)
    learner.train([_batch()], CrossEntropy())
    learner.save_state(str(folder / "step_1"), {"step": 1}, "a")
    learner.state_saved()
    return folder / "base", folder / "step_1", _loss(learner)


def test_an_adapter_goes_on_beside_its_weights_wherever_they_lie(adapted, tmp_path):
    base, state, loss = adapted
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in base.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    learner = _loaded(moved, LORA)
    learner.load_state(str(state))
    assert _loss(learner) == loss


def test_an_adapter_is_not_put_beside_other_weights_nor_scaled_otherwise(adapted, tmp_path):
    base, state, _ = adapted
    other = _loaded(_base(tmp_path / "base", 1), LORA)
    with pytest.raises(TrainStateError, match=r"beside other weights than those of .*begun with \(.*base\)"):
        other.load_state(str(state))
    assert other.trainer.steps == 0
    lora = LORA.lora.replace(alpha=8.0)
    with pytest.raises(TrainStateError, match=r"saved with trainer\.lora\.alpha 4\.0, and this run has 8\.0"):
        _loaded(base, LORA.replace(lora=lora)).load_state(str(state))


def test_an_export_refuses_weights_that_were_replaced(adapted, tmp_path, capsys):
    base, state, _ = adapted
    kept = {file: file.read_bytes() for file in base.iterdir()}
    _base(base, 1)  # as a run that is started again in its place does
    try:
        assert main(["export", str(state), str(tmp_path / "out")]) == 3
    finally:
        for file, content in kept.items():
            file.write_bytes(content)
    assert "beside other weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_state_is_refused_by_a_model_that_computes_otherwise(tmp_path):
    learner = LearnerActor(1)
    learner.create(TINY.to_dict(), PLAIN, 5)
    learner.save_state(str(tmp_path / "step_0"), {}, "a")
    learner.state_saved()
    for key, changed in (
        ("num_experts_per_token", TINY.replace(num_experts_per_token=1)),
        ("activations", TINY.replace(quantization=replace(TINY.quantization, activations="none"))),
    ):
        other = LearnerActor(1)
        other.create(changed.to_dict(), PLAIN, 5)
        with pytest.raises(TrainStateError, match=rf"saved with model\..*{key}.*Resume with the configuration"):
            other.load_state(str(tmp_path / "step_0"))


def test_a_fingerprint_sees_a_change_of_a_small_file_anywhere(tmp_path):
    file = tmp_path / "model.safetensors"
    content = bytes(1000)
    file.write_bytes(content)
    seen = {weights_fingerprint(str(tmp_path), 0), weights_fingerprint(None, 0), weights_fingerprint(None, 1)}
    for place in (0, 500, 999):
        file.write_bytes(content[:place] + b"x" + content[place + 1 :])
        seen.add(weights_fingerprint(str(tmp_path), 0))
    assert len(seen) == 6
