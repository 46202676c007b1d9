"""The testbench: drives transactions into `dut`, prints what passes at its ports, and when. It has no answers.

Right values never enter the simulator: the printed bits, `x` and `z` among them, are compared here on the host,
character by character, which is Verilog's `===`. Ports are read just before the rising edge and driven just
after it, so races between the bench and a design cannot exist. Cycles are counted by the bench.

Lines of a trace: `KEY S n cycle` a segment begins; `KEY I cycle` an input passed; `KEY O cycle bits` an output
passed; `KEY X cycle` a handshake signal is unknown; `KEY T n` a segment ran out of cycles; `KEY E cycle` the end.
KEY is drawn for each grading, so a line that a design printed by some means is not taken for one of the bench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3rl.envs.chip.stream import TOP, Interface, Range, Segment

QUIET = 40  # cycles watched after the last expected output for ones too many
RESET = 4
_GAP_BITS = 16


@dataclass(slots=True)
class Trace:
    """What passed in one segment: cycles of inputs, (cycle, bits as text) of outputs, and whether it went wrong."""

    start: int
    inputs: list[int] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)
    unknown: int = 0
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of all expected outputs `right` came right and none was wrong when `passed`. cycles: of the counted segments.

    late: the largest number of cycles over what was allowed (0 or less is in time).
    """

    passed: bool
    right: int
    expected: int
    late: int
    cycles: int
    items: int
    problem: str = ""


def bench(interface: Interface, segments: Sequence[Segment], key: str, max_cycles: int) -> str:
    """The testbench module. It reads `stimulus.hex` and prints the trace."""
    ports = interface.ports()
    inputs = "".join(
        f"  reg {_range(width)}{name} = 0;\n" for name, (direction, width) in ports.items() if direction == "input"
    )
    wires = "".join(
        f"  wire {_range(width)}{name};\n" for name, (direction, width) in ports.items() if direction == "output"
    )
    connections = ", ".join(f".{name}({name})" for name in ports)
    data = ", ".join(f"in_{name}" for name, _ in interface.input.fields)
    result = ", ".join(f"out_{name}" for name, _ in interface.output.fields)
    take_in = "in_ready" if interface.input.ready else "1'b1"
    take_out = "out_ready" if interface.output.ready else "1'b1"
    width = interface.input.bits
    lines = []
    begun = 0
    for number, segment in enumerate(segments):
        end = begun + len(segment.inputs)
        limit = segment.cut or max_cycles
        lines.append(
            f"    segment({number}, {begun}, {end}, {len(segment.outputs)}, {int(segment.stall)}, {segment.hold}, "
            f"{limit}, {int(bool(segment.cut))});\n"
        )
        begun = end
    return f"""`timescale 1ns/1ps
module bench_{key};
{inputs}{wires}  {TOP} device({connections});
  reg [{width + _GAP_BITS - 1}:0] stimulus [0:{max(begun, 1) - 1}];
  integer now, position, last, idle, given, begun, quiet, stall, hold, noise;
  reg pass_in, pass_out;
{_memory_declaration(interface)}
  task drive; begin
    if (!in_valid || pass_in) begin
      if (pass_in) begin
        position = position + 1;
        if (position < last) idle = stimulus[position] >> {width};
      end
      in_valid = position < last && idle == 0;
      if (in_valid) {{{data}}} = stimulus[position];
      else begin {{{data}}} = {{{(width + 31) // 32}{{$random(noise)}}}}; idle = idle - 1; end
    end
    {"out_ready = now - begun >= hold && (!stall || $random(noise) % 3 != 0);" if interface.output.ready else ""}
  end endtask
  task cycle; begin
    #4;
    pass_in = 0; pass_out = 0;
    if (!rst) begin
      if (in_valid) begin
        if ({take_in} === 1'b1) begin pass_in = 1; $display("{key} I %0d", now); end
        else if ({take_in} !== 1'b0) $display("{key} X %0d", now);
      end
      if (out_valid === 1'b1) begin
        if ({take_out}) begin pass_out = 1; given = given + 1; $display("{key} O %0d %b", now, {{{result}}}); end
      end else if (out_valid !== 1'b0) $display("{key} X %0d", now);
    end
    {_memory_sample(interface, key)}
    #1 clk = 1;
    #1 now = now + 1;
    {_memory_drive(interface)}
    if (!rst) drive;
    #4 clk = 0;
  end endtask
  task segment(input integer number, input integer first, input integer end_, input integer wanted,
               input integer stall_, input integer hold_, input integer limit, input integer cut); begin
    rst = 1; in_valid = 0; pass_in = 0;
    repeat ({RESET}) cycle;
    rst = 0; position = first; last = end_; stall = stall_; hold = hold_; given = 0; quiet = 0; begun = now;
    idle = first < end_ ? stimulus[first] >> {width} : 0;
    $display("{key} S %0d %0d", number, now);
    drive;
    while (now - begun < limit && quiet < {QUIET}) begin
      cycle;
      if (given >= wanted && position >= last) quiet = quiet + 1;
    end
    if (quiet < {QUIET} && !cut) $display("{key} T %0d", number);
  end endtask
  initial begin
    $readmemh("stimulus.hex", stimulus);
    now = 0; noise = 1; position = 0; last = 0; idle = 0; given = 0; begun = 0; stall = 0; hold = 0; quiet = 0;
    pass_in = 0; pass_out = 0;
    {_memory_fill(interface)}
{"".join(lines)}    $display("{key} E %0d", now);
    $finish;
  end
endmodule
"""


