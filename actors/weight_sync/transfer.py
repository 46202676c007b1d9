"""How weights go straight from a learner rank's process to the engines': by a broadcast, or through shared memory.

Both move buckets (`buckets.py`) one after the other while the next is being packed, in two buffers. A store of notes at
the rank tells the size and checksum of each bucket, and what receivers acknowledge, so that nobody waits for a peer
longer than a timeout. What a version is, and whether it is whole and unaltered, is decided by the engine as for any
other transport (`k3rl.engine.weights`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.actors.weight_sync.buckets import Bucket, BucketDamaged, checksum
from k3rl.actors.weight_sync.gpu_memory import SharingRefused, collect, open_shared, share
from k3rl.actors.weight_sync.host_memory import open_host
from k3rl.actors.weight_sync.transport import Transport
from k3rl.config import K3Error

_BUFFERS = 2
_CONNECT_S = 3.0  # of one attempt: a connection that a store accepted is now and then not answered, another one is
_SHARED = ("ipc", "shm")
_POLLS_S = (0.0005, 0.005)  # first and longest pause between two looks at the store


class TransferBroken(K3Error):
    """A peer is gone or came too late; this transport is of no more use."""


@dataclass(frozen=True, slots=True)
class Link:
    """What both sides of a transfer know. nccl: broadcast between GPUs; gloo through host memory otherwise."""

    transport: Transport
    address: str
    receivers: int
    timeout_s: float
    nccl: bool = False


class _NoteStore:
    """One process's connection to the store of notes."""

    def __init__(self, store: dist.TCPStore, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s

    def put(self, key: str, note: Any) -> None:
        self._store.set(key, json.dumps(note))

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def get(self, key: str, what: str) -> Any:
        """Waits for a note. Raises TransferBroken after the timeout, or when the other side has aborted."""
        deadline, pause = time.monotonic() + self._timeout_s, _POLLS_S[0]
        while not self._store.check([key]):
            if self._store.check(["broken"]):
                raise TransferBroken(json.loads(self._store.get("broken")))
            if time.monotonic() > deadline:
                raise TransferBroken(f"{what} did not come within {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLLS_S[1])
        return json.loads(self._store.get(key))


def abort_transfer(link: Link, reason: str) -> None:
    """Tells all who wait for a bucket or its receipt that one of them is gone; the caller knows it by other means."""
    with suppress(RuntimeError):  # without a store nobody waits for longer than it takes to notice
        _NoteStore(_connect(link), link.timeout_s).put("broken", reason)


def _group(link: Link, rank: int) -> Any:
    """A process group of its own, beside those of the learner: rank 0 sends, engine i is rank i + 1."""
    limit = timedelta(seconds=link.timeout_s)
    store = dist.PrefixStore("group", _connect(link))
    if not link.nccl:
        return dist.ProcessGroupGloo(store, rank, link.receivers + 1, limit)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a timeout ends the process, before anyone can tell
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, link.receivers + 1, options)


def _connect(link: Link) -> dist.TCPStore:
    host, _, port = link.address.rpartition(":")
    return _store(host, int(port), link.timeout_s)


def _store(host: str, port: int, timeout_s: float, *, here: bool = False) -> dist.TCPStore:
    """A connection to the store at this address, which is made if it is to be `here`."""
    deadline = time.monotonic() + timeout_s
    while True:
        limit = timedelta(seconds=min(timeout_s, _CONNECT_S))
        try:
            store = dist.TCPStore(host, port, None, here, limit, wait_for_workers=False)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _close(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)


# ------------------------------------------------------------------------------------------------ the learner's side


class _Carrier(Protocol):
    """Moves the contents of a sender's buffers."""

    def free(self, key: str, index: int) -> None:
        """Returns once the bucket before, in this buffer, has arrived everywhere."""
        ...

    def start(self, key: str, index: int, buffer: Tensor, note: dict[str, Any]) -> None:
        """Tells receivers of a bucket and begins to move it."""
        ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class _Broadcast:
    def __init__(self, link: Link, notes: _NoteStore) -> None:
        self._notes, self._group = notes, _group(link, 0)
        self._moving: dict[int, Any] = {}

    def free(self, key: str, index: int) -> None:
        if index in self._moving:
            self._moving.pop(index).wait()

    def start(self, key: str, index: int, buffer: Tensor, note: dict[str, Any]) -> None:
        self._notes.put(f"{key}/{index}", note)  # first: who reads it joins
        self._moving[index] = _broadcast(self._group, buffer)

    def finish(self) -> None:
        while self._moving:
            self._moving.pop(min(self._moving)).wait()

    def close(self) -> None:
        _close(self._group)


class _SharedMemory:
    """share: of a buffer, once for each receiver, what another process opens it by."""

    def __init__(self, link: Link, notes: _NoteStore, share: Callable[[Tensor], Any]) -> None:
        self._notes, self._receivers, self._share = notes, link.receivers, share
        self._shared: dict[int, int] = {}  # buffer -> where it lies, as receivers know it

    def free(self, key: str, index: int) -> None:
        for receiver in range(self._receivers):
            self._notes.get(f"{key}/{index}/taken/{receiver}", f"bucket {index} at rollout actor {receiver}")

    def start(self, key: str, index: int, buffer: Tensor, note: dict[str, Any]) -> None:
        place = index % _BUFFERS
        handles = None
        if self._shared.get(place) != buffer.data_ptr():
            self._shared[place] = buffer.data_ptr()
            storage = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
            handles = [self._share(storage) for _ in range(self._receivers)]
        self._notes.put(f"{key}/{index}", {**note, "buffer": place, "handles": handles})

    def finish(self) -> None:
        self._shared.clear()

    def close(self) -> None:
        self._shared.clear()


class Sender:
    """One rank's side: one for a run, with the store and, for a broadcast, rank 0 of the group.

    host: under which receivers reach this process. share: see `_SharedMemory`. allocate: makes a buffer, uint8 [n], to
    send from; by default where weights are. Raises TransferBroken.
    """

    def __init__(
        self,
        transport: Transport,
        receivers: int,
        device: torch.device,
        timeout_s: float,
        *,
        host: str = "127.0.0.1",
        nccl: bool = False,
        share: Callable[[Tensor], Any] = share,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        try:
            store = _store(host, 0, timeout_s, here=True)
        except RuntimeError as error:
            raise TransferBroken(f"the learner cannot listen at {host}: {error}") from error
        self.link = Link(transport, f"{host}:{store.port}", receivers, timeout_s, nccl)
        self._notes = _NoteStore(store, timeout_s)
        self._device = own = device if transport == "ipc" or nccl else torch.device("cpu")
        self._allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device=own))
        self._share = share
        self._carrier: _Carrier | None = None

    def sends_from(self, buffer: Tensor) -> bool:
        """Whether a buffer, where it lies, is one that can be shared or broadcast."""
        return buffer.device.type == self._device.type

    def join(self) -> None:
        """Meets the receivers, which call theirs meanwhile. Raises TransferBroken."""
        try:
            shared = self.link.transport in _SHARED
            self._carrier = (
                _SharedMemory(self.link, self._notes, self._share) if shared else _Broadcast(self.link, self._notes)
            )
        except RuntimeError as error:
            raise self._broken(f"the engines did not join: {error}") from error

    def send(self, key: str, buckets: Iterable[Bucket]) -> int:
        """Sends buckets to all receivers, which have all of them when this returns; gives their bytes.

        key: a new one each time. At most two buckets are in memory, but for those that lie there anyway. Raises
        TransferBroken; the sender is then closed.
        """
        if self._carrier is None:
            raise TransferBroken("this sender is closed or was never joined")
        buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        count = moved = 0
        try:
            for bucket in buckets:
                if count >= _BUFFERS:
                    self._carrier.free(key, count - _BUFFERS)
                buffer, found = bucket.resident, None
                if buffer is None:
                    place = count % _BUFFERS
                    if buffers[place].numel() < bucket.size:
                        buffers[place] = self._allocate(bucket.size)
                    buffer = buffers[place][: bucket.size]
                    bucket.write(buffer)
                    found = checksum(buffer)  # which waits for the device
                note = {"size": bucket.size, "checksum": found}
                self._carrier.start(key, count, buffer, note)
                count, moved = count + 1, moved + bucket.size
            self._notes.put(f"{key}/{count}", {"end": count})
            for receiver in range(self.link.receivers):
                self._notes.get(f"{key}/done/{receiver}", f"the end of version {key} at rollout actor {receiver}")
            self._carrier.finish()
            self._forget(key, count)
        except (RuntimeError, TransferBroken) as error:
            raise self._broken(str(error)) from error
        except Exception as error:  # of the buckets themselves: receivers are not left waiting
            self._notes.put(f"{key}/{count}", {"failed": f"the learner could not pack it: {error}"})
            self._carrier.finish()
            raise
        finally:
            del buffers
            if self.link.transport == "ipc":
                collect()
        return moved

    def _forget(self, key: str, count: int) -> None:
        """Drops the notes of a version that all have."""
        receivers = range(self.link.receivers)
        self._notes.drop(f"{key}/{index}" for index in range(count + 1))
        self._notes.drop(f"{key}/done/{receiver}" for receiver in receivers)
        if self.link.transport in _SHARED:
            self._notes.drop(f"{key}/{index}/taken/{receiver}" for index in range(count) for receiver in receivers)

    def close(self) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()

    def _broken(self, reason: str) -> TransferBroken:
        text = f"weights no longer go by {self.link.transport}: {reason}"
        with suppress(RuntimeError):
            self._notes.put("broken", text)
        self.close()
        return TransferBroken(text)


