"""What is known of one tensor of sequence ends, for the layers of a forward and backward that all read it.

Tables of chunks depend on the ends alone, and rows behind the last end have to be zeroed where there may be some. A
forward in which many layers read the same ends says so with `covering`; elsewhere each call makes its own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

T = TypeVar("T")

MARK = "_k3rl_tables"


def covering(ends: torch.Tensor) -> torch.Tensor:
    """The tensor itself, marked: every row belongs to a sequence, and nobody writes to it again.

    Inside the capture of a CUDA graph it must be one that was made there: its tables belong to the graph.
    """
    setattr(ends, MARK, {})
    return ends


def covers(ends: torch.Tensor | None) -> bool:
    """Whether no row lies behind the last end, for certain."""
    return ends is None or hasattr(ends, MARK)


def table(ends: torch.Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns, made once for marked ends."""
    tables = getattr(ends, MARK, None)
    if tables is None:
        return make()
    if key not in tables:
        tables[key] = make()
    return tables[key]
