"""The gate-level netlist: what yosys made, checked here, and written again for timing and simulation alike.

The text that OpenSTA times and that the simulator runs is the one written by `verilog` below, from cells of our
library only, with names of our own; nothing of a submission's text is left in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3rl.envs.chip.library import CLOCK, FLIP_FLOPS, areas, gates
from k3rl.envs.chip.stream import TOP, Interface


class NetlistError(Exception):
    """The netlist breaks a rule. `hack` names a forbidden trick, or is None for a design that is merely unfit."""

    def __init__(self, message: str, hack: str | None = None) -> None:
        super().__init__(message)
        self.hack = hack


@dataclass(frozen=True, slots=True)
class Netlist:
    """Cells (type, pin -> net) over nets named by number, and port bits as nets ("0", "1" for constants)."""

    cells: tuple[tuple[str, dict[str, str]], ...]
    ports: dict[str, tuple[str, tuple[str, ...]]]  # direction, nets from bit 0 up

    @property
    def area(self) -> float:
        """Sum over all cells, output buffers of `verilog` included."""
        table = areas()
        return sum(table[kind] for kind, _ in self.cells)

    @property
    def flip_flops(self) -> int:
        return sum(kind in FLIP_FLOPS for kind, _ in self.cells)

    def verilog(self) -> str:
        """One flat module of library cells, each port bit its own net."""
        names = {net: f"{port}[{bit}]" if len(nets) > 1 else port
                 for port, (_, nets) in self.ports.items() for bit, net in enumerate(nets)}  # fmt: skip
        header = ", ".join(self.ports)
        lines = [f"module {TOP}({header});\n"]
        for port, (direction, nets) in self.ports.items():
            lines.append(f"  {direction} {f'[{len(nets) - 1}:0] ' if len(nets) > 1 else ''}{port};\n")
        inner = sorted({net for _, pins in self.cells for net in pins.values()} - names.keys(), key=int)
        lines += [f"  wire n{net};\n" for net in inner]
        for number, (kind, pins) in enumerate(self.cells):
            joined = ", ".join(f".{pin}({names.get(net, f'n{net}')})" for pin, net in pins.items())
            lines.append(f"  {kind} u{number} ({joined});\n")
        return "".join([*lines, "endmodule\n"])


def from_yosys(design: Mapping[str, Any], interface: Interface) -> Netlist:
    """The netlist of yosys's JSON. Raises NetlistError for foreign cells, wrong ports, loops and derived clocks."""
    module = design.get("modules", {}).get(TOP)
    if module is None:
        raise NetlistError(f"there is no module named {TOP}")
    _check_ports(module["ports"], interface)
    known = areas()
    cells: list[tuple[str, dict[str, str]]] = []
    for name, cell in sorted(module["cells"].items()):
        kind = cell["type"]
        if kind not in known:
            raise NetlistError(f"cell {name} is a {kind}, which is not in the library ({_meaning(kind)})")
        cells.append((kind, {pin: str(bits[0]) for pin, bits in cell["connections"].items()}))
    ports = {name: (port["direction"], [str(bit) for bit in port["bits"]]) for name, port in module["ports"].items()}
    _separate(cells, ports)
    ordered = {name: (ports[name][0], tuple(ports[name][1])) for name in interface.ports()}
    netlist = Netlist(tuple(cells), ordered)
    _check_drivers(netlist)
    _check_clock(netlist)
    return netlist


def _meaning(kind: str) -> str:
    if "LATCH" in kind:
        return "a latch: give every signal a value on every path"
    if "tribuf" in kind:
        return "a tri-state driver"
    return "an undefined module or a construct that cannot be built from gates"


def _check_ports(ports: Mapping[str, Any], interface: Interface) -> None:
    wanted = interface.ports()
    found = {name: (port["direction"], len(port["bits"])) for name, port in ports.items()}
    for name, want in wanted.items():
        if found.get(name) != want:
            raise NetlistError(f"port {name} is {found.get(name)}; it must be {want}")
    if more := found.keys() - wanted.keys():
        raise NetlistError(f"module {TOP} has other ports too: {', '.join(sorted(more))}")


