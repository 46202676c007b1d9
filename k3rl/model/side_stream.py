"""Pieces of a layer that need not wait for each other, on streams of their own.

A decode step of few rows is made of many small kernels, none of which fills a GPU. Within `side_streams`,
`on_side_stream` starts its work on another stream; a CUDA graph that is captured meanwhile has it as a branch.
Elsewhere the work is done when its result is asked for, in line. Memory is safe to use again by the order of forks and
joins: a side stream begins after everything that was started before it, and nothing that is used after a join is freed
before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")

_on = False


@contextlib.contextmanager
def side_streams() -> Iterator[None]:
    """Within the block `on_side_stream` has streams of its own on the current CUDA device."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


@functools.cache
def _stream(device: int, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on_side_stream(work: Callable[[], T], number: int = 0) -> Callable[[], T]:
    """Starts `work` on a side stream; the call that is returned waits for it, on the current stream, and gives its
    result.

    Work on one side stream runs in order. What the work reads must not change before the result is asked for, once.
    """
    if not _on:
        return work
    stream = _stream(torch.cuda.current_device(), number)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = work()

    def joined() -> T:
        torch.cuda.current_stream().wait_stream(stream)
        return result

    return joined
