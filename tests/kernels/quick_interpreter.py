"""Takes repeated work out of Triton's interpreter: what is computed stays the same, about twice as fast.

At each call of a function Triton's interpreter lists all members of `triton.language` to put its own in their place,
and it makes the type of every intermediate value anew. Here the members are put there once, and types are kept.
"""

from __future__ import annotations

import math
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_PLAIN = (int, float, bool, str, core.tensor, core.dtype, type(None))


def quicken() -> None:
    """Changes the interpreter of this process, which must have been started with TRITON_INTERPRET=1."""
    interpreter._patch_lang(_everything)  # type: ignore[arg-type]
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    interpreter._get_np_dtype = _kept_numpy_types(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _unwrapping(core._unwrap_if_constexpr)
    core.tensor.__init__ = _tensor_init
    core.tuple.__eq__ = _tuple_equal
    core.block_type.__init__ = _kept_block_types(core.block_type.__init__)


class _everything:
    """Stands for a kernel that sees both names of the language."""

    __globals__ = {"tl": tl, "core": core}


def _kept_numpy_types(make):
    kept: dict[str, Any] = {}

    def numpy_type(given):
        element = given.element_ty if given.is_block() else given
        name = "pointer" if element.is_ptr() else element.name
        if name not in kept:
            kept[name] = make(given)
        return kept[name]

    return numpy_type


def _unwrapping(unwrap):
    def unwrapped(value):
        if isinstance(value, _PLAIN):
            return value
        return value.value if isinstance(value, core.constexpr) else unwrap(value)

    return unwrapped


_TRUE = core.constexpr(True)
_SHAPES: dict[tuple[int, ...], tuple[core.constexpr, core.tuple]] = {}


def _tensor_init(self, handle, type):
    shape = type.shape if type.is_block() else ()
    if shape not in _SHAPES:
        _SHAPES[shape] = (core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape]))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _SHAPES[shape]


def _tuple_equal(self, other):
    if self is other:
        return _TRUE
    return core.constexpr(self.values == list(other.values if isinstance(other, core.tuple) else other))


def _kept_block_types(make):
    kept: dict[tuple[str, tuple[int, ...]], tuple] = {}

    def init(self, element_ty, shape):
        key = element_ty.name, tuple([size.value if type(size) is core.constexpr else size for size in shape])
        if key not in kept:
            make(self, element_ty, shape)
            kept[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = kept[key]

    return init
