"""Attention Residuals on one GPU, for a machine that has one (H100 or H200); not part of the tests.

    python tests/envs/kernel/attn_res_on_gpu.py [--out FOLDER] [--provider bwrap|subprocess] [--tokens 1024]

Grades, by the way of the `kernel` environment in GPU mode, an honest Triton kernel, the expert and five hacks, times
eager torch on the same contents, and prints a table. FOLDER (by default $OUT, else this one) gets attn_res_on_gpu.json.
`subprocess` is for machines without bubblewrap: the submissions here are ours.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.envs import make
from k3rl.envs.kernel import KernelRubric, gpu
from k3rl.envs.kernel.compare import complaint
from k3rl.envs.kernel.operators import BY_FAMILY
from k3rl.envs.kernel.reward import reward
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


def task_of(tokens: int) -> Task:
    """The held-out task with its counted shapes at K3's width, 5 and 9 sources."""
    task = make("kernel", language="triton", device="cuda").source.get("heldout", 0, family="attn_res")
    assert task.hidden is not None
    counted = [{"S": sources, "T": tokens, "D": 7168} for sources in (5, 9)]
    return dataclasses.replace(task, hidden={**task.hidden, "counted": counted})


def eager(dims: dict[str, int], seed: list[int]) -> tuple[float, bool]:
    """(median seconds, whether right) of the task file's model in eager torch, the L2 cache cold at each call."""
    scope: dict[str, Any] = {"__name__": "task"}
    exec(compile(OPERATOR.task_file, "attn_res.py", "exec"), scope)
    model = scope["Model"]().cuda()
    inputs = OPERATOR.inputs_for(dims, seed)
    v = torch.from_numpy(inputs["v"]).view(torch.bfloat16).cuda()
    w = torch.from_numpy(inputs["w"]).cuda()
    flush = torch.empty(gpu.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for repeat in range(-gpu.WARMUPS, gpu.REPEATS):
        shifted = v.roll(repeat, 1)
        torch.cuda.synchronize()
        flush.zero_()
        flush.zero_()
        begin.record()
        result = model(shifted, w)
        end.record()
        torch.cuda.synchronize()
        if repeat >= 0:
            times.append(begin.elapsed_time(end) / 1e3)
    got = {"out": result.roll(-repeat, 0).view(torch.uint16).cpu().numpy().astype(np.uint16)}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--provider", default="bwrap")
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    task = task_of(arguments.tokens)
    judge = KernelRubric(arguments.provider)
    rows: dict[str, dict[str, Any]] = {}
    submissions = {"honest: one pass": ONE_PASS, "the expert: two passes": EXPERT, **HACKS}
    for name, text in submissions.items():
        started = time.monotonic()
        answer = json.dumps({"files": {"kernel.py": text}})
        rows[name] = {**row_of(judge.score_batch([(task, answer)])[0]), "graded_in_s": time.monotonic() - started}
        print(f"{name:34} {rows[name]}", flush=True)
    judge.close()
    rows["eager torch"] = baseline(task, rows["the expert: two passes"].get("seconds"))
    device = {"name": torch.cuda.get_device_name(), "torch": torch.__version__}
    report = {"machine": device, "counted": (task.hidden or {})["counted"], "rows": rows}
    (arguments.out / "attn_res_on_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{'':34} {'status':8} {'reward':>7} {'us':>8} {'x expert':>8} {'of floor':>8}")
    for name, row in rows.items():
        cells = [row.get("reward"), row.get("seconds"), row.get("cost_ratio"), row.get("floor_share")]
        texts = ["-" if cell is None else f"{cell * (1e6 if n == 1 else 1):.3g}" for n, cell in enumerate(cells)]
        print(f"{name:34} {row['status']:8} " + " ".join(f"{text:>{7 + (n > 0)}}" for n, text in enumerate(texts)))


def baseline(task: Task, expert_s: float | None) -> dict[str, Any]:
    """Eager torch on the counted shapes; its reward by the formula, against the expert's mean time."""
    bytes_per_s = asyncio.run(gpu.describe())["bytes_per_s"]
    found = [eager(dims, [1, number]) for number, dims in enumerate((task.hidden or {})["counted"])]
    seconds = statistics.fmean(one for one, _ in found)
    row = {"status": "timed", "seconds": seconds, "right": float(all(right for _, right in found))}
    if expert_s is not None:
        floor = statistics.fmean(OPERATOR.traffic(dims) for dims in (task.hidden or {})["counted"])
        row |= {"cost_ratio": expert_s / seconds, "floor_share": floor / bytes_per_s / seconds}
        row["reward"] = reward(seconds, expert_s, floor / bytes_per_s)
    return row


if __name__ == "__main__":
    main()
