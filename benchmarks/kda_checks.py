"""What must hold on a GPU before a kernel is timed: `kda.py` runs these first, and times no family that fails one.

Every check compares with float64 or with the kernel itself (bit-equal repeats, causality, splits), on buffers that were
filled with NaN. The numbers in names are those of the list of known faults in docs/kernels.md.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator

import kda_cases as cases
import torch

from k3rl.kernels.kda import (
    PendingRows,
    autograd,
    decode_kernels,
    flush_pending,
    kda,
    kda_decode,
    kda_reference,
    short_conv,
    short_conv_kernels,
)  # fmt: skip
from k3rl.kernels.kda.decode import kda_decode_reference
from k3rl.kernels.kda.short_conv import short_conv_reference
from k3rl.kernels.norm import gated_norm
from k3rl.kernels.norm.gated_norm import gated_norm_reference

CAPS = {"o": 6e-3, "state": 3e-3, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2, "dgate": 1.5e-2, "dbeta": 1.5e-2}
CAPS |= {"dA_log": 2e-2, "ddt_bias": 2e-2, "dstate": 1e-2}
GRADIENTS = ("dq", "dk", "dv", "dgate", "dbeta", "dA_log", "ddt_bias", "dstate")
D = cases.D


class Failed(Exception):
    """A check did not hold; the message says which number and its cap."""


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every uninitialised floating-point buffer with NaN, so that an element that nothing wrote shows."""
    kept = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def filled(make):
        def call(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return call

    torch.empty, torch.Tensor.new_empty, torch.empty_like = map(filled, kept)
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty, torch.empty_like = kept


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; inf when anything is not finite."""
    got, want = got.detach().double(), want.detach().double()
    value = ((got - want).norm() / want.norm().clamp(min=1e-300)).item()
    return value if value == value else float("inf")


def within(found: dict[str, float], caps: dict[str, float], where: str = "") -> dict[str, float]:
    """`found` unless a cap is passed."""
    over = [f"{name} {value:.1e} (cap {caps[name]:.1e})" for name, value in found.items() if not value <= caps[name]]
    if over:
        raise Failed(f"{where} {', '.join(over)}".strip())
    return found


def require(holds: bool, what: str) -> None:
    """Raise Failed unless it holds."""
    if not holds:
        raise Failed(what)


def packed(lengths: list[int]) -> torch.Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *lengths], device=cases.device()).cumsum(0).int()


def oracle(regime: str) -> dict[str, float]:
    """Packed sequences with an empty one and a tail that belongs to none (14, 15, 16); repeats bit-equal (17)."""
    lengths = [100, 0, 233, 197] if cases.SIZE != "dry" else [17, 0, 20]
    T, H = sum(lengths) + 5, 2 if cases.SIZE != "dry" else 1
    cu = packed(lengths)
    state = 0.3 * torch.randn(len(lengths), H, D, D, device=cases.device())
    args = [x.requires_grad_() for x in [*cases.inputs(T, H, regime), state]]
    lower_bound = cases.bound(regime)
    run = functools.partial(kda, gate_lower_bound=lower_bound, cu_seqlens=cu)
    o, S = run(*args[:7], initial_state=args[7])
    with torch.no_grad():
        again = run(*args[:7], initial_state=args[7])
    require(torch.equal(o, again[0]) and torch.equal(S, again[1]), "the forward is not bit-identical on repeat")
    require(not o[:, sum(lengths) :].any(), "rows past the last sequence are not 0")
    up = [torch.randn_like(o), 0.1 * torch.randn_like(S)]
    torch.autograd.backward([o, S], up)
    wide = [x.detach().double().requires_grad_() for x in args]
    o2, S2 = kda_reference(*wide[:7], lower_bound, wide[7], cu)
    torch.autograd.backward([o2, S2], [x.double() for x in up])
    found = {"o": error(o, o2), "state": error(S, S2)}
    found |= {name: error(x.grad, y.grad) for name, x, y in zip(GRADIENTS, args, wide, strict=True)}
    for x in args[:5]:
        require(not x.grad[:, sum(lengths) :].any(), "a gradient past the last sequence is not 0")
    # One head with few tokens averages less: the small sums of a dry run get room.
    return within(found, CAPS if cases.SIZE != "dry" else {name: 3 * cap for name, cap in CAPS.items()}, regime)


def suffix(regime: str) -> dict[str, float]:
    """1: later tokens change neither earlier outputs nor their gradients, to the bit."""
    T, cut = (200, 77) if cases.SIZE != "dry" else (40, 21)
    results = []
    for change in (0.0, 3.0):
        args = cases.inputs(T, 2 if cases.SIZE != "dry" else 1, regime)
        for x in args[:5]:
            x[:, cut:] += change
        args = [x.requires_grad_() for x in args]
        o = kda(*args, gate_lower_bound=cases.bound(regime))[0]
        grads = torch.autograd.grad(o[:, :cut].float().square().sum(), args[:5])
        results.append([x[:, :cut] for x in (o, *grads)])
    require(all(map(torch.equal, *results)), "a later token changed an earlier output or gradient")
    return {}


def extremes() -> dict[str, float]:
    """3, 5: everything finite at saturated gates, with A_log of -20 to 100 and biases of +-200."""
    T, H = {"full": (4096, 96), "small": (256, 96), "dry": (40, 1)}[cases.SIZE]
    settings = itertools.product((-5.0, None), ((0.0, 0.0), (-20.0, 200.0), (20.0, -200.0), (100.0, 200.0)))
    for lower_bound, (A, bias) in settings:
        args = cases.inputs(T if A == 0.0 else min(T, 256), H, "saturated")
        args[5].fill_(A)
        args[6].fill_(bias)
        args = [x.requires_grad_() for x in args]
        o, S = kda(*args, gate_lower_bound=lower_bound)
        values = (o, S, *torch.autograd.grad([o, S], args, [torch.ones_like(o), torch.ones_like(S)]))
        require(
            all(bool(torch.isfinite(x).all()) for x in values),
            f"not finite at bound {lower_bound}, A_log {A}, bias {bias}",
        )
    return {}


def lengths_repeat() -> dict[str, float]:
    """17: sequences of 1 to 65 tokens, bit-equal over repeats, forward and backward."""
    lengths = [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65] if cases.SIZE != "dry" else [1, 2, 15, 17]
    args = [x.requires_grad_() for x in cases.inputs(sum(lengths), 2 if cases.SIZE != "dry" else 1, "production")]
    first = None
    for _ in range(50 if cases.SIZE == "full" else 2):
        o, S = kda(*args, cu_seqlens=packed(lengths))
        found = (o, S, *torch.autograd.grad(o.float().sum() + S.sum(), args))
        first = first or found
        require(all(map(torch.equal, first, found)), "a repeat differs")
    return {}


def upstreams() -> dict[str, float]:
    """12, 13, 26: gradients that are slices or expanded, and inputs with NaN behind their end."""
    T, H = (130, 2) if cases.SIZE != "dry" else (33, 1)
    args = []
    for x in cases.inputs(T, H, "production"):
        buffer = torch.full((x.numel() + 4096,), float("nan"), dtype=x.dtype, device=x.device)
        buffer[: x.numel()] = x.flatten()
        args.append(buffer[: x.numel()].view(x.shape).requires_grad_())
    o = kda(*args)[0]
    wide = torch.randn(1, T, 3 * H, D, device=o.device).to(o.dtype)
    for up in (wide[:, :, H : 2 * H], torch.ones(1, 1, 1, 1, device=o.device).to(o.dtype).expand_as(o)):
        results = []
        for given in (up, up.contiguous()):
            o = kda(*args)[0]
            results.append(torch.autograd.grad(o, args, given))
        require(all(map(torch.equal, *results)), "a strided gradient gives another result")
        require(all(bool(torch.isfinite(x).all()) for x in results[0]), "NaN from behind an input")
    return {}


@torch.no_grad()
def far_offsets() -> dict[str, float]:
    """11: a sequence whose offsets pass 2^31, against its last part from the state at the cut (H=96)."""
    T, H, last = {"full": (174_784 + 320, 96, 320), "small": (640, 96, 320), "dry": (96, 1, 32)}[cases.SIZE]
    args = cases.inputs(T, H, "slow")
    o, S = kda(*args)
    tail = o[:, T - last :].clone()
    del o
    head = [x[:, : T - last] for x in args[:5]]
    state = kda(*head, *args[5:])[1]
    o2, S2 = kda(*(x[:, T - last :] for x in args[:5]), *args[5:], initial_state=state)
    return within({"o": error(tail, o2), "state": error(S, S2)}, {"o": 2e-3, "state": 1e-4})


def layer(T: int, H: int, regime: str):
    """A KDA layer's streams and weights, and a function that runs tokens first .. last of it from a state."""
    q, k, v, gate, beta, A_log, dt_bias = cases.inputs(T, H, regime)
    z = torch.randn_like(v)
    weights = [torch.randn(H * D, 4, device=q.device) for _ in range(3)]
    norm, lower_bound = torch.rand(D, device=q.device), cases.bound(regime)

    def prefill(first: int, last: int, history, state):
        xs = [x[:, first:last].flatten(2) for x in (q, k, v)]
        mixed, history = short_conv(xs, weights, history=history)
        mixed = [x.view(1, last - first, H, D) for x in mixed]
        part = (gate[:, first:last], beta[:, first:last])
        o, state = kda(*mixed, *part, A_log, dt_bias, initial_state=state, gate_lower_bound=lower_bound)
        return gated_norm(o, z[:, first:last].contiguous(), norm), history, state

    def decode_one(t: int, conv_pool, pool, pending):
        index = torch.zeros(1, dtype=torch.int32, device=q.device)
        rows = [x[:, t] for x in (q, k, v, gate, beta, z)]
        shared = (weights, A_log, dt_bias, norm)
        return kda_decode(
            *rows, *shared, conv_pool, pool, index, index, gate_lower_bound=lower_bound, pending=pending
        )  # fmt: skip

    return prefill, decode_one


@torch.no_grad()
def splits(regime: str) -> dict[str, float]:
    """18: a layer's prefill in pieces, then decode in either form, then prefill again, against one pass."""
    T = 65536 if cases.SIZE == "full" else 80
    pieces = [20_000, 1, 15, 33, 30_000] if cases.SIZE == "full" else [17, 1, 15]
    steps = 40 if cases.SIZE == "full" else 18
    prefill, decode_one = layer(T, 2 if cases.SIZE != "dry" else 1, regime)
    y, _, final = prefill(0, T, None, None)
    worst: dict[str, float] = {"y": 0.0, "state": 0.0}
    for deferred in (False, True):
        parts, at, history, state = [], 0, None, None
        for piece in pieces:
            part, history, state = prefill(at, at + piece, history, state)
            parts.append(part)
            at += piece
        pool, conv_pool = state.contiguous(), history.contiguous()
        slots = torch.zeros(1, dtype=torch.int64, device=pool.device)
        pending = PendingRows.empty(pool) if deferred else None
        if pending is not None:
            pending.begin(slots, slots + at)
        for t in range(at, at + steps):
            parts.append(decode_one(t, conv_pool, pool, pending)[:, None])
        if pending is not None:
            flush_pending(pool, pending, slots)
        parts.append(prefill(at + steps, T, conv_pool, pool)[0])
        state = prefill(at + steps, T, conv_pool, pool)[2]
        worst["y"] = max(worst["y"], error(torch.cat(parts, 1), y))
        worst["state"] = max(worst["state"], error(state, final))
    return within(worst, {"y": 8e-3, "state": 3e-3}, regime)


@torch.no_grad()
def decode_steps(regime: str) -> dict[str, float]:
    """18, 19: both forms, changes between them and all variants under a CUDA graph over many steps against float64:
    strided indices, padding, forks, phases that differ, slots that nothing may touch."""
    B, H, steps = {"full": (24, 12, 40), "small": (24, 12, 2), "dry": (3, 1, 3)}[cases.SIZE]
    slots = 2 * B
    worst: dict[str, float] = {}
    caps: dict[str, float] = {}
    kernels = decode_kernels
    # (with pending rows, deferred from so many programs on, None: by turns, programs that work on a head)
    forms: dict[str, tuple[bool, int | None, int]] = {"read and write": (False, 0, 1), "deferred": (True, 0, 1)}
    forms |= {"pending, written": (True, 1 << 30, 1), "forms that change": (True, None, 1)}
    for parts in kernels.PARTS:
        forms |= {f"split by {parts}": (False, 0, parts), f"forms that change, split by {parts}": (True, None, parts)}
    for name, (waiting, least, parts) in forms.items():
        rows, shared, _, _ = cases.decode_arguments(B, H, regime)
        generator = torch.Generator(cases.device()).manual_seed(7)
        conv_pool = torch.randn(slots, 3, 3 * H * D, device=cases.device(), generator=generator).bfloat16()
        pool = torch.randn(slots, H, D, D, device=cases.device(), generator=generator)
        wide = [conv_pool.clone(), pool.double()]
        before = pool.clone()
        pending = PendingRows.empty(pool) if waiting else None
        if pending is not None:
            pending.begin(torch.arange(slots, device=pool.device), torch.arange(slots, device=pool.device))
        table = torch.full((B, 2), -1, dtype=torch.int32, device=pool.device)
        step = functools.partial(
            kda_decode, *rows, *shared, conv_pool, pool, table[:, 0], table[:, 1],
            gate_lower_bound=cases.bound(regime), pending=pending,
        )  # fmt: skip
        limits = (0, 0, 1 << 30) if least is None else (least,)
        fixed = {"PARTS": (parts,), "SPLIT_PROGRAMS": 1 << 30}
        runs = [_graphed(cases.under(kernels, step, DEFERRED_FROM=n, **fixed)) for n in limits]
        found = 0.0
        for at in range(steps):
            order = torch.randperm(B, generator=torch.Generator().manual_seed(at)).to(table)
            table[:, 0] = order
            table[:, 1] = order
            table[at % B] = -1
            if at % 7 == 3:
                table[(at + 1) % B, 1] = B + at % B  # a fork; the next steps read the old slot
            y = runs[at % len(runs)]()
            wide_rows = [x.double() for x in rows[3:5]]
            args = (*rows[:3], *wide_rows, rows[5], *shared, wide[0], wide[1], table[:, 0], table[:, 1])
            y2 = kda_decode_reference(*args, gate_lower_bound=cases.bound(regime))
            found = max(found, error(y, y2))
            require(not y[at % B].any(), f"{name}: a padded row is not 0")
            require(torch.equal(conv_pool, wide[0]), f"{name}: the convolution's history differs")
        if pending is not None:
            flush_pending(pool, pending, torch.arange(slots, device=pool.device).int())
        untouched = torch.arange(slots, device=pool.device) >= 2 * B - 1
        require(torch.equal(pool[untouched], before[untouched]), f"{name}: wrote a slot that no row named")
        worst |= {f"{name}: y": found, f"{name}: state": error(pool, wide[1])}
        # A sigmoid that differs in its last bit turns a rounding of the convolution to bf16 the other way.
        caps |= {f"{name}: y": 6e-3, f"{name}: state": 1e-3}
    return within(worst, caps, regime)


def _graphed(step):
    """`step` as a captured graph that returns its output; itself in a dry run. Capturing runs no step."""
    if cases.SIZE == "dry":
        return step
    step()  # compiles; every row is padding
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()

    def run():
        graph.replay()
        return y

    return run


def convolution() -> dict[str, float]:
    """26, 28, 29, 30: short and empty sequences, histories, strided gradients; every variant."""
    worst: dict[str, float] = {"y": 0.0, "gradient": 0.0}
    full = cases.SIZE != "dry"
    settings = [{}, *cases.CONV_BACKWARD.values()] if full else [{"strip": 8}]
    for backward in settings:
        for T, lengths in ((5, None), (1, None), (530, [1, 0, 2, 500, 20]) if full else (20, [1, 0, 2, 12])):
            n = 2 if lengths is None else len(lengths)
            B, C = (2 if lengths is None else 1), 1024 if full else 128
            new = functools.partial(torch.randn, device=cases.device())
            xs = [new(B, T, C).bfloat16().requires_grad_() for _ in range(3)]
            ws = [new(C, 4).requires_grad_() for _ in range(3)]
            history = new(n, 3, 3 * C).bfloat16()
            cu = None if lengths is None else packed(lengths)
            with cases.setting(short_conv_kernels, BACKWARD=backward):
                ys, last = short_conv(xs, ws, history=history, cu_seqlens=cu)
                up = [new(B, 2 * T, C).bfloat16()[:, ::2] for _ in ys]
                got = torch.autograd.grad(ys, [*xs, *ws], up)
            wide = [x.detach().double().requires_grad_() for x in [*xs, *ws]]
            ys2, last2 = short_conv_reference(wide[:3], wide[3:], history=history.double(), cu_seqlens=cu)
            want = torch.autograd.grad(ys2, wide, [x.double() for x in up])
            require(torch.equal(last, last2.to(last.dtype)), "the new history differs")
            worst["y"] = max(worst["y"], *map(error, ys, ys2))
            worst["gradient"] = max(worst["gradient"], *map(error, got, want))
    return within(worst, {"y": 3e-3, "gradient": 3e-3})


def norms() -> dict[str, float]:
    """26, 27: the gated norm with an expanded gradient and a gate of 0."""
    worst: dict[str, float] = {"y": 0.0, "gradient": 0.0}
    for rows in (1, 21, 4001) if cases.SIZE != "dry" else (1, 21):
        new = functools.partial(torch.randn, device=cases.device())
        args = [new(rows, 3, D).bfloat16(), new(rows, 3, D).bfloat16(), new(D)]
        args[1][0] = 0
        args = [x.requires_grad_() for x in args]
        y = gated_norm(*args)
        got = torch.autograd.grad(y.sum(), args)
        wide = [x.detach().double().requires_grad_() for x in args]
        y2 = gated_norm_reference(*wide)
        worst["y"] = max(worst["y"], error(y, y2))
        worst["gradient"] = max(worst["gradient"], *map(error, got, torch.autograd.grad(y2.sum(), wide)))
    return within(worst, {"y": 3e-3, "gradient": 4e-3})


@torch.no_grad()
def recompilation() -> dict[str, float]:
    """21, 45: fifty packings compile nothing new."""
    if cases.SIZE == "dry":
        return {}
    from k3rl.kernels.kda import forward_kernels

    watched = [forward_kernels.chunk_table_kernel, forward_kernels.prepare_kernel, forward_kernels.scan_kernel]
    watched += [forward_kernels.zero_tail_kernel]
    counts = []
    for seed in range(51):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 200, (12,), generator=generator).tolist()
        kda(*cases.inputs(sum(lengths) + seed, 2, "production"), cu_seqlens=packed(lengths))
        counts.append(sum(len(kernel.device_caches[0][0]) for kernel in watched))
    require(counts[0] == counts[-1], f"compiled variants grew from {counts[0]} to {counts[-1]}")
    return {"variants": counts[-1]}


