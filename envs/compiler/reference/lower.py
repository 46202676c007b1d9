"""Syntax tree + constants -> typed IR, checking types on the way."""

from __future__ import annotations

from typing import Any

from .ir import ARITHMETIC, COMPARE, FLOAT_UNARY, LOGIC, REDUCTIONS, Op, Shape, join, split, truncating_division
from .lexer import SourceError
from .parser import Node

Value = tuple[str, str]  # id, type
_ARITY = {
    **dict.fromkeys(("program_id", "num_programs", "abs", "f32", "i32", "trans", *FLOAT_UNARY), (1, 1)),
    **dict.fromkeys(("arange", "maximum", "minimum", "dot", "expand", *REDUCTIONS), (2, 2)),
    **{"where": (3, 3), "load": (2, 4), "store": (3, 4), "zeros": (1, 2), "full": (2, 3)},
}


class Lowering:
    """One kernel with its constants. `lets` collects (name, type) of every `let` in source order."""

    def __init__(self, kernel: Node, consts: dict[str, int]) -> None:
        _, self.name, self._params, self._body = kernel
        self._consts = consts
        self._scopes: list[dict[str, Value]] = [{}]
        self._variables: set[str] = set()
        self._ops: list[Op] = []
        self._count = 0
        self._line = kernel.line
        self.lets: list[list[str]] = []

    def run(self) -> dict[str, Any]:
        """The kernel in IR. Raises SourceError."""
        for param in self._params:
            self._line = param.line
            name, kind = param
            if name in self._scopes[0]:
                raise self._error("redefined")
            if kind == "const" and name not in self._consts:
                raise self._error("const")
            self._scopes[0][name] = (name, kind)
        params = [[name, kind] for name, kind in self._params if kind != "const"]
        for name, kind in self._params:
            if kind == "const":
                self._scopes[0][name] = self._constant(self._consts[name], "i32")
        self._statements(self._body)
        return {"kernel": self.name, "params": params, "body": self._ops}

    def _error(self, code: str) -> SourceError:
        return SourceError(code, self._line, 0)

    def _emit(self, op: str, inputs: list[str], *types: str, **attributes: Any) -> Value:
        outs = [self._fresh() for _ in types]
        self._ops.append({"op": op, "in": inputs, "out": outs, "type": list(types), **attributes})
        return (outs[0], types[0]) if types else ("", "")

    def _fresh(self) -> str:
        self._count += 1
        return f"%{self._count}"

    def _constant(self, value: float | bool, kind: str) -> Value:
        return self._emit("const", [], kind, value=value)

    def _find(self, name: str) -> Value:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise self._error("undefined")

    def _define(self, name: str, value: Value) -> None:
        if any(name in scope for scope in self._scopes):
            raise self._error("redefined")
        self._scopes[-1][name] = value

    # Statements

    def _statements(self, statements: list[Node]) -> None:
        for statement in statements:
            self._line = statement.line
            getattr(self, f"_do_{statement[0]}")(statement)

    def _do_let(self, statement: Node) -> None:
        _, name, expression = statement
        value = self._value(expression)
        self._define(name, value)
        self._variables.add(name)
        self.lets.append([name, value[1]])

    def _do_set(self, statement: Node) -> None:
        _, name, expression = statement
        _, old = self._find(name)
        if name not in self._variables:
            raise self._error("assign")
        value = self._value(expression)
        if split(value[1])[0] != split(old)[0]:
            raise self._error("type")
        if value[1] != old:
            raise self._error("shape")
        for scope in reversed(self._scopes):
            if name in scope:
                scope[name] = value
                return

    def _do_store(self, statement: Node) -> None:
        pointer, element, rest = self._memory("store", statement[1])
        if split(rest[1][1])[0] != element:
            raise self._error("type")
        if len(rest) > 2 and split(rest[2][1])[0] != "bool":
            raise self._error("type")
        values = self._common(rest)
        self._emit("store", [pointer, *(value for value, _ in values)])

    def _do_for(self, statement: Node) -> None:
        _, name, low, high, step, body = statement
        bounds = [self._scalar(one, "i32") for one in (low, high)]
        bounds.append(self._scalar(step, "i32") if step is not None else self._constant(1, "i32"))
        carried = self._assigned(body)
        start = [self._find(one) for one in carried]
        outer, self._ops = self._ops, []
        index = self._fresh()
        inner = [(self._fresh(), kind) for _, kind in start]
        self._rebind(carried, inner)
        self._scopes.append({})
        self._define(name, (index, "i32"))
        self._variables.discard(name)
        self._statements(body)
        self._scopes.pop()
        block = {
            "args": [index, *(value for value, _ in inner)],
            "ops": self._ops,
            "yield": [self._find(one)[0] for one in carried],
        }
        self._ops = outer
        kinds = [kind for _, kind in start]
        self._emit("for", [value for value, _ in bounds + start], *kinds, blocks=[block])
        self._rebind(carried, list(zip(self._ops[-1]["out"], kinds, strict=True)))

    def _do_if(self, statement: Node) -> None:
        _, condition, then, other = statement
        test, _ = self._scalar(condition, "bool")
        carried = self._assigned(then + other)
        start = [self._find(one) for one in carried]
        outer, blocks = self._ops, []
        for body in (then, other):
            self._ops = []
            self._rebind(carried, start)
            self._scopes.append({})
            self._statements(body)
            self._scopes.pop()
            blocks.append({"args": [], "ops": self._ops, "yield": [self._find(one)[0] for one in carried]})
        self._ops = outer
        kinds = [kind for _, kind in start]
        self._emit("if", [test], *kinds, blocks=blocks)
        self._rebind(carried, list(zip(self._ops[-1]["out"], kinds, strict=True)))

    def _assigned(self, statements: list[Node]) -> list[str]:
        """Visible variables that these statements assign, in order of first assignment."""
        found: dict[str, None] = {}
        for statement in statements:
            if statement[0] == "set" and any(statement[1] in scope for scope in self._scopes):
                found[statement[1]] = None
            elif statement[0] == "for":
                found.update(dict.fromkeys(self._assigned(statement[5])))
            elif statement[0] == "if":
                found.update(dict.fromkeys(self._assigned(statement[2] + statement[3])))
        return [name for name in found if name in self._variables]

    def _rebind(self, names: list[str], values: list[Value]) -> None:
        for name, value in zip(names, values, strict=True):
            for scope in reversed(self._scopes):
                if name in scope:
                    scope[name] = value
                    break

    # Expressions

    def _value(self, node: Node) -> Value:
        """A scalar or tile; a pointer here is a type error."""
        kind = node[0]
        if kind in ("int", "float", "bool"):
            return self._constant(node[1], {"int": "i32", "float": "f32", "bool": "bool"}[kind])
        if kind == "name":
            value = self._find(node[1])
            if value[1].startswith("*"):
                raise self._error("type")
            return value
        if kind == "un":
            return self._unary(node[1], self._value(node[2]))
        if kind == "bin":
            return self._binary(node[1], self._value(node[2]), self._value(node[3]))
        return self._call(node[1], node[2])

    def _scalar(self, node: Node, element: str) -> Value:
        value = self._value(node)
        if split(value[1])[0] != element:
            raise self._error("type")
        if split(value[1])[1]:
            raise self._error("shape")
        return value

    def _unary(self, operator: str, value: Value) -> Value:
        if (split(value[1])[0] == "bool") != (operator == "!"):
            raise self._error("type")
        return self._emit("not" if operator == "!" else "neg", [value[0]], value[1])

    def _binary(self, operator: str, left: Value, right: Value) -> Value:
        elements = split(left[1])[0], split(right[1])[0]
        logical = operator in LOGIC
        if elements[0] != elements[1] or (elements[0] == "bool") != logical or (operator == "%" and "f32" in elements):
            raise self._error("type")
        name = ARITHMETIC.get(operator) or COMPARE.get(operator) or LOGIC[operator]
        return self._pointwise(name, [left, right], "bool" if operator in COMPARE else elements[0])

    def _pointwise(self, op: str, values: list[Value], element: str) -> Value:
        values = self._common(values)
        return self._emit(op, [value for value, _ in values], join(element, split(values[0][1])[1]))

    def _common(self, values: list[Value]) -> list[Value]:
        """The values broadcast to their common shape."""
        shapes = [split(kind)[1] for _, kind in values]
        ranks = {len(shape) for shape in shapes if shape}
        if not ranks:
            return values
        if len(ranks) > 1:
            raise self._error("shape")
        rank = ranks.pop()
        target = tuple(max(shape[axis] for shape in shapes if shape) for axis in range(rank))
        if any(shape and any(a not in (1, b) for a, b in zip(shape, target, strict=True)) for shape in shapes):
            raise self._error("shape")
        return [self._spread(value, target) for value in values]

    def _spread(self, value: Value, target: Shape) -> Value:
        element, shape = split(value[1])
        if shape == target:
            return value
        return self._emit("broadcast" if shape else "splat", [value[0]], join(element, target))

    def _memory(self, name: str, nodes: list[Node]) -> tuple[str, str, list[Value]]:
        """(pointer, its element, the other arguments) of a load or store; the offset is checked to be i32."""
        low, high = _ARITY[name]
        if not low <= len(nodes) <= high:
            raise self._error("arity")
        if nodes[0][0] != "name":
            raise self._error("type")
        pointer, kind = self._find(nodes[0][1])
        if not kind.startswith("*"):
            raise self._error("type")
        rest = [self._value(node) for node in nodes[1:]]
        if split(rest[0][1])[0] != "i32":
            raise self._error("type")
        return pointer, kind[1:], rest

    def _call(self, name: str, nodes: list[Node]) -> Value:
        if name not in _ARITY or name == "store":
            raise self._error("undefined")
        low, high = _ARITY[name]
        if not low <= len(nodes) <= high:
            raise self._error("arity")
        if name in ("program_id", "num_programs"):
            axis = self._axis(nodes[0], 2)
            return self._emit(name, [], "i32", axis=axis)
        if name == "arange":
            lo, hi = self._fixed(nodes[0]), self._fixed(nodes[1])
            if hi <= lo:
                raise self._error("const")
            return self._emit("arange", [], join("i32", (hi - lo,)), lo=lo, hi=hi)
        if name in ("zeros", "full"):
            value = self._value(nodes[0]) if name == "full" else self._constant(0.0, "f32")
            dims = tuple(self._fixed(node) for node in nodes[name == "full" :])
            if any(one < 1 for one in dims):
                raise self._error("const")
            if split(value[1])[1]:
                raise self._error("shape")
            return self._spread(value, dims)
        if name == "load":
            return self._load(nodes)
        if name in (*REDUCTIONS, "expand"):
            return self._along(name, nodes)
        return self._compute(name, [self._value(node) for node in nodes])

    def _load(self, nodes: list[Node]) -> Value:
        pointer, element, rest = self._memory("load", nodes)
        if len(rest) > 1 and split(rest[1][1])[0] != "bool":
            raise self._error("type")
        if len(rest) > 2 and split(rest[2][1])[0] != element:
            raise self._error("type")
        if len(rest) == 2:
            rest.append(self._constant(0 if element == "i32" else 0.0, element))
        values = self._common(rest)
        return self._emit("load", [pointer, *(one for one, _ in values)], join(element, split(values[0][1])[1]))

    def _along(self, name: str, nodes: list[Node]) -> Value:
        value, kind = self._value(nodes[0])
        element, shape = split(kind)
        if name == "expand":
            if len(shape) != 1:
                raise self._error("shape")
            axis = self._axis(nodes[1], 2)
            return self._emit("expand", [value], join(element, (1, *shape) if axis == 0 else (*shape, 1)), axis=axis)
        if element == "bool":
            raise self._error("type")
        if not shape:
            raise self._error("shape")
        axis = self._axis(nodes[1], len(shape))
        return self._emit(name, [value], join(element, shape[:axis] + shape[axis + 1 :]), axis=axis)

    def _compute(self, name: str, values: list[Value]) -> Value:
        elements = [split(kind)[0] for _, kind in values]
        if name in FLOAT_UNARY or name == "abs":
            if elements[0] == "bool" or (elements[0] == "i32" and name != "abs"):
                raise self._error("type")
            return self._emit(name, [values[0][0]], values[0][1])
        if name in ("f32", "i32"):
            if elements[0] == name:
                return values[0]
            return self._emit("cast", [values[0][0]], join(name, split(values[0][1])[1]))
        if name in ("maximum", "minimum"):
            if elements[0] != elements[1] or elements[0] == "bool":
                raise self._error("type")
            return self._pointwise(name, values, elements[0])
        if name == "where":
            if elements[0] != "bool" or elements[1] != elements[2]:
                raise self._error("type")
            return self._pointwise(name, values, elements[1])
        shapes = [split(kind)[1] for _, kind in values]
        if any(element != "f32" for element in elements) and name == "dot":
            raise self._error("type")
        if any(len(shape) != 2 for shape in shapes):
            raise self._error("shape")
        if name == "trans":
            return self._emit("trans", [values[0][0]], join(elements[0], shapes[0][::-1]))
        if shapes[0][1] != shapes[1][0]:
            raise self._error("shape")
        return self._emit("dot", [value for value, _ in values], join("f32", (shapes[0][0], shapes[1][1])))

    def _axis(self, node: Node, limit: int) -> int:
        axis = self._fixed(node)
        if not 0 <= axis < limit:
            raise self._error("const")
        return axis

    def _fixed(self, node: Node) -> int:
        """The value of a constant expression."""
        if node[0] == "int":
            return int(node[1])
        if node[0] == "name" and node[1] in self._consts and any(node[1] == p[0] for p in self._params):
            return self._consts[node[1]]
        if node[0] == "un" and node[1] == "-":
            return -self._fixed(node[2])
        if node[0] == "bin" and node[1] in ARITHMETIC:
            left, right = self._fixed(node[2]), self._fixed(node[3])
            if node[1] in "/%":
                if right == 0:
                    raise self._error("const")
                quotient = truncating_division(left, right)
                return quotient if node[1] == "/" else left - quotient * right
            return {"+": left + right, "-": left - right, "*": left * right}[node[1]]
        raise self._error("const")


def lower(kernel: Node, consts: dict[str, int]) -> tuple[dict[str, Any], list[list[str]]]:
    """(the kernel in IR, [name, type] of every `let`). Raises SourceError with the line of the statement."""
    lowering = Lowering(kernel, consts)
    return lowering.run(), lowering.lets
