"""Digests of stored tensors, and of whole manifests of them: how two processes know that they hold the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from k3rl.checkpoint.threads import in_batches, map_in_order

_BATCH = 1 << 20  # bytes of tensors that a thread digests at a time


def digest(tensor: Tensor) -> str:
    """SHA-256, in hex, of dtype, shape and bytes."""
    header = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode()
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    sha = hashlib.sha256(header)
    sha.update(content.data)
    return sha.hexdigest()


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Official name -> digest, of stored tensors such as `official_tensors(model)` gives (buffers included)."""
    return {name: found for batch in map_in_order(digests, in_batches(tensors, _BATCH)) for name, found in batch}


def digests(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """(name, digest) of each."""
    return [(name, digest(tensor)) for name, tensor in tensors]


def manifest_digest(manifest: Mapping[str, str]) -> str:
    """SHA-256, in hex, of all names and digests: equal for equal weights, whatever the order."""
    return hashlib.sha256("\n".join(f"{name} {manifest[name]}" for name in sorted(manifest)).encode()).hexdigest()
