"""Tasks of `kernel`: the ladder with shapes drawn from the seed, and the prompt.

Task `index` of a split stands on rung index % rungs, so a split climbs the ladder again and again. "train" has no
end; "heldout" has EACH tasks a rung, with sizes that training never shows. Hidden: the shapes and the seed of the
contents that judge a submission.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from typing import Any, Literal, TypeAlias

from k3rl.envs.kernel import driver
from k3rl.envs.kernel.operators import BY_FAMILY, LADDER, Dims, Operator
from k3rl.envs.kernel.reward import QUARANTINE, UNTIMED
from k3rl.types import Budgets, Message, Task

NAME = "kernel"
SPLITS = ("train", "heldout")
EACH = 8
SMALL = 4  # hidden shapes that only test rightness
COUNTED = 2  # hidden shapes whose cost counts, where it can be judged
FLAGSHIP = "attn_res"
FLAGSHIP_WALL_S = 24 * 3600.0
WALL_S = 3600.0
Language: TypeAlias = Literal["c", "triton", "numba", "cuda"]
FILE = {"c": "kernel.c", "triton": "kernel.py", "numba": "kernel.py", "cuda": "kernel.cu"}


class KernelLadder:
    """The task source. language: what submissions are written in; device: "cpu", or "cuda" for Triton and CUDA.

    wall_s: budget of a task in seconds; by default an hour, and 24 hours for Attention Residuals. In C all rungs are
    there, in other languages those that have an expert in Triton.
    """

    splits = SPLITS

    def __init__(self, language: Language = "c", device: str = "cpu", wall_s: float | None = None) -> None:
        self._language, self._device, self._wall_s = language, device, wall_s

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """None for "train"."""
        rungs = _rungs(split, level, family, self._language)
        return None if split == "train" else EACH * len(rungs)

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """The task with its hidden part. ValueError: no such split, level or family; IndexError: past the end."""
        rungs = _rungs(split, level, family, self._language)
        length = self.length(split, level=level, family=family)
        if index < 0 or (length is not None and index >= length):
            raise IndexError(f"{NAME} {split} has {length} such tasks; there is no number {index}")
        operator = rungs[index % len(rungs)]
        name = f"{NAME}/{split}/{seed}/{self._language}-{operator.family}/{index // len(rungs)}"
        return self._task(operator, split, name, seed)

    def _task(self, operator: Operator, split: str, name: str, seed: int) -> Task:
        rng = random.Random(name)
        gpu = self._device == "cuda"
        timed = gpu or self._language == "c"
        visible = [operator.draw(rng, "small", gpu=gpu), operator.draw(rng, "train" if timed else "small", gpu=gpu)]
        wall_s = self._wall_s or (FLAGSHIP_WALL_S if operator.family == FLAGSHIP else WALL_S)
        data = {
            "family": operator.family,
            "language": self._language,
            "device": self._device,
            "file": FILE[self._language],
            "visible": visible,
            "visible_seed": rng.getrandbits(32),
            "wall_budget_s": wall_s,
        }
        secret = hashlib.sha256(f"contents of {name}".encode()).hexdigest()
        return Task(
            id=name,
            env=NAME,
            messages=(Message("user", prompt(operator, data)),),
            family=operator.family,
            level=operator.level,
            domain="code",
            budgets=Budgets(wall_s=wall_s),
            data=data,
            hidden={
                "small": [operator.draw(rng, "small", gpu=gpu) for _ in range(SMALL)],
                "counted": [operator.draw(rng, split, gpu=gpu) for _ in range(COUNTED if timed else 0)],
                "seed": int(secret[:12], 16),
            },
            seed=seed,
        )


def _rungs(split: str, level: int | None, family: str | None, language: Language) -> list[Operator]:
    if split not in SPLITS:
        raise ValueError(f"{NAME} has no split {split!r}; it has {', '.join(SPLITS)}")
    rungs = [one for one in LADDER if language == "c" or one.gpu is not None]
    found = [one for one in rungs if level in (None, one.level) and family in (None, one.family)]
    if not found:
        ladder = ", ".join(f"{one.family} (level {one.level})" for one in rungs)
        raise ValueError(f"{NAME} has no family {family!r} with level {level!r}; it has {ladder}")
    return found


def operator_of(task: Task) -> Operator:
    """The rung of a task. Raises ValueError for a task of another environment."""
    if task.env != NAME or task.data.get("family") not in BY_FAMILY:
        raise ValueError(f"task {task.id} of {task.env!r} is not one of the ladder of {NAME!r}")
    return BY_FAMILY[task.data["family"]]


def practice(task: Task) -> Task:
    """The same task judged on its visible shapes: what an agent's own submissions are scored by before the end."""
    visible, data = task.data["visible"], task.data
    counted = visible[-1:] if data["language"] == "c" or data["device"] == "cuda" else []
    hidden = {"small": visible, "counted": counted, "seed": data["visible_seed"]}
    return dataclasses.replace(task, id=f"{task.id}/practice", hidden=hidden)


