"""Where optimizer state is stored between steps changes no bit of a step; bf16 momentum rounds as it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3rl.config import ConfigError, load, split_words
from k3rl.model.config import K3Config
from k3rl.numerics import project, stored_dtype
from k3rl.optim import MuonConfig, PerHeadMuon, StateStorage, newton_schulz
from k3rl.parallel import LearnerConfig, TrainerConfig, check_backend
from k3rl.pipelines.configs import SFTConfig
from tests.optim.official import parameters, set_gradients

NANO = K3Config.named("k3-nano").replace(num_experts=4)
MATRIX = "language_model.model.layers.3.self_attn.o_proj.weight"
IDLE = ("experts.1.w2", "q_b_proj", "model.norm")
HOST = StateStorage(on_host=True)
BF16 = StateStorage(momentum_dtype=torch.bfloat16)


def optimizer(params: dict[str, torch.nn.Parameter], storage: StateStorage, **options: object) -> PerHeadMuon:
    def stored(name: str, master: Tensor) -> Tensor:
        return project(master, stored_dtype(name))

    return PerHeadMuon(params.items(), NANO, MuonConfig(0.02, 0.005, storage=storage, **options), project=stored)


def steps(muon: PerHeadMuon, first: int, last: int) -> None:
    """Steps with gradients drawn from their number; in every second one some parameters have none."""
    for number in range(first, last):
        set_gradients(muon.params, seed=number)
        for name, param in muon.params.items():
            if number % 2 and any(word in name for word in IDLE):
                param.grad = None
        muon.step()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("options", [{}, {"variant": "adamw"}])
def test_state_on_the_host_has_the_bits_of_state_on_the_device(options) -> None:
    ours, theirs = parameters(NANO), parameters(NANO)
    host, device = optimizer(ours, HOST, **options), optimizer(theirs, StateStorage(), **options)
    steps(host, 0, 3), steps(device, 0, 3)
    assert same(host.state_tensors(), device.state_tensors())
    assert all(torch.equal(param, theirs[name]) for name, param in ours.items())


@pytest.mark.parametrize("storage", [HOST, BF16, StateStorage(on_host=True, momentum_dtype=torch.bfloat16)])
def test_a_saved_state_continues_to_the_bit_wherever_it_is_stored(storage) -> None:
    straight, first, second = (optimizer(parameters(NANO), storage) for _ in range(3))
    steps(straight, 0, 4)
    steps(first, 0, 2)
    second.load_state_tensors(first.state_tensors())
    steps(second, 2, 4)
    assert same(straight.state_tensors(), second.state_tensors())
    elsewhere = optimizer(parameters(NANO), StateStorage(momentum_dtype=storage.momentum_dtype))
    elsewhere.load_state_tensors(straight.state_tensors())
    assert same(straight.state_tensors(), elsewhere.state_tensors())


def test_masters_on_the_host_are_read_and_replaced_where_the_parameters_are() -> None:
    params = parameters(NANO)
    muon = optimizer(params, HOST)
    new = muon.masters([MATRIX])[MATRIX].add_(0.25)
    muon.set_masters({MATRIX: new})
    assert torch.equal(muon.state_tensors()[f"{MATRIX}/master"], new)
    assert torch.equal(params[MATRIX], project(new, stored_dtype(MATRIX)))


def test_bf16_momentum_is_rounded_once_a_step_and_takes_half_the_bytes() -> None:
    """Against the recurrence written out, whose update comes from the momentum before it is rounded."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(48, 96, generator=generator))
    muon = PerHeadMuon([(MATRIX, param)], NANO, MuonConfig(lr=0.02, adamw_lr=0.0, weight_decay=0.1, storage=BF16))
    master, kept = param.detach().clone(), torch.zeros(48, 96, dtype=torch.bfloat16)
    for _ in range(5):
        param.grad = torch.randn(48, 96, generator=generator)
        exact = kept.float() * 0.95 + param.grad
        update = newton_schulz((param.grad + 0.95 * exact)[None])[0] * 0.2 * 96**0.5
        master = master * (1 - 0.02 * 0.1) - 0.02 * update
        kept = exact.to(torch.bfloat16)
        muon.step()
    state = muon.state_tensors()
    assert state[f"{MATRIX}/momentum"].dtype == torch.bfloat16
    assert state[f"{MATRIX}/momentum"].nbytes == param.nbytes // 2
    torch.testing.assert_close(state[f"{MATRIX}/momentum"], kept, rtol=2**-7, atol=0)  # one place, where sums differ
    torch.testing.assert_close(state[f"{MATRIX}/master"], master, rtol=1e-5, atol=1e-5)  # float32 in another order


def test_bf16_momentum_stays_close_to_float32_momentum() -> None:
    """Ten steps on one set of gradients: weights are apart by at most 1 % of the way that they went (seen: 0.3 %)."""
    every = []
    for storage in (StateStorage(), BF16):
        params = parameters(NANO)
        muon = optimizer(params, storage)
        start = muon.masters([MATRIX])[MATRIX]
        steps(muon, 0, 10)
        every.append(muon.masters([MATRIX])[MATRIX] - start)
    assert float((every[0] - every[1]).norm() / every[0].norm()) < 0.01
    assert not torch.equal(*every)


def test_a_state_moves_between_float32_and_bf16_momentum() -> None:
    wide, narrow = optimizer(parameters(NANO), StateStorage()), optimizer(parameters(NANO), BF16)
    steps(wide, 0, 2)
    narrow.load_state_tensors(wide.state_tensors())
    got, given = narrow.state_tensors(), wide.state_tensors()
    assert torch.equal(got[f"{MATRIX}/master"], given[f"{MATRIX}/master"])
    assert torch.equal(got[f"{MATRIX}/momentum"], given[f"{MATRIX}/momentum"].to(torch.bfloat16))
    wide.load_state_tensors(got)
    assert wide.state_tensors()[f"{MATRIX}/momentum"].dtype == torch.float32


def test_flags_choose_where_state_is_stored_and_refuse_what_does_nothing() -> None:
    def of(*words: str) -> TrainerConfig:
        return load(SFTConfig(), flags=split_words(words)[1]).trainer

    assert of("--trainer.offload-optimizer", "true", "--trainer.momentum-dtype", "bfloat16").storage == StateStorage(
        True, torch.bfloat16
    )
    with pytest.raises(ConfigError, match="momentum_dtype is Muon's, and optimizer is adamw"):
        of("--trainer.momentum-dtype", "bfloat16", "--trainer.optimizer", "adamw")
    with pytest.raises(ConfigError, match="an adapter trains with AdamW"):
        of("--trainer.momentum-dtype", "bfloat16", "--trainer.lora.rank", "4")
    config = TrainerConfig(optimizer="adamw", offload_optimizer=True)
    with pytest.raises(ConfigError, match=r"learner\.deepspeed\.offload-optimizer"):
        check_backend(LearnerConfig(backend="deepspeed"), config)
