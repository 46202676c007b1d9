from __future__ import annotations

import threading

import pytest

from k3rl.pipelines.background import Background


def test_work_runs_beside_the_caller_in_order_and_one_piece_at_a_time():
    done, gate = [], threading.Event()
    with Background("test") as beside:
        beside.start(lambda: gate.wait(5) and done.append((1, threading.current_thread().name)))
        assert done == []
        gate.set()
        beside.start(lambda: done.append((2, threading.current_thread().name)))
        assert done[0][0] == 1, "the second waits for the first"
        beside.wait()
        assert [number for number, _ in done] == [1, 2]
        assert threading.current_thread().name not in {name for _, name in done}


def test_what_a_piece_raises_comes_out_of_the_next_call_or_of_the_end():
    def broken():
        raise OSError("the disk is full")

    with Background("test") as beside:
        beside.start(broken)
        with pytest.raises(OSError, match="full"):
            beside.wait()
        beside.wait()
    with pytest.raises(OSError, match="full"), Background("test") as beside:
        beside.start(broken)
