"""Random MiniTriton programs, by family. Values stay small, so that float32 and float64 agree to 1e-4.

A case is plain data: source, instances (a kernel with constants), buffers with how they are filled, launches.
Floats are compared only with constants and only as loaded, so that no rounding decides a branch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Case = dict[str, Any]


def buffer(name: str, dtype: str, size: int, kind: str = "zeros", *, out: bool = False, **init: Any) -> dict[str, Any]:
    """One buffer of a case; `out` marks those that are compared."""
    return {"name": name, "dtype": dtype, "size": size, "init": {"kind": kind, **init}, "out": out}


def single(
    family: str,
    source: str,
    kernel: str,
    consts: dict[str, int],
    buffers: list[dict[str, Any]],
    scalars: Sequence[int | float],
    grid: Sequence[int],
) -> Case:
    """A case of one launch whose arguments are the buffers and then the scalars."""
    args: list[list[Any]] = [["buffer", number] for number in range(len(buffers))]
    args += [["f32" if isinstance(one, float) else "i32", one] for one in scalars]
    return {
        "family": family,
        "source": source,
        "instances": [{"name": kernel, "kernel": kernel, "consts": consts}],
        "buffers": buffers,
        "launches": [{"instance": kernel, "grid": list(grid), "args": args}],
    }


def rename_kernels(case: Case, suffix: str) -> Case:
    """The same case with `_suffix` after every kernel's and instance's name."""
    source = re.sub(r"\bkernel (\w+)\(", rf"kernel \1_{suffix}(", case["source"])
    instances = [
        {**one, "name": f"{one['name']}_{suffix}", "kernel": f"{one['kernel']}_{suffix}"} for one in case["instances"]
    ]
    launches = [{**one, "instance": f"{one['instance']}_{suffix}"} for one in case["launches"]]
    return {**case, "source": source, "instances": instances, "launches": launches}


class Expressions:
    """Random expressions over names in scope, printed with few parentheses."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.floats: list[str] = []
        self.loaded: list[str] = []  # float names whose values are exact
        self.ints: list[str] = []

    def number(self) -> str:
        """A float literal."""
        return self.rng.choice(("0.25", "0.5", "0.75", "1.0", "1.5", "2.0", "0.1", "0.3", "1.25e-1", "5e-1"))

    def real_of(self, depth: int) -> str:
        """An f32 expression of bounded value."""
        if depth == 0 or self.rng.random() < 0.1:
            return self.rng.choice([*self.floats, *self.floats, self.number()])
        a, b = self.real_of(depth - 1), self.real_of(depth - 1)
        forms = [
            f"({a} + {b})",
            f"({a} - {b})",
            f"{a} * tanh({b})",
            f"maximum({a}, {b})",
            f"minimum({a}, {b})",
            f"where({self.truth(1)}, {a}, {b})",
            f"exp(-abs({a}))",
            f"sqrt(abs({a}) + {self.number()})",
            f"log(abs({a}) + 1.0)",
            f"({a}) / (abs({b}) + 1.0)",
            f"-abs({a})",
            f"{self.number()} * ({a})",
        ]
        if self.ints:
            forms.append(f"{self.number()} * f32({self.whole_of(1)} % 7)")
        return self.rng.choice(forms)

    def whole_of(self, depth: int) -> str:
        """An i32 expression of bounded value."""
        if depth == 0 or self.rng.random() < 0.1:
            return self.rng.choice([*self.ints, *self.ints, str(self.rng.randint(1, 9))])
        a, b = self.whole_of(depth - 1), self.whole_of(depth - 1)
        small = self.rng.randint(2, 5)
        return self.rng.choice(
            (
                f"({a} + {b})",
                f"({a} - {b})",
                f"{small} * ({a})",
                f"({a}) / {small}",
                f"({a}) % {small}",
                f"maximum({a}, {b})",
                f"minimum({a}, {b})",
                f"abs({a})",
                f"where({a} < {b}, {b}, {small})",
            )
        )

    def truth(self, depth: int) -> str:
        """A bool expression."""
        if depth and self.rng.random() < 0.35:
            joined = self.rng.choice(("&&", "||"))
            return f"({self.truth(0)} {joined} !({self.truth(0)}))"
        if self.ints and self.rng.random() < 0.6:
            return f"{self.whole_of(1)} {self.rng.choice(('<', '<=', '>', '>=', '==', '!='))} {self.whole_of(1)}"
        return f"{self.rng.choice(self.loaded)} {self.rng.choice('<>')} {self.number()}"


