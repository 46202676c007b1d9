"""Where each second of the main job goes: tokens per second of engine and learner, and time by stage and part.

    python benchmarks/quickstart.py [--json] [--seed N]      runs the whole quickstart in a temporary directory
    python benchmarks/quickstart.py --run DIR [--json]       reads a finished run instead

Times are wall-clock seconds of the driver; where rollouts overlap the learner, its time contains theirs.
`floor_ms` is null: no hardware floor is claimed for a job of this kind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from k3rl.run.directory import package_versions
from k3rl.run.metrics import read_metrics

PARTS = {
    "time/wait_for_batch": "rollouts and grading",
    "time/wait_for_policy": "learner",
    "time/teacher": "teacher",
    "time/publish": "publishing weights",
    "time/step": "whole step",
}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = next(
        (row.split(":")[1].strip() for row in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in row), ""
    )
    return {"cpu": model or platform.processor(), "cores": os.cpu_count(), "system": platform.platform()}


def stage_results(rows: list[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    """One result a part of a stage: mean milliseconds a step; and tokens per second of learner and engine."""
    mine = [row for row in rows if row["source"] == stage]
    results = []
    for key, part in PARTS.items():
        values = [row[key] for row in mine if key in row]
        if values:
            results.append(result(f"{stage}: {part}", len(mine), 1000 * sum(values) / len(mine)))
    speeds = {"trained": ("perf/train_tokens", "time/wait_for_policy"), "sampled": ("perf/sampled_tokens", "time/step")}
    for verb, (tokens, clock) in speeds.items():
        count = sum(row.get(tokens, 0.0) * row.get("counts", {}).get(tokens, 1.0) for row in mine)
        seconds = sum(row.get(clock, 0.0) for row in mine)
        if count and seconds:
            over = "the learner's time" if verb == "trained" else "whole steps"
            speed = result(f"{stage}: tokens {verb} a second of {over}", len(mine), 0.0)
            results.append(speed | {"tokens_per_s": round(count / seconds)})
    return results


def result(name: str, steps: int, ms: float) -> dict[str, Any]:
    return {
        "name": name,
        "shape": f"{steps} steps",
        "regime": "cpu",
        "peer": "none",
        "ours_ms": round(ms, 2) if ms else None,
        "peer_ms": None,
        "ratio": None,
        "floor_ms": None,
        "share_of_floor": None,
    }


def run_quickstart(seed: int, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "k3rl",
        "rl",
        "quickstart",
        "--seed",
        str(seed),
        "--out",
        str(folder / "run"),
        "--json",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or run_quickstart(options.seed, Path(folder))
        rows = read_metrics(run / "metrics.jsonl")
        report = json.loads((run / "report.json").read_text())
    results = [entry for stage in report["stages"] for entry in stage_results(rows, stage)]
    for entry in results:
        speed = (
            f"{entry['tokens_per_s']:>12,} tokens/s"
            if "tokens_per_s" in entry
            else f"{entry['ours_ms']:>12,.1f} ms a step"
        )
        print(f"{entry['name']:<60}{entry['shape']:>12}{speed}")
    for stage, figures in report["stages"].items():
        print(f"{stage:<60}{figures['seconds']:>24,.1f} s")
    print(f"{'everything':<60}{report['seconds']:>24,.1f} s, {report['peak_rss_mb']:,} MB")
    if options.json:
        print(json.dumps({"machine": machine(), "versions": package_versions(), "results": results, "report": report}))


if __name__ == "__main__":
    main()
