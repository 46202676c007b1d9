"""Small device work on a stream of its own, so that the host may read its results while a long step is under way."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def moment(device: torch.device) -> torch.cuda.Event | None:
    """What the device has been given so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def aside(device: torch.device, since: torch.cuda.Event | None) -> Iterator[None]:
    """The block's work waits for what was there at `since` only, and what follows the block waits for it.

    It must read and write nothing that what came after `since` writes or reads. Without an event it runs in line.
    """
    if since is None:
        yield
        return
    current = torch.cuda.current_stream(device)
    own = stream(current.device_index)
    own.wait_event(since)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        current.wait_stream(own)