def prompt(operator: Operator, data: dict[str, Any]) -> str:
    """The whole request."""
    tensors = "\n".join(
        f"  {kind}[{number}]  {one.name}: {one.dtype} [{', '.join(one.shape)}]"
        for kind, group in (("in", operator.inputs), ("out", operator.outputs))
        for number, one in enumerate(group)
    )
    limit = operator.tolerance
    beyond = ", beyond what rounding the exact value to bfloat16 costs" if limit.rounding else ""
    return f"""Make an operator faster without making it wrong: {operator.title}.
{operator.text}

Sizes, in this order: {", ".join(operator.axes)}. Tensors:
{tensors}
The operator in torch, as a task file:
```python
{operator.task_file.strip()}
```
{_INTERFACE[data["language"]]}
Judging. Hidden shapes, small odd ones too, with fresh contents; outputs begin as NaN. Each row of an output may
differ from float64 by {limit.rms:g} in the root mean square and {limit.largest:g} at most, relative to that row's own
root mean square{beyond}. Inputs must stay as they are. A wrong kernel is worth 0. {_worth(data)}
Shapes to try: {"; ".join(_words(one) for one in data["visible"])}."""


def _words(dims: Dims) -> str:
    return ", ".join(f"{name}={size}" for name, size in dims.items())


def _worth(data: dict[str, Any]) -> str:
    if data["device"] == "cuda":
        cost, where = "the median time on the GPU, the L2 cache flushed and contents fresh before each call", "bytes"
    elif data["language"] == "c":
        cost, where = "the instructions that it executes, counted by cachegrind", "instructions"
    else:
        return f"A right one is worth {UNTIMED:g}: on this machine its speed cannot be judged."
    return (
        f"The cost of a right one is {cost}: as dear as an expert's kernel is worth 0.5, twice as dear 0.25, and "
        f"cheaper ones up to 1 at the least possible number of {where}. Below that least, the submission is refused; "
        f"more than {QUARANTINE:g} times cheaper than the expert, it is set aside."
    )


_C = f"""
Write `kernel.c`, gnu17 for x86-64 with AVX2 and FMA, compiled with -O3 -ffast-math:
```c
{driver.HEADER.strip()}
```
It may include stdint.h, stddef.h, math.h, string.h and immintrin.h and call mathematics and memcpy, memset, memmove;
no other function, no assembler, no variable that outlives a call, no threads, no function pointers. Functions beside
`kernel` are static.
"""
_TRITON = """
Write `kernel.py` with Triton kernels and a function `launches(dim)`: `dim` has the sizes by name, and it answers a list
of {"kernel": jit function, "grid": (x, y, z), "args": names of tensors or sizes or numbers, "constants": {name: value},
"num_warps": 4, "num_stages": 3}, launched in this order; `args` are the kernel's parameters that are no constants. The
tensor "scratch" has 4 MiB of zeros. Kernels are compiled apart from where they run: no other Python runs there.
"""
_NUMBA = """
Write `kernel.py` with `kernel(dim, inputs, outputs)`: sizes by name, NumPy arrays by name (bfloat16 as uint16 bits);
fill the outputs in place. numba may be imported.
"""
_CUDA = """
Write `kernel.cu` with extern "C" __global__ kernels, and `kernel.py` with a function `launches(dim)`: `dim` has the
sizes by name, and it answers a list of {"kernel": name, "grid": (x, y, z), "threads": 256, "shared": 0, "args": names
of tensors or sizes or numbers}, launched in this order. Sizes and whole numbers are int, others float.
"""
_INTERFACE = {"c": _C, "triton": _TRITON, "numba": _NUMBA, "cuda": _CUDA}
