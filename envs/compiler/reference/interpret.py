"""Runs IR on plain lists, one program instance after another. A tile is a flat list in row-major order."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from .ir import Op, Shape, size, split, truncating_division, types_of, wrap

Tile = list[Any]


def round_f32(value: float) -> float:
    """The nearest float32; values beyond its range become infinite."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _divide(left: Any, right: Any) -> Any:
    if isinstance(left, int):
        return truncating_division(left, right)
    return left / right if right else math.copysign(math.inf, left) if left else math.nan


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "rem": lambda a, b: a - truncating_division(a, b) * b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "maximum": max,
    "minimum": min,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda a: -a,
    "not": lambda a: not a,
    "abs": abs,
    "exp": _exp,
    "log": lambda a: math.log(a) if a > 0 else -math.inf,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else math.nan,
    "tanh": math.tanh,
}


class Machine:
    """One kernel with its buffers. `run` executes one program instance."""

    def __init__(self, kernel: dict[str, Any], arguments: dict[str, Any]) -> None:
        self._kernel = kernel
        self._types = types_of(kernel)
        self._arguments = arguments
        self._pid = (0, 0)
        self._grid = (1, 1)
        self._values: dict[str, Tile] = {}

    def run(self, pid: tuple[int, int], grid: tuple[int, int]) -> None:
        """Execute for program `pid` of `grid`, writing the pointer arguments in place."""
        self._pid, self._grid = pid, grid
        self._values = {
            name: self._arguments[name] if kind.startswith("*") else [self._arguments[name]]
            for name, kind in self._kernel["params"]
        }
        self._ops(self._kernel["body"])

    def _ops(self, ops: list[Op]) -> None:
        for op in ops:
            getattr(self, f"_op_{op['op']}", self._pointwise)(op)

    def _in(self, op: Op) -> list[Tile]:
        return [self._values[one] for one in op["in"]]

    def _set(self, op: Op, values: Tile) -> None:
        element = split(op["type"][0])[0]
        if element == "f32":
            values = [round_f32(one) for one in values]
        elif element == "i32":
            values = [wrap(one) for one in values]
        self._values[op["out"][0]] = values

    def _shape(self, op: Op, number: int = 0) -> Shape:
        return split(self._types[op["in"][number]])[1]

    def _pointwise(self, op: Op) -> None:
        inputs = self._in(op)
        if op["op"] in _BINARY:
            self._set(op, list(map(_BINARY[op["op"]], *inputs)))
        else:
            self._set(op, list(map(_UNARY[op["op"]], inputs[0])))

    def _op_where(self, op: Op) -> None:
        self._set(op, [a if c else b for c, a, b in zip(*self._in(op), strict=True)])

    def _op_cast(self, op: Op) -> None:
        to = float if split(op["type"][0])[0] == "f32" else int
        self._set(op, [to(one) for one in self._in(op)[0]])

    def _op_const(self, op: Op) -> None:
        self._set(op, [op["value"]])

    def _op_program_id(self, op: Op) -> None:
        self._set(op, [self._pid[op["axis"]]])

    def _op_num_programs(self, op: Op) -> None:
        self._set(op, [self._grid[op["axis"]]])

    def _op_arange(self, op: Op) -> None:
        self._set(op, list(range(op["lo"], op["hi"])))

    def _op_splat(self, op: Op) -> None:
        self._set(op, self._in(op)[0] * size(split(op["type"][0])[1]))

    def _op_expand(self, op: Op) -> None:
        self._set(op, self._in(op)[0])

    def _op_broadcast(self, op: Op) -> None:
        shape, own, values = split(op["type"][0])[1], self._shape(op), self._in(op)[0]
        if len(shape) == 1:
            self._set(op, values * shape[0])
            return
        rows, cols = own
        self._set(op, [values[(i % rows) * cols + j % cols] for i in range(shape[0]) for j in range(shape[1])])

    def _op_trans(self, op: Op) -> None:
        (rows, cols), values = self._shape(op), self._in(op)[0]
        self._set(op, [values[i * cols + j] for j in range(cols) for i in range(rows)])

    def _reduce(self, op: Op, function: Callable[[Tile], Any]) -> None:
        shape, values = self._shape(op), self._in(op)[0]
        if len(shape) == 1:
            self._set(op, [function(values)])
            return
        rows, cols = shape
        if op["axis"] == 0:
            self._set(op, [function(values[j::cols]) for j in range(cols)])
        else:
            self._set(op, [function(values[i * cols : (i + 1) * cols]) for i in range(rows)])

    def _op_sum(self, op: Op) -> None:
        self._reduce(op, sum)

    def _op_max(self, op: Op) -> None:
        self._reduce(op, max)

    def _op_min(self, op: Op) -> None:
        self._reduce(op, min)

    def _op_dot(self, op: Op) -> None:
        (rows, inner), cols = self._shape(op), self._shape(op, 1)[1]
        left, right = self._in(op)
        columns = [right[j::cols] for j in range(cols)]
        lines = [left[i * inner : (i + 1) * inner] for i in range(rows)]
        self._set(op, [sum(map(float.__mul__, line, column)) for line in lines for column in columns])

    def _op_load(self, op: Op) -> None:
        pointer, offsets, *rest = self._in(op)
        if not rest:
            self._set(op, [pointer[one] for one in offsets])
            return
        mask, other = rest
        self._set(op, [pointer[one] if m else o for one, m, o in zip(offsets, mask, other, strict=True)])

    def _op_store(self, op: Op) -> None:
        pointer, offsets, values, *mask = self._in(op)
        for number, (offset, value) in enumerate(zip(offsets, values, strict=True)):
            if not mask or mask[0][number]:
                pointer[offset] = value

    def _op_for(self, op: Op) -> None:
        (low,), (high,), (step,), *carried = self._in(op)
        block = op["blocks"][0]
        for index in range(low, high, step):
            self._values[block["args"][0]] = [index]
            self._values.update(zip(block["args"][1:], carried, strict=True))
            self._ops(block["ops"])
            carried = [self._values[one] for one in block["yield"]]
        self._values.update(zip(op["out"], carried, strict=True))

    def _op_if(self, op: Op) -> None:
        block = op["blocks"][0 if self._in(op)[0][0] else 1]
        self._ops(block["ops"])
        self._values.update(zip(op["out"], [self._values[one] for one in block["yield"]], strict=True))


def interpret(kernel: dict[str, Any], grid: list[int], arguments: dict[str, Any]) -> None:
    """Run every program instance in row-major order of the grid; pointer arguments change in place."""
    machine = Machine(kernel, arguments)
    for first in range(grid[0]):
        for second in range(grid[1]):
            machine.run((first, second), (grid[0], grid[1]))
