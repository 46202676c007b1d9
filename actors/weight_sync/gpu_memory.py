"""Buffers on a GPU that another process of the node opens without a copy, by CUDA's handles as torch passes them."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from k3rl.config import K3Error


class SharingRefused(K3Error):
    """A buffer cannot be given to another process, or not be opened here."""


def uuid_of(device: torch.device) -> str:
    """What tells a GPU from all others, whatever number a process knows it by."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return str(torch.cuda.get_device_properties(index).uuid)


def visible_gpus() -> tuple[str, ...]:
    """The UUIDs of the GPUs that this process sees, by number."""
    return tuple(uuid_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))


def share(buffer: Tensor) -> dict[str, Any]:
    """JSON by which one other process may open uint8 [n] of GPU memory, once. The buffer must outlive that."""
    if buffer.device.type != "cuda":
        raise SharingRefused(f"a buffer on {buffer.device} is no GPU memory; send weights another way than ipc")
    _, args = reduce_tensor(buffer)
    _, size, stride, offset, _, _, _, *rest = args  # classes, dtype and this process's number of the device stay here
    handle, storage_bytes, storage_offset, _, counter, counter_offset, event, event_needed = rest
    return {
        "gpu": uuid_of(buffer.device),
        "size": list(size),
        "stride": list(stride),
        "offset": offset,
        "handle": _text(handle),
        "storage": [storage_bytes, storage_offset],
        "counter": [_text(counter), counter_offset],
        "event": [_text(event), bool(event_needed)],
    }


def open_shared(shared: dict[str, Any]) -> Tensor:
    """The buffer of another process, which keeps it until this tensor is dropped. Raises SharingRefused."""
    gpus = visible_gpus()
    if shared["gpu"] not in gpus:
        raise SharingRefused(f"the learner's GPU {shared['gpu']} is not among the {len(gpus)} that this process sees")
    storage_bytes, storage_offset = shared["storage"]
    counter, counter_offset = shared["counter"]
    event, event_needed = shared["event"]
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size(shared["size"]),
        tuple(shared["stride"]),
        shared["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        gpus.index(shared["gpu"]),
        _content(shared["handle"]),
        storage_bytes,
        storage_offset,
        False,
        _content(counter),
        counter_offset,
        _content(event),
        event_needed,
    )


def collect() -> None:
    """Gives memory back that other processes have let go of."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _content(text: str) -> bytes:
    return base64.b64decode(text)
