"""What travels from the learner to the engines when a weight version is published.

A version has one form or several: everything, or the difference from what an engine serves already. An engine takes
any of them and ends with the same bytes. A further kind of form (an adapter beside fixed weights) would be another
`kind` here, another branch in `RolloutActor.prepare`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from k3rl.types import WeightVersion

Served: TypeAlias = tuple[int, str]
"""What an engine serves: the number of the version, and the digest of its manifest."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to send a version. kind: "whole" (buckets are safetensors messages) or "delta" (`checkpoint.delta`).

    header: of a delta, empty otherwise. buckets: references to messages in the object store. bytes: of all of it.
    """

    kind: str
    header: bytes
    buckets: tuple[Any, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Publication:
    """A version, the form for each kind of engine by what it serves, and the bytes of all its tensors."""

    version: WeightVersion
    forms: Mapping[Served, Form]
    bytes_full: int
