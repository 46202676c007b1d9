"""The processes of one learner, and how they notice that one of them is gone.

Each process runs a thread that tells a shared store, several times a timeout, that it lives and what it waits for. When
a collective breaks or times out, the ranks read those notes and agree on one name: who fell silent, who left with an
error, or who never came to where the others wait. So every rank ends with the same name instead of with a socket's.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from k3rl.config import K3Error

_BEATS = 25  # notes a timeout, or more
_BEAT_S = 2.0  # between notes, at most
_NAMING = 3  # beats without a note until a rank counts as silent
_STORE_GONE = "rank 0 is gone, and with it the store where ranks meet"
_LINGER_S = 10.0  # how long rank 0 keeps the store for ranks that still have to read it


class PeerFailed(K3Error):
    """This rank is fine, but another one failed; that one's error says why."""


class RankFailed(PeerFailed):
    """A rank died, hung or left while others waited for it. `rank` is the one to look at; all ranks end."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RanksDisagree(K3Error):
    """Ranks were given different configurations, weights or data. `rank` is the odd one, `what` what differs."""

    exit_code = 2

    def __init__(self, rank: int, what: str, message: str) -> None:
        super().__init__(message)
        self.rank, self.what = rank, what


class _Queued(NamedTuple):
    """The last collective that was given to a GPU."""

    ends: torch.cuda.Event
    deadline: float
    what: str


class _Note(NamedTuple):
    """What a rank last said of itself."""

    beat: int
    entered: int  # collectives entered so far
    inside: bool
    what: str  # the collective it waits in, or was in last


class World:
    """All ranks: `rank`, `size`, `group` (None for one process). Every method with a result is a collective.

    Ranks call collectives in one order, inside `during`. Nothing waits longer than the timeout: then, or as soon as a
    connection breaks, RankFailed names the rank that is missing, and this object can only be closed. hosts: how many
    machines the ranks are on.

    On a GPU a collective returns before it is done, and the host may wait for it anywhere. So the thread that tells of
    this rank also looks whether the last one has ended in time. If not it finds the name, ends the groups, which frees
    the host, and the next collective raises.
    """

    def __init__(
        self, rank: int, size: int, address: str, *, timeout_s: float, device: torch.device | str = "cpu"
    ) -> None:
        """Joins the ranks that meet at tcp://`address`, where rank 0 listens; NCCL on a GPU, gloo elsewhere.

        timeout_s: how long any rank may keep the others waiting. Raises RankFailed when one does not come in time.
        """
        self.rank, self.size, self.device, self.hosts = rank, size, torch.device(device), 1
        self.group: dist.ProcessGroup | None = None
        self._entered, self._inside, self._what = 0, False, "start"
        self._queued: _Queued | None = None
        self._verdict: dict[str, Any] | None = None
        self._ended = threading.Event()
        if size == 1:
            return
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.set_device(self.device)
            # Without it NCCL ends the whole process when a collective times out, before anyone can be named.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        self._every_s = _beat_s(timeout_s)
        self._collective_s = timedelta(seconds=timeout_s - 2 * _NAMING * self._every_s)  # the rest is for naming
        self._store, own = self._meet(address, timeout_s)
        threading.Thread(target=self._live, args=(own,), name="rank-life", daemon=True).start()
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore("groups", self._store),
            rank=rank,
            world_size=size,
            timeout=self._collective_s,
        )
        self.group = dist.group.WORLD

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """One process; its collectives return what they are given."""
        return cls(0, 1, "", timeout_s=1.0, device=device)

    def _meet(self, address: str, timeout_s: float) -> tuple[dist.TCPStore, dist.TCPStore]:
        """Two connections to the store, for this thread and for `_live`, once all ranks are there."""
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(host, int(port), None, self.rank == 0, limit, wait_for_workers=False)
            other = dist.TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
        except RuntimeError as error:
            raise RankFailed(0, f"rank 0 does not listen at {address} after {timeout_s:g} s ({error})") from error
        store.set(f"here/{self.rank}", platform.node())
        deadline = time.monotonic() + timeout_s
        missing = set(range(self.size))
        while missing := {r for r in missing if not store.check([f"here/{r}"])}:
            if time.monotonic() > deadline:
                raise RankFailed(
                    min(missing), f"ranks {sorted(missing)} of {self.size} did not join within {timeout_s:g} s"
                )
            time.sleep(0.01)
        self.hosts = len({store.get(f"here/{rank}") for rank in range(self.size)})
        return store, other

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of some ranks, which all ranks of the world make together; None for a single one."""
        if len(ranks) == 1:
            return None
        if len(ranks) == self.size:
            return self.group
        with self.during("making a group of ranks"):
            return dist.new_group(list(ranks), timeout=self._collective_s)

    # -- collectives --------------------------------------------------------------------------------------------

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Around a collective of any group. Raises RankFailed when it breaks or times out."""
        if self._verdict is not None or self._ended.is_set():
            raise self._failure(what, None)
        self._entered += 1
        self._inside, self._what = True, what
        try:
            yield
            if self.device.type == "cuda":
                self._queue(what)
        except RuntimeError as error:
            raise self._failure(what, error) from error
        finally:
            self._inside = False
        if self._verdict is not None and self.device.type == "cuda":  # what it gave may mean nothing
            raise self._failure(what, None)

    def _queue(self, what: str) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._queued = _Queued(event, time.monotonic() + self._collective_s.total_seconds(), what)

    @contextmanager
    def at_once(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Collectives of one group that NCCL starts as one; gloo takes them one by one. Each `async_op=False`."""
        if self.device.type != "cuda":
            yield
            return
        with distributed_c10d._coalescing_manager(group=group or self.group, device=self.device):
            yield

    def sum(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Sums a tensor over all ranks in place, or over those of `group`."""
        self._all_reduce(tensor, dist.ReduceOp.SUM, group, "a sum")

    def maximum(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """The largest values over all ranks, in place."""
        self._all_reduce(tensor, dist.ReduceOp.MAX, group, "a maximum")

    def _all_reduce(self, tensor: Tensor, op: Any, group: dist.ProcessGroup | None, what: str) -> None:
        if self.size > 1:
            with self.during(what):
                dist.all_reduce(tensor, op=op, group=group or self.group)

    def first_failed(self, fine: bool) -> int | None:
        """The lowest rank that is not fine, or None; the same on every rank."""
        if self.size == 1:
            return None if fine else 0
        flag = torch.tensor([self.size if fine else self.rank], dtype=torch.int32, device=self.device)
        self._all_reduce(flag, dist.ReduceOp.MIN, None, "asking whether all ranks are fine")
        failed = int(flag)
        return None if failed == self.size else failed

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block after which every rank goes on, or the failed one raises its error and the others PeerFailed."""
        try:
            yield
        except Exception:
            self.first_failed(False)
            raise
        if (failed := self.first_failed(True)) is not None:
            raise PeerFailed(f"rank {failed} failed in {what}; its own error says why")

    def gather(self, row: Tensor) -> Tensor:
        """A tensor [n] of each rank, of equal shape -> [ranks, n]."""
        if self.size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        with self.during("comparing ranks"):
            dist.all_gather(rows, row.contiguous())
        return torch.stack(rows)

    def exchange(self, text: str) -> list[str]:
        """A text of each rank -> all of them, by rank."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)  # an empty text too
        sizes = self.gather(torch.tensor([len(data)], device=self.device)).flatten().tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        rows = self.gather(padded).cpu()
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def require_equal(self, facts: Mapping[str, Any], among: int = 0) -> None:
        """Compares a hash of JSON facts over the ranks. Raises RanksDisagree, on all of them, for the first difference.

        among: facts are compared between ranks that give the same number. What most of those say counts as right; of
        two sides equally large, that of the lowest rank.
        """
        text = json.dumps(dict(facts), sort_keys=True, default=str)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        rows = self.gather(torch.tensor([among, digest], dtype=torch.int64, device=self.device)).tolist()
        for side in dict.fromkeys(number for number, _ in rows):
            members = {rank: value for rank, (number, value) in enumerate(rows) if number == side}
            common = Counter(members.values()).most_common(1)[0][0]
            if odd := [rank for rank, value in members.items() if value != common]:
                right = next(rank for rank, value in members.items() if value == common)
                self._disagree(text, odd[0], right)

    def _disagree(self, text: str, odd: int, right: int) -> None:
        texts = self.exchange(text)
        theirs, ours = json.loads(texts[odd]), json.loads(texts[right])
        what = next(key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key))
        raise RanksDisagree(
            odd,
            what,
            f"rank {odd} disagrees about {what}: it has {theirs.get(what)!r}, rank {right} has {ours.get(what)!r}. "
            "Start every rank from one configuration, one checkpoint and one batch",
        )

    # -- life and death -----------------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """This rank failed where others may be waiting for it: they end with its name and `reason`."""
        if self.size > 1 and not self._ended.is_set():
            with suppress(RuntimeError):  # when the store is gone, the others have a name already
                self._conclude(self._store, self.rank, f"rank {self.rank} failed: {reason}")
            self._end()

    def close(self) -> None:
        """Leaves the ranks. Rank 0 waits a little for the others, which may still read its store."""
        if self.size > 1 and not self._ended.is_set():
            self._end()

    def _live(self, store: dist.TCPStore) -> None:
        beat = 0
        while not self._ended.wait(self._every_s):
            beat += 1
            try:
                store.set(f"note/{self.rank}", json.dumps([beat, self._entered, self._inside, self._what]))
                if store.check(["verdict"]):
                    self._verdict = json.loads(store.get("verdict"))
                self._look_at_device(store)
            except RuntimeError:  # rank 0 is gone; whoever waits for anyone will notice
                with suppress(RuntimeError):
                    self._free_device({"rank": 0, "text": _STORE_GONE})
                return

    def _look_at_device(self, store: dist.TCPStore) -> None:
        """Ends the groups when the GPU waits in a collective that is overdue, or that another rank has given up."""
        queued = self._queued
        if queued is None or (self._verdict is None and time.monotonic() < queued.deadline) or queued.ends.query():
            return
        self._free_device(self._verdict or self._find_out(queued.what, store))

    def _free_device(self, verdict: dict[str, Any]) -> None:
        """Whoever waits for the GPU goes on, with values that mean nothing; the next collective raises."""
        queued = self._queued
        if queued is None or self._ended.is_set() or queued.ends.query():
            return
        self._verdict = self._verdict or verdict
        self._queued = None
        distributed_c10d._abort_process_group()

    def _failure(self, what: str, error: Exception | None) -> RankFailed:
        try:
            verdict = self._verdict or self._find_out(what, self._store)
        except RuntimeError:
            verdict = self._verdict or {"rank": 0, "text": _STORE_GONE}
        self._verdict = verdict
        self._end()
        detail = f" ({error})" if error is not None and verdict["rank"] == self.rank else ""
        return RankFailed(
            verdict["rank"], f"{verdict['text']}; rank {self.rank} ended in {what}{detail}. Restart from a checkpoint"
        )

    def _find_out(self, what: str, store: dist.TCPStore) -> dict[str, Any]:
        """The one verdict of all ranks: the first to be written into the store."""
        store.set(f"asks/{self.rank}", "")
        before = _notes(store, self.size)
        for _ in range(_NAMING):
            time.sleep(self._every_s)
            if store.check(["verdict"]):
                return dict(json.loads(store.get("verdict")))
        now = _notes(store, self.size)
        others = (r for r in range(self.size) if r != self.rank)
        there = [r for r in others if not any(store.check([f"{word}/{r}"]) for word in ("asks", "left"))]
        if (found := _suspect(before, now, there, what)) is not None:
            return self._conclude(store, *found)
        return self._conclude(store, self.rank, f"rank {self.rank} lost its connections in {what}")

    def _conclude(self, store: dist.TCPStore, rank: int, text: str) -> dict[str, Any]:
        first = store.compare_set("verdict", "", json.dumps({"rank": rank, "text": text}))
        self._verdict = dict(json.loads(first))
        return self._verdict

    def _close_groups(self) -> None:
        if self._verdict is not None and self.device.type == "cuda":
            distributed_c10d._abort_process_group()  # the other way NCCL waits for what a lost rank never sends
        else:
            dist.destroy_process_group()

    def _end(self) -> None:
        """Closes the groups, so that whoever waits for this rank learns it; rank 0 keeps the store for a while."""
        if self._ended.is_set():
            return
        self._ended.set()
        try:
            self._store.set(f"left/{self.rank}", "")
            gone = {self.rank, -1 if self._verdict is None else self._verdict["rank"]}
            if dist.is_initialized():
                self._close_groups()
            deadline = time.monotonic() + _LINGER_S
            while self.rank == 0 and time.monotonic() < deadline:
                gone |= {r for r in range(self.size) if self._store.check([f"left/{r}"])}
                if gone >= set(range(self.size)):
                    break
                time.sleep(0.02)
        except RuntimeError:  # the store or a connection is gone already, which is what this was about
            pass


def find_lost(address: str, size: int, timeout_s: float) -> RankFailed | None:
    """Whom the `size` ranks of a `World` at `address` wait for, asked by a process that is none of them.

    timeout_s: theirs; the answer takes about a third of it at most. None where nobody waits for another.
    """
    answer: list[RankFailed | None] = []
    asking = threading.Thread(target=lambda: answer.append(_ask(address, size, _beat_s(timeout_s))), daemon=True)
    asking.start()  # a store whose process is stopped takes a connection and never answers, whatever its timeout is
    asking.join((_NAMING + 5) * _beat_s(timeout_s))
    return (
        answer[0]
        if answer
        else RankFailed(0, f"rank 0 hangs: its store, where ranks meet, gives no answer ({address})")
    )


def _ask(address: str, size: int, every_s: float) -> RankFailed | None:
    host, _, port = address.rpartition(":")
    try:
        store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=4 * every_s), wait_for_workers=False)
        before = _notes(store, size)
        time.sleep(_NAMING * every_s)
        if store.check(["verdict"]):
            verdict = json.loads(store.get("verdict"))
            return RankFailed(verdict["rank"], verdict["text"])
        now = _notes(store, size)
    except RuntimeError:
        return RankFailed(0, f"rank 0 is gone: its store, where ranks meet, gives no answer ({address})")
    waits = next((note.what for note in now.values() if note.inside), None)
    there = list(range(size)) if waits is not None else [r for r in before if before[r].beat == now[r].beat]
    found = _suspect(before, now, there, waits or "nothing")
    return None if found is None else RankFailed(*found)


def _beat_s(timeout_s: float) -> float:
    return min(_BEAT_S, timeout_s / _BEATS)


def _notes(store: dist.TCPStore, size: int) -> dict[int, _Note]:
    keys = {r: f"note/{r}" for r in range(size)}
    return {r: _Note(*json.loads(store.get(k))) for r, k in keys.items() if store.check([k])}


def _suspect(
    before: Mapping[int, _Note], now: Mapping[int, _Note], there: Sequence[int], what: str
) -> tuple[int, str] | None:
    """Who of the ranks `there` fell silent, did not come to `what`, or is furthest behind, and a sentence about it."""
    silent = [r for r in there if now.get(r) is None or (r in before and before[r].beat == now[r].beat)]
    late = sorted((now[r].entered, r) for r in there if r in now and not now[r].inside)
    waiting = sorted((now[r].entered, r) for r in there if r in now)
    if silent:
        return silent[0], f"rank {silent[0]} died: it gave no sign of life while others waited"
    if late:
        return late[0][1], f"rank {late[0][1]} hangs: it did not come to {what}, where others waited"
    if waiting:
        return waiting[0][1], f"rank {waiting[0][1]} hangs in {now[waiting[0][1]].what}, others in {what}"
    return None
