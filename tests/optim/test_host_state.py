"""State in host memory is prefetched and written back in order, and what cannot be locked is said.

The streams here are stand-ins that note who waits for whom, as CUDA's do; copies happen at once.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from k3rl.optim import StateStorage, host_memory, offload
from k3rl.optim.offload import SLOTS, StateUpdate, run_prefetched


class Event:
    def __init__(self, seen: frozenset[str]) -> None:
        self.seen = seen


class Stream:
    """Knows which of its own and others' work comes before what it does next."""

    here: list[Stream] = []

    def __init__(self, *_: object, name: str = "") -> None:
        self.name, self.seen = name, frozenset[str]()

    def does(self, what: str) -> None:
        self.seen |= {what}

    def record_event(self) -> Event:
        return Event(self.seen)

    def wait_event(self, event: Event) -> None:
        self.seen |= event.seen

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen


@pytest.fixture
def streams(monkeypatch) -> Stream:
    main = Stream(name="main")
    Stream.here = [main]

    @contextlib.contextmanager
    def on(stream: Stream):
        Stream.here.append(stream)
        yield
        Stream.here.pop()

    monkeypatch.setattr(offload.torch, "cuda", SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda _: main, stream=on
    ))  # fmt: skip
    return main


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_updates_run_in_order_and_each_waits_for_what_it_reads_and_writes_over(streams, count, monkeypatch) -> None:
    homes = [
        (torch.full((3 + number,), float(number)), torch.full((2,), number, dtype=torch.bfloat16))
        for number in range(count)
    ]
    wanted = [(one + 1, (two.float() * 2 + 1).to(torch.bfloat16)) for one, two in homes]
    order: list[int] = []
    copied = torch.Tensor.copy_

    def noted(self: torch.Tensor, other: torch.Tensor, **how: object) -> torch.Tensor:
        if how:
            kept = next((n for n, pair in enumerate(homes) if any(x is self or x is other for x in pair)), None)
            assert kept is not None
            Stream.here[-1].does(f"{'out' if any(x is self for x in homes[kept]) else 'in'} {kept}")
        return copied(self, other)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)

    def update_of(number: int) -> StateUpdate:
        def update(here: list[torch.Tensor]) -> None:
            assert f"in {number}" in streams.seen  # it has arrived
            assert all(tensor.dtype == torch.float32 for tensor in here)
            here[0].add_(1)
            here[1].mul_(2).add_(1)
            streams.does(f"update {number}")
            order.append(number)

        return StateUpdate(homes[number], torch.device("cpu"), torch.float32, update)

    run_prefetched([update_of(number) for number in range(count)])
    assert order == list(range(count))
    assert {f"out {number}" for number in range(count)} <= streams.seen  # the caller's stream waits for the last copy
    for found, expected in zip(homes, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_slot_is_written_over_only_after_what_it_held_was_written_back(streams) -> None:
    given = [torch.full((4,), float(number)) for number in range(2 * SLOTS)]
    arrivals: list[frozenset[str]] = []

    class Watching(Stream):
        def wait_event(self, event: Event) -> None:
            super().wait_event(event)
            arrivals.append(event.seen)

    offload.torch.cuda.Stream = Watching
    updates = [
        StateUpdate((home,), torch.device("cpu"), torch.float32, lambda here, n=n: streams.does(f"update {n}"))
        for n, home in enumerate(given)
    ]
    run_prefetched(updates)
    # Each of the later ones came after the update of the one SLOTS before it, and so after its copy back.
    for number in range(SLOTS, 2 * SLOTS):
        last, later = f"update {number - SLOTS}", f"update {number - SLOTS + 1}"
        assert any(last in seen and later not in seen for seen in arrivals)


def test_host_memory_is_zero_of_its_own_size_and_what_cannot_be_locked_is_said(monkeypatch) -> None:
    made = [host_memory.zeros(shape, torch.float32) for shape in ((3, 5), (0, 4), (7,))]
    assert [tuple(tensor.shape) for tensor in made] == [(3, 5), (0, 4), (7,)]
    assert all(not tensor.any() for tensor in made)
    made[0].fill_(3.0)
    given: list[tuple[int, int, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        given.append((address, size, flags))
        return 0 if size == 60 else 2

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.warns(UserWarning, match="1 of 2 pieces of optimizer state in host memory are not page-locked"):
        assert not host_memory.lock([*made, torch.zeros(3)], torch.device("cuda", 0))
    assert sorted(size for _, size, _ in given) == [28, 60]
    assert bool((made[0] == 3).all())  # what was there before stays
    assert host_memory.lock(made, torch.device("cuda", 0))  # nothing is asked for twice
    assert len(given) == 2


def test_state_of_a_gpus_parameters_is_in_memory_of_its_own_and_that_of_a_cpus_is_plain() -> None:
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        stored = StateStorage(on_host=True).zeros((2, 3), torch.bfloat16, device)
        assert stored.device.type == "cpu"
        assert stored.dtype == torch.bfloat16
        assert not stored.any()
