"""Kernels that models are made of, with random shapes and random small changes: cases for the milestones on speed.

Families: vectors (long element-wise), rows (softmax, RMS norm), matmul, matmul_transposed, attention (one pass over
keys, running maximum), attnres (mix of layers by a softmax over depth), delta (gated delta-rule state, held out).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from k3rl.envs.compiler.fuzz import Case, Expressions, buffer, elementwise, single

NEVER = "-1000000.0"  # stands for minus infinity, which the language has not


def _seed(rng: random.Random) -> int:
    return rng.getrandbits(30)


def _literal(rng: random.Random, low: int, high: int) -> str:
    """A float literal between low and high thousandths, so that hardly two programs are alike."""
    return f"{rng.randint(low, high) / 1000:.4f}"


def vectors(rng: random.Random) -> Case:
    """`fuzz.elementwise` on tiles eight times as long."""
    case = elementwise(rng, 8)
    return {**case, "family": "vectors"}


def rows(rng: random.Random) -> Case:
    """Softmax or RMS norm of rows, with a random element-wise step before it."""
    m, n = rng.choice((4, 8)), rng.choice((96, 128, 160))
    width = n - rng.randint(0, 9)
    e = Expressions(rng)
    e.floats, e.loaded = ["a", "g"], ["a"]
    soft = [
        f"    let top = max(where(ok, z, {NEVER}), 0);",
        "    let p = where(ok, exp(z - top), 0.0);",
        "    store(out, row * n + c, p / sum(p, 0), ok);",
    ]
    norm = [
        "    let square = sum(where(ok, z * z, 0.0), 0) / f32(n);",
        "    store(out, row * n + c, z / sqrt(square + 0.00001) * g, ok);",
    ]
    lines = [
        "kernel line(x: *f32, gain: *f32, out: *f32, n: i32, N: const) {",
        "    let row = program_id(0);",
        "    let c = arange(0, N);",
        "    let ok = c < n;",
        "    let a = load(x, row * n + c, ok, 0.0);",
        "    let g = load(gain, c, ok, 1.0);",
        f"    let z = a * {_literal(rng, 1000, 2000)} + {e.real_of(1)};",
        *rng.choice((soft, norm)),
        "}",
    ]
    buffers = [
        buffer("x", "f32", m * width, "normal", scale=1.0, seed=_seed(rng)),
        buffer("gain", "f32", width, "uniform", low=0.5, high=1.5, seed=_seed(rng)),
        buffer("out", "f32", m * width, out=True),
    ]
    return single("rows", "\n".join(lines), "line", {"N": n}, buffers, [width], [m, 1])


def _product(rng: random.Random, family: str, *, transposed: bool) -> Case:
    bm, bn, bk = rng.choice((8, 16)), rng.choice((16, 32)), rng.choice((8, 16, 32))
    m, n, k = 2 * bm - rng.randint(0, 3), 2 * bn - rng.randint(0, 5), 2 * bk - rng.randint(0, 3)
    after = rng.choice(("acc", "maximum(acc, 0.0)", "acc * tanh(acc)", "acc / (1.0 + exp(-acc))"))
    if transposed:
        load_b = "trans(load(b, expand(c, 1) * k + expand(d, 0), expand(c, 1) < n && expand(d, 0) < k, 0.0))"
    else:
        load_b = "load(b, expand(d, 1) * n + expand(c, 0), expand(d, 1) < k && expand(c, 0) < n, 0.0)"
    lines = [
        "kernel product(a: *f32, b: *f32, bias: *f32, out: *f32, m: i32, n: i32, k: i32,",
        "               M: const, N: const, K: const) {",
        "    let r = program_id(0) * M + arange(0, M);",
        "    let c = program_id(1) * N + arange(0, N);",
        "    let acc = zeros(M, N);",
        "    for s in 0..k step K {",
        "        let d = s + arange(0, K);",
        "        let left = load(a, expand(r, 1) * k + expand(d, 0), expand(r, 1) < m && expand(d, 0) < k, 0.0);",
        f"        let right = {load_b};",
        "        acc = acc + dot(left, right);",
        "    }",
        f"    acc = {_literal(rng, 500, 1500)} * acc + expand(load(bias, c, c < n, 0.0), 0);",
        f"    store(out, expand(r, 1) * n + expand(c, 0), {after}, expand(r, 1) < m && expand(c, 0) < n);",
        "}",
    ]
    buffers = [
        buffer("a", "f32", m * k, "normal", scale=1.0, seed=_seed(rng)),
        buffer("b", "f32", n * k, "normal", scale=0.2, seed=_seed(rng)),
        buffer("bias", "f32", n, "normal", scale=1.0, seed=_seed(rng)),
        buffer("out", "f32", m * n, out=True),
    ]
    consts = {"M": bm, "N": bn, "K": bk}
    return single(family, "\n".join(lines), "product", consts, buffers, [m, n, k], [-(-m // bm), -(-n // bn)])


def matmul(rng: random.Random) -> Case:
    """A product with a bias and an activation, both matrices row-major."""
    return _product(rng, "matmul", transposed=False)


def matmul_transposed(rng: random.Random) -> Case:
    """Held out: the right matrix is stored transposed."""
    return _product(rng, "matmul_transposed", transposed=True)


def attention(rng: random.Random) -> Case:
    """Causal attention of one head, keys in blocks, softmax with a running maximum."""
    bq, bk, d = 8, rng.choice((8, 16)), rng.choice((8, 16, 24))
    t = 3 * 8 - rng.randint(0, 6)
    scale = _literal(rng, 200, 500)
    lines = [
        "kernel attend(q: *f32, k: *f32, v: *f32, out: *f32, t: i32, Q: const, K: const, D: const) {",
        "    let r = program_id(0) * Q + arange(0, Q);",
        "    let e = expand(arange(0, D), 0);",
        "    let query = load(q, expand(r, 1) * D + e, expand(r, 1) < t, 0.0);",
        f"    let top = full({NEVER}, Q);",
        "    let total = zeros(Q);",
        "    let acc = zeros(Q, D);",
        "    for s in 0..minimum(t, (program_id(0) + 1) * Q) step K {",
        "        let c = s + arange(0, K);",
        "        let key = load(k, expand(c, 1) * D + e, expand(c, 1) < t, 0.0);",
        "        let value = load(v, expand(c, 1) * D + e, expand(c, 1) < t, 0.0);",
        f"        let raw = dot(query, trans(key)) * {scale};",
        f"        let score = where(expand(c, 0) <= expand(r, 1) && expand(c, 0) < t, raw, {NEVER});",
        "        let next = maximum(top, max(score, 1));",
        "        let p = exp(score - expand(next, 1));",
        "        let shrink = exp(top - next);",
        "        total = total * shrink + sum(p, 1);",
        "        acc = acc * expand(shrink, 1) + dot(p, value);",
        "        top = next;",
        "    }",
        "    store(out, expand(r, 1) * D + e, acc / expand(total, 1), expand(r, 1) < t);",
        "}",
    ]
    buffers = [buffer(name, "f32", t * d, "normal", scale=1.0, seed=_seed(rng)) for name in "qkv"]
    buffers.append(buffer("out", "f32", t * d, out=True))
    return single("attention", "\n".join(lines), "attend", {"Q": bq, "K": bk, "D": d}, buffers, [t], [-(-t // bq), 1])


def attnres(rng: random.Random) -> Case:
    """Attention Residuals: a token's layers are mixed by a softmax of RMS-normalized dot products with one weight."""
    tokens, depth, width = rng.randint(6, 10), rng.randint(3, 6), rng.choice((64, 96, 128))
    lines = [
        "kernel mix(layers: *f32, w: *f32, out: *f32, tokens: i32, depth: i32, D: const) {",
        "    let t = program_id(0);",
        "    let c = arange(0, D);",
        "    let weight = load(w, c);",
        f"    let top = {NEVER};",
        "    let total = 0.0;",
        "    let acc = zeros(D);",
        "    for j in 0..depth {",
        "        let h = load(layers, (j * tokens + t) * D + c);",
        "        let norm = sqrt(sum(h * h, 0) / f32(D) + 0.00001);",
        f"        let score = {_literal(rng, 800, 1200)} * sum(h * weight, 0) / norm;",
        "        let next = maximum(top, score);",
        "        let shrink = exp(top - next);",
        "        let p = exp(score - next);",
        "        total = total * shrink + p;",
        "        acc = acc * shrink + p * h;",
        "        top = next;",
        "    }",
        "    store(out, t * D + c, acc / total);",
        "}",
    ]
    buffers = [
        buffer("layers", "f32", depth * tokens * width, "normal", scale=1.0, seed=_seed(rng)),
        buffer("w", "f32", width, "normal", scale=0.2, seed=_seed(rng)),
        buffer("out", "f32", tokens * width, out=True),
    ]
    return single("attnres", "\n".join(lines), "mix", {"D": width}, buffers, [tokens, depth], [tokens, 1])


