"""Level 6: the recurrent state update of Kimi Delta Attention in fixed point (k3.md, the KDA recurrence)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from k3rl.envs.chip.stream import Interface, Parameters, Problem, Segment, Stream, exact, gaps, saturate

KEYS = 2


class Kda(Problem):
    """Parameters: columns (value dims) of the state; it has two rows (key dims)."""

    def __init__(self) -> None:
        super().__init__(
            "kda",
            6,
            "KDA state update",
            train=tuple({"values": values} for values in (1, 2, 4)),
            heldout=({"values": 3},),
        )

    def interface(self, p: Parameters) -> Interface:
        fields = (("first", 1), ("q", 8 * KEYS), ("k", 8 * KEYS), ("decay", 8 * KEYS), ("beta", 8))
        return Interface(Stream((*fields, ("v", 8 * p["values"])), ready=True), Stream((("o", 16 * p["values"]),)))

    def behaviour(self, p: Parameters) -> str:
        last = p["values"] - 1
        return f"""A state S[i][j], i = 0 .. {KEYS - 1} (keys), j = 0 .. {last} (values), signed 16 bits each, is
updated by each input (a token); one output follows per token. in_q and in_k hold signed 8-bit q[i] and k[i],
in_decay unsigned 8-bit d[i], number i in bits [8*i+7:8*i]; in_v holds signed 8-bit v[j] in bits
[8*j+7:8*j]; in_beta is unsigned, b. A token with in_first = 1 finds S = 0 whatever was before. All
products and sums are exact, `>>` shifts the sign in (rounds down), sat(x) is the nearest number that
signed 16 bits hold. For every j:
  P[i] = (d[i] * S[i][j]) >> 8
  r    = (sum over i of k[i] * P[i]) >> 7
  u    = sat((b * (16 * v[j] - r)) >> 8)
  S[i][j] = sat(P[i] + ((k[i] * u) >> 7))          the new state
  o[j] = sat((sum over i of q[i] * S[i][j]) >> 7)   with the new state, in out_o[16*j+15:16*j]
