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


class Program:
    """Calls with the key of the call before are replayed; one that cannot be captured runs as it is from then on, which
    is said once (a `UserWarning`). capture: makes a replay of a run, `capture` unless told otherwise."""

    def __init__(self, name: str, capture: Callable[[Run], Replay] = capture) -> None:
        self._name, self._capture = name, capture
        self._key: Hashable = None
        self._replay: Replay | None = None
        self._captures = self._replays = 0
        self.refused: str | None = None
        self.held = 0  # bytes of the graph's own memory, which torch counts as used by nobody

    def __call__(self, key: Hashable, run: Run) -> None:
        """Does what `run` does; with an equal key it must be the same operations on the same memory."""
        if self.refused is None and key == self._key:
            # A capture takes as long as several runs: where keys rarely last there are few.
            if self._replay is None and 4 * self._captures <= self._replays + 8:
                self._captures += 1
                self._replay = self._captured(run)
            if self._replay is not None:
                self._replays += 1
                self._replay()
                return
        self._key, self._replay, self.held = key, None, 0  # the memory of another capture is given back
        run()

    def has(self, key: Hashable) -> bool:
        """Whether a call with this key is a replay."""
        return self._replay is not None and key == self._key

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
