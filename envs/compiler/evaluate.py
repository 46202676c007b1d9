"""What a program means: NumPy over the syntax tree, f32 computed in float64. The grader's truth; shares no code with
the reference compiler but its parser.

Also counts what no compiler can avoid: distinct elements read and written, and multiply-adds of products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3rl.envs.compiler.reference.parser import parse

VECTOR_LANES = 8  # float32 lanes of the widest instruction that the grader's compiler flags allow
_UNARY: dict[str, Any] = {"exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "abs": np.abs}
_REDUCE: dict[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min}
_COMPARE = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}


class OutOfBounds(RuntimeError):
    """A graded program touches memory outside its buffers: a mistake in the program, not in a submission."""


@dataclass
class Work:
    """Elements that must be read and written, and multiply-adds, summed over program instances."""

    reads: int = 0
    writes: int = 0
    products: int = 0

    def floor(self) -> float:
        """A lower bound on executed instructions: one per full vector of each."""
        return (self.reads + self.writes + self.products) / VECTOR_LANES


@dataclass
class _Instance:
    """One program of a launch: its place in the grid, its variables, what it has read and written."""

    consts: Mapping[str, int]
    pid: tuple[int, int]
    grid: tuple[int, int]
    pointers: Mapping[str, np.ndarray]
    scopes: list[dict[str, Any]]
    read: dict[str, np.ndarray] = field(default_factory=dict)
    written: dict[str, np.ndarray] = field(default_factory=dict)
    products: int = 0


def _truncate(left: Any, right: Any) -> Any:
    return np.sign(left) * np.sign(right) * (np.abs(left) // np.abs(right))


def _is_float(value: Any) -> bool:
    return np.asarray(value).dtype.kind == "f"


class Evaluator:
    """The kernels of one source text."""

    def __init__(self, source: str) -> None:
        self._kernels = {kernel[1]: kernel for kernel in parse(source)}

    def launch(
        self, kernel: str, consts: Mapping[str, int], grid: Sequence[int], arguments: Sequence[Any], work: Work
    ) -> None:
        """Run every program instance; array arguments (float64 or int64) change in place."""
        _, _, params, body = self._kernels[kernel]
        values = iter(arguments)
        bound = {name: consts[name] if kind == "const" else next(values) for name, kind in params}
        pointers = {name: value for name, value in bound.items() if isinstance(value, np.ndarray)}
        scalars = {
            name: np.float64(value) if isinstance(value, float) else np.int64(value)
            for name, value in bound.items()
            if name not in pointers
        }
        for first in range(grid[0]):
            for second in range(grid[1]):
                run = _Instance(consts, (first, second), (grid[0], grid[1]), pointers, [dict(scalars), {}])
                self._block(run, body)
                work.reads += sum(int(mask.sum()) for mask in run.read.values())
                work.writes += sum(int(mask.sum()) for mask in run.written.values())
                work.products += run.products

    def _block(self, run: _Instance, statements: Sequence[Any]) -> None:
        for statement in statements:
            kind = statement[0]
            if kind == "let":
                run.scopes[-1][statement[1]] = self._value(run, statement[2])
            elif kind == "set":
                value = self._value(run, statement[2])
                next(scope for scope in reversed(run.scopes) if statement[1] in scope)[statement[1]] = value
            elif kind == "store":
                self._store(run, statement[1])
            elif kind == "for":
                _, name, low, high, step, body = statement
                stride = 1 if step is None else int(self._value(run, step))
                for index in range(int(self._value(run, low)), int(self._value(run, high)), stride):
                    run.scopes.append({name: np.int64(index)})
                    self._block(run, body)
                    run.scopes.pop()
            else:
                run.scopes.append({})
                self._block(run, statement[2] if self._value(run, statement[1]) else statement[3])
                run.scopes.pop()

    def _value(self, run: _Instance, node: Any) -> Any:
        kind = node[0]
        if kind == "int":
            return np.int64(node[1])
        if kind == "float":
            return np.float64(np.float32(node[1]))
        if kind == "bool":
            return np.bool_(node[1])
        if kind == "name":
            return next(scope[node[1]] for scope in reversed(run.scopes) if node[1] in scope)
        if kind == "un":
            value = self._value(run, node[2])
            return np.logical_not(value) if node[1] == "!" else -value
        if kind == "bin":
            return self._binary(node[1], self._value(run, node[2]), self._value(run, node[3]))
        return self._call(run, node[1], node[2])

    def _binary(self, operator: str, left: Any, right: Any) -> Any:
        if operator in _COMPARE:
            return _COMPARE[operator](left, right)
        if operator in ("&&", "||"):
            return np.logical_and(left, right) if operator == "&&" else np.logical_or(left, right)
        if operator == "/":
            return left / right if _is_float(left) else _truncate(left, right)
        if operator == "%":
            return left - _truncate(left, right) * right
        return {"+": np.add, "-": np.subtract, "*": np.multiply}[operator](left, right)

    def _call(self, run: _Instance, name: str, nodes: Sequence[Any]) -> Any:
        if name == "load":
            return self._load(run, nodes)
        values = [self._value(run, node) for node in nodes]
        if name in _UNARY:
            return _UNARY[name](values[0])
        if name in _REDUCE:
            return _REDUCE[name](values[0], axis=int(values[1]))
        if name == "program_id":
            return np.int64(run.pid[int(values[0])])
        if name == "num_programs":
            return np.int64(run.grid[int(values[0])])
        if name == "arange":
            return np.arange(int(values[0]), int(values[1]), dtype=np.int64)
        if name == "zeros":
            return np.zeros([int(one) for one in values])
        if name == "full":
            return np.full([int(one) for one in values[1:]], values[0])
        if name == "expand":
            return np.expand_dims(values[0], int(values[1]))
        if name == "trans":
            return values[0].T
        if name == "dot":
            run.products += values[0].shape[0] * values[0].shape[1] * values[1].shape[1]
            return values[0] @ values[1]
        if name == "where":
            return np.where(values[0], values[1], values[2])
        if name == "f32":
            return np.asarray(values[0], np.float64)
        if name == "i32":
            return np.trunc(values[0]).astype(np.int64)
        return {"maximum": np.maximum, "minimum": np.minimum}[name](values[0], values[1])

    def _checked(self, array: np.ndarray, offsets: np.ndarray, mask: np.ndarray) -> np.ndarray:
        if np.any(mask & ((offsets < 0) | (offsets >= array.size))):
            raise OutOfBounds(f"offsets {offsets[mask].min()}..{offsets[mask].max()} of a buffer of {array.size}")
        return np.where(mask, offsets, 0)

    def _load(self, run: _Instance, nodes: Sequence[Any]) -> Any:
        name = nodes[0][1]
        array = run.pointers[name]
        offsets, *rest = [self._value(run, node) for node in nodes[1:]]
        mask = rest[0] if rest else np.bool_(True)
        other = rest[1] if len(rest) > 1 else array.dtype.type(0)
        offsets, mask, other = np.broadcast_arrays(offsets, mask, other)
        safe = self._checked(array, offsets, mask)
        seen = run.read.setdefault(name, np.zeros(array.size, bool))
        seen[safe[mask]] = True
        result = np.where(mask, array[safe], other)
        return result if result.shape else result[()]

    def _store(self, run: _Instance, nodes: Sequence[Any]) -> None:
        name = nodes[0][1]
        array = run.pointers[name]
        offsets, value, *rest = [self._value(run, node) for node in nodes[1:]]
        mask = rest[0] if rest else np.bool_(True)
        offsets, value, mask = np.broadcast_arrays(offsets, value, mask)
        safe = self._checked(array, offsets, mask)
        array[safe[mask]] = value[mask]
        run.written.setdefault(name, np.zeros(array.size, bool))[safe[mask]] = True


def initial(buffer: Mapping[str, Any], salt: int) -> np.ndarray:
    """The contents of a buffer, float32 or int32 [size]; `salt` gives other contents of the same kind.

    kinds: normal (scale), uniform (low, high), int (low, high exclusive), zeros, given (values).
    """
    init = buffer["init"]
    size = buffer["size"]
    if init["kind"] == "given":
        return np.asarray(init["values"], np.float32 if buffer["dtype"] == "f32" else np.int32)
    if init["kind"] == "zeros":
        return np.zeros(size, np.float32 if buffer["dtype"] == "f32" else np.int32)
    generator = np.random.default_rng([init["seed"], salt])
    if init["kind"] == "int":
        return generator.integers(init["low"], init["high"], size).astype(np.int32)
    if init["kind"] == "normal":
        return (init["scale"] * generator.standard_normal(size)).astype(np.float32)
    return generator.uniform(init["low"], init["high"], size).astype(np.float32)


def run_case(case: Mapping[str, Any], salt: int) -> tuple[list[np.ndarray], list[np.ndarray], Work]:
    """(initial buffers, final buffers in float64/int64, work) of a case whose launches run in order."""
    start = [initial(buffer, salt) for buffer in case["buffers"]]
    final = [one.astype(np.float64 if one.dtype == np.float32 else np.int64) for one in start]
    instances = {one["name"]: one for one in case["instances"]}
    evaluator, work = Evaluator(case["source"]), Work()
    for launch in case["launches"]:
        instance = instances[launch["instance"]]
        arguments = [final[value] if kind == "buffer" else value for kind, value in launch["args"]]
        scalars = [float(np.float32(value)) if isinstance(value, float) else value for value in arguments]
        evaluator.launch(instance["kernel"], instance["consts"], launch["grid"], scalars, work)
    return start, final, work
