"""The netlist: only our cells, one clock, no loops, and a library whose numbers mean what OpenSTA says."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest

from k3rl.envs.chip import flow, library
from k3rl.envs.chip.netlist import Netlist, NetlistError, from_yosys
from k3rl.envs.chip.stream import Interface, Stream
from k3rl.envs.sandbox import provider_named

TINY = Interface(Stream(()), Stream(()))  # clk, rst, in_valid -> out_valid


def _design(cells: dict[str, tuple[str, dict[str, int | str]]], out: int | str = 9, **ports: int) -> dict[str, Any]:
    table = {"clk": ("input", 2), "rst": ("input", 3), "in_valid": ("input", 4), "out_valid": ("output", out)}
    table |= {name: ("input", bit) for name, bit in ports.items()}
    return {
        "modules": {
            "dut": {
                "ports": {name: {"direction": way, "bits": [bit]} for name, (way, bit) in table.items()},
                "cells": {
                    name: {"type": kind, "connections": {pin: [bit] for pin, bit in pins.items()}}
                    for name, (kind, pins) in cells.items()
                },
            }
        }
    }


GOOD = {"f": ("DFF_X1", {"CK": 2, "D": 5, "Q": 9}), "g": ("NOR2_X1", {"A": 3, "B": 4, "Y": 5})}
GATED = {"f": ("DFF_X1", {"CK": 5, "D": 4, "Q": 9}), "g": ("AND2_X1", {"A": 2, "B": 4, "Y": 5})}
DIVIDED = {"f": ("DFF_X1", {"CK": 2, "D": 4, "Q": 5}), "h": ("DFF_X1", {"CK": 5, "D": 4, "Q": 9})}


def test_a_netlist_of_our_cells_is_written_again_with_its_area() -> None:
    netlist = from_yosys(_design(GOOD), TINY)
    assert netlist.area == pytest.approx(7.0 + 1.5)
    assert netlist.flip_flops == 1
    assert re.search(r"DFF_X1 u\d+ \(\.CK\(clk\), \.D\(n5\), \.Q\(out_valid\)\);", netlist.verilog())


@pytest.mark.parametrize(
    ("cells", "hack", "words"),
    [
        (GATED, "derived_clock", "clock"),
        ({"f": ("DFF_X1", {"CK": 2, "D": 2, "Q": 9})}, "derived_clock", "data"),
        (DIVIDED, "derived_clock", "port clk"),
        ({"g": ("NOR2_X1", {"A": 9, "B": 4, "Y": 9})}, None, "loop"),
        ({"g": ("$_DLATCH_P_", {"E": 3, "D": 4, "Q": 9})}, None, "latch"),
        ({"g": ("MAGIC", {"A": 3, "Y": 9})}, None, "not in the library"),
        ({"g": ("BUF_X1", {"A": 7, "Y": 9})}, None, "no driver"),
        ({"g": ("BUF_X1", {"A": 4, "Y": 9}), "h": ("BUF_X1", {"A": 3, "Y": 9})}, None, "more than one driver"),
    ],
    ids=["gated clock", "clock as data", "divided clock", "loop", "latch", "foreign cell", "open input", "two drivers"],
)  # fmt: skip
def test_a_netlist_that_cannot_be_timed_is_refused(cells: Any, hack: str | None, words: str) -> None:
    with pytest.raises(NetlistError, match=words) as caught:
        from_yosys(_design(cells), TINY)
    assert caught.value.hack == hack


def test_ports_must_be_exactly_those_of_the_task() -> None:
    with pytest.raises(NetlistError, match="other ports"):
        from_yosys(_design(GOOD, extra=8), TINY)
    design = _design(GOOD)
    del design["modules"]["dut"]["ports"]["rst"]
    with pytest.raises(NetlistError, match="port rst"):
        from_yosys(design, TINY)


@pytest.mark.parametrize(("bit", "cell"), [("1", "TIE1_X1"), ("0", "TIE0_X1"), ("x", "TIE0_X1"), (4, "BUF_X1")])
def test_an_output_without_a_gate_gets_one_that_is_counted(bit: int | str, cell: str) -> None:
    netlist = from_yosys(_design({}, out=bit), TINY)
    assert [kind for kind, _ in netlist.cells] == [cell]
    assert netlist.area == library.areas()[cell]


def test_models_and_liberty_functions_are_the_same_boolean_functions() -> None:
    models = dict(re.findall(r"module (\w+)\([^)]*output Y\);\s*assign Y = ([^;]+);", library.models()))
    assert models.keys() == library.gates().keys()
    for name, cell in library.gates().items():
        for values in itertools.product((0, 1), repeat=len(cell.inputs)):
            scope = dict(zip(cell.inputs, values, strict=True))
            liberty = eval(cell.function.replace("!", "~"), {}, scope) if cell.inputs else int(cell.function)
            text = models[name].replace("1'b", "")
            verilog = eval(_python(text), {}, scope)
            assert verilog & 1 == liberty & 1, (name, values)


def _python(text: str) -> str:
    """Verilog's `s ? a : b` in Python's words."""
    select, asks, both = text.partition("?")
    if not asks:
        return text
    yes, _, no = both.partition(":")
    return f"({yes}) if ({select}) else ({no})"


def _chain(length: int) -> Netlist:
    """in_valid -> flip-flop -> `length` inverters -> flip-flop -> out_valid."""
    cells = [("DFF_X1", {"CK": "2", "D": "4", "Q": "10"})]
    cells += [("INV_X1", {"A": str(10 + i), "Y": str(11 + i)}) for i in range(length)]
    cells.append(("DFF_X1", {"CK": "2", "D": str(10 + length), "Q": "9"}))
    ports = {"clk": ("input", ("2",)), "rst": ("input", ("3",)), "in_valid": ("input", ("4",))}
    return Netlist(tuple(cells), ports | {"out_valid": ("output", ("9",))})


def _slack(netlist: Netlist, period: float) -> tuple[float, str]:
    async def run() -> tuple[float, str]:
        async with await provider_named("bwrap").create(flow.BACK) as sandbox:
            return await flow.slack_ns(sandbox, netlist.verilog(), TINY, period)

    return asyncio.run(run())


def test_opensta_finds_the_delay_that_the_linear_model_gives_by_hand() -> None:
    length, period, load = 12, 0.5, 0.002
    delay, slew = 0.045 + 4.0 * load, 0.7 * 0.045 + 1.2 * 4.0 * load
    for _ in range(length):
        delay += 0.006 + 0.12 * slew + 4.0 * load
        slew = 0.7 * 0.006 + 0.05 * slew + 1.2 * 4.0 * load
    setup = library.SETUP_NS + 0.1 * slew
    slack, report = _slack(_chain(length), period)
    # Tables hold five decimals; their rounding adds up to some 1e-5 a stage.
    assert slack == pytest.approx(period - delay - setup, abs=2e-4)
    assert "library setup time" in report
