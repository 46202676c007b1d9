"""Level 7: a small inference chip. A host program loads int8 layers into a memory, runs them and reads the result."""

from __future__ import annotations

import random
from collections.abc import Sequence

from k3rl.envs.chip.problems.mac import pack_bytes
from k3rl.envs.chip.stream import Interface, Parameters, Problem, Range, Segment, Stream, exact, gaps, signed

MEMORY_BITS = 8
WRITE, READ, SET_X, SET_W, SET_Y, RUN = range(6)
Command = tuple[int, int, int]  # operation, address, data


class Inference(Problem):
    """Parameters: most words (of four numbers) of a layer's input, bits of the accumulator."""

    def __init__(self) -> None:
        super().__init__(
            "inference",
            7,
            "int8 inference chip",
            train=tuple({"words": words, "bits": bits} for words in (1, 2, 4) for bits in (20, 24)),
            heldout=tuple({"words": 3, "bits": bits} for bits in (20, 22, 24)),
        )

    def interface(self, p: Parameters) -> Interface:
        return Interface(
            Stream((("op", 3), ("addr", MEMORY_BITS), ("data", 32)), ready=True),
            Stream((("data", 32),), ready=True),
            memory_bits=MEMORY_BITS,
        )

    def behaviour(self, p: Parameters) -> str:
        words, bits = p["words"], p["bits"]
        return f"""The chip runs a program: each input is a command, executed as if one after another.
A memory of {1 << MEMORY_BITS} words of 32 bits is outside (its area is not counted) and has one port: in a cycle with
mem_we = 1 the word mem_addr becomes mem_wdata at the clock edge; in a cycle with mem_we = 0 the word
mem_addr is in mem_rdata in the next cycle. After reset its words are arbitrary. Four signed 8-bit numbers
are in a word, number i in bits [8*i+7:8*i].
  in_op 0 WRITE  memory[in_addr] = in_data
  in_op 1 READ   gives one output, out_data = memory[in_addr]
  in_op 2, 3, 4  set the address X, W or Y to in_addr
  in_op 5 RUN    runs a layer: n = in_data[7:0] words of input (1 to {words}), m = in_data[15:8] rows
                 (a multiple of 4, 4 to {4 * words}), s = in_data[19:16], relu = in_data[20]:
      for r = 0 .. m-1:
        base = W + r * (n + 1)
        acc  = memory[base] taken as a bias (its low {bits} bits, signed)
             + the sum over i < n and t < 4 of
               number t of memory[X + i] * number t of memory[base + 1 + i]
        y[r] = (acc + (2^s / 2 rounded down)) >> s, rounded down, then held to -128 .. 127; with relu 0 if negative
      y[r] is number r mod 4 of memory[Y + r / 4]. acc never leaves {bits} bits. Layers do not write what they read.
in_op 6 and 7 do not occur. X, W and Y keep their values after RUN.
Cycle budget: the output of a READ comes at most C cycles after the program's first command, where C is the sum over
all commands up to it: 2 for WRITE and for setting an address, 4 for READ, and m * (3 * n + 6) + 8 for RUN."""

    def reference(self, p: Parameters) -> str:
        bits = p["bits"]
        products = " + ".join(
            f"$signed(x[{8 * lane + 7}:{8 * lane}]) * $signed(mem_rdata[{8 * lane + 7}:{8 * lane}])"
            for lane in range(4)
        )
        return (
            self.interface(p).header(("mem_we", "mem_addr", "mem_wdata", "out_data"))
            + f"""  localparam IDLE = 0, FETCH = 1, GIVE = 2, BIAS = 3, LOADX = 4;
  localparam LOADW = 5, LAST = 6, QUANT = 7, STORE = 8;
  reg [3:0] state;
  reg [{MEMORY_BITS - 1}:0] x_base, w_base, y_base, xp, wp, yp;
  reg [3:0] words, word, shift;
  reg [5:0] rows;
  reg relu;
  reg [31:0] x, gathered;
  reg signed [{bits - 1}:0] acc;
  wire signed [17:0] dot = {products};
  wire signed [{bits}:0] rounded = acc + $signed({{1'b0, (16'd1 << shift) >> 1}});
  wire signed [{bits}:0] scaled = rounded >>> shift;
  wire fits = &scaled[{bits}:7] | ~|scaled[{bits}:7];
  wire [7:0] held = fits ? scaled[7:0] : {{scaled[{bits}], {{7{{~scaled[{bits}]}}}}}};
  wire [7:0] y = relu & scaled[{bits}] ? 8'd0 : held;
  wire take = in_valid & in_ready;
  assign in_ready = state == IDLE;
  assign out_valid = state == GIVE;
  always @* begin
    mem_we = state == STORE | take & in_op == {WRITE};
    mem_wdata = state == IDLE ? in_data : gathered;
    case (state)
      IDLE: mem_addr = in_addr;
      STORE: mem_addr = yp;
      LOADX: mem_addr = xp;
      default: mem_addr = wp;
    endcase
  end
  always @(posedge clk) begin
    if (rst) state <= IDLE;
    else case (state)
      IDLE: if (take) begin
        if (in_op == {READ}) state <= FETCH;
        if (in_op == {RUN}) state <= BIAS;
      end
      FETCH: state <= GIVE;
      GIVE: if (out_ready) state <= IDLE;
      BIAS: state <= LOADX;
      LOADX: state <= LOADW;
      LOADW: state <= word == words ? LAST : LOADX;
      LAST: state <= QUANT;
      QUANT: state <= rows[1:0] == 1 ? STORE : BIAS;
      default: state <= rows == 0 ? IDLE : BIAS;
    endcase
    if (state == FETCH) out_data <= mem_rdata;
    if (take & in_op == {SET_X}) x_base <= in_addr;
    if (take & in_op == {SET_W}) w_base <= in_addr;
    if (take & in_op == {SET_Y}) y_base <= in_addr;
    if (take & in_op == {RUN}) begin
      words <= in_data[3:0];
      rows <= in_data[13:8];
      shift <= in_data[19:16];
      relu <= in_data[20];
      wp <= w_base;
      yp <= y_base;
    end
    if (state == BIAS) begin
      xp <= x_base;
      word <= 1;
    end
    if (state == LOADX) xp <= xp + 1;
    if (state == LOADW) begin
      x <= mem_rdata;
      word <= word + 1;
    end
    if (state == BIAS | state == LOADW) wp <= wp + 1;
    // The bias arrives with the first LOADX, each weight word with the LOADX or LAST after its LOADW.
    if (state == LOADX & word == 1) acc <= mem_rdata[{bits - 1}:0];
    else if (state == LOADX | state == LAST) acc <= acc + dot;
    if (state == QUANT) begin
      gathered <= {{y, gathered[31:8]}};
      rows <= rows - 1;
    end
    if (state == STORE) yp <= yp + 1;
  end
endmodule
"""
        )

    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        return [
            self._segment(p, rng, 1, cut=45),
            self._segment(p, rng, 1 + 6 // p["words"], stall=True),
            self._segment(p, rng, 1, timed=True),
        ]

    def _segment(
        self,
        p: Parameters,
        rng: random.Random,
        programs: int,
        *,
        timed: bool = False,
        stall: bool = False,
        cut: int = 0,
    ) -> Segment:
        memory: dict[int, int] = {}
        commands: list[Command] = []
        outputs: list[tuple[Range | None, ...]] = []
        due: list[tuple[int, int]] = []
        spent = 0
        for _ in range(programs):
            for command in program(p["words"], rng, largest=timed):
                operation, _, data = command
                spent += {READ: 4, RUN: (data >> 8 & 255) * (3 * (data & 255) + 6) + 8}.get(operation, 2)
                commands.append(command)
                if operation == READ:
                    due.append((0, spent))
        for word in execute(commands, memory):
            outputs.append(exact((word,), (32,)))
        idle = [0] * len(commands) if timed else gaps(len(commands), rng, 0.8)
        return Segment(
            tuple(zip(idle, commands, strict=True)), tuple(outputs), tuple(due) if timed else (),
            programs if timed else 0, stall=stall, cut=cut,
        )  # fmt: skip

    def period_ns(self, p: Parameters) -> float:
        return 2.6


def program(most_words: int, rng: random.Random, *, largest: bool = False) -> list[Command]:
    """Two layers, the second fed by the first, with the parts of the memory in random places."""
    words = most_words if largest else rng.randint(1, most_words)
    hidden = most_words if largest else rng.randint(1, most_words)
    final = 1
    sizes = {"x": words, "w1": 4 * hidden * (words + 1), "h": hidden, "w2": 4 * final * (hidden + 1), "y": final}
    names = list(sizes)
    rng.shuffle(names)
    place, free = {}, (1 << MEMORY_BITS) - sum(sizes.values())
    position = 0
    for name in names:
        skip = rng.randint(0, free // len(names))
        place[name] = position + skip
        position += skip + sizes[name]
    commands = [(WRITE, place["x"] + i, _word(rng)) for i in range(words)]
    for name, rows, length in (("w1", 4 * hidden, words), ("w2", 4 * final, hidden)):
        for row in range(rows):
            base = place[name] + row * (length + 1)
            commands.append((WRITE, base, rng.randint(-30000, 30000) & 0xFFFFFFFF))
            commands += [(WRITE, base + 1 + i, _word(rng)) for i in range(length)]
    rng.shuffle(commands)
    for x, w, y, length, rows in (("x", "w1", "h", words, 4 * hidden), ("h", "w2", "y", hidden, 4 * final)):
        options = rng.randint(0, 10) << 16 | rng.randrange(2) << 20
        commands += [(SET_X, place[x], 0), (SET_W, place[w], 0), (SET_Y, place[y], 0)]
        commands.append((RUN, 0, options | rows << 8 | length))
    commands += [(READ, place["h"] + i, 0) for i in range(hidden)]
    return [*commands, *((READ, place["y"] + i, 0) for i in range(final))]


def execute(commands: Sequence[Command], memory: dict[int, int]) -> list[int]:
    """The software model: what the READs of a program give. `memory` is changed as the program says."""
    given = []
    base = {SET_X: 0, SET_W: 0, SET_Y: 0}
    for operation, address, data in commands:
        if operation == WRITE:
            memory[address] = data
        elif operation == READ:
            given.append(memory[address])
        elif operation in base:
            base[operation] = address
        else:
            _layer(memory, base, data)
    return given


def _layer(memory: dict[int, int], base: dict[int, int], data: int) -> None:
    length, rows, shift, relu = data & 255, data >> 8 & 255, data >> 16 & 15, data >> 20 & 1
    inputs = [number for i in range(length) for number in numbers(memory[base[SET_X] + i])]
    results = []
    for row in range(rows):
        start = base[SET_W] + row * (length + 1)
        weights = [number for i in range(length) for number in numbers(memory[start + 1 + i])]
        total = signed(memory[start], 32) + sum(x * w for x, w in zip(inputs, weights, strict=True))
        result = max(-128, min(127, (total + ((1 << shift) >> 1)) >> shift))
        results.append(max(0, result) if relu else result)
    for place in range(rows // 4):
        memory[base[SET_Y] + place] = pack_bytes(results[4 * place : 4 * place + 4])


def numbers(word: int) -> list[int]:
    """The four signed bytes of a word."""
    return [signed(word >> 8 * place, 8) for place in range(4)]


def _word(rng: random.Random) -> int:
    return pack_bytes([rng.choice((-128, 127, rng.randint(-128, 127), rng.randint(-20, 20))) for _ in range(4)])
