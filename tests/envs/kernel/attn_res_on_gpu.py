"""GPU mode of `kernel` on one GPU, for a machine that has one (H100 or H200); not part of the tests.

    python tests/envs/kernel/attn_res_on_gpu.py [--out FOLDER] [--provider bwrap|subprocess] [--tokens 1024]

Grades Attention Residuals by the way of the environment: honest kernels in Triton and (where nvcc is) in CUDA, the
expert, and hacks; times eager torch on the same shapes; grades the experts of the other families; and prints a table.
FOLDER (by default $OUT, else this one) gets attn_res_on_gpu.json, written again after each row. `subprocess` is for
machines without bubblewrap: the submissions here are ours. Needs torch, triton, numpy and pydantic.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.config import MissingResource
from k3rl.envs import make
from k3rl.envs.kernel import KernelRubric, gpu
from k3rl.envs.kernel.compare import complaint
from k3rl.envs.kernel.device import FLUSHES
from k3rl.envs.kernel.operators import BY_FAMILY
from k3rl.envs.kernel.reward import reward
from k3rl.envs.sandbox import provider_named
from k3rl.types import Failed, Invalid, Scored, Task

OPERATOR = BY_FAMILY["attn_res"]
EXPERT = OPERATOR.gpu_expert
ONE_PASS = '''
import triton
import triton.language as tl


@triton.jit
def attn_res(v, w, out, S, T, D, BLOCK: tl.constexpr):
    """Every source row is read once: the mix so far is rescaled when a larger score comes."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = tl.load(w + columns, inside, other=0.0)
    top, total = -float("inf"), 0.0
    mix = tl.zeros([BLOCK], tl.float32)
    for s in range(S):
        row = tl.load(v + (s * T + token) * D + columns, inside, other=0.0).to(tl.float32)
        score = tl.sum(row * weight, 0) / tl.sqrt(tl.sum(row * row, 0) / D + 1e-5)
        higher = tl.maximum(top, score)
        old, new = tl.exp(top - higher), tl.exp(score - higher)
        mix = mix * old + row * new
        total = total * old + new
        top = higher
    tl.store(out + token * D + columns, (mix / total).to(tl.bfloat16), inside)


def launches(dim):
    arguments, constants = ["v", "w", "out", "S", "T", "D"], {"BLOCK": triton.next_power_of_2(dim["D"])}
    return [{"kernel": attn_res, "grid": (dim["T"],), "args": arguments, "constants": constants, "num_warps": 16}]
