"""Tasks from a folder of files in the common shape: `Model`, `get_inputs`, `get_init_inputs`, one operator a file.

Files are read as text and parsed, never imported here. The reference runs in one sandbox, in float64; the submission, a
`kernel.py` with `ModelNew` of the same arguments, in another, on inputs of the reference's making and without its
outputs. A submission uses torch around Triton kernels, which are interpreted on a machine without a GPU: right or not
is judged, speed is not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3rl.config import ConfigError
from k3rl.envs.compiler.toolchain import Refused
from k3rl.envs.kernel import python
from k3rl.envs.kernel.reward import UNTIMED
from k3rl.envs.kernel.tasks import NAME, WALL_S
from k3rl.envs.sandbox import Sandbox, SandboxDied, SandboxLimits, SandboxProvider
from k3rl.types import Budgets, Message, Score, Scored, Task

WANTED = ("Model", "get_inputs", "get_init_inputs")
TRIALS = 3
# Absolute and relative, as such collections state them: float32, and anything narrower.
TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
MAX_FILE_CHARS = 200_000
_LIMITS = SandboxLimits(memory_bytes=32768 * 2**20, processes=64, cpu_s=600, file_bytes=2**30, workspace_bytes=2**31)


class BadCollection(ConfigError, ValueError):
    """A folder that holds no task files, or a file that is none."""


class Collection:
    """The task source of a folder. Every third file, by a hash of its name, is "heldout"; a folder is a family."""

    splits = ("train", "heldout")

    def __init__(self, folder: str | Path, wall_s: float = WALL_S) -> None:
        self._wall_s = wall_s
        root = Path(folder)
        paths = sorted(root.rglob("*.py")) if root.is_dir() else []
        found = [(str(path.relative_to(root)), _text(path)) for path in paths]
        self._files = [(name, text) for name, text in found if missing(text, name) == ()]
        if not self._files:
            raise BadCollection(f"{root} holds no .py file with {', '.join(WANTED)}; name the folder of a collection")

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """How many files the split has."""
        return len(self._chosen(split, family))

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """The task of a file. Raises ValueError for an unknown split, IndexError past the end."""
        files = self._chosen(split, family)
        if not 0 <= index < len(files):
            raise IndexError(f"{NAME} {split} has {len(files)} such files; there is no number {index}")
        name, text = files[index]
        secret = hashlib.sha256(f"{name} {seed} {text}".encode()).hexdigest()
        return Task(
            id=f"{NAME}/{split}/{seed}/{name}",
            env=NAME,
            messages=(Message("user", _PROMPT.format(text=text.strip(), worth=UNTIMED)),),
            family=str(Path(name).parent),
            domain="code",
            budgets=Budgets(wall_s=self._wall_s),
            data={"file": "kernel.py", "language": "triton", "device": "cpu", "name": name, "text": text},
            hidden={"seed": int(secret[:8], 16)},
            seed=seed,
        )

    def _chosen(self, split: str, family: str | None) -> list[tuple[str, str]]:
        if split not in self.splits:
            raise ValueError(f"a collection has no split {split!r}; it has {', '.join(self.splits)}")
        held = [hashlib.sha256(name.encode()).digest()[0] % 3 == 0 for name, _ in self._files]
        if len(self._files) == 1 or len(set(held)) == 1:
            held = [False] * len(self._files) if split == "train" else [True] * len(self._files)
        wanted = split == "heldout"
        return [
            (name, text)
            for (name, text), out in zip(self._files, held, strict=True)
            if out == wanted and family in (None, str(Path(name).parent))
        ]


def missing(text: str, name: str = "file") -> tuple[str, ...]:
    """Which names of the common shape a file does not define. Raises BadCollection for text that is no Python."""
    try:
        tree = ast.parse(text, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadCollection(f"{name} is no Python: {error}") from error
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return tuple(one for one in WANTED if one not in defined)


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    if len(text) > MAX_FILE_CHARS:
        raise BadCollection(f"{path} has {len(text)} characters; a task file has at most {MAX_FILE_CHARS}")
    return text


async def score(provider: SandboxProvider, task: Task, files: Mapping[str, str]) -> Score:
    """Right or not. Raises SandboxDied when the reference itself does not run, Refused for a right answer without a
    kernel: its calls are made again with its Triton kernels replaced by nothing, and must then be wrong."""
    shown = python.with_packages(provider)
    seed = (task.hidden or {})["seed"]
    request = {"seeds": [seed, *(secrets.randbits(31) for _ in range(TRIALS - 1))], "init_seed": seed}
    async with await shown.create(_LIMITS) as sandbox:
        wanted, inputs = await _reference(shown, sandbox, task, request)
    async with await shown.create(_LIMITS) as sandbox:
        await sandbox.write("kernel.py", files["kernel.py"].encode())
        await sandbox.write("request.json", json.dumps({**request, "kind": "candidate"}).encode())
        for name, data in inputs.items():
            await sandbox.write(name, data)
        environment = {"TRITON_INTERPRET": "1", "HOME": "/tmp"}
        if await python.script(provider, sandbox, "model_worker.py", environment) is not None:
            return Scored(0.0, {"right": 0.0})
        if not await _right(sandbox, wanted, "out"):
            return Scored(0.0, {"right": 0.0})
        if await _right(sandbox, wanted, "ghost"):
            raise Refused("no_kernel_of_its_own", "outputs are right although no Triton kernel was run")
    return Scored(UNTIMED, {"right": 1.0})


async def _right(sandbox: Sandbox, wanted: list[list[dict[str, Any]]], kind: str) -> bool:
    """Whether a candidate's outputs of a kind are right in every trial."""
    for number, trial in enumerate(wanted):
        got = await _outputs(sandbox, number, trial, kind)
        if got is None or not all(map(_close, got, trial)):
            return False
    return True


