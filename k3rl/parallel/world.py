"""The processes of one learner: their collectives, whose errors name the rank that is missing (liveness.py)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from k3rl.config import K3Error
from k3rl.parallel.liveness import Liveness, LostRank, PeerFailed, RankFailed, beat_s, naming_s


class RanksDisagree(K3Error):
    """Ranks were given different configurations, weights or data. `rank` is the odd one, `what` what differs."""

    exit_code = 2

    def __init__(self, rank: int, what: str, message: str) -> None:
        super().__init__(message)
        self.rank, self.what = rank, what


@dataclass(frozen=True)
class Axis:
    """Some ranks that meet, seen from one of them: its place, how many there are, and who they are in the world."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    _group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Of those ranks. A single rank has none, and raises: to torch no group is the group of all ranks."""
        if self._group is None:
            raise RuntimeError(f"rank {self.ranks[0]} is alone on its axis, so there is no group; look at `size` first")
        return self._group


class World:
    """All ranks: `rank`, `size`, and `everyone` as an axis. Every method with a result is a collective.

    Ranks call collectives in one order, inside `during`. Nothing waits longer than the timeout: then, or as soon as a
    connection breaks, RankFailed names the rank that is missing, and this object can only be closed. hosts: how many
    machines the ranks are on. liveness: what this rank tells and knows of all ranks; None for one process.
    """

    def __init__(
        self, rank: int, size: int, address: str, *, timeout_s: float, device: torch.device | str = "cpu"
    ) -> None:
        """Joins the ranks that meet at tcp://`address`, where rank 0 listens; NCCL on a GPU, gloo elsewhere.

        timeout_s: how long any rank may keep the others waiting. Raises RankFailed when one does not come in time.
        """
        self.rank, self.size, self.device, self.hosts = rank, size, torch.device(device), 1
        self.everyone = Axis(rank, size, tuple(range(size)))
        self.liveness: Liveness | None = None
        self._known: tuple[bytes, list[str]] | None = None  # digests of what `exchange_once` gave last, and the texts
        if size == 1:
            return
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.set_device(self.device)
            # Without it NCCL ends the whole process when a collective times out, before anyone can be named.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        self._collective_s = timedelta(seconds=timeout_s - naming_s(timeout_s))
        store, other = self._meet(address, timeout_s)
        limit_s = self._collective_s.total_seconds()
        self.liveness = Liveness(store, rank, size, every_s=beat_s(timeout_s), limit_s=limit_s, abort=_abort_groups)
        self.liveness.start(other)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore("groups", store),
            rank=rank,
            world_size=size,
            timeout=self._collective_s,
        )
        self.everyone = Axis(rank, size, self.everyone.ranks, dist.group.WORLD)

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """One process; its collectives return what they are given."""
        return cls(0, 1, "", timeout_s=1.0, device=device)

    def _meet(self, address: str, timeout_s: float) -> tuple[dist.TCPStore, dist.TCPStore]:
        """Two connections to the store, for this thread and for that of `Liveness`, once all ranks are there."""
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

    def axis(self, ranks: tuple[int, ...]) -> Axis | None:
        """Some ranks as an axis, which all ranks of the world make together; None for a rank that is not on it."""
        place = ranks.index(self.rank) if self.rank in ranks else None
        group = None
        if len(ranks) == self.size:
            group = self.everyone._group
        elif len(ranks) > 1:
            with self.during("making a group of ranks"):
                group = dist.new_group(list(ranks), timeout=self._collective_s)
        return None if place is None else Axis(place, len(ranks), ranks, group)

    # -- collectives --------------------------------------------------------------------------------------------

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Around a collective of any group. Raises RankFailed when it breaks or times out."""
        liveness, on_gpu = self.liveness, self.device.type == "cuda"
        if liveness is None:
            yield
            return
        if liveness.lost is not None or liveness.ended.is_set():
            raise self._failure(liveness, what, None)
        with liveness.inside(what):
            try:
                yield
                if on_gpu:
                    event = torch.cuda.Event()
                    event.record(torch.cuda.current_stream(self.device))
                    liveness.queued(what, event)
            except RuntimeError as error:
                raise self._failure(liveness, what, error) from error
        if liveness.lost is not None and on_gpu:  # what it gave may mean nothing
            raise self._failure(liveness, what, None)

    def _failure(self, liveness: Liveness, what: str, error: Exception | None) -> RankFailed:
        lost = liveness.find(what)
        liveness.end(self._close_groups)
        detail = f" ({error})" if error is not None and lost.rank == self.rank else ""
        return RankFailed(
            lost.rank, f"{lost.text}; rank {self.rank} ended in {what}{detail}. Restart from a checkpoint"
        )

    @contextmanager
    def at_once(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Collectives of one group that NCCL starts as one; gloo takes them one by one. Each `async_op=False`."""
        if self.device.type != "cuda":
            yield
            return
        with distributed_c10d._coalescing_manager(group=group, device=self.device):
            yield

    def sum(self, tensor: Tensor, axis: Axis | None = None) -> None:
        """Sums a tensor over all ranks in place, or over those of an axis."""
        self._all_reduce(tensor, dist.ReduceOp.SUM, axis or self.everyone, "a sum")

    def maximum(self, tensor: Tensor, axis: Axis | None = None) -> None:
        """The largest values over all ranks, or those of an axis, in place."""
        self._all_reduce(tensor, dist.ReduceOp.MAX, axis or self.everyone, "a maximum")

    def _all_reduce(self, tensor: Tensor, op: Any, axis: Axis, what: str) -> None:
        if self.size > 1 and axis.size > 1:
            with self.during(what):
                dist.all_reduce(tensor, op=op, group=axis.group)

    def first_failed(self, fine: bool) -> int | None:
        """The lowest rank that is not fine, or None; the same on every rank."""
        if self.size == 1:
            return None if fine else 0
        flag = torch.tensor([self.size if fine else self.rank], dtype=torch.int32, device=self.device)
        self._all_reduce(flag, dist.ReduceOp.MIN, self.everyone, "asking whether all ranks are fine")
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
        data = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())  # an empty text too
        sizes = self.gather(torch.tensor([len(data)], device=self.device)).flatten().tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        rows = self.gather(padded).cpu()
        return [row[:size].numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def exchange_once(self, text: str) -> list[str]:
        """`exchange`, of texts that are mostly those of the time before: then only a digest of each travels."""
        own = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.int64)
        known = self.gather(torch.from_numpy(own.copy()).to(self.device)).cpu().numpy().tobytes()
        if self._known is None or self._known[0] != known:
            self._known = known, self.exchange(text)
        return self._known[1]

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

    # -- leaving --------------------------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """This rank failed where others may be waiting for it: they end with its name and `reason`."""
        if self.liveness is not None and not self.liveness.ended.is_set():
            with suppress(RuntimeError):  # when the store is gone, the others have a name already
                self.liveness.conclude(LostRank(self.rank, f"rank {self.rank} failed: {reason}"))
            self.liveness.end(self._close_groups)

    def close(self) -> None:
        """Leaves the ranks. Rank 0 waits a little for the others, which may still read its store."""
        if self.liveness is not None:
            self.liveness.end(self._close_groups)

    def _close_groups(self) -> None:
        if not dist.is_initialized():
            return
        if self.liveness is not None and self.liveness.lost is not None and self.device.type == "cuda":
            _abort_groups()  # the other way NCCL waits for what a lost rank never sends
        else:
            dist.destroy_process_group()


def _abort_groups() -> None:
    distributed_c10d._abort_process_group()
