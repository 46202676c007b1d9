"""The comparison of what passed at the ports with what must: unknown is never equal, late is late, keys are secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.envs.chip.stream import Interface, Segment, Stream, exact, saturate, signed
from k3rl.envs.chip.testbench import Trace, bench, judge, read_trace, stimulus

PLAIN = Interface(Stream((("a", 4),)), Stream((("y", 4),)))


def _segment(**changes: object) -> Segment:
    values = {"inputs": ((0, (1,)), (0, (2,))), "outputs": (exact((3,), (4,)), exact((-1,), (4,)))}
    return Segment(**{**values, "due": ((0, 2), (1, 2)), "items": 2, **changes})  # type: ignore[arg-type]


def _trace(*outputs: tuple[int, str], **changes: object) -> Trace:
    return Trace(start=4, inputs=[4, 5], outputs=list(outputs), **changes)  # type: ignore[arg-type]


def test_right_outputs_pass_and_are_timed() -> None:
    verdict = judge(PLAIN, [_segment()], [_trace((6, "0011"), (7, "1111"))])
    assert (verdict.passed, verdict.right, verdict.late) == (True, 2, 0)
    assert (verdict.cycles, verdict.items) == (7 - 4 + 1, 2)


@pytest.mark.parametrize("bits", ["xxxx", "00x1", "zzzz", "0010", "011", "00011"])
def test_wrong_unknown_and_floating_bits_are_wrong(bits: str) -> None:
    verdict = judge(PLAIN, [_segment()], [_trace((6, "0011"), (7, bits))])
    assert not verdict.passed
    assert verdict.right == 1


def test_late_outputs_are_counted_from_their_own_input() -> None:
    assert judge(PLAIN, [_segment()], [_trace((6, "0011"), (10, "1111"))]).late == 10 - 5 - 2


@pytest.mark.parametrize(
    "trace",
    [
        _trace((6, "0011")),
        _trace((6, "0011"), (7, "1111"), (8, "0000")),
        _trace((6, "0011"), (7, "1111"), unknown=1),
        _trace((6, "0011"), (7, "1111"), timed_out=True),
    ],
    ids=["one missing", "one too many", "an unknown handshake", "out of cycles"],
)
def test_a_trace_that_is_not_whole_does_not_pass(trace: Trace) -> None:
    assert not judge(PLAIN, [_segment()], [trace]).passed


def test_a_simulation_without_an_end_is_wrong() -> None:
    assert not judge(PLAIN, [_segment()], None).passed


def test_a_queue_must_hold_as_much_as_it_says() -> None:
    held = _segment(hold=10, capacity=2, due=())
    assert judge(PLAIN, [held], [_trace((15, "0011"), (16, "1111"))]).passed
    late = Trace(start=4, inputs=[4, 15], outputs=[(15, "0011"), (16, "1111")])
    assert not judge(PLAIN, [held], [late]).passed


def test_outputs_before_a_reset_must_be_right_but_need_not_all_come() -> None:
    cut = _segment(cut=5, due=(), items=0)
    assert judge(PLAIN, [cut], [_trace((6, "0011"))]).passed
    assert not judge(PLAIN, [cut], [_trace((6, "0000"))]).passed


def test_lines_without_the_key_are_not_the_benchs() -> None:
    text = "k S 0 4\nk I 4\nx O 5 0011\nPASS\nk O 6 0011\nk E 50\nk O 51 1111\n"
    traces = read_trace(text, "k", 1)
    assert traces is not None
    assert traces[0].outputs == [(6, "0011")]
    assert read_trace(text, "other", 1) is None
    assert read_trace("k S 0 4\nk O 6 0011\n", "k", 1) is None


def test_the_bench_holds_no_answer() -> None:
    wide = Interface(Stream((("a", 32),)), Stream((("y", 32),)))
    segment = Segment(inputs=((0, (0x12345678,)),), outputs=(exact((0x9ABCDEF0,), (32,)),))
    text = bench(wide, [segment], "k", 100) + stimulus(wide, [segment])
    assert "12345678" in text
    for answer in (f"{0x9ABCDEF0:x}", str(0x9ABCDEF0), f"{0x9ABCDEF0:032b}"):
        assert answer not in text


@given(st.integers(-1000, 1000), st.integers(2, 9))
def test_signed_and_saturate_agree_with_counting_round_the_ring(value: int, bits: int) -> None:
    ring = list(range(1 << (bits - 1))) + list(range(-(1 << (bits - 1)), 0))
    assert signed(value, bits) == ring[value % len(ring)]
    assert saturate(value, bits) == min(ring, key=lambda number: abs(number - value))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(-600, 600)), min_size=1, max_size=6))
def test_packing_puts_the_first_field_on_top(fields: list[tuple[int, int]]) -> None:
    stream = Stream(tuple((f"f{place}", width) for place, (width, _) in enumerate(fields)))
    text = "".join(f"{value % (1 << width):0{width}b}" for width, value in fields)
    assert stream.pack([value for _, value in fields]) == int(text, 2)
