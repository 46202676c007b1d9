"""Work on stored tensors by as many threads as torch may use: numpy, zlib and hashlib let go of the interpreter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None) -> Iterator[Result]:
    """`map(work, items)` by several threads; threads: torch's number by default, and with one this is `map`.

    Items are taken by the caller's thread, at most two more than there are threads before the first of their results
    is given. The first error, in the order of the items, is raised; nothing runs any more when the iterator has ended
    or is closed.
    """
    threads = threads or torch.get_num_threads()
    if threads == 1:
        yield from map(work, items)
        return
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="k3-weights") as pool:
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > threads + 1:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def in_batches(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors on the host, in lists of at least `size` bytes, but the last one: what is worth handing over."""
    batch: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        batch.append((name, tensor.detach().cpu()))
        held += tensor.numel() * tensor.element_size()
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