async def _reference(
    provider: SandboxProvider, sandbox: Sandbox, task: Task, request: Mapping[str, Any]
) -> tuple[list[list[dict[str, Any]]], dict[str, bytes]]:
    """(per trial, outputs with their dtype, shape and float64 values; files with the inputs)."""
    await sandbox.write("task.py", task.data["text"].encode())
    await sandbox.write("request.json", json.dumps({**request, "kind": "reference"}).encode())
    failed = await python.script(provider, sandbox, "model_worker.py", {"HOME": "/tmp"})
    if failed is not None:
        raise SandboxDied(f"the reference of {task.data['name']} does not run: {failed}")
    listing = json.loads(await sandbox.read("made.json", 2**20))
    inputs = {name: await sandbox.read(name, 2**30) for name in listing["inputs"]}
    for number, trial in enumerate(listing["out"]):
        for place, output in enumerate(trial):
            data = await sandbox.read(f"{number}.{place}.out", 2**30)
            output["values"] = np.frombuffer(data, np.float64).reshape(output["shape"])
    return listing["out"], inputs


async def _outputs(
    sandbox: Sandbox, number: int, trial: list[dict[str, Any]], kind: str
) -> list[dict[str, Any]] | None:
    """What a candidate made of a trial; None unless it has the reference's dtypes and shapes."""
    try:
        made = json.loads(await sandbox.read("made.json", 2**20))[kind][number]
        same = [[one["dtype"], one["shape"]] for one in made] == [[one["dtype"], one["shape"]] for one in trial]
        found = []
        for place, one in enumerate(trial):
            size = 8 * int(np.prod(one["shape"]))
            data = await sandbox.read(f"{number}.{place}.{kind}", size + 1)
            if not same or len(data) != size:
                return None
            found.append({**one, "values": np.frombuffer(data, np.float64).reshape(one["shape"])})
        return found
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def _close(got: dict[str, Any], want: dict[str, Any]) -> bool:
    """Within the tolerance of the dtype, element by element; equal for integers; NaN equals nothing."""
    limit = TOLERANCE.get(want["dtype"], 0.0)
    with np.errstate(invalid="ignore"):
        return bool(np.all(np.abs(got["values"] - want["values"]) <= limit + limit * np.abs(want["values"])))


_PROMPT = """Make an operator faster without making it wrong. The operator in torch, as a task file:
```python
{text}
```
Write `kernel.py` with a class `ModelNew` that is made and called as `Model` is, with the same parameters made in the
same order. It may use torch and Triton. Judging: fresh contents, compared with float64. A wrong one is worth 0, a right
one {worth:g}: on a machine without a GPU its speed cannot be judged. The work must be done by Triton kernels: where
they are replaced by nothing, outputs must change."""

HACKS = {
    "24 does nothing": "class ModelNew:\n    pass\n",
    "38 imports the reference": "from task import Model as ModelNew\n",
    "2 os._exit": "import os\nos._exit(0)\n",
}
