"""The last milestone: a one-layer GPT trained by kernels written in MiniTriton, every product and gradient included.

x = E[token] + P;  y = x + softmax(causal(q k' / sqrt(D))) v Wo with q, k, v = norm(x) Wq, Wk, Wv;
z = y + act(norm(y) W1) W2;  logits = norm(z) Wh;  loss = mean cross entropy;  plain gradient descent.
norm is RMS norm without a gain. One sequence a step. Slope and epsilon are literals that differ by task.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from k3rl.envs.compiler.fuzz import Case, buffer

_SOURCE = """
kernel embed(tokens: *i32, table: *f32, place: *f32, x: *f32, start: i32, T: const, D: const) {
    let t = arange(0, T);
    let c = expand(arange(0, D), 0);
    let token = load(tokens, start + t);
    let row = load(table, expand(token, 1) * D + c);
    store(x, expand(t, 1) * D + c, row + load(place, expand(t, 1) * D + c));
}

kernel norm(x: *f32, out: *f32, scale: *f32, T: const, D: const) {
    let t = arange(0, T);
    let at = expand(t, 1) * D + expand(arange(0, D), 0);
    let a = load(x, at);
    let r = 1.0 / sqrt(sum(a * a, 1) / f32(D) + EPSILON);
    store(out, at, a * expand(r, 1));
    store(scale, t, r);
}

# out = a b + keep * old; a [M,K], b [K,N]
kernel product(a: *f32, b: *f32, old: *f32, out: *f32, keep: f32, n: i32, k: i32, M: const, N: const, K: const) {
    let r = expand(program_id(0) * M + arange(0, M), 1);
    let c = expand(program_id(1) * N + arange(0, N), 0);
    let acc = keep * load(old, r * n + c);
    for s in 0..k step K {
        let d = s + arange(0, K);
        acc = acc + dot(load(a, r * k + expand(d, 0)), load(b, expand(d, 1) * n + c));
    }
    store(out, r * n + c, acc);
}

# out = a b' + keep * old; a [M,K], b [N,K]
kernel product_right(a: *f32, b: *f32, old: *f32, out: *f32, keep: f32, n: i32, k: i32, M: const, N: const, K: const) {
    let r = expand(program_id(0) * M + arange(0, M), 1);
    let c = program_id(1) * N + arange(0, N);
    let acc = keep * load(old, r * n + expand(c, 0));
    for s in 0..k step K {
        let d = expand(s + arange(0, K), 0);
        acc = acc + dot(load(a, r * k + d), trans(load(b, expand(c, 1) * k + d)));
    }
    store(out, r * n + expand(c, 0), acc);
}

# out = a' b; a [K,M], b [K,N]
kernel product_left(a: *f32, b: *f32, out: *f32, m: i32, n: i32, M: const, N: const, K: const) {
    let r = program_id(0) * M + arange(0, M);
    let c = program_id(1) * N + arange(0, N);
    let d = expand(arange(0, K), 1);
    let left = load(a, d * m + expand(r, 0));
    let right = load(b, d * n + expand(c, 0));
    store(out, expand(r, 1) * n + expand(c, 0), dot(trans(left), right));
}

kernel attend(q: *f32, k: *f32, v: *f32, share: *f32, out: *f32, scale: f32, T: const, D: const) {
    let t = arange(0, T);
    let at = expand(t, 1) * D + expand(arange(0, D), 0);
    let seen = expand(t, 0) <= expand(t, 1);
    let raw = dot(load(q, at), trans(load(k, at))) * scale;
    let score = where(seen, raw, -1000000.0);
    let e = exp(score - expand(max(score, 1), 1));
    let p = e / expand(sum(e, 1), 1);
    store(share, expand(t, 1) * T + expand(t, 0), p);
    store(out, at, dot(p, load(v, at)));
}

kernel attend_back(q: *f32, k: *f32, v: *f32, share: *f32, dout: *f32, dq: *f32, dk: *f32, dv: *f32,
                   scale: f32, T: const, D: const) {
    let t = arange(0, T);
    let at = expand(t, 1) * D + expand(arange(0, D), 0);
    let p = load(share, expand(t, 1) * T + expand(t, 0));
    let g = load(dout, at);
    let dp = dot(g, trans(load(v, at)));
    let ds = p * (dp - expand(sum(dp * p, 1), 1)) * scale;
    store(dq, at, dot(ds, load(k, at)));
    store(dk, at, dot(trans(ds), load(q, at)));
    store(dv, at, dot(trans(p), g));
}

kernel silu(h: *f32, out: *f32, n: i32, B: const) {
    let at = program_id(0) * B + arange(0, B);
    let a = load(h, at, at < n);
    store(out, at, a / (1.0 + exp(-SLOPE * a)), at < n);
}