def delta(rng: random.Random) -> Case:
    """Held out: the gated delta rule of linear attention, a state [K, V] per head carried over tokens."""
    heads, tokens, d = 2, rng.randint(6, 10), rng.choice((8, 16))
    lines = [
        "kernel recur(q: *f32, k: *f32, v: *f32, g: *f32, beta: *f32, out: *f32, tokens: i32, D: const) {",
        "    let h = program_id(0);",
        "    let c = arange(0, D);",
        "    let state = zeros(D, D);",
        "    for t in 0..tokens {",
        "        let at = (h * tokens + t) * D + c;",
        "        let raw = load(k, at);",
        "        let key = raw / sqrt(sum(raw * raw, 0) + 0.000001);",
        f"        let decay = 1.0 / ({_literal(rng, 1001, 1500)} + exp(-load(g, at)));",
        "        state = state * expand(decay, 1);",
        "        let seen = sum(state * expand(key, 1), 0);",
        "        let update = (load(v, at) - seen) * load(beta, h * tokens + t);",
        "        state = state + expand(key, 1) * expand(update, 0);",
        "        store(out, at, sum(state * expand(load(q, at), 1), 0));",
        "    }",
        "}",
    ]
    buffers = [buffer(name, "f32", heads * tokens * d, "normal", scale=1.0, seed=_seed(rng)) for name in "qkvg"]
    buffers.append(buffer("beta", "f32", heads * tokens, "uniform", low=0.1, high=0.9, seed=_seed(rng)))
    buffers.append(buffer("out", "f32", heads * tokens * d, out=True))
    return single("delta", "\n".join(lines), "recur", {"D": d}, buffers, [tokens], [heads, 1])


KERNELS: dict[str, Callable[[random.Random], Case]] = {
    "vectors": vectors,
    "rows": rows,
    "matmul": matmul,
    "matmul_transposed": matmul_transposed,
    "attention": attention,
    "attnres": attnres,
    "delta": delta,
}
