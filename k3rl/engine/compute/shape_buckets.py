"""The shapes that a step of an engine runs in: each has its own inputs and, on a GPU, its own CUDA graph.

Weights that change in place are seen by the next replay. Another model, which is how engines take a version, needs
other graphs: those that there are are dropped, and captured again as their shapes are met. Buffers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from k3rl.kernels import CapturedStep, GraphPool
from k3rl.model import K3ForCausalLM, side_streams

Shape = tuple[int, int]
Inputs = TypeVar("Inputs")


@dataclass(slots=True)
class CurrentModel:
    """The model that steps are computed by."""

    model: K3ForCausalLM


@dataclass(frozen=True, slots=True)
class ShapeBucket(Generic[Inputs]):
    """One shape: its buffers, and the step that reads them."""

    inputs: Inputs
    step: CapturedStep[Any]


class ShapeBuckets(Generic[Inputs]):
    """Buckets by shape, made by `make` when a shape is first met. capture: whether their steps become graphs.

    A step must hold nothing that holds these buckets: graphs are freed with the last reference to their owner.
    """

    def __init__(
        self, model: K3ForCausalLM, make: Callable[[Shape, CurrentModel], ShapeBucket[Inputs]], *, capture: bool
    ) -> None:
        self.capture = capture
        self._current, self._make, self._pool = CurrentModel(model), make, GraphPool()
        self._buckets: dict[Shape, ShapeBucket[Inputs]] = {}

    def __getitem__(self, shape: Shape) -> ShapeBucket[Inputs]:
        if shape not in self._buckets:
            self._buckets[shape] = self._make(shape, self._current)
        return self._buckets[shape]

    @property
    def shapes(self) -> Collection[Shape]:
        """Those that were met."""
        return self._buckets.keys()

    @property
    def captured(self) -> int:
        """Shapes that have a graph now."""
        return sum(bucket.step.is_captured for bucket in self._buckets.values())

    def needs_capture(self, bucket: ShapeBucket[Inputs]) -> bool:
        """Whether `record` is to be called before the bucket's step."""
        return self.capture and not bucket.step.is_captured

    def record(self, bucket: ShapeBucket[Inputs]) -> None:
        """Captures the bucket's step, whose inputs must be padding alone: it warms up on them."""
        bucket.step.capture(self._pool, around=side_streams)

    def serve(self, model: K3ForCausalLM) -> None:
        """Goes on with this model."""
        if model is self._current.model:
            return
        self._current.model = model
        self._drop_graphs()

    def stop_capturing(self) -> None:
        """Steps run as they are from now on."""
        self._drop_graphs()
        self.capture = False

    def _drop_graphs(self) -> None:
        if self.capture:  # a step that was launched may still run
            torch.cuda.current_stream().synchronize()
        for bucket in self._buckets.values():
            bucket.step.drop()
        self._pool.renew()
