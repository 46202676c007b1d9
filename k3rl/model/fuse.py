"""Chains of element-wise operations as few kernels on a GPU, by torch.compile.

A function that is `fused` must be pure: tensors in, tensors out, nothing written. Compiled it may leave out a rounding
to bf16 between two of its operations; where that would matter there are two functions. A CPU runs it as it is written.
A function that does not compile is said once (a `UserWarning`) and runs as it is written from then on.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_VARIANTS = 64  # of one function: numbers of sources, one row or many, with gradients or without
_on = True


def widened(x: Tensor) -> Tensor:
    """x in float32, or wider where it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@contextlib.contextmanager
def fusing(on: bool) -> Iterator[None]:
    """Within the block functions are compiled for a GPU, or run as they are written."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def _device_type(given: object) -> str | None:
    if isinstance(given, Tensor):
        return given.device.type
    if isinstance(given, list | tuple) and given:
        return _device_type(given[0])
    return None


class Fused:
    """A pure function, and what torch.compile makes of it at the first call on a GPU."""

    def __init__(self, function: Callable[..., object]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.compiled: Callable[..., object] | None = None
        self.refused: str | None = None

    def __call__(self, *given: object) -> object:
        if not _on or self.refused is not None or _device_type(given) != "cuda":
            return self.function(*given)
        return self.run(*given)

    def run(self, *given: object) -> object:
        """The compiled function, wherever the tensors are."""
        if self.compiled is None:
            torch._dynamo.config.recompile_limit = max(_VARIANTS, torch._dynamo.config.recompile_limit)
            self.compiled = torch.compile(self.function, dynamic=True, fullgraph=True)
        try:
            return self.compiled(*given)
        except (torch._dynamo.exc.TorchDynamoException, ImportError) as error:
            name = getattr(self.function, "__qualname__", repr(self.function))
            self.refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            warnings.warn(f"{name} runs without fusing, it does not compile here: {self.refused}", stacklevel=2)
            return self.function(*given)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled where its tensors are on a GPU. Arguments are positional."""
    return Fused(function)  # type: ignore[return-value]
