"""The cell library of `chip`: eleven gates in two drives, two constants and a flip-flop, in made-up units.

One table gives the Liberty file that synthesis and timing read, the Verilog models that gate-level simulation
reads, and the areas that are counted. Delay is linear: intrinsic + resistance x load + a share of the input's
transition. Times in ns, capacitances in pF, areas in the area of the smallest inverter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_SLEWS = (0.005, 0.02, 0.08, 0.32, 1.28)
_LOADS = (0.0005, 0.002, 0.008, 0.032, 0.128)
_INPUT_PF = 0.002
_SLEW_SHARE = 0.12
SETUP_NS = 0.03
HOLD_NS = 0.005
CLOCK = "clk"
FLIP_FLOPS = ("DFF_X1", "DFF_X2")


@dataclass(frozen=True, slots=True)
class Cell:
    """A gate. `function` is in Liberty's and Verilog's common words (`!`, `&`, `|`, `^`); `senses` per input."""

    name: str
    inputs: tuple[str, ...]
    function: str
    senses: tuple[str, ...]
    area: float
    intrinsic_ns: float
    ohm_ns: float  # ns per pF
    input_pf: float


_UP, _DOWN, _BOTH = "positive_unate", "negative_unate", "non_unate"
# name, inputs, function, senses, area, intrinsic ns, ns per pF, input load relative to an inverter's
_GATES: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...], float, float, float, float], ...] = (
    ("INV", ("A",), "!A", (_DOWN,), 1.0, 0.006, 4.0, 1.0),
    ("BUF", ("A",), "A", (_UP,), 1.5, 0.014, 3.6, 0.9),
    ("NAND2", ("A", "B"), "!(A & B)", (_DOWN,) * 2, 1.5, 0.009, 4.4, 1.1),
    ("NOR2", ("A", "B"), "!(A | B)", (_DOWN,) * 2, 1.5, 0.011, 5.4, 1.2),
    ("AND2", ("A", "B"), "A & B", (_UP,) * 2, 2.0, 0.018, 3.8, 1.0),
    ("OR2", ("A", "B"), "A | B", (_UP,) * 2, 2.0, 0.020, 3.8, 1.0),
    ("XOR2", ("A", "B"), "A ^ B", (_BOTH,) * 2, 3.0, 0.026, 4.8, 1.8),
    ("XNOR2", ("A", "B"), "!(A ^ B)", (_BOTH,) * 2, 3.0, 0.026, 4.8, 1.8),
    ("AOI21", ("A", "B", "C"), "!((A & B) | C)", (_DOWN,) * 3, 2.0, 0.013, 5.6, 1.2),
    ("OAI21", ("A", "B", "C"), "!((A | B) & C)", (_DOWN,) * 3, 2.0, 0.013, 5.2, 1.2),
    ("MUX2", ("A", "B", "S"), "(A & !S) | (B & S)", (_UP, _UP, _BOTH), 3.5, 0.024, 4.2, 1.1),
)
_FLIP_FLOP = ("DFF", 7.0, 0.045, 4.0)
_DRIVES = (("X1", 1.0, 1.0, 1.0), ("X2", 1.35, 0.5, 1.8))  # name, area, resistance, input load


@cache
def gates() -> dict[str, Cell]:
    """The combinational cells by name, with output Y; the two constants TIE0_X1 and TIE1_X1 have no input."""
    cells = {"TIE0_X1": Cell("TIE0_X1", (), "0", (), 0.5, 0.0, 0.0, 0.0)}
    cells["TIE1_X1"] = Cell("TIE1_X1", (), "1", (), 0.5, 0.0, 0.0, 0.0)
    for name, inputs, function, senses, area, intrinsic, ohm, load in _GATES:
        for drive, more_area, less_ohm, more_load in _DRIVES:
            full = f"{name}_{drive}"
            cells[full] = Cell(
                full,
                inputs,
                function,
                senses,
                area * more_area,
                intrinsic,
                ohm * less_ohm,
                _INPUT_PF * load * more_load,
            )
    return cells


@cache
def areas() -> dict[str, float]:
    """Area of every cell by name, flip-flops (pins CK, D, Q) included."""
    table = {cell.name: cell.area for cell in gates().values()}
    for drive, more_area, _, _ in _DRIVES:
        table[f"{_FLIP_FLOP[0]}_{drive}"] = _FLIP_FLOP[1] * more_area
    return table


@cache
def models() -> str:
    """Verilog models of all cells, without delays."""
    text = []
    for cell in gates().values():
        ports = ", ".join([*(f"input {name}" for name in cell.inputs), "output Y"])
        function = {"0": "1'b0", "1": "1'b1"}.get(cell.function, cell.function.replace("!", "~"))
        # A multiplexer written with `?:` gives a known output for equal inputs and an unknown select, as the gate does.
        function = "S ? B : A" if cell.name.startswith("MUX2") else function
        text.append(f"module {cell.name}({ports});\n  assign Y = {function};\nendmodule\n")
    for name in FLIP_FLOPS:
        text.append(f"module {name}(input CK, input D, output reg Q);\n  always @(posedge CK) Q <= D;\nendmodule\n")
    return "".join(text)


@cache
def liberty() -> str:
    """The Liberty file. Setup and hold have a constraint template: without one OpenSTA drops the checks."""
    head = f"""library (k3rl_chip) {{
  delay_model : table_lookup;
  time_unit : "1ns"; voltage_unit : "1V"; current_unit : "1mA"; pulling_resistance_unit : "1kohm";
  capacitive_load_unit (1, pf); leakage_power_unit : "1nW";
  nom_process : 1; nom_temperature : 25; nom_voltage : 1;
  input_threshold_pct_rise : 50; input_threshold_pct_fall : 50;
  output_threshold_pct_rise : 50; output_threshold_pct_fall : 50;
  slew_lower_threshold_pct_rise : 20; slew_upper_threshold_pct_rise : 80;
  slew_lower_threshold_pct_fall : 20; slew_upper_threshold_pct_fall : 80;
  default_max_transition : {_SLEWS[-1]};
  lu_table_template (delay) {{
    variable_1 : input_net_transition; variable_2 : total_output_net_capacitance;
    index_1 ("{_row(_SLEWS)}"); index_2 ("{_row(_LOADS)}");
  }}
  lu_table_template (constraint) {{
    variable_1 : related_pin_transition; variable_2 : constrained_pin_transition;
    index_1 ("{_row(_SLEWS)}"); index_2 ("{_row(_SLEWS)}");
  }}
"""
    body = [_gate(cell) for cell in gates().values()]
    body += [_flip_flop(drive, *scale) for drive, *scale in _DRIVES]
    return head + "".join(body) + "}\n"


def _row(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.5f}" for value in values)


def _table(kind: str, template: str, rows: Sequence[Sequence[float]]) -> str:
    values = ", ".join(f'"{_row(row)}"' for row in rows)
    return f"        {kind} ({template}) {{ values ({values}); }}\n"


def _delays(intrinsic: float, ohm: float) -> str:
    delay = [[intrinsic + _SLEW_SHARE * slew + ohm * load for load in _LOADS] for slew in _SLEWS]
    slew_out = [[0.7 * intrinsic + 0.05 * slew + 1.2 * ohm * load for load in _LOADS] for slew in _SLEWS]
    return "".join(
        _table(f"cell_{edge}", "delay", delay) + _table(f"{edge}_transition", "delay", slew_out)
        for edge in ("rise", "fall")
    )


def _gate(cell: Cell) -> str:
    pins = "".join(
        f"    pin ({name}) {{ direction : input; capacitance : {cell.input_pf:.5f}; }}\n" for name in cell.inputs
    )
    arcs = "".join(
        f'      timing () {{\n        related_pin : "{name}"; timing_sense : {sense};\n'
        f"{_delays(cell.intrinsic_ns, cell.ohm_ns)}      }}\n"
        for name, sense in zip(cell.inputs, cell.senses, strict=True)
    )
    head = f'direction : output; function : "{cell.function}"; max_capacitance : 0.5;'
    output = f"    pin (Y) {{\n      {head}\n{arcs}    }}\n"
    return f"  cell ({cell.name}) {{\n    area : {cell.area:.3f};\n{pins}{output}  }}\n"


def _flip_flop(drive: str, more_area: float, less_ohm: float, more_load: float) -> str:
    name, area, intrinsic, ohm = _FLIP_FLOP
    checks = "".join(
        f'      timing () {{\n        related_pin : "CK"; timing_type : {kind}_rising;\n'
        + "".join(
            _table(f"{edge}_constraint", "constraint", [[time + 0.1 * slew for slew in _SLEWS] for _ in _SLEWS])
            for edge in ("rise", "fall")
        )
        + "      }\n"
        for kind, time in (("setup", SETUP_NS), ("hold", HOLD_NS))
    )
    return (
        f"  cell ({name}_{drive}) {{\n    area : {area * more_area:.3f};\n"
        '    ff (IQ, IQN) { clocked_on : "CK"; next_state : "D"; }\n'
        f"    pin (CK) {{ direction : input; clock : true; capacitance : {_INPUT_PF:.5f}; }}\n"
        f"    pin (D) {{\n      direction : input; capacitance : {_INPUT_PF * more_load:.5f};\n{checks}    }}\n"
        '    pin (Q) {\n      direction : output; function : "IQ"; max_capacitance : 0.5;\n'
        '      timing () {\n        related_pin : "CK"; timing_type : rising_edge; timing_sense : non_unate;\n'
        f"{_delays(intrinsic, ohm * less_ohm)}      }}\n    }}\n  }}\n"
    )
