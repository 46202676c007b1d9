"""Judges IR that a submission made: checks it strictly, runs it in NumPy, and counts element operations.

The IR is data. It is never executed as Python, its size and its work are bounded, and nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from k3rl.envs.compiler.reference.ir import (
    BINARY,
    COMPARE,
    FLOAT_UNARY,
    LOGIC,
    REDUCTIONS,
    SOURCES,
    UNARY,
    VIEWS,
    size,
    split,
)

MAX_OPERATIONS = 20_000  # in the text
MAX_COST = 20_000_000  # element operations of one case
MAX_STEPS = 200_000  # executed operations and iterations of one case
MAX_TILE = 65_536
MAX_ELEMENTS = 2**22  # of all values together
_ELEMENTS = {"f32": np.float64, "i32": np.int64, "bool": np.bool_}
_FUNCTIONS: dict[str, Any] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or},
    **{"maximum": np.maximum, "minimum": np.minimum, "exp": np.exp, "log": np.log, "sqrt": np.sqrt},
    **{"tanh": np.tanh, "abs": np.abs, "neg": np.negative, "not": np.logical_not},
    **{"sum": np.sum, "max": np.max, "min": np.min},
}


class BadIR(ValueError):
    """The IR breaks a rule of the specification, or does too much work."""


def _want(condition: bool, message: str) -> None:
    if not condition:
        raise BadIR(message)


class IRMachine:
    """One kernel of a submission. `cost` counts element operations over all program instances run so far."""

    def __init__(self, kernel: Any, params: Sequence[Sequence[str]]) -> None:
        """`params`: [name, type] as the source declares them, constants left out. Raises BadIR."""
        _want(isinstance(kernel, dict) and isinstance(kernel.get("body"), list), "a kernel is an object with a body")
        _want(kernel.get("params") == [list(one) for one in params], "params differ from the source's")
        self._body = kernel["body"]
        self._params = params
        self._left, self._elements = MAX_OPERATIONS, MAX_ELEMENTS
        self._types: dict[str, str] = {name: kind for name, kind in params}
        self._check(self._body, set(self._types))
        self.cost = 0
        self._steps = 0

    # Rules

    def _define(self, value: Any, kind: Any, visible: set[str]) -> None:
        _want(isinstance(value, str) and value not in self._types, f"value {value!r} is defined twice or is no name")
        _want(isinstance(kind, str), "a type is a string")
        try:
            element, shape = split(kind)
        except ValueError as error:
            raise BadIR(f"no type: {kind!r}") from error
        _want(element in _ELEMENTS and len(shape) <= 2 and all(one > 0 for one in shape), f"no type: {kind!r}")
        _want(size(shape) <= MAX_TILE, f"a tile of {kind} is too large")
        self._elements -= size(shape)
        _want(self._elements >= 0, f"values of more than {MAX_ELEMENTS} elements")
        self._types[value] = kind
        visible.add(value)

    def _check(self, ops: Any, visible: set[str]) -> None:
        ins: Any
        outs: Any
        kinds: Any
        _want(isinstance(ops, list), "operations are a list")
        for op in ops:
            self._left -= 1
            _want(self._left >= 0, f"more than {MAX_OPERATIONS} operations")
            _want(isinstance(op, dict) and isinstance(op.get("op"), str), "an operation is an object with a name")
            ins, outs, kinds = (op.get(key) for key in ("in", "out", "type"))
            _want(all(isinstance(one, list) for one in (ins, outs, kinds)), f"{op['op']}: in, out and type are lists")
            _want(len(outs) == len(kinds), f"{op['op']}: one type per result")
            for one in ins:
                _want(isinstance(one, str) and one in visible, f"{op['op']} reads {one!r}, which is not defined there")
            if op["op"] in ("for", "if"):
                self._check_control(op, visible)
            else:
                self._check_plain(op)
            for value, kind in zip(outs, kinds, strict=True):
                self._define(value, kind, visible)

    def _check_control(self, op: Mapping[str, Any], visible: set[str]) -> None:
        blocks: Any = op.get("blocks")
        ins = op["in"]
        is_for = op["op"] == "for"
        _want(isinstance(blocks, list) and len(blocks) == (1 if is_for else 2), f"{op['op']}: wrong number of blocks")
        wanted = ["i32"] * 3 + op["type"] if is_for else ["bool"]
        _want([self._types[one] for one in ins] == wanted, f"{op['op']}: operands are not of types {wanted}")
        for block in blocks:
            _want(isinstance(block, dict) and isinstance(block.get("args"), list), "a block has args, ops and yield")
            kinds = ["i32", *op["type"]] if is_for else []
            _want(len(block["args"]) == len(kinds), f"{op['op']}: a block needs {len(kinds)} args")
            inside = set(visible)
            for value, kind in zip(block["args"], kinds, strict=True):
                self._define(value, kind, inside)
            self._check(block.get("ops"), inside)
            yields = block.get("yield")
            _want(
                isinstance(yields, list) and all(isinstance(one, str) and one in inside for one in yields), "bad yield"
            )
            _want([self._types[one] for one in yields] == op["type"], f"{op['op']}: yields differ from its types")

    def _check_plain(self, op: Mapping[str, Any]) -> None:
        name, kinds = op["op"], [split(self._types[one]) for one in op["in"]]
        _want(len(op["out"]) == (0 if name == "store" else 1), f"{name}: wrong number of results")
        out = split(op["type"][0]) if op["out"] and isinstance(op["type"][0], str) else ("", ())
        if name in ("load", "store"):
            self._check_memory(name, kinds, out)
            return
        _want(all(not element.startswith("*") for element, _ in kinds), f"{name}: a pointer is no value")
        elements, shapes = [one[0] for one in kinds], [one[1] for one in kinds]
        good = False
        if name in BINARY and len(kinds) == 2:
            logical, compare = name in LOGIC.values(), name in COMPARE.values()
            good = elements[0] == elements[1] and shapes[0] == shapes[1] == out[1]
            good &= (elements[0] == "bool") == logical and out[0] == ("bool" if compare else elements[0])
            good &= not (name == "rem" and elements[0] == "f32")
        elif name in UNARY and len(kinds) == 1:
            wanted = ("f32",) if name in FLOAT_UNARY else ("bool",) if name == "not" else ("f32", "i32")
            good = elements[0] in wanted and kinds[0] == out
        elif name == "where" and len(kinds) == 3:
            good = elements[0] == "bool" and kinds[1] == kinds[2] == out and shapes[0] == out[1]
        elif name == "cast" and len(kinds) == 1:
            good = shapes[0] == out[1] and out[0] in ("f32", "i32")
        elif name in VIEWS and len(kinds) == 1:
            good = elements[0] == out[0] and self._good_view(op, shapes[0], out[1])
        elif name in REDUCTIONS and len(kinds) == 1:
            axis: Any = op.get("axis")
            good = type(axis) is int and 0 <= axis < len(shapes[0]) and elements[0] == out[0] != "bool"
            good = good and out[1] == shapes[0][:axis] + shapes[0][axis + 1 :]
        elif name == "dot" and len(kinds) == 2 and len(shapes[0]) == len(shapes[1]) == 2:
            good = elements == ["f32", "f32"] and shapes[0][1] == shapes[1][0]
            good = good and out == ("f32", (shapes[0][0], shapes[1][1]))
        elif name in SOURCES and not kinds:
            good = self._good_source(op, out)
        _want(good, f"{name}: operands {[self._types[one] for one in op['in']]} do not give {op['type']}")

    def _check_memory(self, name: str, kinds: list[tuple[str, tuple[int, ...]]], out: Any) -> None:
        _want(len(kinds) in ((2, 4) if name == "load" else (3, 4)), f"{name}: wrong number of operands")
        pointer, offset, *rest = kinds
        _want(pointer[0].startswith("*") and offset[0] == "i32", f"{name} takes a pointer and an i32 offset")
        element = pointer[0][1:]
        wanted = ["bool", element] if name == "load" else [element, "bool"]
        _want([one[0] for one in rest] == wanted[: len(rest)], f"{name}: wrong element types")
        _want(all(one[1] == offset[1] for one in rest), f"{name}: shapes differ")
        _want(name == "store" or out == (element, offset[1]), f"{name}: wrong result type")

    def _good_view(self, op: Mapping[str, Any], own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        if op["op"] == "splat":
            return not own and bool(shape)
        if op["op"] == "broadcast":
            return len(own) == len(shape) > 0 and all(a in (1, b) for a, b in zip(own, shape, strict=True))
        if op["op"] == "trans":
            return len(own) == 2 and shape == own[::-1]
        axis = op.get("axis")
        return len(own) == 1 and type(axis) is int and axis in (0, 1) and shape == ((1, *own), (*own, 1))[axis]

    def _good_source(self, op: Mapping[str, Any], out: tuple[str, tuple[int, ...]]) -> bool:
        if op["op"] == "const":
            kinds = {"f32": (float, int), "i32": (int,), "bool": (bool,)}.get(out[0], ())
            value: Any = op.get("value")
            return not out[1] and type(value) in kinds and (out[0] == "bool" or abs(value) < 2**127)
        if op["op"] == "arange":
            lo: Any = op.get("lo")
            hi: Any = op.get("hi")
            return type(lo) is int and type(hi) is int and out == ("i32", (hi - lo,)) and abs(lo) < 2**31
        return out == ("i32", ()) and type(op.get("axis")) is int and op["axis"] in (0, 1)

    # Running

    def run(self, grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
        """All program instances; arrays (float64, int64) change in place. Raises BadIR on bounds and on work."""
        for first in range(grid[0]):
            for second in range(grid[1]):
                values = {
                    name: arguments[name] if kind.startswith("*") else _ELEMENTS[kind](arguments[name])
                    for name, kind in self._params
                }
                self._run(self._body, values, (first, second), (grid[0], grid[1]))

    def _run(self, ops: Sequence[Any], values: dict[str, Any], pid: tuple[int, int], grid: tuple[int, int]) -> None:
        for op in ops:
            name = op["op"]
            ins = [values[one] for one in op["in"]]
            self._spend(self._price(op))
            if name == "for":
                low, high, step, *carried = ins
                _want(step > 0, "a step must be positive")
                block = op["blocks"][0]
                for index in range(int(low), int(high), int(step)):
                    self._spend(1)
                    values.update(zip(block["args"], [np.int64(index), *carried], strict=True))
                    self._run(block["ops"], values, pid, grid)
                    carried = [values[one] for one in block["yield"]]
                values.update(zip(op["out"], carried, strict=True))
            elif name == "if":
                block = op["blocks"][0 if ins[0] else 1]
                self._run(block["ops"], values, pid, grid)
                values.update(zip(op["out"], [values[one] for one in block["yield"]], strict=True))
            elif name == "store":
                mask = ins[3] if len(ins) > 3 else np.ones(np.shape(ins[1]), bool)
                offsets = self._offsets(ins[0], ins[1], mask)
                ins[0][offsets[mask]] = np.asarray(ins[2])[mask]
            else:
                result = self._compute(op, ins, pid, grid)
                element, shape = split(op["type"][0])
                values[op["out"][0]] = np.asarray(result, _ELEMENTS[element]).reshape(shape)

    def _spend(self, cost: int) -> None:
        self.cost += cost
        self._steps += 1
        _want(self.cost <= MAX_COST, f"more than {MAX_COST} element operations")
        _want(self._steps <= MAX_STEPS, f"more than {MAX_STEPS} executed operations")

    def _price(self, op: Mapping[str, Any]) -> int:
        shapes = [split(self._types[one])[1] for one in op["in"]]
        if op["op"] == "dot":
            return shapes[0][0] * shapes[0][1] * shapes[1][1]
        if op["op"] in REDUCTIONS:
            return size(shapes[0])
        if op["op"] == "store":
            return size(shapes[1])
        return 1 if op["op"] in ("for", "if") else size(split(op["type"][0])[1])

    def _offsets(self, array: Any, offsets: Any, mask: Any) -> Any:
        offsets = np.where(mask, offsets, 0)
        _want(bool(np.all((offsets >= 0) & (offsets < array.size))), "memory outside a buffer is touched")
        return offsets

    def _compute(self, op: Mapping[str, Any], ins: list[Any], pid: tuple[int, int], grid: tuple[int, int]) -> Any:
        name = op["op"]
        if name == "load":
            mask = ins[2] if len(ins) > 2 else np.ones(np.shape(ins[1]), bool)
            loaded = ins[0][self._offsets(ins[0], ins[1], mask)]
            return np.where(mask, loaded, ins[3]) if len(ins) > 2 else loaded
        if name in ("program_id", "num_programs"):
            return (pid if name == "program_id" else grid)[op["axis"]]
        if name == "const":
            return np.float32(op["value"]) if op["type"][0] == "f32" else op["value"]
        if name == "arange":
            return np.arange(op["lo"], op["hi"])
        if name in ("splat", "broadcast"):
            return np.broadcast_to(ins[0], split(op["type"][0])[1])
        if name == "expand":
            return np.expand_dims(ins[0], op["axis"])
        if name == "trans":
            return ins[0].T
        if name == "dot":
            return ins[0] @ ins[1]
        if name == "where":
            return np.where(*ins)
        if name == "cast":
            return np.trunc(ins[0]) if op["type"][0].startswith("i32") else ins[0]
        if name in REDUCTIONS:
            return _FUNCTIONS[name](ins[0], axis=op["axis"])
        if name in ("div", "rem") and np.asarray(ins[0]).dtype.kind == "i":
            _want(bool(np.all(ins[1] != 0)), "an integer is divided by zero")
            quotient = np.sign(ins[0]) * np.sign(ins[1]) * (np.abs(ins[0]) // np.abs(ins[1]))
            return quotient if name == "div" else ins[0] - quotient * ins[1]
        return ins[0] / ins[1] if name == "div" else _FUNCTIONS[name](*ins)
