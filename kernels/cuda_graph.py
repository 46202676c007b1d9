"""CUDA graphs of steps of fixed shapes: staged inputs, warm-up, capture and replay.

The engine's decode and prefill steps, the learner's forward-backward and the optimizer step are captured through this
file alone. A captured step reads its inputs from `StagedInputs`, buffers at fixed addresses that the host fills and
moves by one copy. On a CPU the same step runs uncaptured.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Run = Callable[[], object]
Replay = Callable[[], None]

WARM_UPS = 2  # runs of a shape before its first capture: kernels are compiled and workspaces made then
PAYS = 4  # replays that a capture takes the time of
_MOST_WAITS = 64


def reserved_bytes() -> int:
    """Bytes that torch's allocator holds on the current device; 0 before a GPU is used."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


class CaptureError(RuntimeError):
    """A step did something that a CUDA graph cannot record; the message says where."""


class StagedInputs:
    """Named inputs of a captured step: int64 or float64 columns that lie end to end, so that one copy moves them all.

    widths: name -> numbers of a column. reals: names whose numbers are float64. `host` has the columns as NumPy arrays
    in page-locked memory, `device` as tensors at addresses that never change.
    """

    def __init__(self, widths: Mapping[str, int], device: torch.device, reals: Collection[str] = ()) -> None:
        on_gpu = device.type == "cuda"
        self._pinned = torch.zeros(sum(widths.values()), dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros_like(self._pinned, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        start = 0
        for name, width in widths.items():
            kind = torch.float64 if name in reals else torch.int64
            self.host[name] = self._pinned[start : start + width].view(kind).numpy()
            self.device[name] = self._device[start : start + width].view(kind)
            start += width

    def wait(self) -> None:
        """Blocks until the last copy has left the host buffer; call it before writing to `host`."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self) -> None:
        """Starts the copy of all columns to the device, on the current stream."""
        self._device.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class GraphPool:
    """The memory that the graphs of one owner share. Once all of them are dropped, `renew` must be called."""

    def __init__(self) -> None:
        self._handle: Any = None
        self.held = 0  # bytes that captures reserved: they stay, and torch counts them as used by nobody

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def renew(self) -> None:
        """Goes on with fresh memory; a pool whose graphs are all gone must not be used again."""
        self._handle, self.held = None, 0


class CapturedStep(Generic[T]):
    """One step at fixed addresses: run as it is until `capture`, replayed from then on.

    `run` must do the same operations on the same memory each time. `outputs` are overwritten by the next replay.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: T | None = None
        self._warm = False  # kernels are compiled, for an earlier model too

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def capture(self, pool: GraphPool, around: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        """Warms up on a side stream and records the graph in the pool's memory.

        around: a context to warm up and record in. Raises CaptureError when an operation cannot be captured; errors of
        the step itself, which the warm-up meets first, and torch.OutOfMemoryError are raised as they are.
        """
        context = contextlib.nullcontext if around is None else around
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), context():
            for _ in range(1 if self._warm else WARM_UPS):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        handle, graph = pool.handle, torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # as a capture does: what it gives back is no memory of the graph's
        before = reserved_bytes()
        try:
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(graph, pool=handle, capture_error_mode="thread_local"), context():
                self._outputs = self._run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(_said(error)) from error
        pool.held += reserved_bytes() - before
        self._graph, self._warm = graph, True

    def __call__(self) -> T:
        """Replays the graph, or runs the step where it is not captured."""
        if self._graph is None:
            return self._run()
        self._graph.replay()
        assert self._outputs is not None
        return self._outputs

    def drop(self) -> None:
        """Forgets the graph, as when something that it reads was replaced."""
        self._graph, self._outputs = None, None


def _said(error: Exception) -> str:
    """Where an error was raised, its type and its first line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).partition("\n")[0]
    return f"{Path(last.filename).name} line {last.lineno}: {type(error).__name__}: {said}"


def record(run: Run) -> Replay:
    """A CUDA graph of what `run` does, on tensors of the current device; nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on, as one that writes a checkpoint does.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


class KeyedStep:
    """Operations that are captured once a key came up twice in a row; calls with that key are replayed.

    What changes from call to call must lie in tensors or be part of the key. A step that cannot be captured runs as it
    is from then on, which is said once (a `UserWarning`). Where captures did not pay, one after the other, the next key
    must come up longer and longer before it is captured. recorder: makes a replay of a run, `record` unless told
    otherwise. changes: how often a call had another key than the one before; previous: that key, and `key` the one now.
    """

    def __init__(self, name: str, recorder: Callable[[Run], Replay] = record) -> None:
        self._name, self._recorder = name, recorder
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

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph, of the last key."""
        return self._replay is not None

    def has(self, key: Hashable) -> bool:
        """Whether a call with this key is a replay."""
        return self._replay is not None and key == self.key

    def _captured(self, run: Run) -> Replay | None:
        before = reserved_bytes()
        try:
            replay = self._recorder(run)
            self.held = reserved_bytes() - before
            return replay
        except RuntimeError as error:
            self.refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            warnings.warn(f"{self._name} is not captured as a CUDA graph: {self.refused}", stacklevel=4)
            return None
