"""What an operator of the ladder is: tensors, sizes, contents, its meaning in float64, its floor of instructions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

Dims: TypeAlias = Mapping[str, int]
Arrays: TypeAlias = dict[str, np.ndarray]

LANES = 8  # float32 lanes of the widest instruction that the compiler flags allow
VECTOR_BYTES = 32
EXP_OPS = 4  # fewest vector instructions in which an exponential of 8 lanes was counted as possible
STORAGE = {"f32": np.float32, "bf16": np.uint16, "u8": np.uint8, "i32": np.int32}
C_TYPES = {"f32": "float", "bf16": "uint16_t", "u8": "uint8_t", "i32": "int32_t"}
STIR = 65_521  # length of the noise that `stirred` repeats; a prime, so rows get different parts of it
_ROOM = Path(__file__).resolve().parents[1]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Float32 or float64 values as bfloat16 bits (uint16), rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float64 values."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def value_of(array: np.ndarray, dtype: str) -> np.ndarray:
    """What stored numbers mean: float64 for f32 and bf16, int64 for integers."""
    if dtype == "bf16":
        return from_bf16(array)
    return array.astype(np.float64 if dtype == "f32" else np.int64)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: dtype f32, bf16, u8 or i32; shape of dimension names, `X/n`, `X+n` or numbers."""

    name: str
    dtype: str
    shape: tuple[str, ...]

    def sizes(self, dims: Dims) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(_size(part, dims) for part in self.shape)

    def bytes(self, dims: Dims) -> int:
        """How much it takes."""
        return int(np.prod(self.sizes(dims))) * np.dtype(STORAGE[self.dtype]).itemsize


def _size(part: str, dims: Dims) -> int:
    for mark, combine in (("/", int.__floordiv__), ("+", int.__add__)):
        if mark in part:
            name, _, number = part.partition(mark)
            return combine(dims[name], int(number))
    return int(part) if part.isdigit() else dims[part]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values that a dimension takes in training, in held-out tasks, and in small shapes that only test rightness."""

    train: tuple[int, ...]
    heldout: tuple[int, ...]
    small: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed root-mean-square and largest error of a row, both relative to that row's root mean square.

    The scale of a row is at least 1 % of that of the whole output, so that rows near zero do not decide. rounding: what
    storing an element costs at most, in units in the last place of a bfloat16 at the exact value; it is taken off each
    error first, so an exactly computed output is right whatever its size and the number of its elements.
    """

    rms: float
    largest: float
    rounding: float = 0.0


# float32 with fused and reordered sums is near 1e-6 of a row; bfloat16 arithmetic is near 4e-3 and is refused.
FLOAT32 = Tolerance(2e-5, 4e-4)
# Beyond rounding the result, float32 arithmetic errs by 1e-7 of a row, one quantity in bfloat16 on the way by 3e-4.
BFLOAT16 = Tolerance(1e-4, 2e-3, rounding=0.5)