The output comes at most {self._latency(p)} cycles after its token."""

    def _latency(self, p: Parameters) -> int:
        return 8 * p["values"] + 6

    def reference(self, p: Parameters) -> str:
        """One column after another in five steps, which share one multiplier per key."""
        count = p["values"]
        place = max(1, (count - 1).bit_length())
        lines = [self.interface(p).header(("in_ready", "out_valid", "out_o"))]
        lines.append(f"""  reg [{8 * KEYS - 1}:0] q, k, d;
  reg [7:0] b;
  reg [{8 * count - 1}:0] v;
  reg [2:0] step;
  reg [{place - 1}:0] column;
  reg signed [15:0] u;
  wire signed [15:0] value = {{{{4{{v[7]}}}}, v[7:0], 4'b0}};
""")
        for i in range(KEYS):
            part = f"[{8 * i + 7}:{8 * i}]"
            lines.append(f"""  reg signed [{16 * count - 1}:0] s{i};
  reg signed [15:0] p{i};
  reg signed [8:0] x{i};
  reg signed [17:0] y{i};
  wire signed [26:0] m{i} = x{i} * y{i};
  wire signed [17:0] grown{i} = p{i} + (m{i} >>> 7);
  wire signed [15:0] new{i} = {_sat(f"grown{i}", 18)};
  always @*
    case (step)
      1: begin x{i} = {{1'b0, d{part}}}; y{i} = $signed(s{i}[15:0]); end
      2: begin x{i} = $signed(k{part}); y{i} = p{i}; end
      3: begin x{i} = {{1'b0, b}}; y{i} = error; end
      4: begin x{i} = $signed(k{part}); y{i} = u; end
      default: begin x{i} = $signed(q{part}); y{i} = p{i}; end
    endcase
""")
        total = " + ".join(f"m{i}" for i in range(KEYS))
        update = "".join(
            f"      if (step == 1) p{i} <= m{i} >>> 8;\n      if (step == 4) p{i} <= new{i};\n"
            f"      if (take & in_first) s{i} <= 0;\n"
            f"      if (step == 5) s{i} <= {{p{i}{f', s{i}[{16 * count - 1}:16]' if count > 1 else ''}}};\n"
            for i in range(KEYS)
        )
        shift_v = f"{{8'd0, v[{8 * count - 1}:8]}}" if count > 1 else "v"
        keep_o = f", out_o[{16 * count - 1}:16]" if count > 1 else ""
        lines.append(f"""  reg signed [17:0] error;
  wire signed [27:0] total = {total};
  wire signed [20:0] scaled = total >>> 7;
  wire signed [18:0] gained = m0 >>> 8;
  wire take = in_valid & in_ready;
  always @(posedge clk) begin
    if (take) begin q <= in_q; k <= in_k; d <= in_decay; b <= in_beta; v <= in_v; end
{update}    if (step == 2) error <= value - scaled;
    if (step == 3) u <= {_sat("gained", 19)};
    if (step == 5) begin
      out_o <= {{{_sat("scaled", 21)}{keep_o}}};
      v <= {shift_v};
    end
    out_valid <= step == 5 & column == {count - 1} & ~rst;
    if (rst) begin
      step <= 0;
      column <= 0;
      in_ready <= 1;
    end else if (step == 0) begin
      step <= take;
      in_ready <= ~take;
    end else if (step == 5) begin
      step <= column != {count - 1};
      in_ready <= column == {count - 1};
      column <= column == {count - 1} ? 0 : column + 1;
    end else step <= step + 1;
  end
endmodule
""")
        return "".join(lines)

    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        count = 50 // p["values"] + 8
        return [
            self._segment(p, rng, 3, cut=17),
            self._segment(p, rng, count),
            self._segment(p, rng, count, timed=True),
        ]

    def _segment(self, p: Parameters, rng: random.Random, count: int, *, timed: bool = False, cut: int = 0) -> Segment:
        columns = p["values"]
        inputs, outputs = [], []
        state = [[0] * columns for _ in range(KEYS)]
        for number in range(count):
            first = int(number == 0 or rng.random() < 0.1)
            q, k = ([rng.choice((-128, 127, rng.randint(-128, 127))) for _ in range(KEYS)] for _ in range(2))
            v = [rng.choice((-128, 127, rng.randint(-128, 127))) for _ in range(columns)]
            d = [rng.choice((255, rng.randint(128, 255), rng.randint(0, 255))) for _ in range(KEYS)]
            beta = rng.choice((255, rng.randint(0, 255)))
            state, o = update([[0] * columns] * KEYS if first else state, q, k, v, d, beta)
            inputs.append((first, _bytes(q), _bytes(k), _bytes(d), beta, _bytes(v)))
            packed = sum((value & 0xFFFF) << 16 * place for place, value in enumerate(o))
            outputs.append(exact((packed,), (16 * columns,)))
        idle = [0] * count if timed else gaps(count, rng)
        due = tuple((number, self._latency(p)) for number in range(count))
        return Segment(tuple(zip(idle, inputs, strict=True)), tuple(outputs), due, count if timed else 0, cut=cut)

    def period_ns(self, p: Parameters) -> float:
        return 2.4


def update(
    state: Sequence[Sequence[int]], q: Sequence[int], k: Sequence[int], v: Sequence[int], d: Sequence[int], beta: int
) -> tuple[list[list[int]], list[int]]:
    """One token: (new state [K][V], output [V]), all integers as in the prompt."""
    new = [[0] * len(v) for _ in k]
    output = []
    for j, value in enumerate(v):
        kept = [(d[i] * state[i][j]) >> 8 for i in range(len(k))]
        read = sum(k[i] * kept[i] for i in range(len(k))) >> 7
        u = saturate((beta * (16 * value - read)) >> 8, 16)
        for i in range(len(k)):
            new[i][j] = saturate(kept[i] + ((k[i] * u) >> 7), 16)
        output.append(saturate(sum(q[i] * new[i][j] for i in range(len(k))) >> 7, 16))
    return new, output


def _sat(name: str, bits: int) -> str:
    """A signed value of `bits` bits held to 16, in Verilog."""
    top = f"{name}[{bits - 1}:15]"
    return f"(&{top} | ~|{top} ? {name}[15:0] : {{{name}[{bits - 1}], {{15{{~{name}[{bits - 1}]}}}}}})"


def _bytes(values: Sequence[int]) -> int:
    return sum((value & 255) << 8 * place for place, value in enumerate(values))
