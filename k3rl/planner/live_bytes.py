"""Bytes of tensors that are alive while a piece of work runs: what the planner's predictions are compared with.

Every operation is looked at, so work runs several times slower meanwhile. Works on any device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while they live: `now`, and `peak` since the start.

    ignored: tensors whose storages are not counted, such as parameters.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._kept = [tensor.untyped_storage() for tensor in ignored]  # so that no address is used again
        self._bytes = {storage._cdata: 0 for storage in self._kept}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        if storage._cdata in self._bytes:
            return
        self._bytes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        self.now -= self._bytes.pop(address)