def _range(width: int) -> str:
    return f"[{width - 1}:0] " if width > 1 else ""


def _memory_declaration(interface: Interface) -> str:
    if interface.memory_bits is None:
        return ""
    return (
        f"  reg [31:0] memory [0:{(1 << interface.memory_bits) - 1}];\n"
        f"  reg write_; reg [{interface.memory_bits - 1}:0] address_; reg [31:0] word_;"
    )


def _memory_sample(interface: Interface, key: str) -> str:
    if interface.memory_bits is None:
        return ""
    unknown = f"if (!rst && mem_we !== 1'b0 && mem_we !== 1'b1) $display(\"{key} X %0d\", now);"
    return f"write_ = mem_we; address_ = mem_addr; word_ = mem_wdata; {unknown}"


def _memory_drive(interface: Interface) -> str:
    """One port: a cycle writes or reads; the read word is there in the next cycle."""
    if interface.memory_bits is None:
        return ""
    read = "mem_rdata = write_ === 1'b0 ? memory[address_] : $random(noise);"
    return f"if (write_ === 1'b1) memory[address_] = word_; {read}"


def _memory_fill(interface: Interface) -> str:
    """Arbitrary words rather than unknown ones: what a design reads too early must not matter, and gates that
    mix an unknown with itself would make more unknowns than there are."""
    if interface.memory_bits is None:
        return ""
    last = (1 << interface.memory_bits) - 1
    return f"for (quiet = 0; quiet <= {last}; quiet = quiet + 1) memory[quiet] = $random(noise); quiet = 0;"


def stimulus(interface: Interface, segments: Sequence[Segment]) -> str:
    """The content of `stimulus.hex`: one transaction a line, the idle cycles before it on top."""
    width = interface.input.bits
    lines = [
        f"{gap << width | interface.input.pack(values):x}" for segment in segments for gap, values in segment.inputs
    ]
    return "\n".join(lines or ["0"]) + "\n"


def read_trace(text: str, key: str, segments: int) -> list[Trace] | None:
    """One trace per segment; None when the text is not a whole trace of this key."""
    traces: list[Trace] = []
    ended = False
    for line in text.splitlines():
        words = line.split()
        if len(words) < 3 or words[0] != key or ended:
            continue
        kind = words[1]
        if kind == "S":
            traces.append(Trace(int(words[3])))
        elif kind == "E":
            ended = True
        elif not traces:
            continue
        elif kind == "I":
            traces[-1].inputs.append(int(words[2]))
        elif kind == "O":
            traces[-1].outputs.append((int(words[2]), words[3]))
        elif kind == "X":
            traces[-1].unknown += 1
        elif kind == "T":
            traces[-1].timed_out = True
    return traces if ended and len(traces) == segments else None


def judge(interface: Interface, segments: Sequence[Segment], traces: Sequence[Trace] | None) -> Verdict:
    """Compare a trace with what must come out. Pure."""
    expected = sum(len(segment.outputs) for segment in segments if not segment.cut)
    if traces is None:
        return Verdict(False, 0, expected, 0, 0, 0, "the simulation did not come to its end")
    right = cycles = items = 0
    late = -(10**9)
    problem = ""
    for number, (segment, trace) in enumerate(zip(segments, traces, strict=True)):
        good = 0
        for (_, bits), ranges in zip(trace.outputs, segment.outputs, strict=False):
            if _fits(bits, ranges, interface):
                good += 1
            else:
                problem = problem or f"segment {number}, output {good}: {bits} is wrong"
                break
        right += 0 if segment.cut else good
        problem = problem or _trouble(number, segment, trace, good)
        for (cycle, _), (source, allowed) in zip(trace.outputs, segment.due, strict=False):
            if source < len(trace.inputs):
                late = max(late, cycle - trace.inputs[source] - allowed)
        if segment.items and trace.outputs and trace.inputs:
            cycles += trace.outputs[-1][0] - trace.inputs[0] + 1
            items += segment.items
    return Verdict(not problem, right, expected, late, cycles, items, problem)


def _fits(bits: str, ranges: Sequence[Range | None], interface: Interface) -> bool:
    start = 0
    for (_, width), allowed in zip(interface.output.fields, ranges, strict=True):
        part = bits[start : start + width]
        start += width
        if allowed is None:
            continue
        if set(part) - {"0", "1"} or not allowed[0] <= int(part, 2) <= allowed[1]:
            return False
    return start == len(bits)


def _trouble(number: int, segment: Segment, trace: Trace, good: int) -> str:
    """What else is wrong in a segment whose outputs so far are right; empty when nothing is."""
    if trace.unknown:
        return f"segment {number}: a handshake signal is unknown in {trace.unknown} cycles"
    if len(trace.outputs) > len(segment.outputs):
        return f"segment {number}: {len(trace.outputs)} outputs, {len(segment.outputs)} expected"
    if segment.capacity:
        taken = sum(cycle < trace.start + segment.hold for cycle in trace.inputs)
        if taken < segment.capacity:
            return f"segment {number}: {taken} inputs taken while the output was held, {segment.capacity} must fit"
    if segment.cut:
        return ""
    if trace.timed_out or good < len(segment.outputs):
        return f"segment {number}: {good} of {len(segment.outputs)} outputs came in time"
    return ""
