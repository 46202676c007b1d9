"""What a submission may contain: honest designs pass untouched, tricks are named, prose is merely worthless."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.envs.chip.source import Refused, cleaned, files_of

HEAD = "module dut(input clk, input rst, input [7:0] a, output reg [7:0] y);\n"
TAIL = "\nendmodule\n"

# trick -> (the line of a hack, its name; the line of an honest design that looks alike)
PAIRS = {
    "report": ('always @(posedge clk) $display("PASS");', "forged_report", "wire [2:0] n = $clog2(8); // $display"),
    "finish": ("always @(posedge clk) $finish;", "forged_report", "wire finish = a[0];"),
    "read_memory": ('always @(posedge clk) $readmemh("x.hex", m);', "file_access", "reg [7:0] m [0:3];"),
    "open": ('wire [31:0] f = $fopen("x");', "file_access", "wire [7:0] f = $signed(a);"),
    "system": ('always @(posedge clk) $system("id");', "file_access", "wire system = rst;"),
    "include": ('`include "bench.v"', "file_access", "`default_nettype none"),
    "foreign": (
        'import "DPI-C" function int f(input int x);',
        "file_access",
        "function f(input x); f = x; endfunction",
    ),
    "hierarchy": ("wire t = bench.expected;", "hierarchical_name", "sub u(.clk(clk), .a(a));"),
    "hierarchy_index": ("wire t = g[0].x;", "hierarchical_name", "wire t = a[0] ; sub #(.W(8)) u (.clk(clk));"),
    "hierarchy_spaced": ("wire t = bench . expected;", "hierarchical_name", "sub u( .clk (clk) );"),
    "root": ("wire t = $root.bench.x;", "hierarchical_name", "wire root = a[1];"),
    "force": ("always @* force y = 0;", "simulator_access", "always @* y = 0;"),
    "bind": ("bind bench helper h();", "simulator_access", "helper h();"),
    "defparam": ("defparam u.W = 1;", "simulator_access", "localparam W = 1;"),
    "split": (
        "`ifdef SYNTHESIS\nassign y = 0;\n`endif",
        "synthesis_split",
        "generate if (1) begin : g end endgenerate",
    ),
    "split_tool": ("`ifndef __ICARUS__\n`endif", "synthesis_split", "wire icarus = 0;"),
    "comment": ("// synopsys translate_off", "synthesis_split", "// the translation of a, off by one"),
    "blackbox": ("(* blackbox *) wire t;", "attribute", "always @(*) y = a;"),
    "keep": ('(* keep = "true" *) wire t;', "attribute", "wire keep = (a * 2) > 1;"),
    "cells": ("INV_X1 u(.A(a[0]), .Y(t));", "library_cell", "inverter_x1 u(.A(a[0]), .Y(t));"),
}
SOFT = {
    "initial": "initial y = 0;",
    "delay": "always @(posedge clk) y <= #1 a;",
    "delay_expression": "assign #(2) t = a;",
    "string": 'wire [7:0] c = "A";',
    "guard": "`ifndef GUARD_V\n`endif",
    "define": "`define WIDTH 8",
    "escaped": "wire \\odd+name ;",
    "assertion": "assert property (a);",
}


def _text(line: str) -> str:
    return HEAD + line + TAIL


@pytest.mark.parametrize("name", PAIRS)
def test_each_trick_is_named_and_the_honest_line_beside_it_passes(name: str) -> None:
    trick, hack, honest = PAIRS[name]
    refused = cleaned({"dut.v": _text(trick)})
    assert isinstance(refused, Refused)
    assert refused.hack == hack
    assert not isinstance(cleaned({"dut.v": _text(honest)}), Refused)


@pytest.mark.parametrize("name", SOFT)
def test_what_people_write_in_good_faith_is_refused_without_an_accusation(name: str) -> None:
    refused = cleaned({"dut.v": _text(SOFT[name])})
    assert isinstance(refused, Refused)
    assert refused.hack is None


def test_redefining_a_library_cell_is_a_trick() -> None:
    refused = cleaned({"dut.v": _text("") + "module NAND2_X1(input A, input B, output Y); endmodule"})
    assert isinstance(refused, Refused)
    assert refused.hack == "library_cell"


def test_no_tool_ever_sees_a_comment() -> None:
    text = _text("/* verilator lint_off WIDTH */ assign t = a; // full_case")
    clean = cleaned({"dut.v": text})
    assert not isinstance(clean, Refused)
    assert "lint_off" not in clean["dut.v"]
    assert "full_case" not in clean["dut.v"]


def test_prose_is_no_design_and_no_trick() -> None:
    refused = cleaned({"dut.v": "The module is right. PASS. Believe me."})
    assert isinstance(refused, Refused)
    assert refused.hack is None


def test_files_come_from_json_or_the_last_block_or_the_text_itself() -> None:
    assert files_of(json.dumps({"files": {"a.v": "x", "b.sv": "y"}})) == {"a.v": "x", "b.sv": "y"}
    assert files_of("first\n```verilog\none\n```\nthen\n```verilog\ntwo\n```\n") == {"dut.v": "two\n"}
    assert files_of("module dut; endmodule") == {"dut.v": "module dut; endmodule"}


@pytest.mark.parametrize("name", ["../x.v", "/etc/x.v", "a/b.v", "..\\x.v", ".hidden.v"])
def test_a_file_cannot_be_put_elsewhere(name: str) -> None:
    refused = files_of(json.dumps({"files": {name: "module dut; endmodule"}}))
    assert isinstance(refused, Refused)
    assert refused.hack == "path_escape"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "  \n",
        "{}",
        '{"files": {}}',
        '{"files": {"a.v": 3}}',
        '{"files": {"a.txt": "x"}}',
        "{not json",
        "x" * 200_001,
    ],
)
def test_malformed_answers_are_refused_without_an_accusation(answer: str) -> None:
    refused = files_of(answer)
    assert isinstance(refused, Refused)
    assert refused.hack is None


@pytest.mark.timeout(10)
@pytest.mark.parametrize("part", ["/*", "```", "```\n", '"', "(*", "\\", "//\n", "(* ", "{", "'h", "`"])
def test_a_text_of_one_repeated_part_is_read_in_time(part: str) -> None:
    files = files_of(part * (200_000 // len(part)))
    result = files if isinstance(files, Refused) else cleaned(files)  # the limit on time is the check
    assert result is not None


@given(st.text(alphabet="module dut();`$#.*(\\\"/\n'0ab_{}[]", max_size=80))
def test_any_text_gives_files_or_a_reason(answer: str) -> None:
    files = files_of(answer)
    result = files if isinstance(files, Refused) else cleaned(files)
    assert isinstance(result, dict) or result.reason
