"""Kernel benchmark: correctness against float64 first, then times against the peers that are installed.

    python benchmarks/kda.py --json [--parts forward,training,decode,elementwise] [--out FILE]

Needs one Hopper GPU. Every time is the median of samples taken in rotating contender order with the L2 cache flushed
before each; "graph" rows replay a captured CUDA graph. A peer that is not installed has peer_ms null. Figures that
cannot be measured beside ours (a wheel that does not run on this torch) are constants with the word "recorded".
Floors: bytes / 4.3 TB/s, every input read and every output written once, bf16, fp32 states.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from k3rl.kernels import gated_norm, kda_decode, ptxas, short_conv
from k3rl.kernels import kda as kda_module

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # time fla's own kernels, not what it may dispatch to
BANDWIDTH = 4.3e12
LEAD_CYCLES = 6_000_000
D = 128
REGIMES = ("production", "slow", "saturated", "mixed")
# Measured on one NVIDIA H200 on 2026-11-29 with the peers' own harness: (heads, tokens) -> ms.
FLASHKDA = {(96, 8192): 1.40, (96, 65536): 10.98, (12, 8192): 0.849}
CAPS = {"o": 6e-3, "state": 3e-3, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2, "dgate": 1.5e-2, "dbeta": 1.5e-2}
CAPS |= {"dA_log": 2e-2, "ddt_bias": 2e-2}


def measure(
    contenders: dict[str, Callable[[], object]], samples: int = 15, graph: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of each contender, sorted, `samples` each."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    runs = {}
    for name, run in contenders.items():
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            runs[name] = _captured(run) if graph else run
        except Exception as problem:
            if name == "ours":
                raise
            print(f"{name} failed: {problem!r}", file=sys.stderr)  # a peer that fails is said, and has no time
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for sample in range(samples):
        for name in names[sample % len(names) :] + names[: sample % len(names)]:
            flush.zero_()
            if not graph:
                torch.cuda._sleep(LEAD_CYCLES)  # the host enqueues meanwhile: eager rows time the GPU, not Python
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            runs[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: sorted(values) for name, values in times.items()}


def _captured(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def row(name, shape, regime, times, floor_bytes, peer="fla-core", recorded: float | None = None) -> dict[str, object]:
    """One line of the result table."""
    ours = statistics.median(times["ours"])
    theirs = recorded if recorded is not None else statistics.median(times["peer"]) if "peer" in times else None
    floor = floor_bytes / BANDWIDTH * 1e3
    line = {"name": name, "shape": shape, "regime": regime, "peer": peer, "ours_ms": ours, "peer_ms": theirs}
    line |= {"ratio": theirs / ours if theirs else None, "floor_ms": floor, "share_of_floor": floor / ours}
    for who, values in times.items():
        line[f"{who}_p20_p80_ms"] = [values[len(values) // 5], values[-1 - len(values) // 5]]
    shown = f"{theirs:8.4f}" if theirs else "absent"
    print(f"{name:20s} {shape:28s} {regime:11s} {ours:8.4f}  {peer} {shown}  floor {floor:7.4f}", file=sys.stderr)
    return line


def inputs(T: int, H: int, regime: str, B: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, gate, beta, A_log, dt_bias of one gate regime."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v, z = (torch.randn(B, T, H, D, device="cuda", generator=generator).bfloat16() for _ in range(4))
    beta = torch.randn(B, T, H, device="cuda", generator=generator).bfloat16()
    slow = (0.3 * z.float() - 6.5).bfloat16()  # log decay about -0.0075
    if regime == "slow":
        z = slow
    elif regime == "saturated":
        z = torch.full_like(z, 12.0)
    elif regime == "mixed":
        z = torch.where(torch.arange(D, device="cuda") % 2 == 0, slow, z)
    return [q, k, v, z, beta, torch.zeros(H, device="cuda"), torch.zeros(H * D, device="cuda")]


def fla_kda(args, cu_seqlens=None):
    """fla's forward with the same contract, or None."""
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    q, k, v, z, beta, A_log, dt_bias = args
    return lambda: chunk_kda(
        q, k, v, z, beta, A_log=A_log, dt_bias=dt_bias, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; inf when anything is not finite."""
    value = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return value if value == value else float("inf")


def check() -> list[dict[str, object]]:
    """Errors against the float64 reference on packed sequences, forward and backward.

    Prints every regime, then ends the benchmark when a cap is passed: a wrong kernel is not timed.
    """
    report = []
    over: list[str] = []
    for regime in REGIMES:
        cu = torch.tensor([0, 100, 100, 333, 530], device="cuda", dtype=torch.int32)
        args = [x.requires_grad_() for x in [*inputs(530, 2, regime), 0.3 * torch.randn(4, 2, D, D, device="cuda")]]
        o, S = kda_module.kda(*args[:7], initial_state=args[7], cu_seqlens=cu)
        again = kda_module.kda(*args[:7], initial_state=args[7], cu_seqlens=cu)
        if not (torch.equal(o, again[0]) and torch.equal(S, again[1])):
            raise SystemExit(f"{regime}: the forward is not bit-identical on repeat")
        loss = [torch.randn_like(o), 0.1 * torch.randn_like(S)]
        torch.autograd.backward([o, S], loss)
        wide = [x.detach().double().requires_grad_() for x in args]
        o2, S2 = kda_module.kda_reference(*wide[:7], -5.0, wide[7], cu)
        torch.autograd.backward([o2, S2], [x.double() for x in loss])
        found = {"o": error(o, o2), "state": error(S, S2)}
        names = ("dq", "dk", "dv", "dgate", "dbeta", "dA_log", "ddt_bias")
        found |= {name: error(x.grad, y.grad) for name, x, y in zip(names, args, wide, strict=False)}
        report.append({"regime": regime} | found)
        print(regime, {name: f"{value:.1e}" for name, value in found.items()}, file=sys.stderr)
        over += [
            f"{regime} {name} {value:.1e} (cap {CAPS[name]:.1e})"
            for name, value in found.items()
            if not value <= CAPS[name]
        ]
    if over:
        raise SystemExit("over the cap: " + ", ".join(over))
    return report


def forward() -> list[dict[str, object]]:
    """The forward at 96 and 12 heads, whole and packed."""
    lines = []
    per_token = 5 * D * 2 + 2
    packings = {"6 ragged": [1300, 547, 2048, 963, 271, 3063], "8 x 1024": [1024] * 8, "64 x 128": [128] * 64}
    cases = [(96, 8192, regime, None) for regime in REGIMES] + [
        (12, 8192, "production", None),
        (12, 8192, "slow", None),
    ]
    cases += [(96, 8192, "production", name) for name in packings] + [
        (96, 65536, "production", None),
        (96, 65536, "slow", None),
    ]
    for H, T, regime, packing in cases:
        args = inputs(T, H, regime)
        cu = None
        if packing:
            cu = torch.tensor([0, *packings[packing]], device="cuda").cumsum(0).int()
        contenders = {"ours": lambda a=args, c=cu: kda_module.kda(*a, cu_seqlens=c)}
        peer = fla_kda(args, cu)
        if peer:
            contenders["peer"] = peer
        graph = cu is None
        with torch.no_grad():
            times = measure(contenders, 15 if T < 60000 else 5, graph=graph)
        shape = f"T={T} H={H}{' ' + packing if packing else ''}{' graph' if graph else ''}"
        lines.append(row("kda forward", shape, regime, times, H * T * per_token))
        if (H, T) in FLASHKDA and not packing:
            ours = {"ours": times["ours"]}
            lines.append(
                row("kda forward", shape, regime, ours, H * T * per_token, "FlashKDA, recorded", FLASHKDA[H, T])
            )
        del args, contenders, peer
        torch.cuda.empty_cache()
    return lines


def training() -> list[dict[str, object]]:
    """Forward and backward, raw inputs to raw gradients, with the peak of extra memory."""
    lines = []
    for regime in ("production", "slow"):
        args = [x.requires_grad_() for x in inputs(8192, 96, regime)]
        upstream = torch.randn_like(args[2])

        def step(run, args=args, upstream=upstream):
            for x in args:
                x.grad = None
            run()[0].backward(upstream)

        contenders = {"ours": lambda a=args: step(lambda: kda_module.kda(*a))}
        peer = fla_kda(args)
        if peer:
            contenders["peer"] = lambda p=peer: step(p)
        times = measure(contenders, 9)
        line = row("kda forward+backward", "T=8192 H=96", regime, times, 96 * 8192 * (14 * D * 2 + 6))
        for who in times:
            for x in args:
                x.grad = None
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            contenders[who]()
            line[f"{who}_extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print({k: v for k, v in line.items() if k.endswith("gib")}, file=sys.stderr)
        lines.append(line)
    return lines


def decode() -> list[dict[str, object]]:
    """The fused decode step against fla's convolution update, recurrence and gated norm, all under CUDA graphs."""
    cases = ((96, 1), (96, 16), (96, 64), (96, 256), (12, 1), (12, 16), (12, 64))
    return [line for H, B in cases for line in _decode_case(H, B)]


def _decode_case(H: int, B: int) -> list[dict[str, object]]:
    P = H * D
    new = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()  # noqa: E731
    x, z, gate, beta = new(B, 3 * P), new(B, H, D), new(B, H, D), new(B, H)
    q, k, v = (x[:, s * P : (s + 1) * P].view(B, H, D) for s in range(3))
    weights = [torch.randn(P, 4, device="cuda") for _ in range(3)]
    A_log, dt_bias = torch.zeros(H, device="cuda"), torch.zeros(P, device="cuda")
    norm = torch.ones(D, device="cuda")
    conv_pool, pool = new(B, 3, 3 * P), torch.randn(B, H, D, D, device="cuda")
    index = torch.randperm(B, device="cuda").int()

    def ours():
        rest = (weights, A_log, dt_bias, norm, conv_pool, pool, index, index)
        return kda_decode.kda_decode(q, k, v, gate, beta, z, *rest)

    contenders = {"ours": ours}
    alone = None
    try:
        from fla.modules.causal_conv1d import causal_conv1d_update
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.kda import fused_recurrent_kda
    except ImportError:
        pass
    else:
        caches, taps = torch.zeros(B, 3 * P, 4, device="cuda").bfloat16(), torch.cat(weights).bfloat16()
        state = torch.zeros(B, H, D, D, device="cuda")

        def alone(mixed=x):
            a, b, c = (mixed[:, s * P : (s + 1) * P].view(B, 1, H, D) for s in range(3))
            return fused_recurrent_kda(
                a, b, c, gate[:, None], beta[:, None], A_log=A_log, dt_bias=dt_bias, initial_state=state,
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            )[0]  # fmt: skip

        def peer():
            mixed = causal_conv1d_update(x, caches, weight=taps, activation="silu")
            mixed = mixed[0] if isinstance(mixed, tuple) else mixed
            return rms_norm_gated(alone(mixed)[:, 0], z, norm, None, activation="sigmoid", eps=1e-5)

        contenders |= {"peer": peer, "recurrence": alone}
    with torch.no_grad():
        times = measure(contenders, 21, graph=True)
    floor = B * H * D * D * 4 * 2
    recurrence = times.pop("recurrence", None)
    lines = [row("kda decode step", f"B={B} H={H} graph", "production", times, floor, "fla-core, three kernels")]
    if recurrence:
        both = {"ours": times["ours"], "peer": recurrence}
        lines.append(
            row("kda decode step", f"B={B} H={H} graph", "production", both, floor, "fla-core, recurrence alone")
        )
    return lines


def elementwise() -> list[dict[str, object]]:
    """Short convolution and gated norm, forward and backward."""
    T, P = 8192, 12288
    xs = [torch.randn(1, T, P, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    ws = [torch.randn(P, 4, device="cuda").requires_grad_() for _ in range(3)]
    ours_y = short_conv.short_conv(xs, ws)[0]
    up = [torch.randn_like(y) for y in ours_y]
    wide = torch.cat([x.detach() for x in xs], -1).requires_grad_()
    taps, up_wide = torch.cat([w.detach() for w in ws]).bfloat16().requires_grad_(), torch.cat(up, -1)
    forwards = {"ours": lambda: short_conv.short_conv(xs, ws)}
    backwards = {"ours": lambda: torch.autograd.grad(short_conv.short_conv(xs, ws)[0], [*xs, *ws], up)}
    n = 8192 * 96
    x, g, dy = (torch.randn(n, D, device="cuda").bfloat16() for _ in range(3))
    weight = torch.ones(D, device="cuda")
    leaves = [t.requires_grad_() for t in (x, g, weight)]
    norms = {"ours": lambda: gated_norm.gated_norm(*leaves)}
    norm_backwards = {"ours": lambda: torch.autograd.grad(gated_norm.gated_norm(*leaves), leaves, dy)}
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError:
        pass
    else:
        forwards["peer"] = lambda: causal_conv1d(wide, taps, activation="silu")
        backwards["peer"] = lambda: torch.autograd.grad(
            causal_conv1d(wide, taps, activation="silu")[0], [wide, taps], up_wide
        )
        norms["peer"] = lambda: rms_norm_gated(*leaves, None, activation="sigmoid", eps=1e-5)
        norm_backwards["peer"] = lambda: torch.autograd.grad(
            rms_norm_gated(*leaves, None, activation="sigmoid", eps=1e-5), leaves, dy
        )
    lines = []
    for name, shape, run, both, size, back in (
        ("short conv", f"{T} x {3 * P}", forwards, backwards, T * 3 * P * 2, 3),
        ("gated norm", f"{n} x {D}", norms, norm_backwards, n * D * 2, 5),
    ):
        with torch.no_grad():
            times = measure(run, 15, graph=True)
        lines.append(row(f"{name} forward", shape, "-", times, size * (3 if back == 5 else 2)))
        whole = measure(both, 15)
        # Backward alone is the difference: autograd does not run it without its forward.
        times = {who: [max(b - statistics.median(times[who]), 0.0) for b in values] for who, values in whole.items()}
        lines.append(row(f"{name} backward", shape, "-", times, size * back))
    return lines


def machine() -> dict[str, object]:
    """The GPU and everything whose version matters."""
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for package in ("triton", "fla-core"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    used = ptxas.path()
    versions["ptxas"] = ".".join(map(str, ptxas.version(used) or ())) if used else "absent"
    return {"machine": torch.cuda.get_device_name(), "versions": versions}


def main() -> None:
    """Run the parts asked for and print the table; with --json one JSON object last on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", default="forward,training,decode,elementwise")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kda.py needs an NVIDIA Hopper GPU; none is visible to torch")
    result = machine() | {"correctness": check(), "results": []}
    parts = {"forward": forward, "training": training, "decode": decode, "elementwise": elementwise}
    for part in options.parts.split(","):
        result["results"] += parts[part]()
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
