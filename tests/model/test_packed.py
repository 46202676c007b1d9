"""Frozen experts that stay the stored bytes compute, train adapters and export like parameters, to the bit."""

from __future__ import annotations

import pytest
import torch

from k3rl.checkpoint import assign_official_tensors, load_checkpoint, official_tensors, save_checkpoint
from k3rl.losses import CrossEntropy
from k3rl.model import AdapterError, K3Config, K3ForCausalLM, LoraConfig, QuantizationConfig
from k3rl.model.lora import merge
from k3rl.model.packed import PackError, pack_experts
from k3rl.parallel import Trainer, TrainerConfig
from tests.parallel.test_lora import batch

TINY = K3Config.named("k3-nano").replace(num_experts=4)
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "kv_b_proj", "down_proj", "w1", "w2", "w3"))


def build(*, packed: bool = False, **options) -> K3ForCausalLM:
    model = K3ForCausalLM(TINY, packed=packed, **options)
    model.init_weights(5)
    return model


def expert_bytes(model: K3ForCausalLM) -> int:
    """Bytes of routed experts that are in memory."""
    parameters = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n and not p.is_meta)
    return parameters + sum(bank.nbytes for bank in model.packed_banks.values())


def steps(model: K3ForCausalLM, **config) -> Trainer:
    trainer = Trainer(model, TrainerConfig(lora=LORA, adamw_lr=0.01, **config))
    for number in range(2):
        trainer.train(batch(number), CrossEntropy())
    return trainer


@pytest.fixture(scope="module")
def beside_parameters() -> dict[str, torch.Tensor]:
    return steps(build(), packed_experts=False).state_tensors()


@pytest.mark.parametrize("config", [{}, {"recompute": ("attention", "mlp")}])
def test_adapters_train_to_the_same_bits_beside_packed_experts(beside_parameters, config) -> None:
    trainer = steps(build(), **config)
    assert trainer.model.packed
    found = trainer.state_tensors()
    assert found.keys() == beside_parameters.keys()
    for name, value in found.items():
        # Recomputation adds up gradients of what several parts read in another order.
        same = torch.equal(value, beside_parameters[name]) if not config else None
        assert same or torch.allclose(value, beside_parameters[name], rtol=1e-3, atol=1e-5), name


def test_packed_experts_take_17_bytes_for_32_numbers() -> None:
    numbers = sum(p.numel() for n, p in build().official_parameters() if ".experts." in n)
    assert expert_bytes(build()) == 4 * numbers
    packed = build()
    pack_experts(packed)
    assert expert_bytes(packed) == numbers * 17 // 32
    assert expert_bytes(build(packed=True)) == numbers * 17 // 32


@pytest.mark.parametrize("experts", [None, range(1, 3)])
def test_values_are_those_of_the_parameters_however_packing_came_about(experts) -> None:
    wanted = dict(build(experts=experts).official_parameters())
    later = build(experts=experts)
    pack_experts(later)
    for model in (later, build(experts=experts, packed=True)):
        found = dict(model.official_parameters())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
        assert model.parameter_count() == build().parameter_count()


def test_a_checkpoint_goes_through_packed_experts_byte_for_byte(tmp_path) -> None:
    save_checkpoint(build(), tmp_path / "one")
    loaded = load_checkpoint(tmp_path / "one", dtype=torch.float32, packed=True)
    assert loaded.packed
    save_checkpoint(loaded, tmp_path / "two")
    for file in sorted((tmp_path / "one").iterdir()):
        if file.suffix == ".safetensors":
            assert (tmp_path / "two" / file.name).read_bytes() == file.read_bytes()
    whole = load_checkpoint(tmp_path / "one", dtype=torch.float32)
    ids = torch.arange(40).view(1, -1)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, whole(ids).logits)


def test_stored_tensors_are_assigned_to_packed_experts() -> None:
    other = K3ForCausalLM(TINY)
    other.init_weights(6)
    stored = dict(official_tensors(other))
    packed = build(packed=True)
    assign_official_tensors(packed, stored)
    assert all(torch.equal(value, stored[name]) for name, value in official_tensors(packed))


def test_what_cannot_be_packed_or_merged_is_refused() -> None:
    plain = TINY.replace(quantization=QuantizationConfig("none", "ceil", "none"))
    with pytest.raises(PackError, match="only those of 'mxfp4'"):
        K3ForCausalLM(plain, packed=True)
    trainer = Trainer(K3ForCausalLM(plain), TrainerConfig(lora=LORA))
    assert not trainer.model.packed  # experts that are not stored as MXFP4 stay parameters
    with pytest.raises(AdapterError, match="kept packed"):
        merge(Trainer(build(), TrainerConfig(lora=LORA)).model)
