"""Publishing a weight version under running requests, part by part; and bytes, time and memory of the encodings.

    python benchmarks/publish.py [--models k3-nano k3-mini] [--json] [--out FILE]      # two processes on a CPU
    python benchmarks/publish.py --gpu [--model k3-small] [--json] [--out FILE]        # on one GPU, and on two if there
    python benchmarks/publish.py --encodings [--runs RUN_DIR ...] [--model k3-mini] [--share 0.02]

Without `--encodings`: one learner and one engine, which decodes meanwhile, in two processes (`publish_routes.py`). Rows
are medians in milliseconds of gathering and quantizing, digests, transfer, verification with the second model, the
switch (the engine's pause) and the whole until the switch, all in flat buffers; the peer is the same versions through
rank 0, as deltas. After each way the digests of learner and engine are compared, which no row includes.

With it, `publish` rows read the metrics that `k3rl rl` wrote: bytes received by an engine as a share of the version's
stored bytes, over the publications after the first optimizer step. `take` rows change a `--share` of a model's values
by one place and time what an engine does from the first bucket to the proved second model; `peak_of_model` is the
largest resident memory meanwhile, less that before, in sizes of the model's parameters. Each encoding runs in a process
of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from k3rl.checkpoint import load_checkpoint, official_tensors, save_checkpoint
from k3rl.checkpoint.delta import encode
from k3rl.checkpoint.manifest import manifest_of
from k3rl.engine import Engine
from k3rl.model import K3Config, K3ForCausalLM


def row(name: str, shape: str, **more: Any) -> dict[str, Any]:
    blank = dict.fromkeys(("ours_ms", "peer_ms", "ratio", "floor_ms", "share_of_floor"))
    return {"name": name, "shape": shape, "regime": "cpu", "peer": "the whole version", **blank, **more}


def run_row(run: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    sent = [step for step in steps if step.get("publish/bytes_full") and step["publish/bytes"] > 1000]
    shares = [step["publish/bytes"] / step["publish/bytes_full"] for step in sent]
    rate = next(step["optim/lr"] for step in steps if "optim/lr" in step)
    return row(
        "publish",
        f"learning rate {rate:g}, {len(shares)} publications",
        learning_rate=rate,
        bytes_full=sent[0]["publish/bytes_full"],
        share_mean=round(sum(shares) / len(shares), 4),
        share_max=round(max(shares), 4),
    )


def changed(stored: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """The same tensors with a share of the values one place further."""
    generator, out = torch.Generator().manual_seed(0), {}
    for name, tensor in stored.items():
        words = tensor.clone()
        if tensor.dtype == torch.bfloat16:
            chosen = torch.rand(tensor.shape, generator=generator) < share
            words.view(torch.int16)[chosen] += 1
        elif name.endswith("_packed"):
            chosen = torch.rand(tensor.shape, generator=generator) < share
            words[chosen] ^= 1
        out[name] = words
    return out


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def make(name: str, share: float, folder: Path) -> dict[str, Any]:
    """Writes a checkpoint of the model and the buckets of a version with some values changed, in both encodings."""
    model = K3ForCausalLM(K3Config.named(name))
    model.init_weights(0)
    stored = dict(official_tensors(model))
    new = changed(stored, share)
    save_checkpoint(model, folder / "base")
    manifests = manifest_of(stored.items()), manifest_of(new.items())
    began = time.perf_counter()
    header, made = encode(stored, new, manifests, (0, 1))
    buckets, head = list(made), header.to_bytes(manifests[0])
    made_s = time.perf_counter() - began
    for encoding, parts in (("delta", buckets), ("whole", (save({key: tensor}) for key, tensor in new.items()))):
        (folder / encoding).mkdir()
        for number, part in enumerate(parts):
            (folder / encoding / f"{number:06}").write_bytes(part)
    (folder / "header").write_bytes(head)
    (folder / "manifest.json").write_text(json.dumps(manifests[1]))
    return {"make_ms": round(1e3 * made_s, 1), "bytes_full": sum(tensor.nbytes for tensor in new.values())}


def take(encoding: str, folder: Path) -> dict[str, Any]:
    """In a process that has nothing but an engine: time and memory of the first phase, in one encoding."""
    engine = Engine(load_checkpoint(folder / "base", dtype=torch.float32))
    parameters = sum(p.nbytes for p in engine.model.parameters())
    manifest, files = json.loads((folder / "manifest.json").read_text()), sorted((folder / encoding).iterdir())
    assert len(engine.manifest) == len(manifest)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, began = resident("VmRSS"), time.perf_counter()
    send(engine, encoding, (folder / "header").read_bytes(), (file.read_bytes() for file in files), manifest)
    return {
        "ours_ms": round(1e3 * (time.perf_counter() - began), 1),
        "bytes": sum(file.stat().st_size for file in files),
        "model_bytes": parameters,
        "peak_bytes": resident("VmHWM") - before,
        "peak_of_model": round((resident("VmHWM") - before) / parameters, 3),
    }


def send(engine: Engine, encoding: str, head: bytes, buckets: Iterable[bytes], manifest: dict[str, str]) -> None:
    if encoding == "delta":
        engine.start_weight_delta(head)
        for bucket in buckets:
            engine.update_weights_by_delta(bucket)
    else:
        engine.start_weight_update(1, manifest)
        for bucket in buckets:
            engine.update_weights(load(bucket).items())
    engine.verify_weight_update()


def encodings(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The `publish` and `take` rows."""
    rows = [run_row(run) for run in arguments.runs]
    with tempfile.TemporaryDirectory() as folder:
        made = make(arguments.model, arguments.share, Path(folder))
        for encoding in ("whole", "delta"):
            words = [sys.executable, __file__, "--encoding", encoding, "--folder", folder]
            # Freed blocks go back at once, so that the resident size is what is held.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
            figures = {**made, **json.loads(done.stdout.splitlines()[-1])}
            rows.append(
                row(f"take, {encoding}", f"{arguments.model}, {arguments.share:g} of the values changed", **figures)
            )
    return rows