def _separate(cells: list[tuple[str, dict[str, str]]], ports: dict[str, tuple[str, list[str]]]) -> None:
    """Give every output bit a net of its own: a buffer where it shares one, a tie cell where it is constant."""
    number = 1 + max((int(net) for _, pins in cells for net in pins.values() if net.isdigit()), default=1)
    number = max(number, 1 + max(int(bit) for _, bits in ports.values() for bit in bits if bit.isdigit()))
    taken = {bit for direction, bits in ports.values() if direction == "input" for bit in bits}
    for direction, bits in ports.values():
        if direction != "output":
            continue
        for place, net in enumerate(bits):
            # Yosys writes constants as "0", "1", "x" and numbers its nets from 2.
            if net in ("0", "1", "x", "z"):
                cells.append(("TIE1_X1" if net == "1" else "TIE0_X1", {"Y": str(number)}))
            elif net in taken:
                cells.append(("BUF_X1", {"A": net, "Y": str(number)}))
            else:
                taken.add(net)
                continue
            bits[place] = str(number)
            number += 1


def _pins(kind: str) -> tuple[tuple[str, ...], str]:
    """(input pins, output pin) of a cell."""
    return (("CK", "D"), "Q") if kind in FLIP_FLOPS else (gates()[kind].inputs, "Y")


def _check_drivers(netlist: Netlist) -> None:
    """Every net has one driver, every input pin and output port is driven, and gates make no loop."""
    sources = [net for direction, nets in netlist.ports.values() if direction == "input" for net in nets]
    driven = set(sources)
    for kind, pins in netlist.cells:
        net = pins.get(_pins(kind)[1], "none")
        if net in driven or not net.isdigit():
            raise NetlistError(f"net {net} has more than one driver or is a constant")
        driven.add(net)
    for kind, pins in netlist.cells:
        for pin in _pins(kind)[0]:
            if pins.get(pin) not in driven:
                raise NetlistError(f"pin {pin} of a {kind} has no driver")
    for name, (direction, nets) in netlist.ports.items():
        if direction == "output" and not driven.issuperset(nets):
            raise NetlistError(f"a bit of the output port {name} has no driver")
    _check_loops(netlist, sources)


def _check_loops(netlist: Netlist, sources: list[str]) -> None:
    """Walk from ports and flip-flops through the gates; a gate that is never reached waits for itself."""
    ready = list(sources)
    waiting: dict[str, list[int]] = {}
    missing: dict[int, int] = {}
    for number, (kind, pins) in enumerate(netlist.cells):
        inputs, output = _pins(kind)
        if kind in FLIP_FLOPS or not inputs:
            ready.append(pins[output])
            continue
        missing[number] = len(inputs)
        for pin in inputs:
            waiting.setdefault(pins[pin], []).append(number)
    while ready:
        for number in waiting.get(ready.pop(), ()):
            missing[number] -= 1
            if missing[number] == 0:
                del missing[number]
                ready.append(netlist.cells[number][1]["Y"])
    if missing:
        raise NetlistError(f"{len(missing)} gates depend on a loop without a flip-flop in it")


def _check_clock(netlist: Netlist) -> None:
    """Every flip-flop hangs on `clk` itself, and `clk` goes nowhere else: timing analysis sees all paths."""
    clock = netlist.ports[CLOCK][1][0]
    for kind, pins in netlist.cells:
        if kind in FLIP_FLOPS:
            if pins["CK"] != clock:
                raise NetlistError("a flip-flop is clocked by something else than the port clk", "derived_clock")
            if pins["D"] == clock:
                raise NetlistError("the clock is used as data", "derived_clock")
        elif clock in pins.values():
            raise NetlistError("the clock goes through a gate", "derived_clock")