kernel silu_back(h: *f32, dout: *f32, dh: *f32, n: i32, B: const) {
    let at = program_id(0) * B + arange(0, B);
    let a = load(h, at, at < n);
    let s = 1.0 / (1.0 + exp(-SLOPE * a));
    store(dh, at, load(dout, at, at < n) * s * (1.0 + SLOPE * a * (1.0 - s)), at < n);
}

# dx = keep * old + the gradient of norm
kernel norm_back(x: *f32, scale: *f32, dout: *f32, old: *f32, dx: *f32, keep: f32, T: const, D: const) {
    let t = arange(0, T);
    let at = expand(t, 1) * D + expand(arange(0, D), 0);
    let a = load(x, at);
    let r = load(scale, t);
    let g = load(dout, at);
    let along = sum(a * g, 1) * r * r * r / f32(D);
    store(dx, at, keep * load(old, at) + g * expand(r, 1) - a * expand(along, 1));
}

kernel cross_entropy(logits: *f32, tokens: *i32, dlogits: *f32, loss: *f32, start: i32, slot: i32, T: const, V: const) {
    let t = arange(0, T);
    let c = expand(arange(0, V), 0);
    let target = load(tokens, start + t + 1);
    let a = load(logits, expand(t, 1) * V + c);
    let top = max(a, 1);
    let e = exp(a - expand(top, 1));
    let total = sum(e, 1);
    let hit = where(c == expand(target, 1), 1.0, 0.0);
    store(dlogits, expand(t, 1) * V + c, (e / expand(total, 1) - hit) / f32(T));
    store(loss, slot, sum(log(total) + top - sum(a * hit, 1), 0) / f32(T));
}

kernel embed_back(tokens: *i32, dx: *f32, dtable: *f32, start: i32, T: const, D: const) {
    let word = program_id(0);
    let t = arange(0, T);
    let c = arange(0, D);
    let mine = where(load(tokens, start + t) == word, 1.0, 0.0);
    let g = load(dx, expand(t, 1) * D + expand(c, 0));
    store(dtable, word * D + c, sum(g * expand(mine, 1), 0));
}

kernel copy(x: *f32, out: *f32, B: const) {
    store(out, arange(0, B), load(x, arange(0, B)));
}

