"""How the processes of one learner notice that one of them is gone, and agree on its name.

Each process runs a thread that tells a shared store, several times a timeout, that it lives and what it waits for. When
a collective breaks or times out, the ranks read those heartbeats and agree on one name: who fell silent, who left with
an error, or who never came to where the others wait. So every rank ends with the same name instead of with a socket's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch.distributed as dist

from k3rl.config import K3Error

_BEATS = 25  # heartbeats a timeout, or more
_BEAT_S = 2.0  # between heartbeats, at most
_NAMING = 3  # beats without a heartbeat until a rank counts as silent
_STORE_GONE = "rank 0 is gone, and with it the store where ranks meet"
_LINGER_S = 10.0  # how long rank 0 keeps the store for ranks that still have to read it


class PeerFailed(K3Error):
    """This rank is fine, but another one failed; that one's error says why."""


class RankFailed(PeerFailed):
    """A rank died, hung or left while others waited for it. `rank` is the one to look at; all ranks end."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class LostRank(NamedTuple):
    """Who is gone, as all ranks say it, and a sentence about it."""

    rank: int
    text: str

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str | bytes) -> LostRank:
        return cls(**json.loads(text))


class Heartbeat(NamedTuple):
    """What a rank last said of itself."""

    beat: int
    entered: int  # collectives entered so far
    inside: bool
    what: str  # the collective it waits in, or was in last

    def to_json(self) -> str:
        return json.dumps(self)


class DeviceEvent(Protocol):
    """A point in a GPU's work."""

    def query(self) -> bool:
        """Whether the GPU has come by."""
        ...


class _Queued(NamedTuple):
    """The last collective that was given to a GPU."""

    ends: DeviceEvent
    deadline: float
    what: str


def beat_s(timeout_s: float) -> float:
    """Seconds between the heartbeats of ranks with this timeout."""
    return min(_BEAT_S, timeout_s / _BEATS)


def naming_s(timeout_s: float) -> float:
    """Seconds of a timeout that ranks need to agree on a name."""
    return 2 * _NAMING * beat_s(timeout_s)


class Liveness:
    """What one rank tells the others of itself, and what it finds out about them.

    lost: who is gone, once ranks have agreed on it. ended: this rank has left, or is about to.

    On a GPU a collective returns before it is done, and the host may wait for it anywhere. So the thread that tells of
    this rank also looks whether the last one has ended in time. If not it finds the name and calls `abort`, which ends
    the groups and frees the host; the next collective raises.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, every_s: float, limit_s: float, abort: Callable[[], None]
    ) -> None:
        """every_s: between heartbeats. limit_s: how long a collective on a GPU may take."""
        self.lost: LostRank | None = None
        self.ended = threading.Event()
        self._store, self._rank, self._size, self._abort = store, rank, size, abort
        self._every_s, self._limit_s = every_s, limit_s
        self._entered, self._inside, self._what = 0, False, "start"
        self._queued: _Queued | None = None

    def start(self, store: dist.Store) -> None:
        """Tells of this rank from here on, in a thread with this connection of its own."""
        threading.Thread(target=self._beat, args=(store,), name="rank-life", daemon=True).start()

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Around a collective: this rank waits in it."""
        self._entered += 1
        self._inside, self._what = True, what
        try:
            yield
        finally:
            self._inside = False

    def queued(self, what: str, ends: DeviceEvent) -> None:
        """A GPU was given a collective, which has ended once it comes by the event."""
        self._queued = _Queued(ends, time.monotonic() + self._limit_s, what)

    def _beat(self, store: dist.Store) -> None:
        beat = 0
        while not self.ended.wait(self._every_s):
            beat += 1
            try:
                heartbeat = Heartbeat(beat, self._entered, self._inside, self._what)
                store.set(f"note/{self._rank}", heartbeat.to_json())
                if store.check(["verdict"]):
                    self.lost = LostRank.from_json(store.get("verdict"))
                self.check_device(store)
            except RuntimeError:  # rank 0 is gone; whoever waits for anyone will notice
                with suppress(RuntimeError):
                    self._free_device(LostRank(0, _STORE_GONE))
                return

    def check_device(self, store: dist.Store) -> None:
        """Frees the host when the GPU waits in a collective that is overdue, or that another rank has abandoned."""
        queued = self._queued
        if queued is None or (self.lost is None and time.monotonic() < queued.deadline) or queued.ends.query():
            return
        self._free_device(self.lost or self._find(queued.what, store))

    def _free_device(self, lost: LostRank) -> None:
        """Whoever waits for the GPU goes on, with values that mean nothing; the next collective raises."""
        queued = self._queued
        if queued is None or self.ended.is_set() or queued.ends.query():
            return
        self.lost = self.lost or lost
        self._queued = None
        self._abort()

    def find(self, what: str) -> LostRank:
        """Who is gone, after this rank has waited in `what` in vain."""
        try:
            self.lost = self.lost or self._find(what, self._store)
        except RuntimeError:
            self.lost = self.lost or LostRank(0, _STORE_GONE)
        return self.lost

    def _find(self, what: str, store: dist.Store) -> LostRank:
        """The one name of all ranks: the first to be written into the store."""
        store.set(f"asks/{self._rank}", "")
        before = _heartbeats(store, self._size)
        for _ in range(_NAMING):
            time.sleep(self._every_s)
            if store.check(["verdict"]):
                return LostRank.from_json(store.get("verdict"))
        now = _heartbeats(store, self._size)
        others = (r for r in range(self._size) if r != self._rank)
        there = [r for r in others if not any(store.check([f"{word}/{r}"]) for word in ("asks", "left"))]
        found = _suspect(before, now, there, what)
        return self.conclude(found or LostRank(self._rank, f"rank {self._rank} lost its connections in {what}"), store)

    def conclude(self, lost: LostRank, store: dist.Store | None = None) -> LostRank:
        """Writes who is gone for all ranks; what another rank has written before stays, and comes back."""
        first = (store or self._store).compare_set("verdict", "", lost.to_json())
        self.lost = LostRank.from_json(first)
        return self.lost

    def end(self, close: Callable[[], None]) -> None:
        """Leaves: `close` ends the groups, so that whoever waits for this rank learns it.

        Rank 0 keeps the store for a while, which the others may still read.
        """
        if self.ended.is_set():
            return
        self.ended.set()
        try:
            self._store.set(f"left/{self._rank}", "")
            gone = {self._rank, -1 if self.lost is None else self.lost.rank}
            close()
            deadline = time.monotonic() + _LINGER_S
            while self._rank == 0 and time.monotonic() < deadline:
                gone |= {r for r in range(self._size) if self._store.check([f"left/{r}"])}
                if gone >= set(range(self._size)):
                    break
                time.sleep(0.02)
        except RuntimeError:  # the store or a connection is gone already, which is what this was about
            pass


