"""The rules of `kernel`: an agent with tools in a workspace, as often submitting as it likes; the best one counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from k3rl.envs.harness import Agentic, Tool, ToolError, Validation, Workspace, WorkspaceSpec
from k3rl.envs.kernel import driver
from k3rl.envs.kernel.grader import KernelRubric, Measured
from k3rl.envs.kernel.operators import Operator
from k3rl.envs.kernel.tasks import operator_of, practice
from k3rl.envs.kernel.toolchain import FLAGS, MACHINE_FLAGS, MEBIBYTE
from k3rl.envs.sandbox import SandboxDied, SandboxLimits
from k3rl.types import Failed, Invalid, Scored, Task

_TOOL = Path(__file__).with_name("sandboxed") / "tool.py"
_LIMITS = SandboxLimits(memory_bytes=8192 * MEBIBYTE)
_STARTERS = {
    "triton": "import triton\nimport triton.language as tl\n\n\ndef launches(dim):\n    return []\n",
    "numba": "def kernel(dim, inputs, outputs):\n    pass\n",
    "cuda": "",
    "model": "class ModelNew:\n    pass\n",
}


class _Command(Tool):
    """A tool that is a command of `tool.py` in the workspace."""

    command: ClassVar[str]

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """What the command prints."""
        done = await workspace.run(f"python3 tool.py {self.command}", self._timeout_s)
        said = (done.stdout + done.stderr).decode("utf-8", "replace").strip()
        if done.timed_out:
            raise ToolError(f"it ran over {self._timeout_s:g} s")
        return said or f"exit status {done.returncode}"


class Compile(_Command):
    """Compiles."""

    name = "compile"
    command = "compile"
    about = "compile kernel.c as judging does; says what the compiler says"


class Test(_Command):
    """Tests on the visible shapes."""

    name = "test"
    command = "test"
    about = "compile kernel.c and test it on the visible shapes"


class Profile(_Command):
    """Counts instructions."""

    name = "profile"
    command = "profile"
    about = "compile kernel.c and count the instructions that it executes on the visible shapes, by function and line"


def workspace(task: Task) -> WorkspaceSpec:
    """The starting files: an empty kernel, the task file, and for C the driver, the tool and the visible shapes."""
    language, file = task.data["language"], task.data["file"]
    if "text" in task.data:
        return WorkspaceSpec({file: _STARTERS["model"], "task.py": task.data["text"]}, (file,), limits=_LIMITS)
    operator = operator_of(task)
    files = {"task.py": operator.task_file}
    if language == "c":
        files |= {file: driver.EMPTY, "kernel.h": driver.HEADER, "driver.c": driver.DRIVER}
        files |= {"tool.py": _TOOL.read_text(encoding="utf-8"), **_visible(task, operator)}
        return WorkspaceSpec(files, (file,), limits=_LIMITS)
    artifacts = ("kernel.py", "kernel.cu") if language == "cuda" else (file,)
    files |= {"kernel.py": _STARTERS["triton" if language == "cuda" else language]}
    return WorkspaceSpec(files, artifacts, limits=_LIMITS)


def _visible(task: Task, operator: Operator) -> dict[str, str]:
    """The visible shapes with contents and right outputs, as `tool.py` reads them."""
    rows, calls, want = [], [], b""
    for number, dims in enumerate(task.data["visible"]):
        call = driver.call(operator, dims, [task.data["visible_seed"], number])
        right = operator.wanted(dims, call.inputs)
        want += b"".join(np.ascontiguousarray(right[one.name], np.float64).tobytes() for one in operator.outputs)
        outputs = [
            {
                "name": one.name,
                "dtype": one.dtype,
                "place": call.places[one.name],
                "bytes": one.bytes(dims),
                "width": one.sizes(dims)[-1],
            }
            for one in operator.outputs
        ]
        rows.append({"dims": dict(dims), "arena": len(call.arena), "outputs": outputs})
        calls.append(call)
    limit = operator.tolerance
    flags = [*FLAGS, *(part for parts in MACHINE_FLAGS.values() for part in parts)]
    info = {"calls": rows, "rms": limit.rms, "largest": limit.largest, "rounding": limit.rounding}
    info["flags"] = flags
    binary = {"visible.plan": driver.plan(calls), "visible.want": want}
    return {"visible.json": json.dumps(info)} | {
        name: data.decode("utf-8", "surrogateescape") for name, data in binary.items()
    }


class Validator:
    """Scores an agent's submissions on the visible shapes while it works; experts are measured once."""

    def __init__(self, provider: str = "bwrap") -> None:
        self._provider = provider
        self._measured = Measured()

    async def __call__(self, task: Task, answer: str) -> Validation:
        """Its reward on the visible shapes, and why it is not valid. Raises SandboxDied for the machine."""
        rubric = KernelRubric(self._provider, measured=self._measured)
        said, shown = "", practice(task)
        try:
            score = await rubric.score(shown, answer)
            if isinstance(score, Scored) and not score.parts.get("right") and task.data["language"] != "c":
                said = await rubric.explain(shown, answer)
        finally:
            rubric.close()
        match score:
            case Scored(worth, parts):
                wrong = "it does not compile or run: " + said if said else "it is not right on the visible shapes"
                return Validation(True, worth, "") if parts.get("right") else Validation(False, worth, wrong)
            case Invalid(hack, evidence):
                return Validation(False, 0.0, f"refused ({hack}): {evidence}")
            case Failed(reason):
                raise SandboxDied(f"a submission could not be judged: {reason}")


def agentic(language: str, provider: str, *, files: bool = False) -> Agentic:
    """What tasks of a language put into the harness. files: tasks of a collection."""
    tools = (Compile, Test, Profile) if language == "c" and not files else ()
    return Agentic(workspace, None if files else Validator(provider), tools)
