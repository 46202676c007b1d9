"""Steps that are replayed: what a graph holds fast must not be what changes from step to step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from k3rl.kernels.cuda_graph import KeyedStep
from k3rl.model.config import K3Config
from k3rl.numerics import project, stored_dtype
from k3rl.optim import FixedGradients, MuonConfig, PerHeadMuon

NANO = K3Config.named("k3-nano")
RATES = MuonConfig(lr=0.02, adamw_lr=0.01)
AT = "language_model.model.layers.1."
SHAPES = {f"{AT}block_sparse_moe.experts.{e}.w{n}.weight": (32, 64) for e in range(3) for n in (1, 3)}
SHAPES |= {f"{AT}input_layernorm.weight": (64,), f"{AT}self_attn.b_proj.weight": (2, 64), f"{AT}self_attn.A_log": (2,)}


def stored(name: str, master: torch.Tensor) -> torch.Tensor:
    return project(master, stored_dtype(name))


class Recorded(TorchDispatchMode):
    """What a CUDA graph keeps of a run: operations with the numbers and the memory that they had, and no Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Runs them again; results lie where they lay."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def recorder(optimizer: PerHeadMuon, seen: list[int]) -> Callable:
    """Like `k3rl.kernels.cuda_graph.record`: the run itself must leave nothing behind."""

    def capture(run):
        held = [*optimizer.params.values(), *(p.grad for p in optimizer.params.values() if p.grad is not None)]
        held += [*optimizer.state.tensors(), optimizer.gradients.norm, optimizer.gradients.factor]
        before = [tensor.detach().clone() for tensor in held]
        with Recorded() as recorded:
            run()
        for tensor, value in zip(held, before, strict=True):
            tensor.detach().copy_(value)
        seen.append(len(recorded.calls))

        @torch.no_grad()
        def replay() -> None:
            recorded.replay()

        return replay

    return capture


