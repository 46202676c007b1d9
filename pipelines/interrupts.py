"""Ctrl-C and SIGTERM end a run at the next whole step; a second one ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from k3rl.run import Signalled


class Interrupts:
    """While active, the first SIGINT or SIGTERM sets `requested` and `number`; the second raises Signalled."""

    def __init__(self) -> None:
        self.requested = False
        self.number: int = signal.SIGINT
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise Signalled(number)
        self.requested, self.number = True, number
        print("\nending after this step; once more to end at once", file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
