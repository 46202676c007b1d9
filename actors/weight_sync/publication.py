"""What travels from the learner to the engines when a weight version is published.

A version has one form or several: everything, or the difference from what an engine serves already. An engine takes
any of them and ends with the same bytes. Where the learner trains an adapter, only that is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from k3rl.types import WeightVersion

POLICY = "policy"
"""Name under which engines serve the adapter that the learner trains."""

Served: TypeAlias = tuple[int, str]
"""What an engine serves: the number of the version, and the digest of its manifest."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to send a version. kind: "whole" (buckets are safetensors messages), "delta" (`checkpoint.delta`), or
    "adapter" (A and B of an adapter, in safetensors messages; the weights beside it stay).

    header: of a delta or an adapter, empty otherwise. buckets: references to messages in the object store.
    bytes: of all of it. stream: where the learner sends the messages itself (`transfer.py`), under which key; `buckets`
    is then empty and `bytes` 0.
    """

    kind: str
    header: bytes
    buckets: tuple[Any, ...]
    bytes: int
    stream: str = ""


@dataclass(frozen=True, slots=True)
class Publication:
    """A version, the form for each kind of engine by what it serves, and the bytes of all its tensors.

    adapter: the name of the adapter that it is a version of; empty for the weights themselves. half: whether the
    learner computes in bf16, whose sums no engine has to the bit.
    """

    version: WeightVersion
    forms: Mapping[Served, Form]
    bytes_full: int
    adapter: str = ""
    half: bool = False
