"""Where optimizer state lies between steps, and how it visits the parameters' device for one.

State on the host comes to a GPU a bucket at a time: while one is computed with, the next ones are on their way in and
the last one on its way back, on a stream each, through `SLOTS` buffers of the largest visit's size.
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
class Rest:
    """How state is kept between steps. host: in host memory, page-locked where the parameters are on a GPU; every step
    is computed on their device all the same, so it has the same bits. momentum: dtype of Muon's momentum, rounded to
    nearest when a step is over; None for that of the master.
    """

    host: bool = False
    momentum: torch.dtype | None = None

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros where state of parameters on `device` rests."""
        if self.host and device.type == "cuda":
            return host_memory.zeros(shape, dtype)
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu" if self.host else device)

    @contextmanager
    def visit(self, device: torch.device, kind: torch.dtype, *homes: Tensor) -> Iterator[list[Tensor]]:
        """Kept tensors on `device` in `kind`; what the block leaves in them is kept."""
        here = [home.to(device, kind, copy=self.host) for home in homes]
        yield here
        for home, tensor in zip(homes, here, strict=True):
            if tensor is not home:
                home.copy_(tensor)


class Visit(NamedTuple):
    """State that is needed together: kept tensors, and what is done with them on `device` in `kind`."""

    homes: tuple[Tensor, ...]
    device: torch.device
    kind: torch.dtype
    work: Callable[[list[Tensor]], None]


def take_turns(visits: Sequence[Visit], rest: Rest) -> None:
    """Does the work of all visits, in their order; what it leaves in the tensors is kept.

    From a GPU copies to the host are queued on the current stream: wait for it before the host reads what is kept.
    """
    if rest.host and visits and visits[0].device.type == "cuda":
        _overlapped(visits)
        return
    for visit in visits:
        with rest.visit(visit.device, visit.kind, *visit.homes) as here:
            visit.work(here)


def visit_bytes(visit: Visit) -> int:
    """What a visit takes of a slot."""
    return sum(_spaced(home.nbytes) for home in visit.homes)


def _spaced(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _placed(buffer: Tensor, homes: Sequence[Tensor]) -> list[Tensor]:
    """Room for each of `homes` in a buffer uint8 [n]."""
    found, start = [], 0
    for home in homes:
        found.append(buffer[start : start + home.nbytes].view(home.dtype).view(home.shape))
        start += _spaced(home.nbytes)
    return found


def _overlapped(visits: Sequence[Visit]) -> None:
    device = visits[0].device
    here = torch.cuda.current_stream(device)
    coming, going = torch.cuda.Stream(device), torch.cuda.Stream(device)
    size = max(map(visit_bytes, visits))
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    free: list[torch.cuda.Event | None] = [None] * SLOTS
    coming.wait_stream(here)  # what the slots held before may still be read there

    def fetch(number: int) -> tuple[list[Tensor], torch.cuda.Event]:
        with torch.cuda.stream(coming):
            left = free[number % SLOTS]
            if left is not None:
                coming.wait_event(left)
            tensors = _placed(slots[number % SLOTS], visits[number].homes)
            for tensor, home in zip(tensors, visits[number].homes, strict=True):
                tensor.copy_(home, non_blocking=True)
            return tensors, coming.record_event()

    ahead = deque(fetch(number) for number in range(min(SLOTS - 1, len(visits))))
    for number, visit in enumerate(visits):
        tensors, arrived = ahead.popleft()
        here.wait_event(arrived)
        wide = [tensor.to(visit.kind) for tensor in tensors]
        visit.work(wide)
        for tensor, value in zip(tensors, wide, strict=True):
            if value is not tensor:
                tensor.copy_(value)
        going.wait_event(here.record_event())
        with torch.cuda.stream(going):
            for home, tensor in zip(visit.homes, tensors, strict=True):
                home.copy_(tensor, non_blocking=True)
            free[number % SLOTS] = going.record_event()
        if number + SLOTS - 1 < len(visits):
            ahead.append(fetch(number + SLOTS - 1))
    here.wait_stream(going)
