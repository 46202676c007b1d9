"""IR -> cheaper IR: folding, algebra, computing before spreading, common subexpressions, hoisting, dead code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ir import (
    ELEMENTWISE,
    Op,
    Shape,
    has_store,
    join,
    reads,
    size,
    split,
    stored_pointers,
    truncating_division,
    types_of,
    wrap,
)

_INTEGER: dict[str, Callable[[int, int], Any]] = {
    "add": lambda a, b: wrap(a + b),
    "sub": lambda a, b: wrap(a - b),
    "mul": lambda a, b: wrap(a * b),
    "maximum": max,
    "minimum": min,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


class Optimizer:
    """Rebuilds a kernel once. Runs of `optimize` reach a fixed point quickly, so it is called twice."""

    def __init__(self, kernel: dict[str, Any]) -> None:
        self._kernel = kernel
        self.types = types_of(kernel)
        self._stored = stored_pointers(kernel["body"])
        self._map: dict[str, str] = {}
        self._made: dict[str, Op] = {}  # value -> the operation that makes it
        self._depth: dict[str, int] = {name: 0 for name, _ in kernel["params"]}  # value -> loop nest that defines it
        self._tables: list[dict[Any, list[str]]] = [{}]
        self._lists: list[list[Op]] = [[]]  # operations of the open blocks, outermost first
        self._hoist_to: list[int] = [0]  # per open block, the outermost block its operations may move to
        self._sure: list[bool] = [True]  # per open block, whether it certainly runs at least once
        self._count = 0

    def run(self) -> dict[str, Any]:
        """The rebuilt kernel, dead code gone."""
        self._block(self._kernel["body"])
        return {**self._kernel, "body": drop_dead(self._lists[0], set())}

    def _block(self, ops: list[Op]) -> None:
        for op in ops:
            if op["op"] in ("for", "if"):
                self._nested(op)
                continue
            inputs = [self._map.get(one, one) for one in op["in"]]
            result = self._simplify(op, inputs)
            if result is None:
                result = self._place({**op, "in": inputs})
            for old, new in zip(op["out"], [result] if op["out"] else [], strict=True):
                self._map[old] = new

    def _nested(self, op: Op) -> None:
        inputs = [self._map.get(one, one) for one in op["in"]]
        level = len(self._lists)
        blocks = []
        for block in op["blocks"]:
            self._depth.update(dict.fromkeys(block["args"], level))
            self._lists.append([])
            self._tables.append({})
            self._hoist_to.append(self._hoist_to[-1] if op["op"] == "for" else level)
            self._sure.append(op["op"] == "for" and self._sure[-1] and self._runs(inputs))
            self._block(block["ops"])
            for stack in (self._tables, self._hoist_to, self._sure):
                stack.pop()
            ops = self._lists.pop()
            blocks.append({**block, "ops": ops, "yield": [self._map.get(one, one) for one in block["yield"]]})
        for out in op["out"]:
            self._depth[out] = len(self._lists) - 1
        self._lists[-1].append({**op, "in": inputs, "blocks": blocks})

    def _runs(self, inputs: list[str]) -> bool:
        low, high = self._constant(inputs[0]), self._constant(inputs[1])
        return low is not None and high is not None and low < high

    def _place(self, op: Op) -> str:
        """Put an operation as far out as it may go, or find an equal one. Its value."""
        name = op["op"]
        if name == "store":
            self._lists[-1].append(op)
            return ""
        movable = name != "load" or op["in"][0] not in self._stored
        level = len(self._lists) - 1
        if movable:
            level = max([self._hoist_to[-1], *(self._depth[one] for one in op["in"])])
            if name == "load":
                while level < len(self._lists) - 1 and not all(self._sure[level + 1 :]):
                    level += 1
            key = (name, tuple(op["in"]), op["type"][0], *(repr(op.get(one)) for one in ("value", "axis", "lo", "hi")))
            for table in self._tables:
                if key in table:
                    return table[key][0]
            self._tables[level][key] = op["out"]
        self._lists[level].append(op)
        out: str = op["out"][0]
        self._depth[out], self._made[out], self.types[out] = level, op, op["type"][0]
        return out

    def _new(self, op: str, inputs: list[str], kind: str, **attributes: Any) -> str:
        self._count += 1
        return self._place({"op": op, "in": inputs, "out": [f"%o{self._count}"], "type": [kind], **attributes})

    def _constant(self, value: str) -> Any:
        """The number that a value is in every element, or None."""
        op = self._made.get(value)
        while op is not None and op["op"] in ("splat", "broadcast"):
            op = self._made.get(op["in"][0])
        return op["value"] if op is not None and op["op"] == "const" else None

    def _simplify(self, op: Op, inputs: list[str]) -> str | None:
        """A value that equals the operation's result and costs less, or None."""
        name = op["op"]
        if name in ("splat", "broadcast"):
            made = self._made.get(inputs[0])
            spread = made is not None and made["op"] in ("splat", "broadcast")
            return self._spread(made["in"][0], split(op["type"][0])[1]) if made is not None and spread else None
        if name not in ELEMENTWISE:
            return None
        kind = op["type"][0]
        element, shape = split(kind)
        known = [self._constant(one) for one in inputs]
        folded = self._fold(name, known, inputs)
        if folded is not None:
            return self._spread(self._new("const", [], element, value=folded), shape)
        same = self._identity(name, known, inputs)
        if same is not None:
            return self._spread(same, shape)
        return self._sink(op, inputs) if shape else None

    def _fold(self, name: str, known: list[Any], inputs: list[str]) -> Any:
        if any(one is None for one in known):
            return None
        elements = {split(self.types[one])[0] for one in inputs}
        if elements == {"i32"} and name in _INTEGER:
            return _INTEGER[name](*known)
        if elements == {"i32"} and name == "div" and known[1] != 0:
            return truncating_division(*known)
        if elements == {"i32"} and name == "rem" and known[1] != 0:
            return known[0] - truncating_division(*known) * known[1]
        if elements == {"f32"} and name in ("add", "sub", "mul"):
            return {"add": known[0] + known[1], "sub": known[0] - known[1], "mul": known[0] * known[1]}[name]
        if elements == {"bool"} and name in ("and", "or", "not"):
            return {"and": all(known), "or": any(known), "not": not known[0]}[name]
        if name == "neg":
            return -known[0] if "f32" in elements else wrap(-known[0])
        if name == "cast" and elements == {"i32"} and split(self.types[inputs[0]])[0] == "i32":
            return float(known[0]) if abs(known[0]) < 2**24 else None
        return None

    def _identity(self, name: str, known: list[Any], inputs: list[str]) -> str | None:
        left, right = ([*known, None, None])[:2]
        if name in ("add", "or") and left is not None and not left:
            return inputs[1]
        if name in ("add", "sub", "or") and right is not None and not right:
            return inputs[0]
        if name in ("mul", "and") and left is not None and left == 1:
            return inputs[1]
        if name in ("mul", "div", "and") and right is not None and right == 1:
            return inputs[0]
        if name == "mul" and split(self.types[inputs[0]])[0] == "i32":
            for one, value in zip((left, right), inputs, strict=True):
                if one is not None and one == 0:
                    return value
        if name in ("maximum", "minimum", "and", "or") and inputs[0] == inputs[1]:
            return inputs[0]
        if name == "where":
            if known[0] is not None:
                return inputs[1] if known[0] else inputs[2]
            if inputs[1] == inputs[2]:
                return inputs[1]
        return None

    def _sink(self, op: Op, inputs: list[str]) -> str | None:
        """Compute on the values before they were spread, and spread the result."""
        element, shape = split(op["type"][0])
        sources = []
        for one in inputs:
            made = self._made.get(one)
            sources.append(made["in"][0] if made is not None and made["op"] in ("splat", "broadcast") else one)
        shapes = [split(self.types[one])[1] for one in sources]
        ranked = [one for one in shapes if one]
        target = tuple(max(dims) for dims in zip(*ranked, strict=True)) if ranked else ()
        if size(target) >= size(shape):
            return None
        spread = [self._spread(one, target) for one in sources]
        return self._spread(self._new(op["op"], spread, join(element, target)), shape)

    def _spread(self, value: str, shape: Shape) -> str:
        element, own = split(self.types[value])
        if own == shape:
            return value
        return self._new("broadcast" if own else "splat", [value], join(element, shape))