def trained(captured: bool, seen: list[int], in_step: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {n: torch.nn.Parameter(torch.randn(shape, generator=generator)) for n, shape in SHAPES.items()}
    optimizer = PerHeadMuon(params.items(), NANO, RATES, project=stored)
    assert not optimizer.captures, "there is no GPU here"
    if captured:
        optimizer.capture_with(recorder(optimizer, seen))
    buffers = {name: torch.zeros_like(param) for name, param in params.items()}
    norms = []
    for step in range(7):
        for name, param in params.items():
            buffers[name].copy_(torch.randn(param.shape, generator=generator) * (1 + step))
            param.grad = buffers[name]
        launched = optimizer.gradients.launch(25.0) if in_step else None
        for name, param in params.items():
            if step == 4 and ("experts.1" in name or "b_proj" in name):
                param.grad = None
        gradients = optimizer.gradients
        norms.append(gradients.clip_in_step(25.0, launched) if in_step else gradients.clip_(25.0))  # some are scaled
        optimizer.step_clipped(1 / (1 + step))
    return optimizer.state_tensors() | params | {"norms": torch.tensor(norms)}


@pytest.mark.parametrize("in_step", [False, True])
def test_replayed_steps_are_the_steps(in_step: bool) -> None:
    """Learning rates, corrections and who has a gradient change. Norms add up in another order and rates are float32,
    so masters agree to a few roundings; a stored value is on a grid, where one rounding can be a whole step."""
    seen: list[int] = []
    found, wanted = trained(True, seen, in_step), trained(False, seen)
    assert len(seen) == 4, (
        "norm and step are captured once, and again after the step that fewer parameters took part in"
    )
    for key, value in wanted.items():
        if key.endswith(("/master", "/momentum", "/first", "/second", "/steps", "norms")):
            torch.testing.assert_close(
                found[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
        else:
            assert torch.equal(found[key], stored(key, found[f"{key}/master"]))


def trained_in_a_bank(captured: bool, seen: list[int]) -> dict[str, torch.Tensor]:
    """Seven steps in which experts come and go, their gradients at fixed places."""
    generator = torch.Generator().manual_seed(1)
    params = {n: torch.nn.Parameter(torch.randn(shape, generator=generator)) for n, shape in SHAPES.items()}
    experts = [name for name in params if ".experts." in name]
    bank = torch.zeros(len(experts), 32, 64)
    rows = torch.zeros(3, dtype=torch.int32)
    places = {name: (place, int(name.split(".experts.")[1][0])) for name, place in zip(experts, bank, strict=True)}
    optimizer = PerHeadMuon(params.items(), NANO, RATES, fixed=FixedGradients(rows, places))
    if captured:
        optimizer.capture_with(recorder(optimizer, seen))
    rest = {name: torch.zeros_like(param) for name, param in params.items() if name not in places}
    norms = []
    for step in range(7):
        rows.copy_(torch.tensor([step % 2, 1 + step, (step + 1) // 2 % 2]))
        bank.zero_()
        for name, param in params.items():
            if name in rest:
                param.grad = rest[name].copy_(torch.randn(param.shape, generator=generator))
            elif rows[places[name][1]] > 0:
                param.grad = places[name][0]
                param.grad.copy_(torch.randn(param.shape, generator=generator))
            else:
                param.grad = None
        norms.append(optimizer.gradients.clip_in_step(25.0))
        optimizer.step_clipped()
    return optimizer.state_tensors() | params | {"norms": torch.tensor(norms)}


def test_experts_that_come_and_go_are_no_other_graph() -> None:
    """One without rows keeps master and momentum, without decay. Norms and rates as above."""
    seen: list[int] = []
    found, wanted = trained_in_a_bank(True, seen), trained_in_a_bank(False, seen)
    assert len(seen) == 2, "norm and step are captured once"
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_a_gradient_that_is_not_at_its_place_is_not_taken_from_there() -> None:
    place, rows = torch.zeros(32, 64), torch.ones(1, dtype=torch.int32)
    name = next(iter(SHAPES))
    param = torch.nn.Parameter(torch.randn(32, 64, generator=torch.Generator().manual_seed(2)))
    start = param.detach().clone()
    fixed = FixedGradients(rows, {name: (place, 0)})
    optimizer = PerHeadMuon([(name, param)], NANO, RATES, fixed=fixed)
    optimizer.capture_with(recorder(optimizer, []))
    param.grad = torch.ones(32, 64)
    assert optimizer.gradients.clip_in_step(1e9) == pytest.approx((32 * 64) ** 0.5)
    optimizer.step_clipped()
    assert not torch.equal(param.detach(), start)


def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once() -> None:
    def refuse(run: Callable[[], object]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    ran: list[int] = []
    program = KeyedStep("a run", refuse)
    program("key", lambda: ran.append(1))
    with pytest.warns(UserWarning, match=r"a run is not captured .* not permitted"):
        program("key", lambda: ran.append(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program("key", lambda: ran.append(3))
    assert ran == [1, 2, 3]


def test_keys_that_rarely_last_are_seldom_captured() -> None:
    captured: list[int] = []

    def capture(run: Callable[[], object]) -> Callable[[], None]:
        captured.append(1)

        def replay() -> None:
            run()

        return replay

    ran: list[int] = []
    program = KeyedStep("a run", capture)
    for number in range(40):
        program(number // 2, lambda: ran.append(1))
    assert len(ran) == 40
    assert len(captured) == 2
    for _ in range(40):
        program("lasting", lambda: ran.append(1))
    assert len(ran) == 80
    assert len(captured) == 3


def test_keys_that_do_not_last_are_waited_for_longer_but_not_for_good() -> None:
    runs: list[str] = []

    def capture(run: Callable[[], object]) -> Callable[[], None]:
        runs.append("capture")
        return lambda: runs.append("replay")

    def called(key: str, times: int) -> list[str]:
        runs.clear()
        for _ in range(times):
            program(key, lambda: runs.append("run"))
        return list(runs)

    program = KeyedStep("step", capture)
    for key, waits in (("a", 1), ("b", 1), ("c", 2), ("d", 4)):
        assert called(key, waits + 1) == ["run"] * waits + ["capture", "replay"]
    assert called("e", 6) == ["run"] * 6, "8 are wanted now"
    assert called("f", 12) == ["run"] * 8 + ["capture"] + ["replay"] * 4
    assert called("g", 2) == ["run", "capture", "replay"], "the last one paid"
    assert (program.changes, program.previous, program.key) == (6, "f", "g")
