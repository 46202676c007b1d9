"""Where optimizer state lies between steps, and how offloaded state is brought to the parameters' device for one.

State on the host comes to a GPU a bucket at a time: while one bucket is updated, the next ones are prefetched and the
last one is written back, on a stream each, through `SLOTS` buffers of the largest bucket's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from k3rl.optim import host_memory

SLOTS = 3  # one is computed with, one comes, one goes
_ALIGNED = 256  # bytes: where kernels want a tensor to start


@dataclass(frozen=True)
class StateStorage:
    """How optimizer state is stored between steps.

    on_host: in host memory, page-locked where the parameters are on a GPU (optimizer offload); every step is computed
    on the parameters' device all the same, so it has the same bits. momentum_dtype: of Muon's stored momentum, which
    is rounded to nearest when a step is over; None for that of the master.
    """

    on_host: bool = False
    momentum_dtype: torch.dtype | None = None

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros where state of parameters on `device` is stored."""
        if self.on_host and device.type == "cuda":
            return host_memory.zeros(shape, dtype)
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu" if self.on_host else device)

    @contextmanager
    def loaded(self, device: torch.device, kind: torch.dtype, *stored: Tensor) -> Iterator[list[Tensor]]:
        """Stored tensors on `device` in `kind`; what the block leaves in them is written back."""
        here = [tensor.to(device, kind, copy=self.on_host) for tensor in stored]
        yield here
        for home, tensor in zip(stored, here, strict=True):
            if tensor is not home:
                home.copy_(tensor)


class StateUpdate(NamedTuple):
    """State that is updated together: tensors as they are stored, and what is done with them on `device` in `kind`."""

    tensors: tuple[Tensor, ...]
    device: torch.device
    kind: torch.dtype
    update: Callable[[list[Tensor]], None]

    @property
    def slot_bytes(self) -> int:
        """What its tensors take of a slot."""
        return sum(_spaced(tensor.nbytes) for tensor in self.tensors)


def run_updates(updates: Sequence[StateUpdate], storage: StateStorage) -> None:
    """Runs all updates in their order; what they leave in the tensors is stored.

    From a GPU copies to the host are queued on the current stream: wait for it before the host reads what is stored.
    """
    if storage.on_host and updates and updates[0].device.type == "cuda":
        run_prefetched(updates)
        return
    for one in updates:
        with storage.loaded(one.device, one.kind, *one.tensors) as here:
            one.update(here)


def _spaced(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _in_slot(slot: Tensor, stored: Sequence[Tensor]) -> list[Tensor]:
    """Room for each of these tensors in a slot uint8 [n]."""
    found, start = [], 0
    for tensor in stored:
        found.append(slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _spaced(tensor.nbytes)
    return found


def run_prefetched(updates: Sequence[StateUpdate]) -> None:
    """`run_updates` on a GPU of state on the host: copies in, updates and copies back overlap."""
    device = updates[0].device
    here = torch.cuda.current_stream(device)
    prefetch, write_back = torch.cuda.Stream(device), torch.cuda.Stream(device)
    size = max(one.slot_bytes for one in updates)
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    free: list[torch.cuda.Event | None] = [None] * SLOTS
    prefetch.wait_stream(here)  # what the slots held before may still be read there

    def fetch(number: int) -> tuple[list[Tensor], torch.cuda.Event]:
        with torch.cuda.stream(prefetch):
            left = free[number % SLOTS]
            if left is not None:
                prefetch.wait_event(left)
            tensors = _in_slot(slots[number % SLOTS], updates[number].tensors)
            for tensor, home in zip(tensors, updates[number].tensors, strict=True):
                tensor.copy_(home, non_blocking=True)
            return tensors, prefetch.record_event()

    fetched = deque(fetch(number) for number in range(min(SLOTS - 1, len(updates))))
    for number, one in enumerate(updates):
        tensors, arrived = fetched.popleft()
        here.wait_event(arrived)
        wide = [tensor.to(one.kind) for tensor in tensors]
        one.update(wide)
        for tensor, value in zip(tensors, wide, strict=True):
            if value is not tensor:
                tensor.copy_(value)
        write_back.wait_event(here.record_event())
        with torch.cuda.stream(write_back):
            for home, tensor in zip(one.tensors, tensors, strict=True):
                home.copy_(tensor, non_blocking=True)
            free[number % SLOTS] = write_back.record_event()
        if number + SLOTS - 1 < len(updates):
            fetched.append(fetch(number + SLOTS - 1))
    here.wait_stream(write_back)
