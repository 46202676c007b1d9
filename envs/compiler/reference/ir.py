"""The IR: SSA operations as dicts, exactly the JSON of the specification, and helpers over types.

operation: {"op", "in": [value ids], "out": [value ids], "type": [types of out], attributes...}, and "blocks" in
`for` and `if`; block: {"args": [ids], "ops": [operations], "yield": [ids]}.
kernel: {"kernel": name, "params": [[id, type]], "body": [operations]}; constants are operations, not parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

Op = dict[str, Any]
Shape = tuple[int, ...]

ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "div", "%": "rem"}
COMPARE = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
LOGIC = {"&&": "and", "||": "or"}
BINARY = (*ARITHMETIC.values(), *COMPARE.values(), *LOGIC.values(), "maximum", "minimum")
FLOAT_UNARY = ("exp", "log", "sqrt", "tanh")
UNARY = (*FLOAT_UNARY, "abs", "neg", "not")
VIEWS = ("splat", "broadcast", "expand", "trans")
REDUCTIONS = ("sum", "max", "min")
ELEMENTWISE = (*BINARY, *UNARY, "where", "cast")
SOURCES = ("const", "program_id", "num_programs", "arange")


@lru_cache(maxsize=4096)
def split(text: str) -> tuple[str, Shape]:
    """A type as (element or pointer, shape): "f32[8,4]" -> ("f32", (8, 4))."""
    if not text.endswith("]"):
        return text, ()
    element, _, dims = text[:-1].partition("[")
    return element, tuple(int(one) for one in dims.split(","))


def join(element: str, shape: Shape) -> str:
    """The inverse of `split`."""
    return f"{element}[{','.join(map(str, shape))}]" if shape else element


def size(shape: Shape) -> int:
    """Number of elements."""
    total = 1
    for one in shape:
        total *= one
    return total


def walk(ops: list[Op]) -> Iterator[Op]:
    """Every operation, nested ones after the one that holds them."""
    for op in ops:
        yield op
        for block in op.get("blocks", ()):
            yield from walk(block["ops"])


def types_of(kernel: dict[str, Any]) -> dict[str, str]:
    """Value id -> type, for the whole kernel."""
    types = {name: kind for name, kind in kernel["params"]}
    for op in walk(kernel["body"]):
        types.update(zip(op["out"], op["type"], strict=True))
        if op["op"] == "for":
            args = op["blocks"][0]["args"]
            types[args[0]] = "i32"
            types.update(zip(args[1:], op["type"], strict=True))
    return types


def reads(op: Op) -> Iterator[str]:
    """Every value id that an operation reads, inside its blocks too."""
    yield from op["in"]
    for block in op.get("blocks", ()):
        for inner in block["ops"]:
            yield from reads(inner)
        yield from block["yield"]


def has_store(op: Op) -> bool:
    """Whether an operation writes memory, itself or inside."""
    return any(inner["op"] == "store" for inner in walk([op]))


def stored_pointers(ops: list[Op]) -> set[str]:
    """The pointers that some operation writes through."""
    return {op["in"][0] for op in walk(ops) if op["op"] == "store"}


def wrap(value: int) -> int:
    """Two's complement to 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def truncating_division(left: int, right: int) -> int:
    """Quotient rounded towards zero, as C has it; 0 for a zero divisor, whose result is not defined."""
    if right == 0:
        return 0
    quotient = abs(left) // abs(right)
    return wrap(quotient if (left < 0) == (right < 0) else -quotient)
