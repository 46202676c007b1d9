"""Work beside the loop: what a step leaves to be written, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class Background:
    """One piece of work at a time, in order. What a piece raises comes out of the next call.

    With `with` it ends when the last piece is done.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._under_way: Future[Any] | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Begins it when the piece before is done, so that no more than one is held."""
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> None:
        """Until nothing is under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        if error is None:
            self.wait()
