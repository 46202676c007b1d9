"""Sums of experts that start on a side stream come after what they read, on ranks without micro-batches too."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import k3rl.parallel.gradient_reduction as gradient_reduction
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import Mesh, Trainer, TrainerConfig


class Stream:
    """A stream that knows what is certain to be done before its next work."""

    device_index = 0

    def __init__(self) -> None:
        self.before: set[str] = set()

    def do(self, work: str) -> None:
        self.before.add(work)

    def record_event(self) -> set[str]:
        return set(self.before)

    def wait_event(self, event: set[str]) -> None:
        self.before |= event

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


@pytest.fixture
def streams(monkeypatch) -> tuple[Stream, Stream]:
    main, side = Stream(), Stream()
    now = [main]

    @contextmanager
    def inside(stream):
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(gradient_reduction, "side_stream", lambda _: side)
    return main, side


@pytest.mark.parametrize("idle", [True, False])
def test_banks_are_reduced_after_they_were_cleared_and_added_to(streams, monkeypatch, idle) -> None:
    main, _ = streams
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
    model.init_weights(0)
    reduction = Trainer(model, TrainerConfig(), Mesh.alone()).native.reduction
    reduction._overlaps = True
    banks = reduction._experts.sums
    for bank in banks:
        bank.done = {"the step before"}  # recorded by the last backward that there was
    clear = reduction._experts.clear
    monkeypatch.setattr(reduction._experts, "clear", lambda **kw: (main.do("cleared"), clear(**kw)))
    reduced: list[set[str]] = []
    monkeypatch.setattr(
        gradient_reduction, "reduce_to_owners", lambda *_: reduced.append(set(torch.cuda.current_stream().before))
    )
    reduction.zero_grad()
    if not idle:
        for number, bank in enumerate(reversed(banks)):
            main.do(f"added {number}")
            bank.done = main.record_event()
    reduction._planned = [*((bank, [SimpleNamespace()]) for bank in reversed(banks)), (None, [])]
    reduction.launch()
    assert len(reduced) == len(banks) + 1
    for number, before in enumerate(reduced[:-1]):
        assert "cleared" in before
        assert idle or f"added {number}" in before
