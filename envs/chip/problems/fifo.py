"""Level 2: a queue with handshakes on both sides."""

from __future__ import annotations

import random

from k3rl.envs.chip.stream import Interface, Parameters, Problem, Segment, Stream, exact, gaps

LATENCY = 2


class Fifo(Problem):
    """Parameters: width of a word, depth in words."""

    def __init__(self) -> None:
        super().__init__(
            "fifo",
            2,
            "Queue (FIFO)",
            train=tuple({"width": width, "depth": depth} for width in (4, 8, 16) for depth in (4, 8)),
            heldout=tuple({"width": width, "depth": depth} for width in (6, 12) for depth in (4, 8)),
        )

    def interface(self, p: Parameters) -> Interface:
        return Interface(Stream((("data", p["width"]),), ready=True), Stream((("data", p["width"]),), ready=True))

    def behaviour(self, p: Parameters) -> str:
        return f"""Words leave in the order in which they came, none lost or doubled. While the output is
not taken, at least {p["depth"]} words must fit. A word that comes into an empty queue is offered at most
{LATENCY} cycles later, and a queue that is neither full nor empty takes a word and gives a word in every cycle."""

    def reference(self, p: Parameters) -> str:
        bits = (p["depth"] - 1).bit_length()
        return (
            self.interface(p).header()
            + f"""  reg [{p["width"] - 1}:0] memory [0:{p["depth"] - 1}];
  reg [{bits - 1}:0] head, tail;
  reg [{bits}:0] count;
  wire take = in_valid & in_ready;
  wire give = out_valid & out_ready;
  assign in_ready = count != {p["depth"]};
  assign out_valid = count != 0;
  assign out_data = memory[head];
  always @(posedge clk) begin
    if (take) memory[tail] <= in_data;
    if (rst) begin
      head <= 0;
      tail <= 0;
      count <= 0;
    end else begin
      head <= head + give;
      tail <= tail + take;
      count <= count + take - give;
    end
  end
endmodule
"""
        )

    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        depth = p["depth"]
        return [
            self._segment(p, rng, 50, cut=30, stall=True),
            self._segment(p, rng, 120, stall=True),
            self._segment(p, rng, 4 * depth, hold=2 * depth + 8, capacity=depth),
            self._segment(p, rng, 120, timed=True),
        ]

    def _segment(
        self, p: Parameters, rng: random.Random, count: int, *, timed: bool = False, stall: bool = False, cut: int = 0,
        hold: int = 0, capacity: int = 0,
    ) -> Segment:  # fmt: skip
        values = [rng.getrandbits(p["width"]) for _ in range(count)]
        idle = [0] * count if timed or hold else gaps(count, rng, 0.6)
        return Segment(
            inputs=tuple((gap, (value,)) for gap, value in zip(idle, values, strict=True)),
            outputs=tuple(exact((value,), (p["width"],)) for value in values),
            due=tuple((number, LATENCY) for number in range(count)) if timed else (),
            items=count if timed else 0,
            stall=stall,
            cut=cut,
            hold=hold,
            capacity=capacity,
        )

    def period_ns(self, p: Parameters) -> float:
        return 0.75 if p["depth"] <= 4 else 0.9
