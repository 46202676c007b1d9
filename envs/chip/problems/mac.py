"""Level 3: a dot product unit, several int8 products a cycle into one accumulator."""

from __future__ import annotations

import random

from k3rl.envs.chip.stream import Interface, Parameters, Problem, Segment, Stream, exact, gaps, signed

LATENCY = 5


class Mac(Problem):
    """Parameters: lanes (products a cycle), bits of the accumulator."""

    def __init__(self) -> None:
        super().__init__(
            "mac",
            3,
            "Multiply-accumulate unit",
            train=tuple({"lanes": lanes, "bits": bits} for lanes in (1, 2, 4) for bits in (24, 32)),
            heldout=tuple({"lanes": lanes, "bits": bits} for lanes in (2, 3) for bits in (20, 28)),
        )

    def interface(self, p: Parameters) -> Interface:
        return Interface(
            Stream((("last", 1), ("a", 8 * p["lanes"]), ("b", 8 * p["lanes"]))), Stream((("sum", p["bits"]),))
        )

    def behaviour(self, p: Parameters) -> str:
        return f"""in_a and in_b each hold signed 8-bit numbers, {p["lanes"]} of them, number i in bits [8*i+7:8*i].
Each input adds the sum over i of a[i] * b[i] to an accumulator of {p["bits"]} bits (two's complement, wrapping),
which is 0 after reset. An input with in_last = 1 ends a dot product: one output follows with out_sum = the
accumulator with that input added, and the accumulator begins at 0 again with the next input. Inputs
without in_last give no output.
An output comes at most {LATENCY} cycles after its input. Inputs can come in every cycle and cannot be refused."""

    def reference(self, p: Parameters) -> str:
        lanes, bits = p["lanes"], p["bits"]
        width = 16 + (lanes - 1).bit_length()
        products = " + ".join(
            f"$signed(in_a[{8 * lane + 7}:{8 * lane}]) * $signed(in_b[{8 * lane + 7}:{8 * lane}])"
            for lane in range(lanes)
        )
        return (
            self.interface(p).header(("out_valid", "out_sum"))
            + f"""  reg signed [{width - 1}:0] products;
  reg valid, last;
  reg signed [{bits - 1}:0] total;
  wire signed [{bits - 1}:0] next = total + products;
  always @(posedge clk) begin
    products <= {products};
    last <= in_last;
    valid <= in_valid & ~rst;
    out_valid <= valid & last & ~rst;
    out_sum <= next;
    if (rst) total <= 0;
    else if (valid) total <= last ? 0 : next;
  end
endmodule
"""
        )

    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        return [self._segment(p, rng, 40, cut=25), self._segment(p, rng, 110), self._segment(p, rng, 110, timed=True)]

    def _segment(self, p: Parameters, rng: random.Random, count: int, *, timed: bool = False, cut: int = 0) -> Segment:
        lanes, bits = p["lanes"], p["bits"]
        inputs, outputs, due, total = [], [], [], 0
        for number in range(count):
            last = int(number == count - 1 or rng.random() < 0.25)
            a, b = ([_byte(rng) for _ in range(lanes)] for _ in range(2))
            inputs.append((last, pack_bytes(a), pack_bytes(b)))
            total += sum(x * y for x, y in zip(a, b, strict=True))
            if last:
                outputs.append(exact((signed(total, bits),), (bits,)))
                due.append((number, LATENCY))
                total = 0
        idle = [0] * count if timed else gaps(count, rng)
        return Segment(
            tuple(zip(idle, inputs, strict=True)), tuple(outputs), tuple(due), count if timed else 0, cut=cut
        )

    def period_ns(self, p: Parameters) -> float:
        return round(1.7 + 0.2 * (p["lanes"] - 1).bit_length(), 1)


def _byte(rng: random.Random) -> int:
    return rng.choice((-128, 127, -1, 0)) if rng.random() < 0.2 else rng.randint(-128, 127)


def pack_bytes(values: list[int]) -> int:
    """Signed bytes side by side, the first lowest."""
    return sum((value & 255) << 8 * place for place, value in enumerate(values))
