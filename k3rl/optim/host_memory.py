"""Host memory that a GPU copies from and to at full speed: page-locked, by several threads at once.

What a bucket of state takes is some hundred megabytes, and there are hundreds of buckets. torch's allocator of
page-locked memory makes one after the other, rounds each up to a power of two, and keeps it for good; so this one maps
memory of the size that is needed, and locks all of it together once it is known.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

THREADS = 8  # that have pages made and locked; more wait for each other in the driver
_PORTABLE = 1  # cudaHostRegisterPortable
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: makes pages without changing what is in them, from Linux 5.14 on


_libc = ctypes.CDLL(None)


class _Mapping(mmap.mmap):
    """Anonymous memory; unlocked before it goes."""

    locked_at = 0

    def __del__(self) -> None:
        if self.locked_at:
            with suppress(Exception):  # at the end of a process the driver may be gone
                torch.cuda.cudart().cudaHostUnregister(self.locked_at)


_unlocked: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()  # by address


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory of their own, whose pages are made when `lock` or a write asks for them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    _unlocked[flat.data_ptr()] = mapping
    return flat.view(dtype).view(tuple(shape))


def lock(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Has the pages of tensors of `zeros` made and locked for a GPU; True when all are. Other tensors stay as they are.

    What they hold stays, and may be read and written meanwhile. What cannot be locked still works, with copies that the
    host waits for; that is said (a `UserWarning`).
    """
    waiting = [
        (tensor, mapping) for tensor in tensors if (mapping := _unlocked.pop(tensor.data_ptr(), None)) is not None
    ]
    refused: list[str] = []

    def one(found: tuple[Tensor, _Mapping]) -> None:
        tensor, mapping = found
        # By this thread, without Python's lock; where the kernel cannot, the driver makes one page after the other.
        _libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(len(mapping)), _POPULATE_WRITE)
        torch.cuda.set_device(device)  # of the thread, which would make a context on the first one
        error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), len(mapping), _PORTABLE)
        if int(error) == 0:
            mapping.locked_at = tensor.data_ptr()
        else:
            refused.append(str(error))

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(one, waiting))
    if refused:
        warnings.warn(
            f"{len(refused)} of {len(waiting)} pieces of optimizer state in host memory are not page-locked "
            f"({refused[0]}): a step waits for each of their copies",
            stacklevel=3,
        )
    return not refused