def _names(rng: random.Random, count: int) -> list[str]:
    pool = ["alpha", "beta", "gamma", "delta", "acc", "tmp", "u", "v", "val", "z1", "q_2", "mix", "left", "right"]
    return rng.sample(pool, count)


def elementwise(rng: random.Random, scale: int = 1) -> Case:
    """One expression a tile of a long vector, with a masked tail."""
    block = rng.choice((16, 24, 32, 64)) * scale
    n = rng.randint(2, 4) * block + rng.randint(1, block - 1)
    e = Expressions(rng)
    e.floats, e.loaded, e.ints = ["a", "b"], ["a", "b"], ["c"]
    names = _names(rng, 3)
    lines = [
        "kernel pointwise(x: *f32, y: *f32, k: *i32, out: *f32, n: i32, s: f32, B: const) {",
        "    let pid = program_id(0);",
        "    let offs = pid * B + arange(0, B);",
        "    let ok = offs < n;",
        "    let a = load(x, offs, ok, 0.5);",
        "    let b = load(y, offs, ok);",
        "    let c = load(k, offs, ok, 1);",
    ]
    for name in names:
        lines.append(f"    let {name} = {e.real_of(3)};")
        e.floats.append(name)
    lines += [f"    store(out, offs, {names[-1]} + s * {names[0]}, ok);", "}"]
    buffers = [
        buffer("x", "f32", n, "normal", scale=1.0, seed=rng.getrandbits(30)),
        buffer("y", "f32", n, "uniform", low=-2.0, high=2.0, seed=rng.getrandbits(30)),
        buffer("k", "i32", n, "int", low=-50, high=50, seed=rng.getrandbits(30)),
        buffer("out", "f32", n, out=True),
    ]
    grid = [-(-n // block), 1]
    return single("elementwise", "\n".join(lines), "pointwise", {"B": block}, buffers, [n, 0.5], grid)


def integers(rng: random.Random) -> Case:
    """Integer arithmetic, with division and remainder of negative numbers."""
    block = rng.choice((8, 16, 20, 32))
    n = 3 * block - rng.randint(0, block - 1)
    e = Expressions(rng)
    e.ints, e.floats, e.loaded = ["a", "b"], ["f32(a)"], ["f32(a)"]
    lines = [
        "kernel whole(x: *i32, y: *i32, out: *i32, n: i32, B: const) {",
        "    let offs = program_id(0) * B + arange(0, B);",
        "    let ok = offs < n;",
        "    let a = load(x, offs, ok);",
        "    let b = load(y, offs, ok, 3);",
    ]
    for name in _names(rng, 2):
        lines.append(f"    let {name} = {e.whole_of(3)};")
        e.ints.append(name)
    lines += [f"    store(out, offs, {e.ints[-1]} - {e.ints[-2]}, ok);", "}"]
    buffers = [
        buffer("x", "i32", n, "int", low=-50, high=50, seed=rng.getrandbits(30)),
        buffer("y", "i32", n, "int", low=-9, high=30, seed=rng.getrandbits(30)),
        buffer("out", "i32", n, out=True),
    ]
    return single("integers", "\n".join(lines), "whole", {"B": block}, buffers, [n], [3, 1])


def loops(rng: random.Random) -> Case:
    """A row is read block by block; values are carried around a loop."""
    block, rows = rng.choice((8, 16, 32)), rng.randint(2, 4)
    n = rng.randint(2, 4) * block + rng.randint(0, block - 1)
    e = Expressions(rng)
    e.floats, e.loaded, e.ints = ["a", "s"], ["a"], ["j"]
    decay = rng.choice(("0.5", "0.75", "0.9"))
    lines = [
        "kernel rows(x: *f32, out: *f32, last: *f32, n: i32, s: f32, B: const) {",
        "    let row = program_id(0);",
        "    let acc = zeros(B);",
        "    let best = full(-9.0, B);",
        "    let count = 0;",
        "    for j in 0..n step B {",
        "        let offs = j + arange(0, B);",
        "        let a = load(x, row * n + offs, offs < n, 0.25);",
        f"        let inner = {e.real_of(2)};",
        f"        acc = {decay} * acc + inner * s;",
        f"        best = maximum(best, {e.real_of(1)});",
        "        count = count + 1;",
        "    }",
        "    store(out, row * B + arange(0, B), acc + best);",
        "    store(last, row, f32(count) + sum(acc, 0));",
        "}",
    ]
    buffers = [
        buffer("x", "f32", rows * n, "normal", scale=1.0, seed=rng.getrandbits(30)),
        buffer("out", "f32", rows * block, out=True),
        buffer("last", "f32", rows, out=True),
    ]
    return single("loops", "\n".join(lines), "rows", {"B": block}, buffers, [n, 0.5], [rows, 1])


def branches(rng: random.Random) -> Case:
    """Scalar conditions decide which tile is made."""
    block, programs = rng.choice((8, 16, 24)), rng.randint(4, 6)
    n = programs * block
    e = Expressions(rng)
    e.floats, e.loaded, e.ints = ["a", "b"], ["a", "b"], ["pid"]
    k = rng.randint(2, 3)
    lines = [
        "kernel choose(x: *f32, y: *f32, k: *i32, out: *f32, B: const) {",
        "    let pid = program_id(0);",
        "    let offs = pid * B + arange(0, B);",
        "    let a = load(x, offs);",
        "    let b = load(y, offs);",
        "    let flag = load(k, pid);",
        "    let r = a;",
        f"    if pid % {k} == 0 {{",
        f"        r = {e.real_of(2)} + b;",
        "    } else if flag > 3 && pid != 1 {",
        f"        let half = {e.real_of(2)};",
        "        r = half * 0.5 + a;",
        "    }",
        f"    store(out, offs, r - {e.real_of(1)} * b);",
        "}",
    ]
    buffers = [
        buffer("x", "f32", n, "normal", scale=1.0, seed=rng.getrandbits(30)),
        buffer("y", "f32", n, "uniform", low=-1.0, high=1.0, seed=rng.getrandbits(30)),
        buffer("k", "i32", programs, "int", low=0, high=9, seed=rng.getrandbits(30)),
        buffer("out", "f32", n, out=True),
    ]
    return single("branches", "\n".join(lines), "choose", {"B": block}, buffers, [], [programs, 1])


def tiles(rng: random.Random) -> Case:
    """Two-dimensional tiles: expansion, broadcasting, reductions along both axes."""
    rows, cols = rng.choice((4, 6, 8)), rng.choice((8, 12, 16, 20))
    n, m = cols - rng.randint(0, 3), 2 * rows - rng.randint(0, 2)
    e = Expressions(rng)
    e.floats, e.loaded, e.ints = ["a", "w"], ["a"], ["c"]
    first, second, third = _names(rng, 3)
    how, other = rng.choice(("sum", "max", "min")), rng.choice(("sum", "max"))
    lines = [
        "kernel tile(x: *f32, bias: *f32, out: *f32, stat: *f32, col: *f32, m: i32, n: i32, M: const, N: const) {",
        "    let pid = program_id(0);",
        "    let r = expand(pid * M + arange(0, M), 1);",
        "    let c = expand(arange(0, N), 0);",
        "    let ok = r < m && c < n;",
        "    let a = load(x, r * n + c, ok, 0.0);",
        "    let w = expand(load(bias, arange(0, N), arange(0, N) < n), 0);",
        f"    let {first} = {e.real_of(2)} + a;",
        f"    let {second} = {how}(where(ok, {first}, 0.0), 1);",
        f"    let {third} = ({first} - 0.1 * expand({second}, 1)) * w;",
        f"    store(out, r * n + c, {third}, ok);",
        f"    store(stat, pid * M + arange(0, M), {second}, pid * M + arange(0, M) < m);",
        f"    store(col, pid * N + arange(0, N), {other}(where(ok, {third}, 0.0), 0));",
        "}",
    ]
    buffers = [
        buffer("x", "f32", m * n, "normal", scale=1.0, seed=rng.getrandbits(30)),
        buffer("bias", "f32", n, "uniform", low=-1.0, high=1.0, seed=rng.getrandbits(30)),
        buffer("out", "f32", m * n, out=True),
        buffer("stat", "f32", m, out=True),
        buffer("col", "f32", 2 * cols, out=True),
    ]
    consts = {"M": rows, "N": cols}
    return single("tiles", "\n".join(lines), "tile", consts, buffers, [m, n], [2, 1])


def nested(rng: random.Random) -> Case:
    """Held out: a branch in a loop, two carried values that trade places, a load of what was stored."""
    block, rows = rng.choice((8, 12, 16)), rng.randint(2, 3)
    steps = rng.randint(3, 5)
    e = Expressions(rng)
    e.floats, e.loaded, e.ints = ["a", "s"], ["a"], ["i"]
    lines = [
        "kernel trade(x: *f32, work: *f32, out: *f32, steps: i32, s: f32, B: const) {",
        "    let row = program_id(0);",
        "    let here = row * B + arange(0, B);",
        "    let p = full(s, B);",
        "    let q = zeros(B);",
        "    for i in 0..steps {",
        "        let a = load(x, i * B + arange(0, B));",
        "        let old = p;",
        "        p = q + a * 0.5;",
        "        q = old;",
        f"        if i % 2 == {rng.randint(0, 1)} {{",
        f"            q = q + {e.real_of(2)};",
        "        }",
        "        store(work, here, p - q);",
        "    }",
        "    let back = load(work, row * B + (B - 1 - arange(0, B)));",
        "    store(out, here, back + p * q);",
        "}",
    ]
    buffers = [
        buffer("x", "f32", steps * block, "normal", scale=1.0, seed=rng.getrandbits(30)),
        buffer("work", "f32", rows * block, out=True),
        buffer("out", "f32", rows * block, out=True),
    ]
    return single("nested", "\n".join(lines), "trade", {"B": block}, buffers, [steps, 0.5], [rows, 1])


def redundant(rng: random.Random) -> Case:
    """What an optimizer removes: repeats, dead lets, loop invariants, neutral elements, work on spread values."""
    block, rows = rng.choice((8, 16)), rng.randint(2, 3)
    n = rng.randint(3, 5) * block
    e = Expressions(rng)
    e.floats, e.loaded, e.ints = ["a", "t"], ["a"], ["j"]
    twice = e.real_of(2)
    lines = [
        "kernel wasteful(x: *f32, out: *f32, n: i32, s: f32, B: const) {",
        "    let row = program_id(0);",
        "    let acc = zeros(B);",
        "    let two = 1 + 1;",
        "    for j in 0..n step B {",
        "        let t = full(s, B) * 1.0 + 0.0;",
        "        let never = exp(t) + tanh(t);",
        "        let offs = row * n * 1 + j + arange(0, B);",
        "        let a = load(x, offs);",
        f"        let one = {twice};",
        f"        let same = {twice};",
        "        let slow = exp(-abs(t)) * f32(two);",
        "        acc = acc + one * same * 0.1 + slow;",
        "    }",
        "    store(out, row * B + arange(0, B), acc);",
        "}",
    ]
    buffers = [
        buffer("x", "f32", rows * n, "normal", scale=1.0, seed=rng.getrandbits(30)),
        buffer("out", "f32", rows * block, out=True),
    ]
    return single("redundant", "\n".join(lines), "wasteful", {"B": block}, buffers, [n, 0.5], [rows, 1])


RUNNABLE: dict[str, Callable[[random.Random], Case]] = {
    "elementwise": elementwise,
    "integers": integers,
    "loops": loops,
    "branches": branches,
    "tiles": tiles,
    "nested": nested,
    "redundant": redundant,
}
