"""Level 4: an n x n output-stationary int8 matrix product; the reference is a systolic array."""

from __future__ import annotations

import random

from k3rl.envs.chip.problems.mac import pack_bytes
from k3rl.envs.chip.stream import Interface, Parameters, Problem, Segment, Stream, exact, gaps


class Gemm(Problem):
    """Parameters: size n of the array, bits of an accumulator. The rung's name is 4x4; smaller ones lead to it."""

    def __init__(self) -> None:
        super().__init__(
            "gemm",
            4,
            "Systolic int8 matrix product",
            train=tuple({"size": size, "bits": bits} for size in (2, 4) for bits in (20, 24)),
            heldout=tuple({"size": size, "bits": bits} for size, bits in ((3, 20), (3, 24), (4, 22))),
        )

    def interface(self, p: Parameters) -> Interface:
        size = p["size"]
        return Interface(
            Stream((("last", 1), ("a", 8 * size), ("b", 8 * size)), ready=True), Stream((("row", p["bits"] * size),))
        )

    def behaviour(self, p: Parameters) -> str:
        size, bits = p["size"], p["bits"]
        return f"""The product C = A B of A [{size}, K] and B [K, {size}] with signed 8-bit elements; K is 1 to 16 and
not known before the last step. Input number k of a product holds column k of A (A[i][k] in in_a[8*i+7:8*i])
and row k of B (B[k][j] in in_b[8*j+7:8*j]); the last has in_last = 1. Then {size} outputs follow:
out_row = row i of C for i = 0 .. {size - 1}, with C[i][j] in out_row[{bits}*j+{bits - 1}:{bits}*j], {bits} bits,
wrapping. The next product may begin whenever in_ready is 1.
Output i comes at most {self._latency(p)} + 2*i cycles after the last input of its product."""

    def _latency(self, p: Parameters) -> int:
        return 4 * p["size"] + 4

    def reference(self, p: Parameters) -> str:
        n, bits = p["size"], p["bits"]
        lines = [self.interface(p).header(("in_ready", "out_valid", "out_row"))]
        lines.append(f"  reg [{2 * n - 2}:0] age;\n  wire take = in_valid & in_ready;\n")
        for i in range(n):
            # Row i of A and column i of B enter i cycles late, so that matching elements meet in every cell.
            for kind in "ab":
                source = f"(take ? in_{kind}[{8 * i + 7}:{8 * i}] : 8'd0)"
                lines.append(f"  reg signed [7:0] {', '.join(f'{kind}{i}_{hop}' for hop in range(i + n))};\n")
                lines.append("  always @(posedge clk) begin\n")
                for hop in range(i + n):
                    before = source if hop == 0 else f"{kind}{i}_{hop - 1}"
                    lines.append(f"    {kind}{i}_{hop} <= rst ? 8'd0 : {before};\n")
                lines.append("  end\n")
        clear = f"age[{2 * n - 2}]"
        for i in range(n):
            for j in range(n):
                lines.append(
                    f"  reg signed [{bits - 1}:0] c{i}_{j};\n  always @(posedge clk)\n"
                    f"    if (rst | out_valid & row == {n - 1}) c{i}_{j} <= 0;\n"
                    f"    else c{i}_{j} <= c{i}_{j} + a{i}_{i + j} * b{j}_{i + j};\n"
                )
        row_bits = max(1, (n - 1).bit_length())
        lines.append(f"  reg [{row_bits - 1}:0] row;\n")
        lines.append(f"""  always @(posedge clk) begin
    age <= rst ? 0 : {{age[{2 * n - 3}:0], take & in_last}};
    if (rst) in_ready <= 1;
    else if (take & in_last) in_ready <= 0;
    else if (out_valid & row == {n - 1}) in_ready <= 1;
    if (rst) out_valid <= 0;
    else if ({clear}) out_valid <= 1;
    else if (row == {n - 1}) out_valid <= 0;
    row <= {clear} | rst ? 0 : row + 1;
  end
  always @*
    case (row)
""")
        for i in range(n):
            label = "default" if i == n - 1 else str(i)
            lines.append(f"      {label}: out_row = {{{', '.join(f'c{i}_{j}' for j in reversed(range(n)))}}};\n")
        lines.append("    endcase\nendmodule\n")
        return "".join(lines)

    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        return [self._segment(p, rng, 3, cut=30), self._segment(p, rng, 8), self._segment(p, rng, 8, timed=True)]

    def _segment(self, p: Parameters, rng: random.Random, count: int, *, timed: bool = False, cut: int = 0) -> Segment:
        size, bits = p["size"], p["bits"]
        inputs, outputs, due = [], [], []
        lengths = [8 if timed else rng.choice((1, 2, rng.randint(3, 16))) for _ in range(count)]
        for length in lengths:
            a = [[rng.randint(-128, 127) for _ in range(length)] for _ in range(size)]
            b = [[rng.randint(-128, 127) for _ in range(size)] for _ in range(length)]
            for k in range(length):
                inputs.append((int(k == length - 1), pack_bytes([row[k] for row in a]), pack_bytes(b[k])))
            for i in range(size):
                row = [sum(a[i][k] * b[k][j] for k in range(length)) for j in range(size)]
                packed = sum((value & (1 << bits) - 1) << bits * j for j, value in enumerate(row))
                outputs.append(exact((packed,), (bits * size,)))
                due.append((len(inputs) - 1, self._latency(p) + 2 * i))
        idle = [0] * len(inputs) if timed else gaps(len(inputs), rng, 0.7)
        return Segment(
            tuple(zip(idle, inputs, strict=True)), tuple(outputs), tuple(due), sum(lengths) if timed else 0, cut=cut
        )

    def period_ns(self, p: Parameters) -> float:
        return 1.7
