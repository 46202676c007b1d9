"""Small device work on a side stream, so that the host may read its results while a long step is under way."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The side stream of a device, whose work goes before that of other streams."""
    return torch.cuda.Stream(device, priority=-1)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """What the device has been given so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def on_side_stream(device: torch.device, since: torch.cuda.Event | None) -> Iterator[None]:
    """The block's work waits for what was there at `since` only, and what follows the block waits for it.

    It must read and write nothing that what came after `since` writes or reads. Without an event it runs in line.
    """
    if since is None:
        yield
        return
    current = torch.cuda.current_stream(device)
    side = side_stream(current.device_index)
    side.wait_event(since)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)
