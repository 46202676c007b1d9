"""A run of operations on tensors at fixed addresses, captured as a CUDA graph once it has come up twice the same.

An optimizer step is some thousand small calls, for which the host takes longer than a GPU for their work. What changes
from step to step must lie in tensors; everything else is part of the key.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

Run = Callable[[], object]
Replay = Callable[[], None]


def capture(run: Run) -> Replay:
    """A CUDA graph of what `run` does, on tensors of the current device; nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on, as one that writes a checkpoint does.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


PAYS = 4  # replays that a capture takes the time of
_MOST_WAITS = 64


class Program:
    """Calls with the key of the call before are replayed; one that cannot be captured runs as it is from then on, which
    is said once (a `UserWarning`). capture: makes a replay of a run, `capture` unless told otherwise.

    Where captures did not pay, one after the other, the next key must come up longer and longer before it is captured.
    changes: how often a call had another key than the one before; previous: that key, and `key` the one now.
    """

    def __init__(self, name: str, capture: Callable[[Run], Replay] = capture) -> None:
        self._name, self._capture = name, capture
        self.key: Hashable = None
        self.previous: Hashable = None
        self.changes = 0
        self._replay: Replay | None = None
        self._calls = self._replays = 0  # with this key since it came up; of the graph that there is
        self._unpaid = 0  # captures in a row
        self.refused: str | None = None
        self.held = 0  # bytes of the graph's own memory, which torch counts as used by nobody

    def __call__(self, key: Hashable, run: Run) -> None:
        """Does what `run` does; with an equal key it must be the same operations on the same memory."""
        if key != self.key:
            self._change(key)
        elif self.refused is None:
            self._calls += 1
            if self._replay is None and self._calls >= min(1 << max(0, self._unpaid - 1), _MOST_WAITS):
                self._replay = self._captured(run)
            if self._replay is not None:
                self._replays += 1
                self._replay()
                return
        run()

    def _change(self, key: Hashable) -> None:
        if self._replay is not None:
            self._unpaid = 0 if self._replays >= PAYS else self._unpaid + 1
        self.changes += self.key is not None
        self.previous, self.key = self.key, key
        self._replay, self.held = None, 0  # the memory of another capture is given back
        self._calls = self._replays = 0

    def has(self, key: Hashable) -> bool:
        """Whether a call with this key is a replay."""
        return self._replay is not None and key == self.key

    def _captured(self, run: Run) -> Replay | None:
        before = _reserved()
        try:
            replay = self._capture(run)
            self.held = _reserved() - before
            return replay
        except RuntimeError as error:
            self.refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            warnings.warn(f"{self._name} is not captured as a CUDA graph: {self.refused}", stacklevel=4)
            return None
