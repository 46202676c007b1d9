"""Kernel benchmark: correctness against float64 first, then times against the peers that are installed.

    python benchmarks/kda.py --json [--parts decode,elementwise,forward,training,unbounded] [--out FILE] [--warm N]
    [--seconds S] python benchmarks/kda.py --table FILE ...     the table of result files
    python benchmarks/kda.py --dry                the whole program at tiny sizes on a CPU, under Triton's interpreter

Needs one Hopper GPU. Every time is the median of samples taken in rotating contender order with the L2 cache flushed
before each; "graph" rows replay a captured CUDA graph. A family that fails a check is not timed. A peer that is not
installed has peer_ms null. Figures that cannot be measured beside ours (a wheel that does not run on this torch) are
constants with the word "recorded". Floors: bytes / 4.3 TB/s, every input read and every output written once, bf16, fp32
states. The result file is written after every row, so that a run that is cut short loses nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # safe-path mode leaves a script's own folder out
if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # time fla's own kernels, not what it may dispatch to

import kda_cases as cases
import kda_checks
import torch

from k3rl.kernels import dispatch, ptxas

FAMILIES = {"kda forward": "kda", "kda forward+backward": "kda", "kda decode step": "kda_decode"}
FAMILIES |= {"short conv forward": "short_conv", "short conv backward": "short_conv"}
FAMILIES |= {"gated norm forward": "gated_norm", "gated norm backward": "gated_norm"}


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
    name = "dry run on a CPU" if cases.SIZE == "dry" else torch.cuda.get_device_name()
    return {"machine": name, "versions": versions}


def worker(index: int, count: int, parts: list[str]) -> None:
    """Compile this worker's share of everything: our contenders by turns, of a peer every config of its autotuner.

    Compiled kernels meet in Triton's cache on disk, where the process that measures finds them.
    """
    cases.SIZE = "small"
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
        turn = (index + zlib.crc32(self.base_fn.__name__.encode())) % count
        for config in configs[turn::count]:
            with contextlib.suppress(Exception):  # what does not compile is met, and said, by the process that measures
                self.fn.run(*args, **(kwargs | {"warmup": True}), **config.all_kwargs())
        # Nothing is launched: shapes are enough to reach the next kernel, and a launch would compile for each worker.

    Autotuner.run = run
    for _, _, check in list(kda_checks.checks())[index::count]:
        kda_checks.run(check, poison=False)
    turn = 0
    seen = set()
    for part in parts:
        for case in cases.TABLES[part]():
            builds = [case.build] + ([case.without] if case.without else [])
            for name, contender in [pair for build in builds for pair in build().items()]:
                key = (case.name, name, case.shape.split("H=")[-1].replace(" graph", ""))
                if key in seen or case.regime not in ("production", "-", cases.UNBOUNDED[0]):
                    continue
                seen.add(key)
                turn += 1
                if turn % count == index or name in ("peer", "recurrence"):
                    with contextlib.suppress(Exception):
                        contender()
            gc.collect()


def warm(count: int, parts: list[str], limit: float) -> float:
    """Run `count` workers side by side; returns the seconds that took. One that takes longer than `limit` is ended."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--parts", ",".join(parts), "--worker"]
    running = [subprocess.Popen([*command, f"{i}/{count}"], stderr=subprocess.DEVNULL) for i in range(count)]
    for process in running:
        try:
            process.wait(max(1.0, limit - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return time.monotonic() - start


def rows(case: cases.Case) -> list[dict[str, object]]:
    """Time one case: a line for what runs by default and one for each variant, each beside the peer."""
    contenders = case.build()
    times, failed = cases.measure(contenders, case.samples, case.graph)
    times = {name: [value / case.calls for value in values] for name, values in times.items()}
    typical = {name: cases.typical(name, values) for name, values in times.items()}
    if case.without is not None:
        forward, _ = cases.measure({k: run for k, run in case.without().items() if k in ("ours", "peer")}, 24, False)
        bases = {name: forward.get("peer" if name == "peer" else "ours") for name in typical}
        typical = {name: typical[name] - cases.typical(name, base) for name, base in bases.items() if base}
    memory = {}
    if case.memory:
        memory = {name: cases.extra_memory(contenders[name]) for name in ("ours", "peer") if name in times}
    floor = case.floor / cases.BANDWIDTH * 1e3
    peers = {case.peer: typical.get("peer")}
    if "recurrence" in contenders:
        peers["fla-core, recurrence alone"] = typical.get("recurrence")
    if "launch" in contenders:
        peers["nothing: a kernel that adds 1 to one number"] = typical.get("launch")
    if case.recorded:
        peers["FlashKDA, recorded"] = case.recorded
    lines = []
    for name in contenders:
        if not name.startswith("ours"):
            continue
        for peer, theirs in peers.items():
            ours = typical.get(name)
            line = {"name": case.name, "shape": case.shape, "regime": case.regime, "peer": peer, "ours_ms": ours,
                    "peer_ms": theirs, "ratio": theirs / ours if theirs and ours else None, "floor_ms": floor,
                    "share_of_floor": floor / ours if ours else None,
                    "variant": name.removeprefix("ours").removeprefix(": ") or "default"}  # fmt: skip
            for who, label in ((name, "ours"), ("peer", "peer")):
                values = sorted(times.get(who, ()))
                if values and case.without is None:
                    line[f"{label}_p20_p80_ms"] = [values[len(values) // 5], values[-1 - len(values) // 5]]
                if who in failed:
                    line[f"{label}_failed"] = failed[who]
            line |= {f"{who}_extra_gib": value for who, value in memory.items()}
            lines.append(line)
    return lines


def shown(value: object, width: int, digits: int) -> str:
    """A number, or a dash where there is none."""
    return f"{value:{width}.{digits}f}" if isinstance(value, int | float) else "-".rjust(width)


def table(results: list[dict[str, object]]) -> str:
    """The default and the best variant of each row, against each peer."""
    by_row = defaultdict(list)
    for line in results:
        by_row[line["name"], line["shape"], line["regime"], line["peer"]].append(line)
    text = [f"{'':23s}{'':27s}{'':11s}   ours  ratio   best  ratio    peer   floor  share  GiB"]
    for (name, shape, regime, peer), lines in by_row.items():
        timed = [line for line in lines if line["ours_ms"]]
        default = next((line for line in lines if line["variant"] == "default"), lines[0])
        best = min(timed, key=lambda line: line["ours_ms"]) if timed else default
        gib = f"{default['ours_extra_gib']:.2f}" if default.get("ours_extra_gib") else ""
        gib += f" / {default['peer_extra_gib']:.2f}" if default.get("peer_extra_gib") else ""
        text.append(
            f"{name:23s}{shape:27s}{regime:11s}{shown(default['ours_ms'], 7, 4)}{shown(default['ratio'], 7, 2)}"
            f"{shown(best['ours_ms'], 7, 4)}{shown(best['ratio'], 7, 2)} {shown(default['peer_ms'], 7, 4)} "
            f"{shown(default['floor_ms'], 7, 4)}{shown(best['share_of_floor'], 7, 2)}  {gib}  {peer}; {best['variant']}"
        )
    return "\n".join(text)


def run_checks(result: dict[str, object], save, wanted: set[str]) -> set[str]:
    """Run the checks of the wanted families; returns those that failed one."""
    bad = set()
    for family, name, check in kda_checks.checks():
        if family not in wanted:
            continue
        start = time.monotonic()
        found, problem = kda_checks.run(check)
        line = {"family": family, "check": name, "found": found, "problem": problem, "s": time.monotonic() - start}
        result["correctness"].append(line)
        save()
        worst = max(((value, key) for key, value in found.items()), default=("", ""))
        print(f"{'FAILED' if problem else 'ok':7s}{family}: {name} {problem or worst} {line['s']:.1f} s",
              file=sys.stderr)  # fmt: skip
        if problem:
            bad |= {"kda", "kda_decode", "short_conv", "gated_norm"} if family == "layer" else {family}
    return bad


def quicken_autotuning() -> None:
    """Let a peer's autotuner take 25 ms a config instead of 100: it has hundreds of them."""
    import triton.testing

    measured = triton.testing.do_bench

    def shorter(run, warmup=25, rep=100, **options):
        return measured(run, warmup=min(warmup, 5), rep=min(rep, 25), **options)

    triton.testing.do_bench = shorter


def main() -> None:
    """Check, time and print the table; with --json one JSON object last on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU: finds what would stop a real run")
    parser.add_argument("--parts", default=",".join(cases.TABLES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", type=int, default=0, help="processes that compile every part beforehand")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this many seconds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these files and end")
    options = parser.parse_args()
    if options.table:
        return print(table([line for path in options.table for line in json.loads(path.read_text())["results"]]))
    parts = options.parts.split(",")
    start = time.monotonic()
    if options.dry:
        cases.SIZE = "dry"
        dispatch.use_kernel = lambda *_, **__: True
    elif not torch.cuda.is_available():
        raise SystemExit("benchmarks/kda.py needs an NVIDIA Hopper GPU; none is visible to torch (--dry needs none)")
    if options.worker:
        return worker(*map(int, options.worker.split("/")), parts)
    result: dict[str, object] = machine() | {"correctness": [], "results": [], "seconds": {}}

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    if options.warm:
        result["seconds"]["warm"] = warm(options.warm, parts, 150.0)
    with dispatch.strict():
        wanted = {FAMILIES[case.name] for part in parts for case in cases.TABLES[part]()}
        bad = run_checks(result, save, wanted | ({"layer"} if "kda" in wanted else set()))
        result["seconds"]["checks"] = time.monotonic() - start
        if not options.dry:
            quicken_autotuning()
        for part in parts:
            for case in cases.TABLES[part]():
                late = time.monotonic() - start > options.seconds
                if late or FAMILIES[case.name] in bad:
                    why = "no time was left" if late else "its family failed a check"
                    print(f"not timed, {why}: {case.name} {case.shape} {case.regime}", file=sys.stderr)
                    continue
                lines = rows(case)
                result["results"] += lines
                print(table(lines).partition("\n")[2], file=sys.stderr)
                gc.collect()
                if not options.dry:
                    torch.cuda.empty_cache()
                save()
            result["seconds"][part] = time.monotonic() - start
    save()
    print(table(result["results"]), file=sys.stderr)
    print({name: round(value) for name, value in result["seconds"].items()}, "failed:", sorted(bad), file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    if bad:
        raise SystemExit(f"not timed, a check failed: {', '.join(sorted(bad))}")


if __name__ == "__main__":
    main()
