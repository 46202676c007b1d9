"""GPU mode: a submission is compiled in a sandbox, launched and timed in a process of ours, and judged here.

    sandbox    `compile_worker`: all Python of a submission runs here, without a GPU, contents or expected values
    device     launches machine code, owns the clock; no code of a submission but device code
    grader     expected values, comparison, plausibility

So a submission cannot patch a timer, start a thread, use another stream, keep a tensor, or see a stopwatch. What is
left to it is device code: no row of the contents comes twice, outputs begin as NaN, the L2 cache is flushed, scratch is
zeroed, bytes around the tensors are watched, and a launch that changes nothing must leave outputs untouched.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3rl.envs.compiler.toolchain import Refused
from k3rl.envs.kernel import python
from k3rl.envs.kernel.compare import complaint
from k3rl.envs.kernel.driver import Call
from k3rl.envs.kernel.operators import STORAGE, Arrays, Dims, Operator
from k3rl.envs.kernel.reward import implausible, reward
from k3rl.envs.kernel.tasks import operator_of
from k3rl.envs.kernel.toolchain import KernelToolsMissing
from k3rl.envs.sandbox import SandboxDied, SandboxLimits, SandboxProvider
from k3rl.types import Score, Scored, Task

SETS = 3  # of contents for one shape; each repeat takes one of them, rolled and with other low bits
ROWS, CHECKERS = 256, 4  # rows of an output that are compared (all of the last one), and outputs at a time
REPEATS, WARMUPS, CHECKED = 30, 3, 6
SPREAD = 0.10  # of the median, between the 20th and the 80th percentile: above it the measurement is made again
TRIES = 3
FLUSH_BYTES = 256 * 2**20  # more than twice the L2 cache of any GPU of today
MEASURE_S = 300.0
COMPILE_S = 300.0
MAX_LAUNCHES, MAX_CUBIN_BYTES, MAX_SHARED = 64, 16 * 2**20, 232_448
HOPPER = 90
LIBRARY = "libcuda.so.1"
NVCC_PATH = "/usr/local/cuda/bin:/usr/local/bin:/usr/bin"  # as compile_worker looks for it
_LIMITS = SandboxLimits(memory_bytes=32768 * 2**20, processes=64, cpu_s=300, file_bytes=256 * 2**20)
_SAMPLE = 4  # salt of contents

Launches = list[dict[str, Any]]


class NoGpu(KernelToolsMissing):
    """GPU mode on a machine without a CUDA driver or GPU."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a submission launches for each call, and its machine code by file name."""

    plans: list[Launches]
    cubins: Mapping[str, bytes]


def check(provider: SandboxProvider, language: str) -> None:
    """Raises KernelToolsMissing or NoGpu when a submission cannot be compiled or run here."""
    python.check(provider, "compile")  # the expert is in Triton
    if language == "cuda" and shutil.which("nvcc", path=NVCC_PATH) is None:
        raise KernelToolsMissing(
            f"kernels in CUDA need nvcc in one of {NVCC_PATH.replace(':', ', ')}; install the CUDA toolkit"
        )
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise NoGpu(
            "GPU mode needs an NVIDIA driver (libcuda.so.1), which is not here; use `device=cpu`, where kernels "
            "are judged by counted instructions"
        ) from None


async def compiled(
    provider: SandboxProvider, language: str, files: Mapping[str, str], calls: Sequence[Call], capability: int = HOPPER
) -> Compiled | str:
    """Machine code and launches, or why there are none. Needs no GPU."""
    async with await python.with_packages(provider).create(_LIMITS) as sandbox:
        for name in ("kernel.py", "kernel.cu"):
            if name in files:
                await sandbox.write(name, files[name].encode())
        request = python.request(language, calls) | {"capability": capability}
        await sandbox.write("request.json", json.dumps(request).encode())
        variables = {"HOME": "/tmp", "TRITON_CACHE_DIR": "/tmp/triton"}
        failed = await python.script(provider, sandbox, "compile_worker.py", variables, COMPILE_S)
        if failed is not None:
            return failed
        try:
            plans = plans_of(json.loads(await sandbox.read("plan.json", 2**20)), calls)
            numbers = {launch["cubin"] for plan in plans for launch in plan}
            cubins = {f"{n}.cubin": await sandbox.read(f"{n}.cubin", MAX_CUBIN_BYTES + 1) for n in sorted(numbers)}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return f"what it wants to launch makes no sense: {error}"
        if any(len(code) > MAX_CUBIN_BYTES for code in cubins.values()):
            return f"machine code of more than {MAX_CUBIN_BYTES} bytes"
        return Compiled(plans, cubins)


