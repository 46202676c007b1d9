"""A GPU that waits in a collective for a rank that is gone: the rank is named, and the host is freed.

The process group and the GPU's event are stand-ins; the store where ranks meet is a real one.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from k3rl.parallel import RankFailed, World, world


class Event:
    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


@pytest.fixture
def waiting(monkeypatch) -> World:
    """Rank 0 of two on a GPU; rank 1 has said something once, and nothing since."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    made = World.__new__(World)
    made.rank, made.size, made.device, made.group = 0, 2, torch.device("cuda", 0), None
    made._entered, made._inside, made._what, made._verdict = 7, False, "a sum", None
    made._queued, made._ended, made._store, made._every_s = None, threading.Event(), store, 0.01
    made._collective_s = timedelta(seconds=1)
    store.set("note/1", json.dumps([3, 6, False, "a sum"]))
    made.aborted = []
    monkeypatch.setattr(world.distributed_c10d, "_abort_process_group", lambda: made.aborted.append(True))
    monkeypatch.setattr(world, "_LINGER_S", 0.0)
    return made


def test_a_collective_that_is_overdue_names_the_silent_rank_and_frees_the_host(waiting) -> None:
    waiting._queued = world._Queued(Event(done=False), time.monotonic() - 1, "summing gradients")
    waiting._look_at_device(waiting._store)
    assert waiting.aborted == [True]
    with pytest.raises(RankFailed, match="rank 1 died") as error:
        waiting.sum(torch.zeros(1))
    assert error.value.rank == 1


def test_a_verdict_of_others_frees_the_host_at_once(waiting) -> None:
    waiting._queued = world._Queued(Event(done=False), time.monotonic() + 60, "summing gradients")
    waiting._look_at_device(waiting._store)
    assert waiting.aborted == []  # there is time left
    waiting._verdict = {"rank": 1, "text": "rank 1 failed: out of memory"}
    waiting._look_at_device(waiting._store)
    assert waiting.aborted == [True]


def test_what_has_ended_is_left_alone_however_late_it_is(waiting) -> None:
    waiting._queued = world._Queued(Event(done=True), time.monotonic() - 100, "summing gradients")
    waiting._look_at_device(waiting._store)
    assert waiting.aborted == []
    assert waiting._verdict is None
