"""The tools, each run in a sandbox: lint, simulation, synthesis, timing.

A submission's text is seen by verilator, iverilog and yosys; its behaviour runs in vvp alone, in a sandbox that is
thrown away after it. Synthesis has a second sandbox, and timing and gate-level simulation a third, in which only
the netlist that this side wrote itself exists.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from k3rl.envs.chip import library
from k3rl.envs.chip.netlist import Netlist, from_yosys
from k3rl.envs.chip.stream import TOP, Interface, Segment
from k3rl.envs.chip.testbench import Trace, bench, read_trace, stimulus
from k3rl.envs.sandbox.base import MEBIBYTE, ExecResult, Sandbox, SandboxError, SandboxLimits, SandboxUnavailable

PACKAGES = ("iverilog", "verilator", "yosys", "opensta")
INSTALL = f"apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
_COMMANDS = {"iverilog": "iverilog", "vvp": "iverilog", "verilator": "verilator", "yosys": "yosys", "sta": "opensta"}

# A design that needs more processor time of one tool than this counts as unfit. References need a fifth at most.
FRONT_CPU_S = 5  # lint and simulation of the text
BACK_CPU_S = 180  # synthesis, timing and simulation of gates
WALL_S = 1800.0  # a tool that neither ends nor uses up its processor time was starved by this machine
_LIMITS = SandboxLimits(memory_bytes=4096 * MEBIBYTE, workspace_bytes=512 * MEBIBYTE, output_bytes=4 * MEBIBYTE)
FRONT = dataclasses.replace(_LIMITS, cpu_s=FRONT_CPU_S)
BACK = dataclasses.replace(_LIMITS, cpu_s=BACK_CPU_S)
INPUT_DELAY = 0.2  # of the period, for inputs to arrive and outputs to be used
OUTPUT_LOAD_PF = 0.01
# Delay-driven mapping, then sizing that stops soon where a target cannot be met (by default it goes on for minutes).
_MAPPING = "+strash;map,{D};buffer;upsize,-I,60,-J,10,{D};dnsize,{D};stime,-p"
INPUT_SLEW_NS = 0.02

# Warnings of verilator that mean a design cannot be what it seems; the others are taste.
_LINT_ERRORS = ("LATCH", "MULTIDRIVEN", "ASSIGNDLY", "STMTDLY", "COMBDLY", "SELRANGE", "PINMISSING")


class ToolsMissing(SandboxUnavailable):
    """A chip design tool is not installed; the message names the one command that installs them all."""


class Unfit(Exception):
    """The submission does not pass a tool: syntax, lint, a construct without gates, or too much work for it."""


def check_tools() -> None:
    """Raises ToolsMissing when a tool is not in /usr/bin, where sandboxes look for it."""
    places = "/usr/local/bin:/usr/bin"
    missing = sorted({package for command, package in _COMMANDS.items() if shutil.which(command, path=places) is None})
    if missing:
        raise ToolsMissing(
            f"the environment `chip` needs the Debian packages {', '.join(missing)}; run `sudo {INSTALL}`"
        )


async def _run(sandbox: Sandbox, argv: Sequence[str], what: str) -> ExecResult:
    """Run one tool. Raises SandboxError when the machine failed it, Unfit when its work was too much."""
    result = await sandbox.exec(argv, timeout_s=WALL_S, env={"VERILATOR_ROOT": "/usr/share/verilator"})
    if result.timed_out:
        raise SandboxError(f"{what} neither ended nor used up its processor time in {WALL_S:.0f} s")
    if result.returncode and result.stderr.startswith((b"bwrap:", b"prlimit:")):
        raise SandboxError(f"{what} could not be started: {_tail(result)}")
    if result.returncode is None or result.truncated:
        raise Unfit(f"{what} printed more than is read")
    if result.workspace_exceeded:
        raise Unfit(f"{what} made more files than fit")
    if result.returncode > 128 or result.returncode < 0:
        raise Unfit(f"{what} was ended: it needs too much processor time or memory")
    return result


def _tail(result: ExecResult) -> str:
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    errors = [line for line in text.splitlines() if "rror" in line] or text.splitlines()[-6:]
    return "\n".join(errors[:6])[:800]


async def write_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write texts by name."""
    for name, text in files.items():
        await sandbox.write(name, text.encode())


async def lint(sandbox: Sandbox, files: Sequence[str]) -> None:
    """Verilator over the files. Raises Unfit with its first errors."""
    strict = [f"-Werror-{name}" for name in _LINT_ERRORS]
    command = ["verilator_bin", "--lint-only", "--no-timing", "-Wno-fatal", "--top-module", TOP, *strict, *files]
    result = await _run(sandbox, command, "lint")
    if result.returncode != 0:
        raise Unfit(f"lint: {_tail(result)}")


