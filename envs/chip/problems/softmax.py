"""Level 5: numerators and denominator of a softmax, from a table of exponentials."""

from __future__ import annotations

import math
import random

from k3rl.envs.chip.stream import Interface, Parameters, Problem, Range, Segment, Stream, gaps, signed

FRACTION = 4  # bits after the point of a score


class Softmax(Problem):
    """Parameters: most scores of a vector (a power of two), bits of an exponential."""

    def __init__(self) -> None:
        super().__init__(
            "softmax",
            5,
            "Softmax unit (exponential table)",
            train=tuple({"scores": scores, "bits": bits} for scores in (4, 8) for bits in (8, 10)),
            heldout=tuple({"scores": scores, "bits": 9} for scores in (4, 8)),
        )

    def interface(self, p: Parameters) -> Interface:
        return Interface(
            Stream((("last", 1), ("score", 8)), ready=True), Stream((("exp", p["bits"]), ("sum", self._sum_bits(p))))
        )

    def _sum_bits(self, p: Parameters) -> int:
        return p["bits"] + (p["scores"] - 1).bit_length()

    def behaviour(self, p: Parameters) -> str:
        bits = p["bits"]
        return f"""A vector is 1 to {p["scores"]} scores, the last marked with in_last = 1. A score is signed with
{FRACTION} bits after the point: its value is in_score / {1 << FRACTION}. After the last score come as many outputs as
the vector has scores, in the same order, m being the greatest score of the vector:
  out_exp = {(1 << bits) - 1} * exp(score - m)    rounded to the nearest integer, unsigned, {bits} bits
A difference of 1 to the exact rounding is allowed. With the last output of a vector out_sum is the sum of
the vector's out_exp values (a difference of 1 per score is allowed); with the others out_sum is free.
Output number i (from 0) comes at most {self._latency(p)} + i cycles after the last score. The next vector may
begin whenever in_ready is 1."""

    def _latency(self, p: Parameters) -> int:
        return 6

    def reference(self, p: Parameters) -> str:
        count, bits, sum_bits = p["scores"], p["bits"], self._sum_bits(p)
        place = (count - 1).bit_length()
        table = [round(((1 << bits) - 1) * math.exp(-x / (1 << FRACTION))) for x in range(256)]
        entries = [f"      8'd{x}: e = {bits}'d{value};\n" for x, value in enumerate(table) if value]
        return (
            self.interface(p).header(("in_ready", "out_valid", "out_exp", "out_sum"))
            + f"""  reg signed [7:0] score [0:{count - 1}];
  reg signed [7:0] top;
  reg [{place - 1}:0] wanted, next;
  reg fresh, lookup, ends, begun;
  reg [7:0] below;
  reg [{bits - 1}:0] e;
  wire take = in_valid & in_ready;
  always @(posedge clk) begin
    if (take) score[wanted] <= in_score;
    if (take & (fresh | $signed(in_score) > top)) top <= in_score;
    // Scores come in while in_ready, then go out one a cycle: difference, table, output register.
    if (rst) begin
      in_ready <= 1;
      fresh <= 1;
      wanted <= 0;
      next <= 0;
    end else if (in_ready) begin
      if (take) begin
        fresh <= in_last;
        in_ready <= ~in_last;
        if (~in_last) wanted <= wanted + 1;
      end
    end else begin
      next <= next + 1;
      if (next == wanted) begin
        in_ready <= 1;
        wanted <= 0;
        next <= 0;
      end
    end
    lookup <= ~in_ready & ~rst;
    ends <= next == wanted;
    below <= top - score[next];
    out_valid <= lookup & ~rst;
    out_exp <= e;
    out_sum <= (begun ? out_sum : {sum_bits}'d0) + e;
    begun <= lookup & ~ends & ~rst;
  end
  always @*
    case (below)
{"".join(entries)}      default: e = {bits}'d0;
    endcase
endmodule
"""
        )

    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        return [self._segment(p, rng, 4, cut=15), self._segment(p, rng, 30), self._segment(p, rng, 24, timed=True)]

    def _segment(self, p: Parameters, rng: random.Random, count: int, *, timed: bool = False, cut: int = 0) -> Segment:
        inputs: list[tuple[int, int]] = []
        outputs: list[tuple[Range | None, ...]] = []
        due: list[tuple[int, int]] = []
        scale = (1 << p["bits"]) - 1
        for _ in range(count):
            length = p["scores"] if timed else rng.randint(1, p["scores"])
            middle, spread = rng.randint(-128, 127), rng.choice((8, 24, 64, 255))
            vector = [signed(max(-128, min(127, middle + rng.randint(-spread, spread))), 8) for _ in range(length)]
            top = max(vector)
            exact = [round(scale * math.exp((score - top) / (1 << FRACTION))) for score in vector]
            for place, (score, value) in enumerate(zip(vector, exact, strict=True)):
                inputs.append((int(place == length - 1), score))
                whole = (sum(exact) - length, sum(exact) + length) if place == length - 1 else None
                outputs.append(((value - 1, value + 1), whole))
            due += [(len(inputs) - 1, self._latency(p) + place) for place in range(length)]
        idle = [0] * len(inputs) if timed else gaps(len(inputs), rng, 0.7)
        items = len(inputs) if timed else 0
        return Segment(tuple(zip(idle, inputs, strict=True)), tuple(outputs), tuple(due), items, cut=cut)

    def period_ns(self, p: Parameters) -> float:
        return 1.3
