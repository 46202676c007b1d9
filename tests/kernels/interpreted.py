"""Runs one kernel family under Triton's interpreter on the CPU and compares it with the float64 reference.

    TRITON_INTERPRET=1 python tests/kernels/interpreted.py CASE

In a process of its own: the switch must be set before Triton is imported. The interpreter proves algebra, masks, packed
sequences and offsets; not layouts, races or the assembler. Every new buffer is filled with NaN, so that an element that
is read before it is written shows.
"""

from __future__ import annotations

import sys

import hypothesis
import layer
import torch

from k3rl.kernels import limits
from k3rl.kernels.gemm import grouped_skinny, grouped_skinny_kernels, w4_grouped_skinny, w4_grouped_skinny_kernels
from k3rl.kernels.kda import autograd, decode_kernels, decode_split_kernels, short_conv_kernels
from k3rl.kernels.kda import decode as decode_reference
from k3rl.kernels.kda import operator as kda_reference
from k3rl.kernels.kda.short_conv import short_conv_reference
from k3rl.kernels.mla import decode_attention, decode_attention_kernels
from k3rl.kernels.moe import decode_routing, decode_routing_kernels, situ_kernels
from k3rl.kernels.norm import gated_norm_kernels
from k3rl.kernels.norm.gated_norm import gated_norm_reference
from k3rl.kernels.sampling import cut_kernels, draw_kernels
from k3rl.kernels.sampling.cut import Cuts, cut_reference
from k3rl.kernels.sampling.draw import draw_reference
from k3rl.numerics import mx

# Relative Frobenius error of bf16 kernels against float64 on the same inputs, see docs/kernels.md. The caps are for
# K = V = 128: roundings average less over fewer channels, so cases with slow channels take K = 64. dA_log is one number
# per head, so the relative error needs several heads where its sum over tokens cancels.
CAPS = dict(o=6e-3, S=3e-3, q=1e-2, k=1e-2, v=1e-2, gate=1.5e-2, beta=1.5e-2, A_log=2e-2, dt_bias=2e-2, S0=1e-2)
_empty, _new_empty, _empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like


