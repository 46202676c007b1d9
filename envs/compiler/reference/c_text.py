"""Small pieces of C text: types, literals, places in arrays, and what every file starts with."""

from __future__ import annotations

from typing import Any

from .ir import Shape

PRELUDE = """#include <stdint.h>
#include <math.h>
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
static inline float mt_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } s;
    s.i = ((int32_t)n + 127) << 23;
    return p * s.f;
}
static inline float mt_tanh(float x) { return 1.0f - 2.0f / (mt_exp(2.0f * x) + 1.0f); }
"""
_START = {"sum": "0", "max": "-3.0e38f", "min": "3.0e38f"}


def c_type(element: str) -> str:
    """The C type of an element; booleans are ints."""
    return "float" if element == "f32" else "int32_t"


def flat(index: tuple[str, ...], shape: Shape) -> str:
    """C text of the position of an element in a row-major array."""
    if len(index) == 1:
        return index[0]
    if index[0] == "0":
        return index[1]
    return f"{index[0]} * {shape[1]} + {index[1]}"


def literal(value: Any, element: str) -> str:
    """C text of a constant."""
    if element == "f32":
        return f"{float(value)!r}f" if value >= 0 else f"({float(value)!r}f)"
    return str(int(value)) if int(value) >= 0 else f"({int(value)})"


def start_of(reduction: str, element: str) -> str:
    """The neutral element of a reduction."""
    if element == "f32" or reduction == "sum":
        return _START[reduction]
    return "(-2147483647 - 1)" if reduction == "max" else "2147483647"
