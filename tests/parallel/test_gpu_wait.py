"""A GPU that waits in a collective for a rank that is gone: the rank is named, and the host is freed.

The GPU's event is a stand-in; the store where ranks meet is a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from k3rl.parallel import RankFailed, World
from k3rl.parallel.liveness import Heartbeat, Liveness, LostRank


class Event:
    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)


@pytest.fixture
def aborts() -> list[bool]:
    """Grows when groups are ended."""
    return []


@pytest.fixture
def waiting(store, aborts) -> Callable[[float], Liveness]:
    """Rank 0 of two by a collective's time limit; rank 1 has said something once, and nothing since."""
    store.set("note/1", Heartbeat(3, 6, False, "a sum").to_json())
    return lambda limit_s: Liveness(store, 0, 2, every_s=0.01, limit_s=limit_s, abort=lambda: aborts.append(True))


def test_a_collective_that_is_overdue_names_the_silent_rank_and_frees_the_host(waiting, store, aborts) -> None:
    liveness = waiting(0.0)
    liveness.queued("summing gradients", Event(done=False))
    liveness.check_device(store)
    assert aborts == [True]
    world = World.alone()
    world.liveness = liveness
    with pytest.raises(RankFailed, match="rank 1 died") as error, world.during("a sum"):
        pytest.fail("no collective may be entered any more")
    assert error.value.rank == 1
    assert liveness.ended.is_set()


def test_a_name_that_others_found_frees_the_host_at_once(waiting, store, aborts) -> None:
    liveness = waiting(60.0)
    liveness.queued("summing gradients", Event(done=False))
    liveness.check_device(store)
    assert aborts == []  # there is time left
    liveness.conclude(LostRank(1, "rank 1 failed: out of memory"))
    liveness.check_device(store)
    assert aborts == [True]


def test_what_has_ended_is_let_alone_however_late_it_is(waiting, store, aborts) -> None:
    liveness = waiting(-100.0)
    liveness.queued("summing gradients", Event(done=True))
    liveness.check_device(store)
    assert aborts == []
    assert liveness.lost is None


def test_the_first_name_that_is_written_is_that_of_all_ranks(waiting) -> None:
    one, other = waiting(60.0), waiting(60.0)
    one.conclude(LostRank(1, "rank 1 failed: out of memory"))
    assert other.conclude(LostRank(0, "rank 0 failed: later")) == one.lost == other.find("a sum")
