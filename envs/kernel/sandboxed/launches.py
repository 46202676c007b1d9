"""Reads the `launches(dim)` of a submission: what to launch, in plain values. Runs inside a sandbox only."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Mapping, Sequence
from typing import Any


def module_of(path: str) -> types.ModuleType:
    """A submission's file as a module."""
    spec = importlib.util.spec_from_file_location("submission", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grid_of(launch: Mapping[str, Any]) -> tuple[int, int, int]:
    """The grid, filled up to three dimensions."""
    grid = tuple(int(one) for one in launch["grid"])
    return (*grid, 1, 1)[:3]  # type: ignore[return-value]


def argument_of(one: Any, dim: Mapping[str, int], tensors: Sequence[str]) -> tuple[str, Any]:
    """("tensor", name), ("int", value) or ("float", value) of one entry of `args`."""
    if isinstance(one, str):
        if one in tensors:
            return "tensor", one
        return "int", int(dim[one])
    return ("float", float(one)) if isinstance(one, float) else ("int", int(one))