async def simulate(
    sandbox: Sandbox, files: Sequence[str], interface: Interface, segments: Sequence[Segment], key: str
) -> list[Trace] | None:
    """Iverilog and vvp over the files and the bench; None when the simulation did not come to its end."""
    limit = 400 + 40 * max(len(segment.inputs) + len(segment.outputs) for segment in segments)
    await write_files(
        sandbox,
        {f"bench_{key}.v": bench(interface, segments, key, limit), "stimulus.hex": stimulus(interface, segments)},
    )
    top = f"bench_{key}"
    compiled = await _run(
        sandbox, ["iverilog", "-g2012", "-s", top, "-o", "sim.vvp", f"{top}.v", *files], "simulation compiler"
    )
    if compiled.returncode != 0:
        raise Unfit(f"iverilog: {_tail(compiled)}")
    result = await _run(sandbox, ["vvp", "-n", "sim.vvp"], "simulation")
    return read_trace(result.stdout.decode("ascii", "replace"), key, len(segments))


def synthesis_script(files: Sequence[str], period_ns: float) -> str:
    """The commands of yosys. Undefined bits become 0, so the netlist has no choice left to a simulator."""
    target_ps = period_ns * 1000 * (1 - INPUT_DELAY)
    return "\n".join(
        [
            *(f"read_verilog -sv {name}" for name in files),
            f"hierarchy -check -top {TOP}",
            f"synth -flatten -top {TOP}",
            "setundef -undriven -zero",
            "dfflegalize -cell $_DFF_P_ x",
            "dfflibmap -liberty cells.lib",
            "opt -fast",
            f"abc -liberty cells.lib -constr abc.constr -D {target_ps:.0f} -script {_MAPPING}",
            "setundef -zero",
            "hilomap -hicell TIE1_X1 Y -locell TIE0_X1 Y",
            "opt_clean -purge",
            "write_json net.json",
        ]
    )


async def synthesize(sandbox: Sandbox, files: Sequence[str], interface: Interface, period_ns: float) -> Netlist:
    """The checked netlist of the files. Raises Unfit, or NetlistError when it breaks a rule."""
    await write_files(
        sandbox,
        {
            "cells.lib": library.liberty(),
            "abc.constr": f"set_driving_cell BUF_X1\nset_load {OUTPUT_LOAD_PF}\n",
            "synth.ys": synthesis_script(files, period_ns),
        },
    )
    result = await _run(sandbox, ["yosys", "-q", "-s", "synth.ys"], "synthesis")
    if result.returncode != 0:
        raise Unfit(f"yosys: {_tail(result)}")
    try:
        design: dict[str, Any] = json.loads(await sandbox.read("net.json", 256 * MEBIBYTE))
    except (OSError, ValueError) as error:
        raise Unfit(f"yosys wrote no netlist that can be read: {error}") from error
    return from_yosys(design, interface)


def timing_script(interface: Interface, period_ns: float) -> str:
    """The commands of OpenSTA: every path is between flip-flops or ports of one clock."""
    ports = interface.ports()
    inputs = " ".join(name for name, (direction, _) in ports.items() if direction == "input" and name != "clk")
    edge = INPUT_DELAY * period_ns
    return f"""read_liberty cells.lib
read_verilog net.v
link_design {TOP}
create_clock -name clk -period {period_ns} [get_ports clk]
set_input_delay {edge:.4f} -clock clk [get_ports {{{inputs}}}]
set_output_delay {edge:.4f} -clock clk [all_outputs]
set_input_transition {INPUT_SLEW_NS} [all_inputs]
set_load {OUTPUT_LOAD_PF} [all_outputs]
report_worst_slack -digits 5
report_checks -path_delay max -digits 4
"""


async def slack_ns(sandbox: Sandbox, netlist: str, interface: Interface, period_ns: float) -> tuple[float, str]:
    """(worst setup slack of the netlist, the report of its path). Raises SandboxError when OpenSTA gives none."""
    await write_files(
        sandbox,
        {"cells.lib": library.liberty(), "net.v": netlist, "sta.tcl": timing_script(interface, period_ns)},
    )
    result = await _run(sandbox, ["sta", "-no_splash", "-exit", "sta.tcl"], "timing")
    text = result.stdout.decode("utf-8", "replace")
    found = re.search(r"^worst slack (-?\d+\.\d+)\s*$", text, re.MULTILINE)
    if result.returncode != 0 or "Error" in text or found is None:
        raise SandboxError(f"OpenSTA gave no slack: {_tail(result)}")
    return float(found[1]), text
