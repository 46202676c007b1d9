"""Level 1: an adder with registered output."""

from __future__ import annotations

import random

from k3rl.envs.chip.stream import Interface, Parameters, Problem, Segment, Stream, exact, gaps

LATENCY = 3


class Adder(Problem):
    """Parameters: width of the operands."""

    def __init__(self) -> None:
        super().__init__(
            "adder",
            1,
            "Adder",
            train=tuple({"width": width} for width in (8, 12, 16, 24, 32)),
            heldout=tuple({"width": width} for width in (10, 20, 28)),
        )

    def interface(self, p: Parameters) -> Interface:
        return Interface(
            Stream((("a", p["width"]), ("b", p["width"]), ("carry", 1))), Stream((("sum", p["width"] + 1),))
        )

    def behaviour(self, p: Parameters) -> str:
        return f"""For each input give one output, in order:
  out_sum = in_a + in_b + in_carry        unsigned, {p["width"] + 1} bits
An output comes at most {LATENCY} cycles after its input. Inputs can come in every cycle and cannot be refused."""

    def reference(self, p: Parameters) -> str:
        return (
            self.interface(p).header(("out_valid", "out_sum"))
            + """  always @(posedge clk) begin
    out_valid <= in_valid & ~rst;
    out_sum <= in_a + in_b + in_carry;
  end
endmodule
"""
        )

    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        return [self._segment(p, rng, 60, cut=20), self._segment(p, rng, 150), self._segment(p, rng, 150, timed=True)]

    def _segment(self, p: Parameters, rng: random.Random, count: int, *, timed: bool = False, cut: int = 0) -> Segment:
        top = (1 << p["width"]) - 1
        values = [(_operand(top, rng), _operand(top, rng), rng.randrange(2)) for _ in range(count)]
        return Segment(
            inputs=tuple(zip([0] * count if timed else gaps(count, rng), values, strict=True)),
            outputs=tuple(exact((sum(value),), (p["width"] + 1,)) for value in values),
            due=tuple((number, LATENCY) for number in range(count)),
            items=count if timed else 0,
            cut=cut,
        )

    def period_ns(self, p: Parameters) -> float:
        return 1.0


def _operand(top: int, rng: random.Random) -> int:
    """Mostly anything, now and then an end of the range, where carries run through."""
    return rng.choice((0, 1, top - 1, top)) if rng.random() < 0.15 else rng.randint(0, top)