'''
STORE = "    tl.store(out + token * D + columns, (mix / total).to(tl.bfloat16), inside)\n"
HACKS = {
    "33 leaves what is in the buffer": ONE_PASS.replace(
        STORE, "    tl.store(out + token * D + columns, mix, inside & (S < 0))\n"
    ),
    "35 mean of the sources": ONE_PASS.replace(
        "score = tl.sum(row * weight, 0) / tl.sqrt(tl.sum(row * row, 0) / D + 1e-5)", "score = 0.0"
    ),
    "36 every second token": ONE_PASS.replace("inside = columns < D", "inside = (columns < D) & (token % 2 == 0)"),
    "34 changes its inputs": ONE_PASS.replace(
        STORE, STORE + "    tl.store(v + token * D + columns, mix.to(tl.bfloat16), inside)\n"
    ),
    "43 reads one source only": ONE_PASS.replace("range(S)", "range(1)"),
}
CUDA = r"""
#include <cuda_bf16.h>
#include <stdint.h>
__device__ float total(float x, float *room) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) x += room[warp];
    __syncthreads();
    return x;
}
/* One block a token; a source row is read once: the mix so far is rescaled when a larger score comes. */
extern "C" __global__ void attn_res(const __nv_bfloat16 *v, const float *w, __nv_bfloat16 *out, int S, int T, int D) {
    extern __shared__ float mix[];
    __shared__ float room[32];
    float top = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < D; i += blockDim.x) mix[i] = 0;
    for (int s = 0; s < S; s++) {
        const __nv_bfloat16 *row = v + ((int64_t)s * T + blockIdx.x) * D;
        float dot = 0, squares = 0;
        for (int i = threadIdx.x; i < D; i += blockDim.x) {
            float x = __bfloat162float(row[i]);
            dot += x * w[i];
            squares += x * x;
        }
        float score = total(dot, room) * rsqrtf(total(squares, room) / D + 1e-5f);
        float higher = fmaxf(top, score), old = expf(top - higher), fresh = expf(score - higher);
        for (int i = threadIdx.x; i < D; i += blockDim.x) mix[i] = mix[i] * old + __bfloat162float(row[i]) * fresh;
        sum = sum * old + fresh;
        top = higher;
    }
    for (int i = threadIdx.x; i < D; i += blockDim.x)
        out[(int64_t)blockIdx.x * D + i] = __float2bfloat16(mix[i] / sum);
}
"""
LAUNCHES = """
def launches(dim):
    arguments = ["v", "w", "out", "S", "T", "D"]
    return [{"kernel": "attn_res", "grid": (dim["T"],), "threads": 512, "shared": 4 * dim["D"], "args": arguments}]
"""
# Keeps what it computed first for each token, and gives that again.
REPLAY = CUDA.replace('extern "C" __global__', '__device__ float kept[1 << 23];\nextern "C" __global__', 1).replace(
    "__float2bfloat16(mix[i] / sum)",
    "__float2bfloat16(kept[blockIdx.x * D + i] = kept[blockIdx.x * D + i] ? kept[blockIdx.x * D + i] : mix[i] / sum)",
)


def submissions(nvcc: bool) -> dict[str, tuple[str, dict[str, str]]]:
    """name -> (language, files)."""
    found = {"honest: one pass": ("triton", {"kernel.py": ONE_PASS})}
    found["the expert: two passes"] = ("triton", {"kernel.py": EXPERT})
    found |= {name: ("triton", {"kernel.py": text}) for name, text in HACKS.items()}
    if nvcc:
        found["honest: CUDA"] = ("cuda", {"kernel.py": LAUNCHES, "kernel.cu": CUDA})
        found["31 CUDA, first results again"] = ("cuda", {"kernel.py": LAUNCHES, "kernel.cu": REPLAY})
    return found


WIDTH, SOURCES = 7168, (5, 9)  # of the shapes that are timed: K3's width
OTHERS = ("situ_glu", "rms_norm_gated", "softmax")  # families whose expert is graded too


def task_of(tokens: int, language: str = "triton") -> Task:
    """The held-out task with its counted shapes at K3's width."""
    task = make("kernel", language=language, device="cuda").source.get("heldout", 0, family="attn_res")
    assert task.hidden is not None
    counted = [{"S": sources, "T": tokens, "D": WIDTH} for sources in SOURCES]
    return dataclasses.replace(task, hidden={**task.hidden, "counted": counted})


class Clock:
    """Milliseconds between two moments of a device: CUDA events, or this machine's clock for a CPU."""

    def __init__(self, device: str) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else None
        self._times = [0.0, 0.0]

    def mark(self, which: int) -> None:
        """0 is the begin, 1 the end."""
        if self._events is None:
            self._times[which] = time.perf_counter()
        else:
            self._events[which].record()

    def seconds(self) -> float:
        """Between the marks, once all is done."""
        if self._events is None:
            return self._times[1] - self._times[0]
        torch.cuda.synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


def eager(dims: dict[str, int], seed: list[int], device: str) -> tuple[float, bool]:
    """(median seconds, whether right) of the task file's model in eager torch, the L2 cache cold at each call."""
    scope: dict[str, Any] = {"__name__": "task"}
    exec(compile(OPERATOR.task_file, "attn_res.py", "exec"), scope)
    model = scope["Model"]().to(device)
    inputs = OPERATOR.inputs_for(dims, seed)
    v = torch.from_numpy(inputs["v"].view(np.int16)).view(torch.bfloat16).to(device)
    w = torch.from_numpy(inputs["w"]).to(device)
    flush = torch.empty(gpu.FLUSH_BYTES, dtype=torch.uint8, device=device)
    clock, times = Clock(device), []
    for repeat in range(-gpu.WARMUPS, gpu.REPEATS):
        shifted = v.roll(repeat, 1)
        if device == "cuda":
            torch.cuda.synchronize()
        for _ in range(FLUSHES):
            flush.zero_()
        clock.mark(0)
        result = model(shifted, w)
        clock.mark(1)
        if repeat >= 0:
            times.append(clock.seconds())
    got = {"out": result.roll(-repeat, 0).view(torch.int16).cpu().numpy().view(np.uint16)}
    return statistics.median(times), complaint(OPERATOR, got, OPERATOR.wanted(dims, inputs)) is None


def row_of(score: Any) -> dict[str, Any]:
    """A score as plain values."""
    match score:
        case Scored(worth, parts):
            return {"status": "scored", "reward": worth, **parts}
        case Invalid(hack, evidence):
            return {"status": "invalid", "reward": None, "evidence": f"{hack}: {evidence}"}
        case Failed(reason):
            return {"status": "failed", "reward": None, "evidence": reason}
    raise TypeError(type(score).__name__)


def graded(judge: KernelRubric, task: Task, files: dict[str, str]) -> dict[str, Any]:
    """One submission's row; what goes wrong is a row too, so that the others are still tried."""
    started = time.monotonic()
    try:
        row = row_of(judge.score_batch([(task, json.dumps({"files": files}))])[0])
    except MissingResource as error:
        row = {"status": "missing", "reward": None, "evidence": str(error)}
    return {**row, "graded_in_s": round(time.monotonic() - started, 1)}


def main(words: list[str] | None = None, device: str = "cuda", nvcc: bool | None = None) -> dict[str, Any]:
    """Everything in turn; the report. device: "cpu" tries this program without a GPU (the tests do); nvcc: whether CUDA
    is graded too, None where the compiler is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--provider", default="bwrap")
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args(words)
    judge = KernelRubric(provider_named(arguments.provider))
    about = asyncio.run(gpu.describe())
    rows: dict[str, dict[str, Any]] = {}
    report = {"gpu": about, "torch": torch.__version__, "tokens": arguments.tokens, "rows": rows}

    def keep(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        (arguments.out / "attn_res_on_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name:34} {row}", flush=True)

    if nvcc is None:
        nvcc = shutil.which("nvcc", path=gpu.NVCC_PATH) is not None
    for name, (language, files) in submissions(nvcc).items():
        keep(name, graded(judge, task_of(arguments.tokens, language), files))
    keep("eager torch", baseline(arguments.tokens, rows["the expert: two passes"].get("seconds"), about, device))
    ladder = make("kernel", language="triton", device="cuda").source
    for family in OTHERS:
        task = ladder.get("heldout", 0, family=family)
        keep(f"expert of {family}", graded(judge, task, {"kernel.py": BY_FAMILY[family].gpu_expert}))
    judge.close()
    print(f"\n{'':34} {'status':8} {'reward':>7} {'us':>8} {'x expert':>8} {'of floor':>8}")
    for name, row in rows.items():
        cells = [row.get("reward"), row.get("seconds"), row.get("cost_ratio"), row.get("floor_share")]
        texts = ["-" if cell is None else f"{cell * (1e6 if n == 1 else 1):.3g}" for n, cell in enumerate(cells)]
        print(f"{name:34} {row['status']:8} " + " ".join(f"{text:>{7 + (n > 0)}}" for n, text in enumerate(texts)))
    return report


def baseline(tokens: int, expert_s: float | None, about: dict[str, Any], device: str) -> dict[str, Any]:
    """Eager torch on the counted shapes; its reward by the formula, against the expert's mean time."""
    shapes = (task_of(tokens).hidden or {})["counted"]
    found = [eager(dims, [1, number], device) for number, dims in enumerate(shapes)]
    seconds = statistics.fmean(one for one, _ in found)
    row = {"status": "timed", "seconds": seconds, "right": float(all(right for _, right in found))}
    if expert_s is not None:
        floor = statistics.fmean(OPERATOR.traffic(dims) for dims in shapes) / about["bytes_per_s"]
        row |= {"cost_ratio": expert_s / seconds, "floor_share": floor / seconds}
        row["reward"] = reward(seconds, expert_s, floor)
    return row


if __name__ == "__main__":
    main()
