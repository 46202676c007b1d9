"""The MX quantizer and the optimizer step against public implementations on the same shapes, in one process.

    python benchmarks/numerics.py [--json] [--threads N] [--model k3-nano] [--repeats 15] [--out FILE]

Peers: `torch.float8_e4m3fn` casts for MXFP8 and a `torch.bucketize` search for MXFP4 (both give the same values, which
is checked before timing); `torch.optim.Muon` on the matrices with `torch.optim.AdamW` on the rest, and AdamW on all.
Contenders take turns; a figure is the fastest of the repeats, so that other work on the machine counts least.
Floors: a quantizer must read and write its tensor once (timed as a copy of it); a Muon step must do the products of
Newton-Schulz (their operations at the rate of the fastest batched product timed here); an AdamW step must read four
tensors and write three (at the same copy's rate).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rl.model import K3Config, K3ForCausalLM
from k3rl.numerics import mx, project, stored_dtype
from k3rl.optim import MuonConfig, PerHeadMuon, Project, Variant

Timed = dict[str, Callable[[], object]]


def fastest(contenders: Timed, repeats: int, inner: int) -> dict[str, float]:
    """Milliseconds of one call of each contender: the fastest of `repeats` rounds of `inner` calls, taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(repeats):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(inner):
                call()
            samples[name].append((time.perf_counter() - start) / inner * 1e3)
    return {name: min(values) for name, values in samples.items()}


def row(
    name: str, shape: str, peer: str, ours: float, theirs: float | None, floor: float, **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "shape": shape,
        "regime": f"cpu, {torch.get_num_threads()} threads",
        "peer": peer,
        "ours_ms": round(ours, 4),
        "peer_ms": None if theirs is None else round(theirs, 4),
        "ratio": None if theirs is None else round(theirs / ours, 3),
        "floor_ms": round(floor, 4),
        "share_of_floor": round(floor / ours, 3),
        **more,
    }


# ---------------------------------------------------------------------------------------------------- quantizer


def cast_mxfp8(x: Tensor) -> Tensor:
    """fake_quantize_mxfp8 by torch's own float8 cast."""
    blocks = x.unflatten(-1, (-1, mx.BLOCK))
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / 448.0)
    power = exponent.exponent - (exponent.mantissa == 0.5).int()  # smallest e with 448 * 2^e >= amax
    scale = torch.ldexp(torch.ones_like(exponent.mantissa), power)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(x.shape)


_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BOUNDARIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def search_mxfp4(x: Tensor) -> Tensor:
    """fake_quantize_mxfp4 by a search of the seven boundaries."""
    blocks = x.unflatten(-1, (-1, mx.BLOCK))
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / 6.0)
    power = exponent.exponent - (exponent.mantissa == 0.5).int()
    scale = torch.ldexp(torch.ones_like(exponent.mantissa), power)
    codes = torch.bucketize((blocks / scale).abs(), _BOUNDARIES)
    return (_MAGNITUDES[codes] * scale).copysign(blocks).view(x.shape)