def drop_dead(ops: list[Op], live: set[str]) -> list[Op]:
    """The operations that something needs; `live` are the values needed after them."""
    kept: list[Op] = []
    needed = set(live)
    for op in reversed(ops):
        if not has_store(op) and not needed & set(op["out"]):
            continue
        if "blocks" in op:
            op = {**op, "blocks": [_shrink(block) for block in op["blocks"]]}
        kept.append(op)
        needed |= set(reads(op))
    return kept[::-1]


def _shrink(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "ops": drop_dead(block["ops"], set(block["yield"]))}


def optimize(kernel: dict[str, Any]) -> dict[str, Any]:
    """An equivalent kernel that executes fewer element operations."""
    for _ in range(2):
        kernel = rename(Optimizer(kernel).run())
    return kernel


def rename(kernel: dict[str, Any]) -> dict[str, Any]:
    """The same kernel with values numbered in order."""
    names: dict[str, str] = {name: name for name, _ in kernel["params"]}

    def name(old: str) -> str:
        return names.setdefault(old, f"%{len(names)}")

    def block_of(ops: list[Op]) -> list[Op]:
        renamed = []
        for op in ops:
            new = {**op, "in": [name(one) for one in op["in"]]}
            if "blocks" in op:
                new["blocks"] = [
                    {
                        "args": [name(one) for one in block["args"]],
                        "ops": block_of(block["ops"]),
                        "yield": [name(one) for one in block["yield"]],
                    }
                    for block in op["blocks"]
                ]
            new["out"] = [name(one) for one in op["out"]]
            renamed.append(new)
        return renamed

    return {**kernel, "body": block_of(kernel["body"])}
