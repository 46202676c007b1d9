"""The rows of `kda.py`: what is timed, our variants beside the peer, and how a time is taken.

A `Case` builds its contenders on first use: "ours" is what the public function runs, "ours: NAME" the same with another
setting of a kernel module, "peer" fla-core with the same contract. `SIZE` scales every shape: "full" for the figures,
"small" to compile everything beforehand, "dry" to run the whole program on a CPU under Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from k3rl.kernels.kda import PendingRows, autograd, decode_kernels, kda, kda_decode, short_conv, short_conv_kernels
from k3rl.kernels.norm import gated_norm

BANDWIDTH = 4.3e12
LEAD_CYCLES = 6_000_000
D = 128
REGIMES = ("production", "slow", "saturated", "mixed")
# Kimi Linear's gate, -exp(A_log) softplus: rates of 1 to 16 and biases as training begins with; all but no decay; about
# -60 a token; channels of all of these beside each other.
UNBOUNDED = tuple(f"unbounded{kind}" for kind in ("", ", slow", ", saturated", ", mixed"))
# Measured on one NVIDIA H200 on 2026-11-29 with the peers' own harness: (heads, tokens) -> ms.
LAYERS, LAYER_BYTES = 69, 4 << 30
FLASHKDA = {(96, 8192): 1.40, (96, 65536): 10.98, (12, 8192): 0.849}
PACKINGS = {"6 ragged": [1300, 547, 2048, 963, 271, 3063], "8 x 1024": [1024] * 8, "64 x 128": [128] * 64}
SIZE = "full"
Contenders = dict[str, Callable[[], object]]


def device() -> str:
    """Where everything runs."""
    return "cpu" if SIZE == "dry" else "cuda"


def tokens(n: int) -> int:
    """A count of tokens at the size in use."""
    return n if SIZE == "full" else {"small": 2048, "dry": 64}[SIZE]


def heads(n: int) -> int:
    """A count of heads: kernels are compiled for it, so only a dry run changes it."""
    return n if SIZE != "dry" else 1


def rows_of(n: int) -> int:
    """A batch of decode rows."""
    return n if SIZE == "full" else min(n, 2)


@dataclasses.dataclass
class Case:
    """One row of a table and its variants; floor in bytes moved. `build` returns the contenders."""

    table: str
    name: str
    shape: str
    regime: str
    floor: float
    build: Callable[[], Contenders]
    graph: bool = False
    samples: int = 48
    peer: str = "fla-core"
    recorded: float | None = None  # a figure of the peer from another process
    memory: bool = False
    calls: int = 1  # that one run of a contender makes; times are of one
    # Backward alone is a difference: autograd does not run it without its forward, which this builds.
    without: Callable[[], Contenders] | None = None


@contextlib.contextmanager
def setting(module, **values) -> Iterator[None]:
    """Module constants changed within the block; a dict is updated, anything else replaced."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        old = before[name]
        setattr(module, name, old | value if isinstance(old, dict) and isinstance(value, dict) else value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def under(module, run: Callable[[], object], **values) -> Callable[[], object]:
    """`run` with changed module constants."""

    def changed():
        with setting(module, **values):
            return run()

    return changed


def bound(regime: str) -> float | None:
    """The lower bound of a regime's gates."""
    return None if regime in UNBOUNDED else -5.0


def have_peer() -> bool:
    """Whether fla-core is installed (never used in a dry run: the interpreter cannot run its autotuner)."""
    return SIZE != "dry" and importlib.util.find_spec("fla") is not None


def inputs(T: int, H: int, regime: str, B: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, gate, beta, A_log, dt_bias of one gate regime of `REGIMES` or `UNBOUNDED`."""
    generator = torch.Generator(device()).manual_seed(seed)
    new = functools.partial(torch.randn, device=device(), generator=generator)
    q, k, v, z = (new(B, T, H, D).bfloat16() for _ in range(4))
    beta = new(B, T, H).bfloat16()
    if regime in UNBOUNDED:
        return [q, k, v, *_unbounded_gates(z, beta, regime, generator)]
    slow = (0.3 * z.float() - 6.5).bfloat16()  # log decay about -0.0075
    if regime == "slow":
        z = slow
    elif regime == "saturated":
        z = torch.full_like(z, 12.0)
    elif regime == "mixed":
        z = torch.where(torch.arange(D, device=device()) % 2 == 0, slow, z)
    return [q, k, v, z, beta, torch.zeros(H, device=device()), torch.zeros(H * D, device=device())]


def _unbounded_gates(z, beta, regime: str, generator) -> list[torch.Tensor]:
    """gate, beta, A_log, dt_bias of a regime of `UNBOUNDED`."""
    H = z.shape[-2]
    rate = 1 + 15 * torch.rand(H, device=device(), generator=generator)
    forgotten = torch.exp(torch.empty(H * D, device=device()).uniform_(-6.9, -2.3, generator=generator))
    bias = forgotten + torch.log(-torch.expm1(-forgotten))  # softplus(bias) = forgotten
    kind = torch.arange(D, device=device()) % 3
    strong = 60 / rate[:, None] + 0.25 * z.float()
    if regime == "unbounded, slow":
        rate = 1e-3 * rate
    elif regime == "unbounded, saturated":
        z, bias = strong.bfloat16(), torch.zeros_like(bias)
    elif regime == "unbounded, mixed":
        z = torch.where(kind == 0, z.float(), torch.where(kind == 1, z.float() - 8, strong + 3)).bfloat16()
    return [z, beta, rate.log(), bias]


def fla_kda(args, regime: str, cu_seqlens=None):
    """fla's forward with the same contract."""
    from fla.ops.kda import chunk_kda

    q, k, v, z, beta, A_log, dt_bias = args
    return lambda: chunk_kda(
        q, k, v, z, beta, A_log=A_log, dt_bias=dt_bias, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=bound(regime) is not None,
        lower_bound=bound(regime), cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _forward(H: int, T: int, regime: str, packing: str | None) -> Contenders:
    args = inputs(tokens(T), heads(H), regime)
    cu = None
    if packing:
        lengths = PACKINGS[packing] if SIZE == "full" else [tokens(T) - 33, 0, 33]
        cu = torch.tensor([0, *lengths], device=device()).cumsum(0).int()
    run = lambda: kda(*args, cu_seqlens=cu, gate_lower_bound=bound(regime))  # noqa: E731
    contenders: Contenders = {"ours": run}
    if not packing:
        contenders["ours: loads where they are used"] = under(autograd, run, EARLY_PREPARE=False)
    if have_peer():
        contenders["peer"] = fla_kda(args, regime, cu)
    return contenders


def forward() -> Iterator[Case]:
    """The forward at 96 and 12 heads, whole and packed, every regime apart."""
    cases = [(H, T, regime, None) for T in (8192, 65536) for H in (96, 12) for regime in REGIMES]
    cases += [(96, 8192, regime, name) for name in PACKINGS for regime in ("production", "slow")]
    for H, T, regime, packing in cases:
        graph = packing is None
        shape = f"T={T} H={H}{' ' + packing if packing else ''}{' graph' if graph else ''}"
        build = functools.partial(_forward, H, T, regime, packing)
        samples = 48 if T < 60000 else 12
        case = Case("forward", "kda forward", shape, regime, H * T * (5 * D * 2 + 2), build, graph, samples)
        if (H, T) in FLASHKDA and not packing:
            case.recorded = FLASHKDA[H, T]
        yield case


def _training(H: int, regime: str, packing: str | None, T: int = 8192) -> Contenders:
    args = [x.requires_grad_() for x in inputs(tokens(T), heads(H), regime)]
    upstream = torch.randn_like(args[2])
    cu = None
    if packing:
        lengths = PACKINGS[packing] if SIZE == "full" else [tokens(8192) - 33, 0, 33]
        cu = torch.tensor([0, *lengths], device=device()).cumsum(0).int()

    def step(run):
        run()[0].backward(upstream)
        for x in args:
            x.grad = None

    run = functools.partial(kda, *args, cu_seqlens=cu, gate_lower_bound=bound(regime))
    ours = functools.partial(step, run)
    contenders = {"ours": ours, "ours: loads where they are used": under(autograd, ours, EARLY=False)}
    if have_peer():
        peer = fla_kda(args, regime, cu)
        contenders["peer"] = lambda: step(peer)
    return contenders


def training() -> Iterator[Case]:
    """Forward and backward, raw inputs to raw gradients, with the peak of extra memory."""
    floor = 96 * 8192 * (14 * D * 2 + 6)
    for regime in REGIMES:
        build = functools.partial(_training, 96, regime, None)
        yield Case("training", "kda forward+backward", "T=8192 H=96", regime, floor, build, samples=24, memory=True)
    build = functools.partial(_training, 96, "production", "6 ragged")
    yield Case("training", "kda forward+backward", "T=8192 H=96 6 ragged", "production", floor, build, samples=24,
               memory=True)  # fmt: skip


def unbounded() -> Iterator[Case]:
    """Gates without a bound at Kimi Linear's 32 heads: forward, with backward, decode."""
    shapes = [(8192, regime) for regime in UNBOUNDED] + [(65536, UNBOUNDED[0])]
    for T, regime in shapes:
        build = functools.partial(_forward, 32, T, regime, None)
        yield Case("unbounded", "kda forward", f"T={T} H=32 graph", regime, 32 * T * (5 * D * 2 + 2), build, True,
                   48 if T < 60000 else 16)  # fmt: skip
    for T, regime in shapes:
        build = functools.partial(_training, 32, regime, None, T)
        yield Case("unbounded", "kda forward+backward", f"T={T} H=32", regime, 32 * T * (14 * D * 2 + 6), build,
                   samples=24 if T < 60000 else 8, memory=True)  # fmt: skip
    for B in (1, 16, 64, 256):
        build = functools.partial(_decode, 32, B, UNBOUNDED[0])
        yield Case("unbounded", "kda decode step", f"B={B} H=32 graph", UNBOUNDED[0], B * 32 * D * D * 4 * 2, build,
                   True, 48, "fla-core, three kernels")  # fmt: skip


def decode_arguments(B: int, H: int, regime: str = "production", seed: int = 0):
    """(q, k, v, gate, beta, out_gate), (weights, A_log, dt_bias, norm), conv pool, state pool; projections strided."""
    generator = torch.Generator(device()).manual_seed(seed)
    new = functools.partial(torch.randn, device=device(), generator=generator)
    P = H * D
    x = new(B, 3 * P).bfloat16()
    q, k, v = (x[:, s * P : (s + 1) * P].view(B, H, D) for s in range(3))
    gate = new(B, H, D).bfloat16()
    gate = {"slow": 0.3 * gate - 6.5, "saturated": gate * 0 + 12}.get(regime, gate)
    beta = new(B, H).bfloat16()
    A_log, dt_bias = torch.zeros(H, device=device()), torch.zeros(P, device=device())
    if regime in UNBOUNDED:
        gate, beta, A_log, dt_bias = _unbounded_gates(gate, beta, regime, generator)
    rows = (q, k, v, gate, beta, new(B, H, D).bfloat16())
    shared = ([new(P, 4) for _ in range(3)], A_log, dt_bias, torch.ones(D, device=device()))
    return rows, shared, new(B, 3, 3 * P).bfloat16(), new(B, H, D, D)


def waiting_rows(pool, B: int) -> PendingRows:
    """Rows of every phase of a chunk, by turns: the mean cost of such a batch is what a token costs."""
    pending = PendingRows.empty(pool)
    pending.keys.normal_()
    pending.updates.normal_()
    pending.decay.fill_(-1.0)
    pending.span[:, :, 1] = torch.arange(B, device=pool.device)[:, None] % 16
    return pending


def _decode(H: int, B: int, regime: str = "production") -> Contenders:
    H, B = heads(H), rows_of(B)
    rows, shared, conv_pool, pool = decode_arguments(B, H, regime)
    index = torch.randperm(B, device=device()).int()
    step = functools.partial(kda_decode, gate_lower_bound=bound(regime))
    plain = functools.partial(step, *rows, *shared, conv_pool, pool, index, index)
    late = [functools.partial(plain, pending=waiting_rows(pool, B)) for _ in range(3)]
    contenders: Contenders = {"ours": plain, "ours: with pending": late[0]}
    contenders["ours: deferred"] = under(decode_kernels, late[1], DEFERRED_FROM=0)
    contenders["ours: with pending, written"] = under(decode_kernels, late[2], DEFERRED_FROM=1 << 30)
    if B == 1:
        contenders |= _programs_of_a_head(plain)
        one = torch.zeros(1, device=device())
        contenders["launch"] = lambda: one.add_(1.0)
    if have_peer():
        contenders |= _fla_decode(rows, shared, B, H, bound(regime))
    return contenders


def _programs_of_a_head(run: Callable[[], object]) -> Contenders:
    names = {"one program": (), "four programs": (4,), "eight programs": (8,)}
    return {f"ours: {name} a head": under(decode_kernels, run, PARTS=parts) for name, parts in names.items()}


def _in_a_row(runs: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """All of them, one after the other; what they return is kept, so that no two write the same memory."""
    every = list(runs)
    return lambda: [run() for run in every]


def layers(H: int, B: int) -> int:
    """Calls in a row: as many as K3 has KDA layers, less where their states would take more than LAYER_BYTES."""
    return max(4, min(LAYERS, LAYER_BYTES // (B * H * D * D * 4))) if SIZE == "full" else 2


def _decode_layers(H: int, B: int) -> Contenders:
    """A graph of one decode step in every layer: each has its own projections, weights, histories and states."""
    count, H, B = layers(H, B), heads(H), rows_of(B)
    plain, late, theirs = [], [], []
    for layer in range(count):
        rows, shared, conv_pool, pool = decode_arguments(B, H, seed=layer)
        index = torch.randperm(B, device=device()).int()
        step = functools.partial(kda_decode, *rows, *shared)
        plain.append(functools.partial(step, conv_pool, pool, index, index))
        if B * H >= decode_kernels.DEFERRED_FROM:
            pools = conv_pool.clone(), pool.clone()
            late.append(functools.partial(step, *pools, index, index, pending=waiting_rows(pool, B)))
        if have_peer():
            theirs.append(_fla_decode(rows, shared, B, H)["peer"])
    run = _in_a_row(plain)
    contenders: Contenders = {"ours": run}
    if late:
        contenders["ours: with pending"] = _in_a_row(late)
    if B * H <= decode_kernels.SPLIT_PROGRAMS:
        contenders |= _programs_of_a_head(run)
    if B == 1:
        ones = torch.zeros(count, 1, device=device())
        contenders["launch"] = lambda: [one.add_(1.0) for one in ones]
    if theirs:
        contenders["peer"] = _in_a_row(theirs)
    return contenders


def _fla_decode(rows, shared, B: int, H: int, lower_bound: float | None = -5.0) -> Contenders:
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda import fused_recurrent_kda

    q, _, _, gate, beta, z = rows
    weights, A_log, dt_bias, norm = shared
    P = H * D
    x = q.as_strided((B, 3 * P), (3 * P, 1), q.storage_offset())
    caches, taps = torch.zeros(B, 3 * P, 4, device="cuda").bfloat16(), torch.cat(weights).bfloat16()
    state = torch.zeros(B, H, D, D, device="cuda")

    def alone(mixed=x):
        a, b, c = (mixed[:, s * P : (s + 1) * P].view(B, 1, H, D) for s in range(3))
        return fused_recurrent_kda(
            a, b, c, gate[:, None], beta[:, None], A_log=A_log, dt_bias=dt_bias, initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=lower_bound,
        )  # fmt: skip

    def whole():
        mixed = causal_conv1d_update(x, caches, weight=taps, activation="silu")
        o, final = alone(mixed[0] if isinstance(mixed, tuple) else mixed)
        return rms_norm_gated(o[:, 0], z, norm, None, activation="sigmoid", eps=1e-5), final

    return {"peer": whole, "recurrence": alone}


def decode_cases() -> Iterator[Case]:
    """The fused decode step against fla's convolution update, recurrence and gated norm, all under CUDA graphs.

    Alone in a graph, and as one of the steps of all layers, whose launches overlap.
    """
    for H, B in ((96, 1), (96, 16), (96, 64), (96, 256), (12, 1), (12, 16), (12, 64)):
        build = functools.partial(_decode, H, B)
        floor = B * H * D * D * 4 * 2
        yield Case("decode", "kda decode step", f"B={B} H={H} graph", "production", floor, build, True,
                   96 if B < 200 else 48, "fla-core, three kernels")  # fmt: skip
    for H, B in ((12, 1), (12, 2), (12, 4), (96, 1), (12, 16), (12, 64), (96, 16), (96, 64), (96, 256)):
        count = layers(H, B)
        build = functools.partial(_decode_layers, H, B)
        shape = f"B={B} H={H} in a graph of {count}"
        yield Case("decode", "kda decode step", shape, "production", B * H * D * D * 4 * 2, build, True, 32,
                   "fla-core, three kernels", calls=count)  # fmt: skip


CONV_BACKWARD = {"four stages": {"stages": 4}}


def _conv(backward: bool) -> Contenders:
    T, P = tokens(8192), 12288 if SIZE != "dry" else 128
    xs = [torch.randn(1, T, P, device=device()).bfloat16().requires_grad_() for _ in range(3)]
    ws = [torch.randn(P, 4, device=device()).requires_grad_() for _ in range(3)]
    up = [torch.randn_like(x) for x in xs]
    run = lambda: short_conv(xs, ws)  # noqa: E731
    contenders: Contenders = {}
    if backward:
        both = lambda: torch.autograd.grad(run()[0], [*xs, *ws], up)  # noqa: E731
        contenders["ours"] = both
        for name, options in CONV_BACKWARD.items():
            contenders[f"ours: {name}"] = under(short_conv_kernels, both, BACKWARD=options)
    else:
        contenders["ours"] = torch.no_grad()(run)
    if have_peer():
        from fla.modules.causal_conv1d import causal_conv1d

        wide = torch.cat([x.detach() for x in xs], -1).requires_grad_()
        taps, up_wide = torch.cat([w.detach() for w in ws]).bfloat16().requires_grad_(), torch.cat(up, -1)
        peer = lambda: causal_conv1d(wide, taps, activation="silu")  # noqa: E731
        contenders["peer"] = torch.no_grad()(peer)
        if backward:
            contenders["peer"] = lambda: torch.autograd.grad(peer()[0], [wide, taps], up_wide)
    return contenders


def _norm(backward: bool) -> Contenders:
    n = tokens(8192) * heads(96)
    x, g, dy = (torch.randn(n, D, device=device()).bfloat16() for _ in range(3))
    leaves = [t.requires_grad_() for t in (x, g, torch.ones(D, device=device()))]
    run = lambda: gated_norm(*leaves)  # noqa: E731
    contenders: Contenders = {"ours": torch.no_grad()(run)}
    if backward:
        both = lambda: torch.autograd.grad(run(), leaves, dy)  # noqa: E731
        contenders["ours"] = both
    if have_peer():
        from fla.modules.norm.fused_norm_gate import rms_norm_gated

        peer = lambda: rms_norm_gated(*leaves, None, activation="sigmoid", eps=1e-5)  # noqa: E731
        contenders["peer"] = torch.no_grad()(peer)
        if backward:
            contenders["peer"] = lambda: torch.autograd.grad(peer(), leaves, dy)
    return contenders


def elementwise() -> Iterator[Case]:
    """Short convolution and gated norm, forward and backward."""
    T, P = 8192, 12288
    for name, shape, build, size, moved in (
        ("short conv", f"{T} x {3 * P}", _conv, T * 3 * P * 2, (2, 3)),
        ("gated norm", f"{T * 96} x {D}", _norm, T * 96 * D * 2, (3, 5)),
    ):
        one = functools.partial(build, False)
        yield Case("elementwise", f"{name} forward", shape, "-", size * moved[0], one, True)
        both = functools.partial(build, True)
        yield Case("elementwise", f"{name} backward", shape, "-", size * moved[1], both, without=one)


TABLES = {"decode": decode_cases, "elementwise": elementwise, "forward": forward, "training": training}
TABLES |= {"unbounded": unbounded}


def measure(contenders: Contenders, samples: int, graph: bool) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds of each contender in the order taken, and why contenders have none.

    Contenders take turns, in another order each time, with the L2 cache flushed before each.
    """
    flush = None if SIZE == "dry" else torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    runs: Contenders = {}
    failed: dict[str, str] = {}
    for name, run in contenders.items():
        try:
            for _ in range(1 if SIZE == "dry" else 3):
                run()
            runs[name] = _captured(run) if graph and SIZE != "dry" else run
        except Exception as problem:  # a contender that fails is said, and has no time
            failed[name] = f"{type(problem).__name__}: {problem}"[:300]
            print(f"{name} failed: {failed[name]}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for sample in range(1 if SIZE == "dry" else samples):
        turn = sample % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            times[name].append(_sample(runs[name], flush, graph))
    return times, failed


def _sample(run, flush, graph: bool) -> float:
    if flush is None:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    flush.zero_()
    if not graph:
        torch.cuda._sleep(LEAD_CYCLES)  # the host enqueues meanwhile: eager rows time the GPU, not Python
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    run()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def _captured(run):
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def typical(name: str, values: list[float]) -> float:
    """The median; for a deferred step, whose cost has a period of 16, the median of the means of 16 samples."""
    if "deferred" in name and len(values) >= 16:
        whole = len(values) // 16 * 16
        values = [statistics.fmean(values[at : at + 16]) for at in range(0, whole, 16)]
    return statistics.median(values)


def extra_memory(run) -> float | None:
    """Peak GiB that a contender allocates beyond what is there; None in a dry run."""
    if SIZE == "dry":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
