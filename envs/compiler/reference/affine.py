"""What of an address or a mask does not change along a row: written before the row's loop, so that gcc sees `q[j]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ir import Op, Shape

Index = tuple[str, ...]
_ORDER = {"lt": "<", "le": "<="}


class Rows:
    """Symbolic values over the column counter `j`. `scalar`: C text of a stored scalar, or None; the others look up."""

    def __init__(
        self,
        made: Callable[[str], Op | None],
        shape: Callable[[str], Shape],
        scalar: Callable[[str], str | None],
    ) -> None:
        self._made, self._shape, self._scalar = made, shape, scalar

    def affine(self, value: str, index: Index) -> tuple[int, str] | None:
        """(factor of j: 0 or 1, C text of the rest), or None when the value is not of that form."""
        if not self._shape(value):
            text = self._scalar(value)
            return None if text is None else (0, text)
        op = self._made(value)
        if op is None:
            return None
        name = op["op"]
        if name == "arange":
            return (1, str(op["lo"])) if index[0] == "j" else (0, f"({index[0]} + {op['lo']})")
        if name in ("splat", "broadcast", "expand", "trans"):
            return self.affine(op["in"][0], self.inner(op, index))
        if name not in ("add", "sub", "mul"):
            return None
        left, right = (self.affine(one, index) for one in op["in"])
        if left is None or right is None:
            return None
        sign = {"add": "+", "sub": "-", "mul": "*"}[name]
        factor = left[0] + right[0] if name == "add" else left[0] - right[0]
        if (name == "mul" and (left[0] or right[0])) or factor not in (0, 1):
            return None
        return factor, f"({left[1]} {sign} {right[1]})"

    def inner(self, op: Op, index: Index) -> Index:
        """The index into the operand of a change of shape."""
        if op["op"] == "splat":
            return ()
        if op["op"] == "broadcast":
            own: Any = self._shape(op["in"][0])
            return tuple("0" if dim == 1 else one for one, dim in zip(index, own, strict=True))
        return (index[1 - op["axis"]],) if op["op"] == "expand" else index[::-1]

    def mask(self, value: str, index: Index) -> tuple[list[str], list[str]] | None:
        """(conditions of the whole row, upper bounds of j), all of which must hold, or None."""
        op = self._made(value)
        if op is None or not self._shape(value):
            return None
        name = op["op"]
        if name in ("splat", "broadcast", "expand", "trans"):
            return self.mask(op["in"][0], self.inner(op, index))
        if name == "and":
            sides = [self.mask(one, index) for one in op["in"]]
            if sides[0] is None or sides[1] is None:
                return None
            return sides[0][0] + sides[1][0], sides[0][1] + sides[1][1]
        if name not in _ORDER:
            return None
        left, right = (self.affine(one, index) for one in op["in"])
        if left is None or right is None or right[0]:
            return None
        if not left[0]:
            return [f"{left[1]} {_ORDER[name]} {right[1]}"], []
        return [], [f"({right[1]} - {left[1]}{' + 1' if name == 'le' else ''})"]