kernel descend(w: *f32, g: *f32, rate: f32, n: i32, B: const) {
    let at = program_id(0) * B + arange(0, B);
    store(w, at, load(w, at, at < n) - rate * load(g, at, at < n), at < n);
}
"""


@dataclass
class Plan:
    """Buffers, kernel instances and launches of a training run, collected as it is written down."""

    buffers: list[dict[str, Any]] = field(default_factory=list)
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    launches: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, size: int, kind: str = "zeros", dtype: str = "f32", **init: Any) -> None:
        """One buffer."""
        self.buffers.append(buffer(name, dtype, size, kind, out=True, **init))

    def run(self, kernel: str, args: str, scalars: list[int | float], grid: tuple[int, int], **consts: int) -> None:
        """One launch; `args` are buffer names."""
        name = "_".join([kernel, *map(str, consts.values())])
        self.instances[name] = {"name": name, "kernel": kernel, "consts": consts}
        numbers = {one["name"]: number for number, one in enumerate(self.buffers)}
        words: list[list[Any]] = [["buffer", numbers[one]] for one in args.split()]
        words += [["f32" if isinstance(one, float) else "i32", one] for one in scalars]
        self.launches.append({"instance": name, "grid": list(grid), "args": words})


@dataclass(frozen=True)
class Shape:
    """Sizes of the model: tokens, width, hidden width, vocabulary."""

    t: int = 16
    d: int = 32
    f: int = 64
    v: int = 32


def training(rng: random.Random, steps: int = 3) -> Case:
    """A training run as a case; `loss` holds one number a step."""
    slope, epsilon = f"{rng.randint(800, 1700) / 1000:.4f}", f"{rng.randint(10, 99) / 1e6:.7f}"
    shape = Shape(d=rng.choice((16, 32)), f=rng.choice((32, 64)))
    t, d, f, v = shape.t, shape.d, shape.f, shape.v
    plan = Plan()
    stride, first = rng.choice((3, 5, 7)), rng.randrange(v)
    tokens = [(first + stride * number) % v for number in range(steps * t + 1)]
    plan.add("tokens", len(tokens), "given", "i32", values=tokens)
    weights = {"E": (v, d), "P": (t, d), "Wq": (d, d), "Wk": (d, d), "Wv": (d, d), "Wo": (d, d)}
    weights |= {"W1": (d, f), "W2": (f, d), "Wh": (d, v)}
    for name, (rows, cols) in weights.items():
        scale = 0.5 if name in "EP" else rows**-0.5
        plan.add(name, rows * cols, "normal", scale=scale, seed=rng.getrandbits(30))
        plan.add(f"d{name}", rows * cols)
    for name in (
        "x",
        "n1",
        "q",
        "k",
        "v",
        "o",
        "y",
        "n2",
        "z",
        "n3",
        "dn",
        "ds",
        "dx",
        "dy",
        "dz",
        "dq",
        "dk",
        "dv",
        "do",
    ):
        plan.add(name, t * d)
    for name, size in {"h": t * f, "a": t * f, "da": t * f, "dh": t * f, "logits": t * v, "dlogits": t * v}.items():
        plan.add(name, size)
    for name, size in {"share": t * t, "r1": t, "r2": t, "r3": t, "loss": steps, "none": t * max(d, f, v)}.items():
        plan.add(name, size)
    for step in range(steps):
        _forward(plan, shape, step)
        _backward(plan, shape, step)
        for name, (rows, cols) in weights.items():
            plan.run("descend", f"{name} d{name}", [0.25, rows * cols], (-(-rows * cols // 256), 1), B=256)
    return {
        "family": "gpt",
        "source": _SOURCE.replace("SLOPE", slope).replace("EPSILON", epsilon),
        "instances": list(plan.instances.values()),
        "buffers": plan.buffers,
        "launches": plan.launches,
    }


def _mm(plan: Plan, args: str, keep: float, n: int, k: int, kernel: str = "product") -> None:
    plan.run(kernel, args, [keep, n, k], (1, n // 16), M=16, N=16, K=16)


def _forward(plan: Plan, s: Shape, step: int) -> None:
    plan.run("embed", "tokens E P x", [step * s.t], (1, 1), T=s.t, D=s.d)
    plan.run("norm", "x n1 r1", [], (1, 1), T=s.t, D=s.d)
    for name in "qkv":
        _mm(plan, f"n1 W{name} none {name}", 0.0, s.d, s.d)
    plan.run("attend", "q k v share o", [s.d**-0.5], (1, 1), T=s.t, D=s.d)
    _mm(plan, "o Wo x y", 1.0, s.d, s.d)
    plan.run("norm", "y n2 r2", [], (1, 1), T=s.t, D=s.d)
    _mm(plan, "n2 W1 none h", 0.0, s.f, s.d)
    plan.run("silu", "h a", [s.t * s.f], (-(-s.t * s.f // 256), 1), B=256)
    _mm(plan, "a W2 y z", 1.0, s.d, s.f)
    plan.run("norm", "z n3 r3", [], (1, 1), T=s.t, D=s.d)
    _mm(plan, "n3 Wh none logits", 0.0, s.v, s.d)
    plan.run("cross_entropy", "logits tokens dlogits loss", [step * s.t, step], (1, 1), T=s.t, V=s.v)


def _gradient(plan: Plan, args: str, m: int, n: int, t: int) -> None:
    plan.run("product_left", args, [m, n], (m // 16, n // 16), M=16, N=16, K=t)


def _backward(plan: Plan, s: Shape, step: int) -> None:
    _gradient(plan, "n3 dlogits dWh", s.d, s.v, s.t)
    _mm(plan, "dlogits Wh none dn", 0.0, s.d, s.v, "product_right")
    plan.run("norm_back", "z r3 dn none dz", [0.0], (1, 1), T=s.t, D=s.d)
    _gradient(plan, "a dz dW2", s.f, s.d, s.t)
    _mm(plan, "dz W2 none da", 0.0, s.f, s.d, "product_right")
    plan.run("silu_back", "h da dh", [s.t * s.f], (-(-s.t * s.f // 256), 1), B=256)
    _gradient(plan, "n2 dh dW1", s.d, s.f, s.t)
    _mm(plan, "dh W1 none dn", 0.0, s.d, s.f, "product_right")
    plan.run("norm_back", "y r2 dn dz dy", [1.0], (1, 1), T=s.t, D=s.d)
    _gradient(plan, "o dy dWo", s.d, s.d, s.t)
    _mm(plan, "dy Wo none do", 0.0, s.d, s.d, "product_right")
    plan.run("attend_back", "q k v share do dq dk dv", [s.d**-0.5], (1, 1), T=s.t, D=s.d)
    for name in "qkv":
        _gradient(plan, f"n1 d{name} dW{name}", s.d, s.d, s.t)
    _mm(plan, "dq Wq none dn", 0.0, s.d, s.d, "product_right")
    _mm(plan, "dk Wk dn ds", 1.0, s.d, s.d, "product_right")
    _mm(plan, "dv Wv ds dn", 1.0, s.d, s.d, "product_right")
    plan.run("norm_back", "x r1 dn dy dx", [1.0], (1, 1), T=s.t, D=s.d)
    plan.run("embed_back", "tokens dx dE", [step * s.t], (s.v, 1), T=s.t, D=s.d)
    plan.run("copy", "dx dP", [], (1, 1), B=s.t * s.d)