@dataclass(frozen=True)
class Operator:
    """One rung. contents: (generator, dims) -> inputs as stored. meaning: (dims, inputs in float64) -> outputs.

    arithmetic: dims -> elementary operations on single elements that no way of computing it avoids, fused
    multiply-adds counted once. row_axis: the axis along which rows do not know of each other, or empty. gpu: sizes
    for a GPU, where an expert for it is there.
    """

    family: str
    level: int
    title: str
    text: str
    axes: Mapping[str, Axis]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    contents: Callable[[np.random.Generator, Dims], Arrays]
    meaning: Callable[[Dims, Arrays], Arrays]
    arithmetic: Callable[[Dims], float]
    tolerance: Tolerance = FLOAT32
    row_axis: str = ""
    gpu: Mapping[str, Axis] | None = None

    def draw(self, rng: random.Random, kind: str, *, gpu: bool = False) -> dict[str, int]:
        """A shape: one value for each axis of `kind`, "train", "heldout" or "small"."""
        axes = self.gpu if gpu and self.gpu else self.axes
        return {name: rng.choice(getattr(axis, kind)) for name, axis in axes.items()}

    def inputs_for(self, dims: Dims, seed: Sequence[int]) -> Arrays:
        """Fresh contents, as stored. Equal seeds give equal contents."""
        made = self.contents(np.random.default_rng(list(seed)), dims)
        return {one.name: np.ascontiguousarray(made[one.name], STORAGE[one.dtype]) for one in self.inputs}

    def wanted(self, dims: Dims, inputs: Arrays) -> Arrays:
        """The right outputs in float64 for inputs as stored."""
        exact = {one.name: value_of(inputs[one.name], one.dtype) for one in self.inputs}
        return self.meaning(dims, exact)

    def floor(self, dims: Dims) -> float:
        """A lower bound on executed instructions: every input read or every operation done, then every output written.

        An arithmetic instruction can read one vector from memory as it goes, so reads and operations overlap.
        """
        read = sum(one.bytes(dims) for one in self.inputs) / VECTOR_BYTES
        written = sum(one.bytes(dims) for one in self.outputs) / VECTOR_BYTES
        return max(read, self.arithmetic(dims) / LANES) + written

    def rolled(self, arrays: Arrays, shift: int) -> Arrays:
        """Inputs or outputs by name, rolled by `shift` along the row axis where they have it."""
        shapes = {one.name: one.shape for one in (*self.inputs, *self.outputs)}
        return {
            name: np.roll(array, shift, shapes[name].index(self.row_axis)) if self.row_axis in shapes[name] else array
            for name, array in arrays.items()
        }

    def stirred(self, inputs: Arrays, seed: int) -> Arrays:
        """Inputs with other low bits in every number: no row is one that was seen before, exponents stay.

        A result for the inputs as they were is wrong by far more than the tolerance.
        """
        found = dict(inputs)
        rng = np.random.default_rng(seed)
        for one in self.inputs:
            bits, low, count = (np.uint16, 0, 3) if one.dtype == "bf16" else (np.uint32, 12, 8)
            if one.dtype in ("bf16", "f32"):
                noise = (rng.integers(0, 2**count, STIR, dtype=bits) << bits(low)).astype(bits)
                own = inputs[one.name].reshape(-1).view(bits)
                mixed = own ^ np.resize(noise, own.size)
                found[one.name] = mixed.view(STORAGE[one.dtype]).reshape(inputs[one.name].shape)
        return found

    def some(self, arrays: Arrays, rows: Sequence[int]) -> Arrays:
        """These rows along the row axis of inputs or outputs by name; tensors without it whole."""
        shapes = {one.name: one.shape for one in (*self.inputs, *self.outputs)}
        return {
            name: array.take(rows, shapes[name].index(self.row_axis)) if self.row_axis in shapes[name] else array
            for name, array in arrays.items()
        }

    def traffic(self, dims: Dims) -> int:
        """Bytes that must cross memory: every input and every output once."""
        return sum(one.bytes(dims) for one in (*self.inputs, *self.outputs))

    @property
    def expert(self) -> str:
        """The expert's C."""
        return (_ROOM / "experts" / f"{self.family}.c").read_text(encoding="utf-8")

    @property
    def gpu_expert(self) -> str:
        """The expert for a GPU, in Triton."""
        return (_ROOM / "sandboxed" / f"{self.family}_expert.py").read_text(encoding="utf-8")

    @property
    def task_file(self) -> str:
        """The task in the common shape: `Model`, `get_inputs`, `get_init_inputs` in torch."""
        return (_ROOM / "sandboxed" / f"{self.family}.py").read_text(encoding="utf-8")


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers whose rows have different sizes, so that no row can be left out."""
    scale = rng.choice([0.25, 1.0, 3.0], size=(*shape[:-1], 1))
    return rng.standard_normal(shape) * scale


def near_one(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Weights of a norm."""
    return 1.0 + 0.2 * rng.standard_normal(shape)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))
