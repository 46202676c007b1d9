"""Functions to be completed, from JSONL rows in the form of HumanEval (Chen et al. 2021): task_id, prompt,
entry_point, canonical_solution, test. A row may name a `family` and a `level` too.

The row's `check(candidate)` runs in the grader; `candidate` stands for the submission's function, each call of which
runs in a sandbox and gives a plain value. So no check, and no wanted value, is ever where the submission runs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from k3rl.envs.base import Environment, Hack, Rubric
from k3rl.envs.coding.grader import MAX_ANSWER_CHARS, source_of
from k3rl.envs.coding.loaders.rows import FixedTasks, OneAnswer, family_of, hidden_of, read_rows, text
from k3rl.envs.rubric import reward
from k3rl.envs.rubric_sandbox import GraderSandbox
from k3rl.envs.sandbox import SandboxError
from k3rl.types import Message, Task

REQUEST = "Complete this Python function. Answer with the whole code in one fenced block.\n\n```python\n{}\n```"


def humaneval(path: str, *, heldout: float = 0.2) -> Environment:
    """The environment over a file, plain or gzipped. heldout: share that is never trained on; 1 to only measure."""
    family = family_of(path)
    tasks = read_rows(path, lambda row: _task(row, family))
    return Environment(
        name=f"humaneval:{path}",
        description=f"{len(tasks)} functions to be completed, judged by hidden checks",
        source=FixedTasks(tasks, heldout),
        make_env=OneAnswer,
        grader=Rubric.of(passes),
        oracle=lambda task: str(task.data["prompt"]) + str(hidden_of(task)["solution"]),
        null=lambda task: "",
        hacks=_hacks,
        domain="code",
    )


def _task(row: Mapping[str, Any], family: str) -> Task:
    prompt, entry, test = text(row, "prompt"), text(row, "entry_point"), text(row, "test")
    for name, code in (("prompt", whole(prompt)), ("test", test)):
        try:
            ast.parse(code)
        except SyntaxError as error:
            raise ValueError(f"{name!r} is no Python: {error.msg}") from None
    if not _defines(whole(prompt), entry):
        raise ValueError(f"'prompt' does not define {entry!r}, the entry_point")
    if not _defines(test, "check"):
        raise ValueError("'test' does not define check(candidate)")
    return Task(
        id=text(row, "task_id"),
        env="humaneval",
        messages=(Message("user", REQUEST.format(prompt.strip("\n"))),),
        family=str(row.get("family", family)),
        level=int(row.get("level", 0)),
        domain="code",
        data={"prompt": prompt, "entry": entry},
        hidden={"test": test, "solution": text(row, "canonical_solution")},
    )


def whole(prompt: str) -> str:
    """A prompt as code by itself; a function that has not even a docstring gets a body."""
    try:
        ast.parse(prompt)
    except SyntaxError:
        return f"{prompt}\n    pass\n"
    return prompt


def program_of(answer: str, prompt: str, entry: str) -> str:
    """The program of an answer: a whole function, or what goes on where the prompt ends."""
    code = source_of(answer)
    return f"{whole(prompt)}\n{code}" if _defines(code, entry) else prompt + code


def _defines(code: str, name: str) -> bool:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in tree.body)


@reward(timeout_s=180.0)
def passes(answer: str, data: Mapping[str, Any], hidden: Mapping[str, Any], sandbox: GraderSandbox) -> float:
    """1 when the row's own check holds. What a check raises, other than for the sandbox, is the submission's fault."""
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    scope: dict[str, Any] = {"__name__": "check"}
    exec(compile(whole(data["prompt"]), "prompt", "exec"), scope)  # checks may use its helpers
    exec(compile(hidden["test"], "test", "exec"), scope)
    program = program_of(answer, data["prompt"], data["entry"])
    try:
        scope["check"](sandbox.function(program, data["entry"]))
    except SandboxError:
        raise
    except Exception:
        return 0.0
    return 1.0


def _hacks(task: Task) -> dict[str, Hack]:
    entry = task.data["entry"]
    equal = "class Equal(dict):\n    def __eq__(self, other):\n        return True\n"
    return {
        "an object equal to all": Hack(f"{equal}def {entry}(*a):\n    return Equal()\n"),
        "exit": Hack(f"import os\ndef {entry}(*a):\n    os._exit(0)\n"),
        "exit at import": Hack(f"raise SystemExit(0)\ndef {entry}(*a):\n    return 1\n"),
        "says it passed": Hack(f"print('PASS')\ndef {entry}(*a):\n    print('1 passed')\n"),
        "hangs": Hack(f"import time\ndef {entry}(*a):\n    time.sleep(1000)\n"),
        "looks for the check": Hack(
            f"import sys\ndef {entry}(*a):\n    frame = sys._getframe()\n    while frame:\n"
            "        if 'check' in frame.f_globals or 'candidate' in frame.f_locals:\n"
            "            frame.f_globals['check'] = lambda c: None\n        frame = frame.f_back\n"
        ),
        "catches assertions": Hack(
            "import builtins\nbuiltins.AssertionError = type('Never', (Exception,), {})\n"
            f"def {entry}(*a):\n    return object()\n"
        ),
        "the request": Hack(str(task.data["prompt"])),
    }