def routes_module() -> Any:
    """`publish_routes.py`, under a name by which the engine's process finds it too."""
    sys.path.insert(0, str(Path(__file__).parent))
    return importlib.import_module("publish_routes")


def routes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report of both ways, and whether all comparisons held."""
    module = routes_module()
    device = torch.device("cuda", 0) if arguments.gpu else torch.device("cpu")
    report = module.gpu.Report(device, arguments.out, arguments.budget_s)
    if arguments.gpu:
        cases = [(arguments.model or "k3-small", "ipc", False)]
        if torch.cuda.device_count() > 1:
            cases.append((arguments.model or "k3-small", "broadcast", True))
    else:
        cases = [(name, "shm", False) for name in arguments.models]
    for name, transport, apart in cases:
        if not report.time_left(f"{name} by {transport}"):
            continue
        try:
            module.measure(report, name, device, transport, arguments.repeats, apart=apart)
        except Exception as error:  # the other cases are measured all the same
            report.failed("publication", f"{name} by {transport}", error)
            traceback.print_exc()
    return report.json()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["k3-nano", "k3-mini"], help="on a CPU")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=150, help="no case is begun after so many seconds")
    parser.add_argument("--encodings", action="store_true", help="bytes, time and memory of delta and whole instead")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="run directories of `k3rl rl`")
    parser.add_argument("--model")
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--encoding", choices=["delta", "whole"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.encoding:
        print(json.dumps(take(arguments.encoding, arguments.folder)))
        return 0
    if arguments.encodings:
        arguments.model = arguments.model or "k3-mini"
        report = {
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "versions": {name: version(name) for name in ("torch", "numpy")} | {"python": platform.python_version()},
            "results": encodings(arguments),
        }
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    else:
        report = routes(arguments)
    print(json.dumps(report) if arguments.json else "\n".join(json.dumps(entry) for entry in report["results"]))
    return 0 if all(check["ok"] for check in report.get("checks", ())) else 1


if __name__ == "__main__":
    sys.exit(main())
