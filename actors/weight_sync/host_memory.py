"""Buffers in host memory that another process of the node opens without a copy: files without a name on any disk."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import Tensor

from k3rl.actors.weight_sync.gpu_memory import SharingRefused


class HostBuffers:
    """Makes buffers of one process, and says by what another one opens them."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # address -> descriptor

    def allocate(self, size: int) -> Tensor:
        """uint8 [size] of zeros. Its memory is given back when this tensor and all views of it are gone."""
        file = os.memfd_create("k3rl-weights")
        try:
            os.ftruncate(file, size)
            buffer = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
        except BaseException:
            os.close(file)
            raise
        self._files[buffer.data_ptr()] = file
        weakref.finalize(buffer, self._close, buffer.data_ptr())
        return buffer

    def _close(self, address: int) -> None:
        os.close(self._files.pop(address))

    def share(self, buffer: Tensor) -> dict[str, Any]:
        """JSON by which other processes of this node may open a buffer that `allocate` made."""
        if buffer.data_ptr() not in self._files:
            raise SharingRefused("this buffer is not in memory that processes share; make it with allocate(...)")
        return {"file": f"/proc/{os.getpid()}/fd/{self._files[buffer.data_ptr()]}", "size": buffer.numel()}


def open_host(shared: dict[str, Any]) -> Tensor:
    """The buffer of another process. Raises SharingRefused."""
    try:
        return torch.from_file(shared["file"], shared=True, size=shared["size"], dtype=torch.uint8)
    except RuntimeError as error:
        raise SharingRefused(f"the learner's memory cannot be opened here ({error})") from error