def plans_of(rows: Any, calls: Sequence[Call]) -> list[Launches]:
    """A plan as read from a submission's process, every part of it checked. Raises ValueError, KeyError, TypeError."""
    if len(rows) != len(calls):
        raise ValueError(f"{len(rows)} plans for {len(calls)} calls")
    return [[_launch(one, call) for one in _few(plan)] for plan, call in zip(rows, calls, strict=True)]


def _few(plan: Any) -> list[Any]:
    if not isinstance(plan, list) or not 0 < len(plan) <= MAX_LAUNCHES:
        raise ValueError(f"a call launches 1 to {MAX_LAUNCHES} kernels")
    return plan


def _launch(row: Any, call: Call) -> dict[str, Any]:
    names = {one.name for one in (*call.operator.inputs, *call.operator.outputs)} | {"scratch"}
    args: list[tuple[str, Any]] = []
    for kind, value in row["args"]:
        if kind == "tensor" and value in names:
            args.append((kind, value))
        elif kind == "float" and isinstance(value, int | float):
            args.append((kind, float(value)))
        elif kind == "int" and type(value) is int and -(2**63) <= value < 2**63:
            args.append((kind, value))
        else:
            raise ValueError(f"an argument {str(kind)[:20]} {str(value)[:40]!r}")
    if not isinstance(row["name"], str) or len(args) > 64:
        raise ValueError("a launch needs the name of a kernel and at most 64 arguments")
    grid = [_number(one, 1, 2**31 - 1 if place == 0 else 65535) for place, one in enumerate(row["grid"])]
    return {
        "cubin": _number(row["cubin"], 0, 1000),
        "name": row["name"][:500],
        "grid": [*grid, 1, 1][:3],
        "threads": _number(row["threads"], 1, 1024),
        "shared": _number(row["shared"], 0, MAX_SHARED),
        "scratch": _number(row["scratch"], 0, 2),
        "args": args,
    }


def _number(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]!r} where a number from {low} to {high} belongs")
    return value


async def score(provider: SandboxProvider, task: Task, files: Mapping[str, str]) -> Score:
    """The score of a submission. Raises Refused for a hack, SandboxDied for a machine that does not do its part."""
    operator, hidden = operator_of(task), task.hidden or {}
    device = await describe()
    shapes = [*hidden["small"], *hidden["counted"]]
    calls = [Call(operator, dims, {}, b"", {}) for dims in shapes]  # compilation needs sizes, not contents
    own = await compiled(provider, task.data["language"], files, calls, device["capability"])
    if isinstance(own, str):
        return Scored(0.0, {"right": 0.0})
    expert = await compiled(provider, "triton", {"kernel.py": operator.gpu_expert}, calls, device["capability"])
    if isinstance(expert, str):
        raise SandboxDied(f"the expert of {operator.family} does not compile: {expert}")
    found = []
    for number, dims in enumerate(shapes):
        timed = number >= len(hidden["small"])
        seeds = [[hidden["seed"], _SAMPLE, number, n] for n in range(SETS)]
        sides = {"candidate": (own, number), "expert": (expert, number)}
        try:
            found.append(await measured(operator, dims, seeds, sides, timed=timed))
        except WrongOutput:
            return Scored(0.0, {"right": 0.0})
    return worth([one for one in found if one is not None])


class WrongOutput(Exception):
    """The submission's kernels gave wrong outputs, or did not run."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the submission and of the expert on one shape, and the least possible ones."""

    candidate: float
    expert: float
    floor: float
    reading: float  # of the inputs alone: outputs may still be in the cache when the clock stops