def segments(regime: str) -> dict[str, float]:
    """A scan cut into segments (few heads) against the float64 reference."""
    T, H = (4096, 2) if cases.SIZE != "dry" else (70, 1)
    args = cases.inputs(T, H, regime)
    o2, S2 = kda_reference(*(x.double() for x in args), cases.bound(regime))
    with torch.no_grad(), cases.setting(autograd, SEGMENT_LEAST=32 if cases.SIZE != "dry" else 1):
        o, S = kda(*args, gate_lower_bound=cases.bound(regime))
    return within({"o": error(o, o2), "state": error(S, S2)}, CAPS)


def checks() -> Iterator[tuple[str, str, Callable[[], dict[str, float]]]]:
    """(family, name, check); the cheap and telling ones first."""
    for regime in (*cases.REGIMES, *cases.UNBOUNDED):
        yield "kda", f"float64, {regime}", functools.partial(oracle, regime)
    for regime in ("production", "slow", "saturated", *cases.UNBOUNDED):
        yield "kda_decode", f"decode steps, {regime}", functools.partial(decode_steps, regime)
    yield "short_conv", "convolution", convolution
    yield "gated_norm", "norm", norms
    for regime in ("production", "unbounded, mixed"):
        yield "kda", f"later tokens, {regime}", functools.partial(suffix, regime)
    for regime in ("slow", "unbounded"):
        yield "kda", f"segments, {regime}", functools.partial(segments, regime)
    yield "kda", "strided gradients, NaN tails", upstreams
    yield "kda", "lengths, repeats", lengths_repeat
    for regime in ("production", "slow", "unbounded"):
        yield "layer", f"splits of one pass, {regime}", functools.partial(splits, regime)
    yield "kda", "extreme gates", extremes
    yield "kda", "recompilation", recompilation
    yield "kda", "offsets past 2^31", far_offsets


def run(check: Callable[[], dict[str, float]], poison: bool = True) -> tuple[dict[str, float], str | None]:
    """(what was found, None) or ({}, why it failed)."""
    torch.manual_seed(0)
    try:
        with poisoned() if poison else contextlib.nullcontext():
            return check(), None
    except Failed as problem:
        return {}, str(problem)
    except Exception as problem:  # one check that cannot run must not take the figures of the others with it
        return {}, f"{type(problem).__name__}: {problem}"[:500]
    finally:
        gc.collect()
        if cases.SIZE != "dry":
            torch.cuda.empty_cache()