def quantizer_rows(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for shape in ((64, 64), (512, 64), (6000, 64), (12288, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for name, ours, peer_name, peer in (
            ("fake_quantize_mxfp8", mx.fake_quantize_mxfp8, "torch float8_e4m3fn cast", cast_mxfp8),
            ("fake_quantize_mxfp4", mx.fake_quantize_mxfp4, "torch.bucketize search", search_mxfp4),
        ):
            if not torch.equal(ours(x), peer(x)):
                raise SystemExit(f"{name} and {peer_name} differ; the comparison would time two different things")
            contenders: Timed = {
                "ours": lambda ours=ours, x=x: ours(x),  # type: ignore[misc]
                "peer": lambda peer=peer, x=x: peer(x),  # type: ignore[misc]
                "floor": x.clone,
            }
            times = fastest(contenders, repeats, 10)
            rate = 2 * x.numel() * x.element_size() / times["ours"] / 1e6
            rows.append(
                row(
                    name, str(list(shape)), peer_name, times["ours"], times["peer"], times["floor"], gb_s=round(rate, 2)
                )
            )
    return rows + packing_rows(repeats)


def packing_rows(repeats: int) -> list[dict[str, Any]]:
    """Export and load: bytes from values and back, without a peer."""
    x = torch.randn(12288, 64, generator=torch.Generator().manual_seed(0))
    packed, elements = mx.quantize_mxfp4(x), mx.quantize_mxfp8(x)
    calls: Timed = {
        "quantize_mxfp4": lambda: mx.quantize_mxfp4(x),
        "dequantize_mxfp4": lambda: mx.dequantize_mxfp4(*packed),
        "quantize_mxfp8": lambda: mx.quantize_mxfp8(x),
        "dequantize_mxfp8": lambda: mx.dequantize_mxfp8(*elements),
    }
    times = fastest(calls | {"floor": x.clone}, repeats, 5)
    bytes_moved = {"mxfp4": x.numel() * (4 + 17 / 32), "mxfp8": x.numel() * (4 + 33 / 32)}
    return [
        row(
            name,
            str(list(x.shape)),
            "none",
            times[name],
            None,
            times["floor"] * bytes_moved[name[-5:]] / (8 * x.numel()),
            gb_s=round(bytes_moved[name[-5:]] / times[name] / 1e6, 2),
        )
        for name in calls
    ]


# ---------------------------------------------------------------------------------------------------- optimizer


def copy_gb_s() -> float:
    """Bytes read and written per second by a copy of 16 MiB."""
    x = torch.randn(1 << 22)
    return 2 * x.numel() * 4 / fastest({"copy": x.clone}, 9, 5)["copy"] / 1e6


def product_gflop_s() -> float:
    """The fastest batched float32 product found, on blocks of 64 to 256."""
    best = 0.0
    for side in (64, 128, 256):
        x = torch.randn(max(1, (1 << 20) // side**2), side, side)
        best = max(best, 2 * len(x) * side**3 / fastest({"bmm": lambda x=x: torch.bmm(x, x)}, 9, 5)["bmm"] / 1e6)  # type: ignore[misc]
    return best


def newton_schulz_flop(optimizer: PerHeadMuon) -> float:
    """Operations of five steps over every block: X X^T, A (bI + cA), (aI + B) X."""
    total = 0.0
    for name, info in optimizer.infos.items():
        if info.group == "muon":
            for rows in info.row_blocks:
                short, long = sorted((rows, optimizer.params[name].shape[1]))
                total += 5 * 2 * (2 * short * short * long + short**3)
    return total


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def optimizer_rows(model_name: str, repeats: int) -> list[dict[str, Any]]:
    config = K3Config.named(model_name)
    model = K3ForCausalLM(config)
    model.init_weights(0)
    params = [(name, param) for name, param in model.official_parameters() if param.requires_grad]
    generator = torch.Generator().manual_seed(0)
    for _, param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3

    def ship(name: str, master: Tensor) -> Tensor:
        return project(master, stored_dtype(name), "ceil")

    def build(variant: Variant, project: Project | None = None) -> PerHeadMuon:
        return PerHeadMuon(params, config, MuonConfig(1e-4, 1e-4, variant=variant), project=project)

    ours = {
        "per_head_muon": build("per_head_muon"),
        "per_head_muon, shipped values": build("per_head_muon", ship),
        "muon_whole": build("muon_whole"),
        "adamw": build("adamw"),
    }
    matrices = [p for n, p in params if ours["per_head_muon"].infos[n].group == "muon"]
    rest = [p for n, p in params if ours["per_head_muon"].infos[n].group == "adamw"]
    muon = torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    side = torch.optim.AdamW(rest, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    adamw = torch.optim.AdamW([p for _, p in params], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    calls: Timed = {name: optimizer.step for name, optimizer in ours.items()}
    times = fastest(calls | {"peer muon": lambda: (muon.step(), side.step()), "peer adamw": adamw.step}, repeats, 1)

    numel = sum(p.numel() for _, p in params)
    bandwidth, products = copy_gb_s(), product_gflop_s()
    shape = f"{model_name}: {len(params)} tensors, {numel} parameters"
    rows = []
    for name, optimizer in ours.items():
        is_adamw = name == "adamw"
        floor = 7 * 4 * numel / bandwidth / 1e6 if is_adamw else newton_schulz_flop(optimizer) / products / 1e6
        own = sum(
            v.numel() * v.element_size() for k, v in optimizer.state_tensors().items() if not k.endswith("/steps")
        )
        theirs = state_bytes(adamw) if is_adamw else state_bytes(muon) + state_bytes(side)
        rows.append(
            row(
                f"optimizer step, {name}",
                shape,
                "torch.optim.AdamW" if is_adamw else "torch.optim.Muon + AdamW",
                times[name],
                times["peer adamw" if is_adamw else "peer muon"],
                floor,
                state_bytes_per_parameter=round(own / numel, 2),
                peer_state_bytes_per_parameter=round(theirs / numel, 2),
            )
        )
    return rows


# --------------------------------------------------------------------------------------------------------- main


def machine() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {"cpu": cpu or platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="k3-nano", help="a named size whose parameters the optimizers step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "numpy")} | {"python": platform.python_version()},
        "results": quantizer_rows(arguments.repeats) + optimizer_rows(arguments.model, arguments.repeats),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return
    for entry in report["results"]:
        peer = (
            "-" if entry["peer_ms"] is None else f"{entry['peer_ms']:.3f} ms ({entry['ratio']:.2f}x, {entry['peer']})"
        )
        print(f"{entry['name']:44} {entry['shape']:44} {entry['ours_ms']:9.3f} ms  peer {peer}")


if __name__ == "__main__":
    main()