# ------------------------------------------------------------------------------------------------ an engine's side


_open_on_gpu = open_shared


class Receiver:
    """One engine's side: receiver `number` of those of the link. open_shared: opens what the sender shares."""

    def __init__(
        self, link: Link, number: int, device: torch.device, *, open_shared: Callable[[Any], Tensor] | None = None
    ) -> None:
        self._link, self._number = link, number
        self._open_shared = open_shared or (open_host if link.transport == "shm" else _open_on_gpu)
        self._device = device if link.transport in _SHARED or link.nccl else torch.device("cpu")
        self._group: Any = None
        self._notes: _NoteStore | None = None

    def join(self) -> None:
        """Meets the others. Raises TransferBroken."""
        try:
            self._notes = _NoteStore(_connect(self._link), self._link.timeout_s)
            if self._link.transport == "broadcast":
                self._group = _group(self._link, self._number + 1)
        except RuntimeError as error:
            self.close()
            raise TransferBroken(f"rollout actor {self._number} did not meet the learner: {error}") from error

    async def receive(self, key: str, take: Callable[[Tensor], None]) -> None:
        """Gives each bucket of `key`, uint8 [n] of its own memory, to `take`, until the last one.

        After an error of `take`, or a damaged bucket, the rest is received and dropped, so that peers are not held up;
        then it is raised. Other calls of the event loop run between buckets. Raises BucketDamaged, TransferBroken.
        """
        if self._notes is None:
            raise TransferBroken("this receiver is closed or was never joined")
        opened: dict[int, Tensor] = {}
        refused: Exception | None = None
        index = 0
        try:
            while "end" not in (note := await self._note(key, index)):
                if "failed" in note:
                    raise BucketDamaged(f"bucket {index} of version {key} was not sent: {note['failed']}")
                bucket = self.fetch(note, opened)
                if refused is None:
                    try:
                        take(self._checked(bucket, note, key, index))
                    except Exception as error:  # raised below, once peers have gone on
                        refused = error
                del bucket
                if self._link.transport in _SHARED:
                    self._notes.put(f"{key}/{index}/taken/{self._number}", True)
                index += 1
            opened.clear()
            self._notes.put(f"{key}/done/{self._number}", True)
        except (RuntimeError, SharingRefused, TransferBroken) as error:
            raise self._broken(str(error)) from error
        if refused is not None:
            raise refused

    async def _note(self, key: str, index: int) -> dict[str, Any]:
        if self._notes is None:
            raise TransferBroken("this receiver was closed")
        return dict(await asyncio.to_thread(self._notes.get, f"{key}/{index}", f"bucket {index} of version {key}"))

    def fetch(self, note: dict[str, Any], opened: dict[int, Tensor]) -> Tensor:
        """The bucket of a note, in memory of this process."""
        if self._link.transport == "broadcast":
            bucket = torch.empty(note["size"], dtype=torch.uint8, device=self._device)
            _broadcast(self._group, bucket).wait()
            return bucket
        place = note["buffer"]
        if note["handles"] is not None:
            opened[place] = self._open_shared(note["handles"][self._number])
        bucket = opened[place][: note["size"]].to(self._device, copy=True)
        if bucket.device.type == "cuda":
            torch.cuda.synchronize(bucket.device)  # the sender writes over it once it is acknowledged
        return bucket

    def _checked(self, bucket: Tensor, note: dict[str, Any], key: str, index: int) -> Tensor:
        if (sent := note["checksum"]) is None:
            return bucket
        if (found := checksum(bucket)) != sent:
            raise BucketDamaged(
                f"bucket {index} of version {key} arrived altered (checksum {found:016x}, sent {sent:016x})"
            )
        return bucket

    def _broken(self, reason: str) -> TransferBroken:
        text = f"rollout actor {self._number} no longer takes weights by {self._link.transport}: {reason}"
        with suppress(RuntimeError):  # the learner may be what is gone
            if self._notes is not None:
                self._notes.put("broken", text)
        self.close()
        return TransferBroken(text)

    def close(self) -> None:
        group, self._group, self._notes = self._group, None, None
        if group is not None:
            _close(group)