def find_lost(address: str, size: int, timeout_s: float) -> RankFailed | None:
    """Whom the `size` ranks of a `World` at `address` wait for, asked by a process that is none of them.

    timeout_s: theirs; the answer takes about a third of it at most. None where nobody waits for another.
    """
    answer: list[RankFailed | None] = []
    asking = threading.Thread(target=lambda: answer.append(_ask(address, size, beat_s(timeout_s))), daemon=True)
    asking.start()  # a store whose process is stopped takes a connection and never answers, whatever its timeout is
    asking.join((_NAMING + 5) * beat_s(timeout_s))
    return (
        answer[0]
        if answer
        else RankFailed(0, f"rank 0 hangs: its store, where ranks meet, gives no answer ({address})")
    )


def _ask(address: str, size: int, every_s: float) -> RankFailed | None:
    host, _, port = address.rpartition(":")
    try:
        store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=4 * every_s), wait_for_workers=False)
        before = _heartbeats(store, size)
        time.sleep(_NAMING * every_s)
        if store.check(["verdict"]):
            return RankFailed(*LostRank.from_json(store.get("verdict")))
        now = _heartbeats(store, size)
    except RuntimeError:
        return RankFailed(0, f"rank 0 is gone: its store, where ranks meet, gives no answer ({address})")
    waits = next((heartbeat.what for heartbeat in now.values() if heartbeat.inside), None)
    there = list(range(size)) if waits is not None else [r for r in before if before[r].beat == now[r].beat]
    found = _suspect(before, now, there, waits or "nothing")
    return None if found is None else RankFailed(*found)


def _heartbeats(store: dist.Store, size: int) -> dict[int, Heartbeat]:
    keys = {r: f"note/{r}" for r in range(size)}
    return {r: Heartbeat(*json.loads(store.get(k))) for r, k in keys.items() if store.check([k])}


def _suspect(
    before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat], there: Sequence[int], what: str
) -> LostRank | None:
    """Who of the ranks `there` fell silent, did not come to `what`, or is furthest behind, and a sentence about it."""
    silent = [r for r in there if now.get(r) is None or (r in before and before[r].beat == now[r].beat)]
    late = sorted((now[r].entered, r) for r in there if r in now and not now[r].inside)
    waiting = sorted((now[r].entered, r) for r in there if r in now)
    if silent:
        return LostRank(silent[0], f"rank {silent[0]} died: it gave no sign of life while others waited")
    if late:
        return LostRank(late[0][1], f"rank {late[0][1]} hangs: it did not come to {what}, where others waited")
    if waiting:
        rank = waiting[0][1]
        return LostRank(rank, f"rank {rank} hangs in {now[rank].what}, others in {what}")
    return None