def poison() -> None:
    """Make every uninitialised floating-point buffer NaN."""

    def filled(make):
        def call(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return call

    torch.empty, torch.Tensor.new_empty, torch.empty_like = map(filled, (_empty, _new_empty, _empty_like))


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def require(name: str, got: torch.Tensor, want: torch.Tensor, cap: float) -> None:
    found = ((got.double() - want.double()).norm() / want.double().norm()).item()
    if not found <= cap:
        raise SystemExit(f"{name}: relative error {found:.2e}, allowed {cap:.1e}")


def kda(
    T: int, H: int, K: int, V: int, lengths: list[int] | None, regime: str, bound: float | None = -5.0
) -> None:  # fmt: skip
    """Forward, bit-equal repeat and all gradients."""
    n = 1 if lengths is None else len(lengths)
    ends = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    q, k, z, v, beta = bf16(1, T, H, K), bf16(1, T, H, K), bf16(1, T, H, K), bf16(1, T, H, V), bf16(1, T, H)
    z = {
        "production": z,
        "slow": z * 0 - 6,
        "saturated": z * 0 + (12 if bound else 3.75),  # without a bound about -60 a token
        "mixed": torch.where(torch.arange(K) % 2 == 0, z - 7, z + 7),
    }[regime]
    A_log = 0.3 * torch.randn(H)
    if bound is None:  # rates of 1 to 16, as they are when training begins
        A_log = torch.linspace(1.0, 16.0, H + 1)[1:].log() - (8 if regime == "slow" else 0)
    args = [q, k, v, z.bfloat16(), beta, A_log, 0.3 * torch.randn(H * K), torch.randn(n, H, K, V)]
    args = [x.requires_grad_() for x in args]
    o, S = autograd.kda(*args[:7], bound, args[7], ends)
    with torch.no_grad():
        again = autograd.kda(*args[:7], bound, args[7], ends)
    if not (torch.equal(o, again[0]) and torch.equal(S, again[1])):
        raise SystemExit("kda: a repeated forward differs")
    up = [torch.randn_like(o), 0.1 * torch.randn_like(S)]
    grads = torch.autograd.grad([o, S], args, up)
    wide = [x.detach().double().requires_grad_() for x in args]
    o2, S2 = kda_reference.kda_reference(*wide[:7], bound, wide[7], ends)
    want = torch.autograd.grad([o2, S2], wide, [x.double() for x in up])
    require("o", o, o2, CAPS["o"])
    require("S", S, S2, CAPS["S"])
    for name, got, expected in zip(("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "S0"), grads, want, strict=True):
        require(f"gradient of {name}", got, expected, CAPS[name])


def inputs(T: int, H: int = 1, K: int = 32) -> list[torch.Tensor]:
    """q, k, v, gate, beta, A_log, dt_bias."""
    rows = [bf16(1, T, H, width) for width in (K, K, 2 * K, K)]
    return [*rows, bf16(1, T, H), 0.3 * torch.randn(H), 0.3 * torch.randn(H * K)]


def require_equal(what: str, some, others) -> None:
    if not all(map(torch.equal, some, others)):
        raise SystemExit(f"{what}: not equal to the bit")


def kernels(args, initial_state=None, ends=None, bound=-5.0):
    return autograd.kda(*args, bound, initial_state, ends)


def faults() -> None:
    """Known faults of other kernels, on ours; the numbers are those of docs/kernels.md."""
    # 1: a later token changes neither earlier outputs nor their gradients.
    results = []
    for change in (0.0, 2.0):
        for bound in (-5.0, None):
            torch.manual_seed(1)
            args = inputs(40)
            for x in args[:5]:
                x[:, 21:] += change
            args = [x.requires_grad_() for x in args]
            o = kernels(args, bound=bound)[0]
            grads = torch.autograd.grad(o[:, :21].float().square().sum(), args[:5])
            results.append([x[:, :21] for x in (o, *grads)])
    require_equal("causality", [x for each in results[:2] for x in each], [x for each in results[2:] for x in each])
    # 2: one token from the zero state does not depend on its gate.
    args = [x.requires_grad_() for x in inputs(1)]
    with torch.no_grad():
        args[3].fill_(20.0)
    o, S = kernels(args)
    if torch.autograd.grad(o.float().sum() + (S * torch.randn_like(S)).sum(), args[3])[0].any():
        raise SystemExit("the diagonal leaves a gradient of the gate")
    # 5: the largest rates and biases stay finite.
    for A, bias, bound in (
        (-20.0, 200.0, -5.0), (20.0, -200.0, -5.0), (100.0, 200.0, -5.0), (100.0, 200.0, None), (20.0, 2.0, None),
    ):  # fmt: skip
        args = inputs(20)
        args[5].fill_(A)
        args[6].fill_(bias)
        args = [x.requires_grad_() for x in args]
        o, S = kernels(args, bound=bound)
        for x in (o, S, *torch.autograd.grad([o, S], args, [torch.ones_like(o), torch.ones_like(S)])):
            if not torch.isfinite(x).all():
                raise SystemExit(f"not finite at A_log {A}, bias {bias}, bound {bound}")
    # 12, 13, 26: gradients that are slices or expanded (of the final state too), NaN behind every input.
    args = []
    for x in inputs(33):
        buffer = torch.full((x.numel() + 512,), float("nan"), dtype=x.dtype)
        buffer[: x.numel()] = x.flatten()
        args.append(buffer[: x.numel()].view(x.shape).requires_grad_())
    wide, one = bf16(1, 33, 3, 64), torch.ones(())
    strided = (wide[:, :, 1:2], one.expand(1, 1, 32, 64))
    expanded = (one.bfloat16().expand(1, 33, 1, 64), torch.randn(1, 1, 64, 32).transpose(2, 3))
    for up in (strided, expanded):
        results = [torch.autograd.grad(kernels(args), args, given) for given in (up, [x.contiguous() for x in up])]
        require_equal("strided gradients", *results)
        if not all(torch.isfinite(x).all() for x in results[0]):
            raise SystemExit("NaN from behind an input")
    # 14: a batch of empty sequences hands its states through.
    S0 = torch.randn(2, 1, 32, 64)
    o, S = kernels(inputs(3), S0, torch.tensor([0, 0, 0]))
    require_equal("empty sequences", (o, S), (torch.zeros_like(o), S0))
    # A state that is a transposed view is read as what it is.
    turned = torch.randn(2, 1, 64, 32).transpose(2, 3)
    args, ends = inputs(4), torch.tensor([0, 4, 4])
    require_equal("strided state", kernels(args, turned, ends), kernels(args, turned.contiguous(), ends))


def lengths() -> None:
    """17: tails of every kind, repeats bit-equal, forward and backward, against the reference."""
    sizes = [1, 2, 7, 15, 16, 17, 33]
    ends = torch.tensor([0, *sizes]).cumsum(0)
    args = [x.requires_grad_() for x in inputs(sum(sizes))]
    results = []
    for _ in range(2):
        o, S = kernels(args, None, ends)
        results.append((o, S, *torch.autograd.grad(o.float().sum() + S.sum(), args)))
    require_equal("repeat", *results)
    wide = [x.detach().double().requires_grad_() for x in args]
    o2, S2 = kda_reference.kda_reference(*wide, -5.0, None, ends)
    want = (o2, S2, *torch.autograd.grad(o2.sum() + S2.sum(), wide))
    names = ("o", "S", "q", "k", "v", "gate", "beta", "A_log", "dt_bias")
    for name, x, y in zip(names, results[0], want, strict=True):
        require(name, x, y, 2 * CAPS[name])  # 32 channels average less than 128


class Neighbours:
    """A `ContextCommunicator` of ranks that run one after the other in this process, whose messages lie in a list."""

    def __init__(self, before: int, continues: bool, messages: list[torch.Tensor]) -> None:
        self.before, self.continues, self.messages = before, continues, messages

    def send(self, tensor: torch.Tensor, *, right: bool = False) -> None:
        self.messages.append(tensor.clone())

    def receive(self, like: torch.Tensor, *, right: bool = False) -> torch.Tensor:
        return self.messages.pop().view(like.shape)


def in_context(bound: float | None) -> None:
    """Documents of 45 and 12 tokens on three ranks, one of which the first crosses from end to end."""
    whole = inputs(57, 2, 64)
    whole[2] = whole[2][..., :64]
    up, messages, outs = bf16(1, 57, 2, 64), [], []
    for first, last, ends, before, continues in (
        (0, 19, [0, 19], 0, True),
        (19, 38, [0, 19], 19, True),
        (38, 57, [0, 7, 19], 38, False),
    ):
        own = [(x[:, first:last] if place < 5 else x).detach().requires_grad_() for place, x in enumerate(whole)]
        o, _ = autograd.kda(*own, bound, None, torch.tensor(ends), Neighbours(before, continues, messages))
        outs.append((o, own, up[:, first:last]))
    if messages:
        raise SystemExit("kda: a state that nobody took")
    grads = [torch.autograd.grad(o, own, part) for o, own, part in reversed(outs)][::-1]
    if messages:
        raise SystemExit("kda: a state's gradient that nobody took")
    wide = [x.detach().double().requires_grad_() for x in whole]
    o2, _ = kda_reference.kda_reference(*wide, bound, None, torch.tensor([0, 45, 57]))
    require("o", torch.cat([o for o, _, _ in outs], 1), o2, CAPS["o"])
    wanted = torch.autograd.grad(o2, wide, up.double())
    names = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias")
    for place, (name, want) in enumerate(zip(names, wanted, strict=True)):
        parts = [each[place] for each in grads]
        require(f"gradient of {name}", torch.cat(parts, 1) if place < 5 else sum(parts), want, CAPS[name])


def offsets() -> None:
    """11: rows whose offsets pass 2^31, in memory of which only those rows are ever touched."""
    rows, K = 64, 128
    first = (1 << 24) + 32
    far = _empty(first + rows, 1, K, dtype=torch.bfloat16)
    out = _empty(first + rows, 1, K, dtype=torch.bfloat16)
    near = bf16(rows, 1, K)
    far[first:] = near
    beta = _empty(first + rows, 1, dtype=torch.bfloat16)
    beta[first:] = 0.5
    got = []
    for x, o, b, start in ((far, out, beta, first), (near, _empty_like(near), beta[first:], 0)):
        table = [torch.tensor(values, dtype=torch.int32) for values in ([start, start + 32], [32, 32], [0, 2])]
        chunks = autograd.Chunks(*table)
        p = autograd.prepare(x, x, x, b, torch.zeros(1), torch.zeros(K), -5.0, chunks, save=True)
        S, states, updates = autograd.scan(p, x, o, None, chunks, save=True, segment=0)
        got.append((o[start:], S, states, updates, p.q_in))
    require_equal("far rows", *got)


def segments() -> None:
    """The scan cut into segments, and snapshots, against the scan of whole sequences."""
    for lengths in (None, [100, 0, 90]):
        K = V = 64
        T = 200
        ends = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
        n = 1 if lengths is None else len(lengths)
        rows = [bf16(T, 1, K), bf16(T, 1, K), bf16(T, 1, K) - 2]
        v, beta, S0 = bf16(T, 1, V), bf16(T, 1), torch.randn(n, 1, K, V)
        chunks = autograd.fixed_chunks(1, T, v.device) if ends is None else autograd.packed_chunks(ends, T)
        p = autograd.prepare(*rows, beta, torch.zeros(1), torch.zeros(K), -5.0, chunks)
        for start, segment in ((S0, 2), (S0, 3), (None, 2)):
            whole, o = torch.zeros_like(v), torch.zeros_like(v)
            S, _, _ = autograd.scan(p, v, whole, start, chunks, segment=0)
            got, _, _ = autograd.scan(p, v, o, start, chunks, segment=segment)
            require("o in segments", o, whole, 3e-3)
            require("S in segments", got, S, 3e-3)


def decode_arguments(B: int, slots: int, H: int = 2, D: int = 32):
    """Projections as strided slices of one matrix, weights, pools."""
    P = H * D
    wide = bf16(B, 5 * P + H + 3)
    q, k, v, gate, out = (wide[:, s * P : (s + 1) * P].view(B, H, D) for s in range(5))
    rows = (q, k, v, gate, wide[:, 5 * P : 5 * P + H], out)
    shared = ([torch.randn(P, 4) for _ in range(3)], 0.2 * torch.randn(H), 0.2 * torch.randn(P), torch.randn(D))
    return rows, shared, bf16(slots, 3, 3 * P), torch.randn(slots, H, D, D)


def decode(tile: int, parts: int, bound: float | None = -5.0) -> None:
    """Strided projections and indices, padding, a fork, no write."""
    B, slots = 5, 8
    rows, shared, conv_pool, pool = decode_arguments(B, slots)
    index = torch.arange(B, dtype=torch.int32)[:, None].repeat(1, 2)
    index[1] = torch.tensor([slots - 1, slots - 2])
    index[2] = index[3, 1] = -1
    mine, wanted = (conv_pool.clone(), pool.clone()), (conv_pool.clone(), pool.clone())
    args = (*rows, *shared, *mine, index[:, 0], index[:, 1], bound, 1e-5, None)
    arrivals = torch.zeros(B * rows[0].shape[1], dtype=torch.int32)
    y = decode_split_kernels.step(*args, arrivals, parts) if parts > 1 else decode_kernels.step(*args, False, tile=tile)
    y2 = decode_reference.kda_decode_reference(
        *rows, *shared, *wanted, index[:, 0], index[:, 1], gate_lower_bound=bound
    )  # fmt: skip
    require("y", y, y2, 1e-3)  # equal but for a rounding of o to bf16 that falls the other way
    require("state", mine[1], wanted[1], 1e-5)
    if not torch.equal(mine[0], wanted[0]) or y[2].any() or arrivals.any():
        raise SystemExit("decode: conv history or a padded row is wrong, or counters are not back at 0")


def deferred(bound: float | None = -5.0) -> None:
    """Steps with pending rows against the reference that reads and writes: slots at different phases, in another order
    at each step, with padding, a fork, a step without a write, a slot that is used again, and forms that change.
    Without a bound some channels decay by about e^-16 a token: states are written between chunk boundaries too."""
    B, slots, forms = 4, 6, "d" * 16 + "wdswd"  # deferred; read and write by one program a head or several
    _, shared, conv_pool, pool = decode_arguments(B, slots, H=1)
    if bound is None:
        shared[2].copy_(torch.where(torch.arange(32) % 8 == 0, 16.0, -6.0))
    mine, wanted = (conv_pool.clone(), pool.clone()), (conv_pool.clone(), pool.clone())
    pending = decode_reference.PendingRows.empty(mine[1])
    phase = torch.tensor([3, 0, 14, 16, 25, 7])
    pending.begin(torch.arange(slots), phase)
    for step in range(21):
        rows, *_ = decode_arguments(B, slots, H=1)
        read = torch.randperm(4)[:B].to(torch.int32)
        write = read.clone()
        if step % 5 == 1:
            read[1] = write[1] = -1
        if step in (4, 12):
            write[0] = 4 if step == 4 else 5
        if step == 9:
            write[2] = -1
        if step == 15:
            for _, states in (mine, wanted):
                states[3] = 0.5
            phase[3] = 0
            pending.begin(torch.tensor([3]))
        kept = write >= 0
        phase[write[kept].long()] = phase[read[kept].long()] + 1
        indices = torch.stack([read, write], 1).unbind(1)  # strided slices
        args = (*rows, *shared, *mine, *indices, bound, 1e-5, pending)
        if forms[step] == "s":
            y = decode_split_kernels.step(*args, torch.zeros(B, dtype=torch.int32), 2)
        else:
            y = decode_kernels.step(*args, forms[step] == "d", tile=16 if step % 2 else 32)
        y2 = decode_reference.kda_decode_reference(*rows, *shared, *wanted, *indices, gate_lower_bound=bound)
        require(f"y of step {step}", y, y2, 2e-3)
        if not torch.equal(mine[0], wanted[0]) or y[read < 0].any():
            raise SystemExit("deferred: conv history or a padded row is wrong")
        if not torch.equal(pending.span[:, 0, 1].long(), phase % 16):
            raise SystemExit(f"step {step}: the places in the chunks are {pending.span[:, 0, 1]}, not {phase % 16}")
        if step in (7, 20):
            decode_kernels.flush(mine[1], pending, torch.tensor([2, -1, 0, 5, 4]))
            at = torch.tensor([0, 2, 4, 5])
            require("flushed states", mine[1][at], wanted[1][at], 1e-5)
    if not torch.equal(pending.span[2, :, 0], pending.span[2, :, 1]):
        raise SystemExit("deferred: rows are left after a flush")


def splits() -> None:
    """18: prefill in pieces, decode in either form, prefill again, in any order, against one pass of the kernels."""

    def run_kda(q, k, v, gate, beta, A_log, dt_bias, state):
        return autograd.kda(q, k, v, gate, beta, A_log, dt_bias, -5.0, state, None)

    def conv(xs, weights, history):
        return short_conv_kernels.short_conv(xs, weights, history, None)

    def step(*args):
        return decode_kernels.step(*args[:-1], -5.0, 1e-5, args[-1], args[-1] is not None, tile=32)

    def norm(o, z, weight):
        return gated_norm_kernels.gated_norm(o, z, weight, 1e-5)

    whole = layer.Layer(50, 64, torch.bfloat16, conv, run_kda, norm, step, decode_kernels.flush)
    with torch.no_grad():
        y, state = whole.run([])

    @hypothesis.settings(derandomize=True, deadline=None, max_examples=3, database=None)
    @hypothesis.given(layer.PLANS)
    def any_plan(plan):
        with torch.no_grad():
            y2, state2 = whole.run(plan)
        require(f"y of {plan}", y2, y, 8e-3)
        require(f"state of {plan}", state2, state, CAPS["S"])

    any_plan()


def conv() -> None:
    """Forward and gradients, short and empty sequences, history, several strips of a sequence."""
    for B, T, lengths, with_history in (
        (2, 5, None, False),
        (2, 1, None, True),
        (1, 20, [1, 0, 8, 9], True),
        (1, 48, [37, 9], True),
    ):
        for settings in (short_conv_kernels.FORWARD, short_conv_kernels.BACKWARD):
            settings |= {"strip": 16}
        C, n = 128, B if lengths is None else len(lengths)
        ends = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
        xs = [bf16(B, T, C).requires_grad_() for _ in range(3)]
        ws = [torch.randn(C, 4).requires_grad_() for _ in range(3)]
        history = bf16(n, 3, 3 * C) if with_history else None
        ys, new = short_conv_kernels.short_conv(xs, ws, history, ends)
        up = [bf16(B, 2 * T, C)[:, ::2] for _ in ys]  # strided gradients, as split and expand make them
        got = torch.autograd.grad(ys, [*xs, *ws], up)
        wide = [x.detach().double().requires_grad_() for x in [*xs, *ws]]
        past = None if history is None else history.double()
        ys2, new2 = short_conv_reference(wide[:3], wide[3:], history=past, cu_seqlens=ends)
        want = torch.autograd.grad(ys2, wide, [x.double() for x in up])
        if not torch.equal(new, new2.to(new.dtype)):
            raise SystemExit("conv: the new history differs")
        for a, b in zip([*ys, *got], [*ys2, *want], strict=True):
            require("conv", a, b, 3e-3)


def norm() -> None:
    """Forward and gradients for rows that fill no tile, with an expanded upstream gradient."""
    for rows in (1, 21, 70):
        args = [bf16(rows, 3, 128), bf16(rows, 3, 128), torch.randn(128)]
        args[1][0] = 0
        args = [x.requires_grad_() for x in args]
        y = gated_norm_kernels.gated_norm(*args, 1e-5)
        wide = [x.detach().double().requires_grad_() for x in args]
        y2 = gated_norm_reference(*wide)
        require("y", y, y2, 3e-3)
        for a, b in zip(torch.autograd.grad(y.sum(), args), torch.autograd.grad(y2.sum(), wide), strict=True):
            require("norm", a, b, 3e-3)


def routing() -> None:
    """Choices, their order by expert and their sums: ties, NaN, strided rows, experts without rows, one row."""
    for n, experts, k in ((5, 64, 8), (1, 3, 1), (17, 24, 6), (3, 300, 16)):
        # Quarters: equal scores are many, and others lie further apart than any rounding.
        logits = torch.randint(-12, 12, (n, experts)) / 4
        wide = torch.cat([logits, torch.full((n, 5), float("nan"))], 1)[:, :experts]
        bias = torch.randint(-1, 2, (experts,)) / 8
        if n > 1 and experts > 3:
            wide[1, 2] = float("nan")
        for renormalize, scaling in ((True, 2.5), (False, 1.0)):
            weights, ids = decode_routing_kernels.choose(wide, bias, k, renormalize, scaling)
            weights2, ids2 = decode_routing.choose_reference(wide, bias, k, renormalize, scaling)
            require_equal("ids", [ids], [ids2])
            again = decode_routing_kernels.choose(wide, bias, k, renormalize, scaling, ids.to(torch.int16))
            require_equal("recorded", [x.nan_to_num(7.0) for x in again], [weights.nan_to_num(7.0), ids])
            torch.testing.assert_close(weights, weights2, atol=1e-6, rtol=1e-6, equal_nan=True)
        got, want = decode_routing_kernels.sort_assignments(ids, experts), decode_routing.sort_reference(ids, experts)
        require_equal("order", got, want)
        token, inverse, _ = want
        for kind, bound in ((torch.bfloat16, 3e-3), (torch.float32, 1e-6)):
            rows, weights = torch.randn(n * k, 72).to(kind), torch.rand(n, k)
            total = decode_routing_kernels.sum_choices(rows, inverse, weights)
            require("sum", total, decode_routing.sum_reference(rows, inverse, weights, kind), bound)
            norm = (torch.randn(72).to(kind), 1e-5)
            normed = decode_routing_kernels.sum_choices(rows, inverse, weights, norm)
            wide = (rows.double(), inverse, weights.double(), torch.float64, (norm[0].double(), 1e-5))
            require("normed sum", normed, decode_routing.sum_reference(*wide), max(bound, 4e-6) * 2)
            by_hand = torch.zeros(n, 72).index_add(0, token, torch.zeros(n * k, 72).index_copy(
                0, inverse, weights.view(-1, 1) * rows.float()[inverse]))  # fmt: skip
            require("sum by token", total, by_hand, bound)


def grouped() -> None:
    """Experts without rows, with one and with more than a pass holds; gathered rows and rows in order; both depths."""
    for counts, width, outputs in (([0, 1, 20, 0, 3], 64, 128), ([2, 0, 0], 128, 64), ([70], 64, 64)):
        ends, count = torch.tensor(counts).cumsum(0).to(torch.int32), sum(counts)
        matrices, x = bf16(len(counts), outputs, width), bf16(9, width)
        token = torch.randint(0, 9, (count,))
        for rows, at in ((x, token), (x[token], None)):
            got = grouped_skinny_kernels.product(rows, at, matrices, ends)
            by_hand = [r.double() @ m.double().t() for r, m in zip(x[token].split(counts), matrices, strict=True)]
            require("product", got, torch.cat(by_hand), 3e-3)
            require("reference", grouped_skinny.product_reference(rows, at, matrices, ends), torch.cat(by_hand), 3e-3)


def w4_grouped() -> None:
    """Every code beside every scale to the bit; products with the bits of the bf16 kernel, in one pass and in two."""
    packed = torch.arange(256).to(torch.uint8).view(1, 4, 64).repeat(1, 64, 1)
    scale = torch.arange(256).clamp(max=limits.W4_GROUPED_SKINNY.scale).to(torch.uint8).view(1, 256, 1).repeat(1, 1, 4)
    for turn in range(4):  # a chunk of four rows holds each byte once
        tiles = w4_grouped_skinny.tiled(packed.roll(turn, 1), scale)
        want = mx.dequantize_mxfp4(packed.roll(turn, 1), scale, torch.bfloat16)
        got = w4_grouped_skinny_kernels.decode(*tiles)
        require_equal("decoded", [got.view(torch.int16)], [want.view(torch.int16)])
    launch = w4_grouped_skinny_kernels.LAUNCHES[16]
    for counts, width, outputs, own in (
        ([0, 1, 20], 256, 64, launch),
        ([35, 0, 7], 128, 128, launch | {"extra": 16, "rest": 16, "strip": 128, "blocks": 1}),
    ):  # fmt: skip
        ends, token = torch.tensor(counts).cumsum(0).to(torch.int32), torch.randint(0, 9, (sum(counts),))
        packed = torch.randint(0, 256, (len(counts), outputs, width // 2), dtype=torch.uint8)
        scale = torch.randint(110, 124, (len(counts), outputs, width // 32), dtype=torch.uint8)
        matrices, x = mx.dequantize_mxfp4(packed, scale, torch.bfloat16), bf16(9, width)
        tiles = w4_grouped_skinny.tiled(packed, scale)
        for rows, at in ((x, token), (x[token], None)):
            got = w4_grouped_skinny_kernels.product(rows, at, *tiles, ends, own)
            want = grouped_skinny_kernels.product(rows, at, matrices, ends)
            require_equal("packed product", [got.view(torch.int16)], [want.view(torch.int16)])
            for rule in (None, "ceil"):
                got = w4_grouped_skinny_kernels.product(rows, at, *tiles, ends, own, (4.0, 25.0, rule))
                require_equal("packed unit", [got], [situ_kernels.situ(want, 4.0, 25.0, rule)])


def attention() -> None:
    """Rows of one token, of a full page and of more, pages in any order, one split and several, strided queries."""
    for h, z, r, page, splits in ((3, 64, 16, 16, 1), (2, 32, 16, 32, 3), (20, 64, 32, 64, 2), (40, 32, 16, 16, 1)):
        past = torch.tensor([0, page - 1, page, 2 * page + 5])
        rows, blocks = len(past), 4
        pages = bf16(rows * blocks + 1, page, z + r)
        table = torch.randperm(rows * blocks).view(rows, blocks) + 1
        absorbed, q_r = bf16(rows, h, z).transpose(0, 1), bf16(rows, h, 2 * r)[..., r:]
        got = decode_attention_kernels.attend(absorbed, q_r, pages, table, past, 0.2, splits=splits)
        wide = (absorbed.double(), q_r.double(), pages.double())
        require("attention", got, decode_attention.attend_reference(*wide, table, past, 0.2), 6e-3)


def draw() -> None:
    """Greedy and sampled rows, equal largest logits, NaN and infinities, a uniform at either end; wider than it is."""
    for rows, tokens in ((9, 40), (3, 64), (2, 1)):
        logits = (4 * torch.randn(rows, tokens + 3))[:, :tokens]
        logits[0, tokens // 2 :] = 9.0
        logits[-1, 0] = float("nan") if tokens > 1 else 0.0
        if rows > 5:
            logits[4, 3], logits[5, 1] = float("inf"), float("-inf")
        heat = torch.tensor([0.0, 1.0, 0.6]).repeat(3)[:rows].double()
        uniform = torch.rand(rows, dtype=torch.float64)
        uniform[1] = 1 - 2.0**-53
        got = draw_kernels.draw(logits, heat, uniform)
        want = draw_reference(logits, heat, uniform)
        good = want[:, 2] > 0
        require_equal("ids and flags", [got[good][:, 0], got[:, 2]], [want[good][:, 0], want[:, 2]])
        torch.testing.assert_close(got[good][:, 1], want[good][:, 1], atol=1e-12, rtol=0)
        if not ((got[:, 0] >= 0) & (got[:, 0] < tokens)).all():
            raise SystemExit("draw: an id outside the vocabulary")


def draw_cut() -> None:
    """Ranks and masses over two chunks, equal logits, a row that is greedy and one that is not finite."""
    logits = torch.tensor([[2.0, 1.0] * 10, [0.0, 3.0] * 10, [1.0, float("nan")] * 10]) + torch.arange(20) // 6
    reals = torch.tensor([[0.7, 0.0, 1.0], [0.9, 0.5, 0.1], [0.8, 0.9, 1.0], [0.01, 0.0, 0.0]]).double()
    cuts = Cuts(*reals.unbind(), torch.tensor([9, 0, 0]))
    got = cut_kernels.draw_cut(logits, cuts, by_rank=True, by_mass=True, chunk=16)
    want, keep = cut_reference(logits, cuts)
    require_equal("flags", [got.drawn[:, 2]], [want[:, 2]])
    require_equal("ids", [got.drawn[:2, 0], got.kept[:2]], [want[:2, 0], keep[:2].sum(1)])
    torch.testing.assert_close(got.drawn[:2, 1], want[:2, 1], atol=1e-12, rtol=0)
    counts = torch.tensor([int(got.kept[0]), 0, 0])
    require_equal("what is left", [got.ids(counts).long()], [keep[0].nonzero()[:, 0]])
    wide = cut_kernels.draw_wide(logits[:2], cuts.temperature[:2], cuts.uniform[:2])
    torch.testing.assert_close(wide, draw_reference(logits[:2], *reals[:2, :2]), atol=1e-12, rtol=0)


CASES = {
    "kda-fixed": lambda: kda(70, 2, 32, 64, None, "production"),
    "kda-packed": lambda: kda(101, 1, 32, 64, [17, 0, 15, 1, 65], "production"),
    "kda-slow": lambda: kda(80, 1, 64, 64, None, "slow"),
    "kda-saturated": lambda: kda(80, 1, 32, 64, None, "saturated"),
    "kda-mixed": lambda: kda(48, 4, 64, 64, None, "mixed"),
    "unbounded-packed": lambda: kda(69, 2, 32, 64, [17, 0, 15, 1, 33], "production", None),
    "unbounded-slow": lambda: kda(64, 1, 64, 64, None, "slow", None),
    "unbounded-saturated": lambda: kda(48, 1, 32, 64, None, "saturated", None),
    "unbounded-mixed": lambda: kda(48, 4, 64, 64, None, "mixed", None),
    "kda-faults": faults,
    "kda-lengths": lengths,
    "kda-offsets": offsets,
    "kda-context": lambda: (in_context(-5.0), in_context(None)),
    "segments": segments,
    "decode": lambda: (decode(tile=16, parts=1), decode(tile=8, parts=4)),
    "unbounded-decode": lambda: (decode(16, 1, None), decode(8, 4, None), deferred(None)),
    "decode-deferred": deferred,
    "splits": splits,
    "conv": conv,
    "norm": norm,
    "draw-cut": draw_cut,
    "decode-parts": lambda: (routing(), grouped(), w4_grouped(), attention(), draw()),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    poison()
    CASES[sys.argv[1]]()
