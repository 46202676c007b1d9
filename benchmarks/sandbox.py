"""What a sandboxed program costs, and what it leaves: `python benchmarks/sandbox.py [--json] [--calls N] ...`.

Program rows: milliseconds per program through `ProgramRunner`; the peer starts a bubblewrap and a Python for each
program, the floor is a bare fork and exit of a small Python. Call rows: `/bin/true`, each in a fresh bubblewrap; the
peer is the same command as a plain process. They are medians of `--repeats` runs, with the machine's load beside
them; the bars are 15 ms a call and 150 calls a second on 2 cores. The last row makes `--left` calls, every fifth of
which ends badly, and counts what is left of them: processes, mounts, files, control groups, descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from k3rl.envs import make
from k3rl.envs.leaks import watched
from k3rl.envs.sandbox import (
    ExecOutcome,
    ProgramJob,
    ProgramRunner,
    ProgramStatus,
    SandboxLimits,
    cgroups,
    provider_named,
)

CALL_MS, CALLS_PER_S = 15.0, 150.0  # the bars
BADLY = (  # (command, seconds that it gets)
    ("kill -9 $$", 20.0),
    ("head -c 9000000 /dev/zero", 20.0),
    ("(setsid setsid sleep 60 &) ; sleep 60", 0.05),
    ("(setsid sleep 60 &) ; exit 3", 20.0),
    ("no-such-command", 20.0),
)

_FORK = (
    "import os, time\nn = 300\nstarted = time.perf_counter()\n"
    "for _ in range(n):\n pid = os.fork()\n if pid == 0: os._exit(0)\n os.waitpid(pid, 0)\n"
    "print((time.perf_counter() - started) / n * 1000)"
)


def jobs(count: int) -> list[ProgramJob]:
    """Reference programs of the quickstart environment, no two alike."""
    environment = make("coding-lists")
    made = []
    for index in range(count):
        task = environment.source.get("train", index)
        assert task.hidden is not None
        calls = tuple((values,) for values in task.hidden["inputs"])
        made.append(ProgramJob(f"{task.hidden['program']}\n# {index}", "f", calls))
    return made


def programs(count: int, workers: int) -> float:
    """Milliseconds per program of one batch on warm workers."""
    batch = jobs(count)
    with ProgramRunner(provider_named("bwrap"), workers=workers) as runner:
        runner.run_batch(jobs(4 * workers))
        started = time.perf_counter()
        outcomes = runner.run_batch(batch)
        elapsed = time.perf_counter() - started
    if any(outcome.status is not ProgramStatus.RETURNED for outcome in outcomes):
        raise RuntimeError("a reference program failed")
    return elapsed / count * 1000


def first_program() -> float:
    """Milliseconds from nothing to the first outcome: start of the sandbox included."""
    started = time.perf_counter()
    with ProgramRunner(provider_named("bwrap")) as runner:
        runner.run_batch([ProgramJob("def f(a):\n return a", "f", ((1,),))])
        return (time.perf_counter() - started) * 1000


def calls(count: int, provider: str, *argv: str, at_once: int = 1) -> tuple[float, float]:
    """(median milliseconds of a call, calls per second) of a command in one sandbox per strand."""

    async def strand(times: list[float]) -> None:
        async with await provider_named(provider).create() as box:
            for _ in range(count // at_once):
                started = time.perf_counter()
                result = await box.exec(argv)
                times.append((time.perf_counter() - started) * 1000)
                if result.returncode != 0:
                    raise RuntimeError(result.stderr.decode())

    async def all_strands() -> tuple[float, float]:
        times: list[float] = []
        started = time.perf_counter()
        await asyncio.gather(*[strand(times) for _ in range(at_once)])
        return statistics.median(times), len(times) / (time.perf_counter() - started)

    return asyncio.run(all_strands())


def left_after(count: int) -> tuple[float, list[str]]:
    """(milliseconds a call, what is left in words) of calls of which every fifth ends badly, some by being dropped."""

    async def strand(number: int) -> None:
        async with await provider_named("bwrap").create(SandboxLimits(processes=16)) as box:
            for index in range(number, count, 4):
                if index % 5:
                    await box.exec(["/bin/true"])
                    continue
                script, seconds = BADLY[index // 5 % len(BADLY)]
                done = await box.exec(["/bin/sh", "-c", script], timeout_s=seconds)
                if done.outcome is ExecOutcome.EXITED and done.returncode == 0:
                    raise RuntimeError(f"`{script}` ended well")
                if index % 25 == 0:
                    dropped = asyncio.create_task(box.exec(["/bin/sleep", "60"]))
                    await asyncio.sleep(0.004)
                    dropped.cancel()
                    await asyncio.wait({dropped})

    async def all_strands() -> None:
        await asyncio.gather(*map(strand, range(4)))

    with watched() as watch:
        started = time.perf_counter()
        asyncio.run(all_strands())
        elapsed = time.perf_counter() - started
        return elapsed / count * 1000, watch.leaks()


def plain(count: int, *argv: str) -> float:
    """Median milliseconds of a plain process."""
    return statistics.median(
        _timed(lambda: subprocess.run(argv, check=True, capture_output=True)) for _ in range(count)
    )


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def row(
    name: str, shape: str, regime: str, ours_ms: float, peer: str, peer_ms: float, floor_ms: float | None
) -> dict[str, Any]:
    """One result with the keys that every benchmark prints."""
    return {
        "name": name,
        "shape": shape,
        "regime": regime,
        "peer": peer,
        "ours_ms": round(ours_ms, 3),
        "peer_ms": round(peer_ms, 3),
        "ratio": round(peer_ms / ours_ms, 3),
        "floor_ms": None if floor_ms is None else round(floor_ms, 3),
        "share_of_floor": None if floor_ms is None else round(floor_ms / ours_ms, 3),
        "per_second": round(1000 / ours_ms, 1),
    }


def measure(count: int, call_count: int, repeats: int, left: int) -> list[dict[str, Any]]:
    """All rows."""
    python = ("/usr/bin/python3", "-I", "-S", "-c", "pass")
    floor = float(subprocess.run([*python[:3], "-c", _FORK], check=True, capture_output=True, text=True).stdout)
    fresh, _ = calls(max(10, call_count // 10), "bwrap", *python)
    peer = "a bubblewrap and a Python each"
    results = [
        row("program", "6 lists", f"{workers} at a time", programs(count, workers), peer, fresh, floor)
        for workers in (1, 2)
    ]
    results.append(row("first program", "1 call", "cold", first_program(), peer, fresh, None))
    process = plain(call_count // 4, "/bin/true")
    runs = [(calls(call_count, "bwrap", "/bin/true")[0], os.getloadavg()[0]) for _ in range(repeats)]
    one = statistics.median(ms for ms, _ in runs)
    single = row("call", "/bin/true", "median, one at a time", one, "plain process", process, None)
    results.append({**single, "bar_ms": CALL_MS, "runs_ms": [round(ms, 2) for ms, _ in runs], "load": runs[-1][1]})
    many = [calls(call_count, "bwrap", "/bin/true", at_once=4)[1] for _ in range(repeats)]
    rate = statistics.median(many)
    packed = row("call", "/bin/true", "mean, four at a time", 1000 / rate, "plain process", process, None)
    load = os.getloadavg()[0]
    results.append(
        {**packed, "bar_per_second": CALLS_PER_S, "runs_per_second": [round(one, 1) for one in many], "load": load}
    )
    each, leaks = left_after(left)
    after = row("calls and crashes", f"{left} calls", "four at a time", each, "plain process", process, None)
    results.append({**after, "calls": left, "left_behind": leaks})
    return results


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Cost of sandboxed programs and commands.")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--programs", type=int, default=1000, help="programs in a batch")
    parser.add_argument("--calls", type=int, default=400, help="sandboxed commands")
    parser.add_argument("--repeats", type=int, default=5, help="runs of the call rows, of which the median counts")
    parser.add_argument("--left", type=int, default=1000, help="calls after which nothing may be left")
    options = parser.parse_args()
    results = measure(options.programs, options.calls, options.repeats, options.left)
    if not options.json:
        for item in results:
            print(
                f"{item['name']:14} {item['regime']:22} {item['ours_ms']:8.2f} ms  {item['per_second']:7.1f}/s  "
                f"{item['peer']}: {item['peer_ms']:.2f} ms ({item['ratio']:.1f}x)"
                + (f"  load {item['load']:.1f}" if "load" in item else "")
                + (f"  left behind: {item['left_behind'] or 'nothing'}" if "left_behind" in item else "")
            )
        return
    bwrap = subprocess.run(["bwrap", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    groups = cgroups.available()
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "sandbox_limits": groups.describe() if groups is not None else "rlimits",
    }
    versions = {"python": sys.version.split()[0], "bubblewrap": bwrap}
    print(json.dumps({"machine": machine, "versions": versions, "results": results}))


if __name__ == "__main__":
    main()