async def measured(
    operator: Operator,
    dims: Dims,
    seeds: Sequence[Sequence[int]],
    sides: Mapping[str, tuple[Compiled, int]],
    *,
    timed: bool,
) -> Timing | None:
    """Run one shape until its timing is steady; None for a shape that only tests rightness.

    Raises Refused, WrongOutput, and SandboxDied when the GPU or the expert fails or no timing was steady.
    """
    spreads: list[float] = []
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="k3rl-gpu-") as name:
            folder = Path(name)
            result = await _device(folder, request_of(operator, dims, seeds, sides, folder, timed=timed))
            right = await asyncio.to_thread(outputs_right, operator, dims, seeds, result, folder)
        if "error" in result:
            await _blame(operator, dims, seeds, sides["expert"], str(result["error"]))
        check_run(result, right)
        if not timed:
            return None
        timing, spread = timing_of(operator, dims, result)
        if spread <= SPREAD:
            return timing
        spreads.append(spread)
    said = ", ".join(f"{one:.0%}" for one in spreads)
    raise SandboxDied(f"times of {dict(dims)} spread by {said} of the median; something else uses this GPU")


async def _blame(
    operator: Operator, dims: Dims, seeds: Sequence[Sequence[int]], expert: tuple[Compiled, int], error: str
) -> None:
    """Raises SandboxDied when the GPU fails with the expert alone too: then the error was not the submission's."""
    with tempfile.TemporaryDirectory(prefix="k3rl-gpu-") as name:
        sides = {"candidate": expert, "expert": expert}
        alone = await _device(Path(name), request_of(operator, dims, seeds, sides, Path(name), timed=False))
    if "error" in alone:
        raise SandboxDied(f"the GPU fails with the expert too: {alone['error']} (with the submission: {error})")


def request_of(
    operator: Operator,
    dims: Dims,
    seeds: Sequence[Sequence[int]],
    sides: Mapping[str, tuple[Compiled, int]],
    folder: Path,
    *,
    timed: bool,
) -> dict[str, Any]:
    """The request to the device process; machine code is put into its folder."""
    launches = {}
    for side, (code, number) in sides.items():
        for name, image in code.cubins.items():
            (folder / f"{side}-{name}").write_bytes(image)
        launches[side] = [{**one, "cubin": f"{side}-{one['cubin']}.cubin"} for one in code.plans[number]]
    return {
        "family": operator.family,
        "dims": dict(dims),
        "seeds": [list(one) for one in seeds],
        "repeats": REPEATS if timed else 2,
        "warmups": WARMUPS if timed else 0,
        "checked": CHECKED if timed else 2,
        "launches": launches,
        "flush_bytes": FLUSH_BYTES,
    }


_described: dict[str, dict[str, Any]] = {}  # by where libraries are looked for; the GPU of a process stays the same


async def describe() -> dict[str, Any]:
    """What the GPU is: name, capability, bytes_per_s. Asked once a process. Raises NoGpu, SandboxDied."""
    where = os.environ.get("LD_LIBRARY_PATH", "")
    if where in _described:
        return _described[where]
    with tempfile.TemporaryDirectory(prefix="k3rl-gpu-") as folder:
        found = await _device(Path(folder), None)
    if not found["bytes_per_s"] > 0:
        raise SandboxDied(f"the driver does not say how fast the memory of {found['name']} is")
    _described[where] = found
    return found


async def _device(folder: Path, request: Mapping[str, Any] | None) -> dict[str, Any]:
    """The answer of the device process. A submission's kernel that hangs or faults is {"error": ...}. Raises NoGpu."""
    if request is not None:
        (folder / "request.json").write_text(json.dumps(request))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "k3rl.envs.kernel.device", str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "CUDA_CACHE_DISABLE": "1"},
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), MEASURE_S)
    except TimeoutError:
        return {"error": f"nothing came back within {MEASURE_S:g} s"}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        raise SandboxDied(f"the device process ended without a result: {said.decode()[-400:]}") from None
    if result.get("no_driver"):
        raise NoGpu(f"GPU mode needs an NVIDIA driver: {result['error']}")
    if request is None and "error" in result:
        raise SandboxDied(f"the GPU does not answer: {result['error']}")
    return result


