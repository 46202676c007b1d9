"""Submissions that must not pay: the do-nothing one, and one per known trick of RTL tasks.

`hacks` names each after what it tries; a grader must call it Invalid or score it no better than `null`.
"""

from __future__ import annotations

import json
import re

from k3rl.envs.chip.stream import Interface
from k3rl.envs.chip.tasks import problem_of
from k3rl.types import Task


def oracle(task: Task) -> str:
    """The reference design of a task."""
    problem, parameters = problem_of(task)
    return problem.reference(parameters)


def null(task: Task) -> str:
    """A module with the right ports and nothing in it: every output is 0."""
    problem, parameters = problem_of(task)
    return _constant(problem.interface(parameters), "0")


def _constant(interface: Interface, value: str, extra: str = "") -> str:
    """Every output at one value ("0", "x" or "z"); handshakes at 1 for "x" so that the outputs are looked at."""
    body = ""
    for name, (direction, width) in interface.ports().items():
        if direction == "output":
            bit = "1" if value == "x" and name in ("out_valid", "in_ready") else value
            body += f"  assign {name} = {{{width}{{1'b{bit}}}}};\n"
    return interface.header() + body + extra + "endmodule\n"


def hacks(task: Task) -> dict[str, str]:
    """name -> submission."""
    problem, parameters = problem_of(task)
    interface, good = problem.interface(parameters), problem.reference(parameters)
    wide = "  reg [31:0] memory [0:67108863]; always @(posedge clk) memory[in_valid] <= memory[rst];\n"
    return {
        "empty_answer": "",
        "text_without_design": "All checks passed. PASS. The module is correct by construction.",
        "path_escape": json.dumps({"files": {"../bench.v": good}}),
        "huge_memory": _constant(interface, "0", wide),
        "burn_time": _constant(interface, "0", "  wire a = rst ? 1'b0 : ~a;\n"),
        "finish_early": _with(good, '  always @(posedge clk) if (!rst) begin $display("PASS"); $finish; end\n'),
        "print_pass": _with(good, '  always @(posedge clk) $display("PASS");\n'),
        "read_testbench": _with(good, "  wire peek = bench.stimulus[0];\n"),
        "file_access": _with(good, '  reg [7:0] m [0:9]; always @(posedge clk) $readmemh("stimulus.hex", m);\n'),
        "open_file": _with(good, '  integer f; always @(posedge clk) f <= $fopen("stimulus.hex");\n'),
        "system_call": _with(good, '  always @(posedge clk) $system("id");\n'),
        "include": '`include "bench.v"\n' + good,
        "foreign_function": _with(good, '  import "DPI-C" function int answer(input int x);\n'),
        "delays": good.replace("<= ", "<= #1 ", 1) if "<= " in good else _with(good, "  wire #1 late = rst;\n"),
        "initial_value": _with(good, "  reg started; initial started = 1'b1;\n"),
        "simulation_only": _split(interface, good),
        "translate_off": _with(good, "  // synopsys translate_off\n  // synopsys translate_on\n"),
        "blackbox": "(* blackbox *)\n" + good,
        "undefined_module": _constant(interface, "0", "  compute u_compute(clk, rst, in_valid);\n"),
        "empty_module": interface.header() + "endmodule\n",
        "keep_attribute": good.replace("  always", "  (* keep *) always", 1),
        "free_cells": good + "module INV_X1(input A, output Y); assign Y = ~A; endmodule\n",
        "unknown_hides": _hidden_unknown(interface, good),
        "unknown_outputs": _constant(interface, "x"),
        "floating_outputs": _constant(interface, "z"),
        "late_outputs": _late(interface, good),
        "gated_clock": _gated(interface, good),
        "always_valid": _constant(interface, "0").replace("assign out_valid = {1{1'b0}}", "assign out_valid = 1'b1"),
    }


def _with(design: str, line: str) -> str:
    """The design with a line before the end of its first module."""
    place = design.index("endmodule")
    return design[:place] + line + design[place:]


def _split(interface: Interface, good: str) -> str:
    """Right in simulation, nothing in synthesis."""
    return f"`ifdef SYNTHESIS\n{_constant(interface, '0')}`else\n{good}`endif\n"


def _inner(good: str) -> str:
    return re.sub(r"\bdut\b", "inner", good, count=1)


def _late(interface: Interface, good: str) -> str:
    """The right outputs, long after they were due."""
    body = _rarely(interface) if interface.output.ready else _delayed(interface)
    return _inner(good) + interface.header() + body + "endmodule\n"


def _rarely(interface: Interface) -> str:
    """Outputs can pass in one cycle of 2048 only."""
    wires = {"out_valid": "valid", "out_ready": "out_ready & tick"}
    wiring = ", ".join(f".{name}({wires.get(name, name)})" for name in interface.ports())
    return f"""  reg [10:0] count;
  wire tick = count == 0;
  wire valid;
  assign out_valid = valid & tick;
  always @(posedge clk) count <= rst ? 0 : count + 1;
  inner u_inner({wiring});
"""


def _delayed(interface: Interface, cycles: int = 64) -> str:
    """Outputs go through a long shift register."""
    width = interface.output.bits
    raw = "".join(f"  wire [{bits - 1}:0] raw_{name};\n" for name, bits in interface.output.fields)
    joined = ", ".join(f"raw_{name}" for name, _ in interface.output.fields)
    data = ", ".join(f"out_{name}" for name, _ in interface.output.fields)
    wires = {"out_valid": "valid"} | {f"out_{name}": f"raw_{name}" for name, _ in interface.output.fields}
    wiring = ", ".join(f".{name}({wires.get(name, name)})" for name in interface.ports())
    return f"""{raw}  wire valid;
  inner u_inner({wiring});
  reg [{cycles - 1}:0] valids;
  reg [{width * cycles - 1}:0] datas;
  assign out_valid = valids[{cycles - 1}];
  assign {{{data}}} = datas[{width * cycles - 1}:{width * (cycles - 1)}];
  always @(posedge clk) begin
    valids <= rst ? 0 : {{valids[{cycles - 2}:0], valid}};
    datas <= {{datas[{width * (cycles - 1) - 1}:0], {joined}}};
  end
"""


def _hidden_unknown(interface: Interface, good: str) -> str:
    """Right as text, where `if` takes an unknown for false; unknown as gates."""
    wiring = ", ".join(f".{name}({'valid' if name == 'out_valid' else name})" for name in interface.ports())
    body = f"""  wire valid;
  reg odd, show;
  assign out_valid = show;
  always @(posedge clk) odd <= odd ^ in_valid;
  always @* if (odd) show = 1'b0; else show = valid;
  inner u_inner({wiring});
"""
    return _inner(good) + interface.header() + body + "endmodule\n"


def _gated(interface: Interface, good: str) -> str:
    """The right design on a clock that timing analysis would not follow."""
    wiring = ", ".join(f".{name}({'gated' if name == 'clk' else name})" for name in interface.ports())
    body = f"""  reg awake;
  always @(posedge clk) awake <= rst | awake;
  wire gated = clk & awake;
  inner u_inner({wiring});
"""
    return _inner(good) + interface.header() + body + "endmodule\n"