def outputs_right(
    operator: Operator, dims: Dims, seeds: Sequence[Sequence[int]], result: Mapping[str, Any], folder: Path
) -> dict[str, bool]:
    """Per side, whether every output that was kept is right for the contents of its repeat."""
    if "error" in result:
        return {}
    chosen = [
        (side, repeat, sample)
        for side, samples in result["samples"].items()
        for repeat, sample in enumerate(samples)
        if sample["checked"]
    ]
    numbers = sorted({sample["set"] for _, _, sample in chosen})
    with ThreadPoolExecutor(CHECKERS) as pool:
        made = pool.map(lambda number: operator.inputs_for(dims, seeds[number]), numbers)
        sets = dict(zip(numbers, made, strict=True))

        def right(one: tuple[str, int, Mapping[str, Any]]) -> bool:
            side, repeat, sample = one
            got = {
                one.name: np.fromfile(folder / f"{side}.{repeat}.{one.name}", STORAGE[one.dtype]).reshape(
                    one.sizes(dims)
                )
                for one in operator.outputs
            }
            inputs = operator.stirred(operator.rolled(sets[sample["set"]], sample["shift"]), sample["stir"])
            whole = repeat == len(result["samples"][side]) - 1
            return output_right(operator, dims, inputs, got, None if whole else ROWS)

        found = list(pool.map(right, chosen))
    return {
        side: all(good for (one, _, _), good in zip(chosen, found, strict=True) if one == side)
        for side in result["samples"]
    }


def output_right(operator: Operator, dims: Dims, inputs: Arrays, got: Arrays, rows: int | None) -> bool:
    """Whether an output is right, in so many random rows where rows do not know of each other; None: in all."""
    axis = operator.row_axis
    if rows is not None and axis and dims[axis] > rows:
        places = sorted(secrets.SystemRandom().sample(range(dims[axis]), rows))
        inputs, got = operator.some(inputs, places), operator.some(got, places)
        dims = {**dims, axis: rows}
    return complaint(operator, got, operator.wanted(dims, inputs)) is None


def check_run(result: Mapping[str, Any], right: Mapping[str, bool]) -> None:
    """Raises WrongOutput, Refused, or SandboxDied for a run that does not count."""
    if "error" in result:
        raise WrongOutput(result["error"])
    if not right["expert"]:
        raise SandboxDied("the expert's outputs are not right on this GPU")
    for side, what in (("strayed", "bytes that are no output changed"), ("ghost", "bytes changed without a launch")):
        if result[side]["candidate"]:
            raise Refused(
                "writes_outside" if side == "strayed" else "late_writes", f"{result[side]['candidate']} {what}"
            )
    if not right["candidate"]:
        raise WrongOutput("outputs are not right")


def timing_of(operator: Operator, dims: Dims, result: Mapping[str, Any]) -> tuple[Timing, float]:
    """(medians and floors, the wider spread of the two). Raises SandboxDied when two clocks contradict each other."""
    medians, spreads = {}, []
    for side, samples in result["samples"].items():
        times = sorted(one["device_s"] for one in samples)
        medians[side] = statistics.median(times)
        spreads.append((times[len(times) * 4 // 5] - times[len(times) // 5]) / medians[side])
        host = statistics.median(one["host_s"] for one in samples)
        if host < 0.95 * medians[side]:
            raise SandboxDied(f"the GPU's clock says {medians[side]:.3g} s where the host waited {host:.3g} s")
    rate = result["device"]["bytes_per_s"]
    read = sum(one.bytes(dims) for one in operator.inputs)
    return Timing(medians["candidate"], medians["expert"], operator.traffic(dims) / rate, read / rate), max(spreads)


def worth(timings: Sequence[Timing]) -> Score:
    """The score of right kernels. Raises Refused for a time that no honest kernel has."""
    found = []
    for one in timings:
        if one.expert <= one.floor:
            raise SandboxDied(f"the expert took {one.expert:.3g} s, less than the least possible {one.floor:.3g} s")
        if hack := implausible(one.candidate, one.expert, min(one.reading, one.floor)):
            raise Refused(*hack)
        found.append(reward(max(one.candidate, one.floor), one.expert, one.floor))
    mean = statistics.fmean
    parts = {
        "right": 1.0,
        "cost_ratio": mean(one.expert / one.candidate for one in timings),
        "floor_share": mean(one.floor / one.candidate for one in timings),
        "seconds": mean(one.candidate for one in timings),
    }
    return Scored(mean(found), parts)
