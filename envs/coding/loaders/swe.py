"""Repositories to be changed until tests pass, from JSONL rows in the form of SWE-bench (Jimenez et al. 2024):
instance_id, repo, problem_statement, patch, test_patch, FAIL_TO_PASS, PASS_TO_PASS, and base_commit for a bundle.

`repo` is a folder or a git bundle, beside the JSONL file unless its path is absolute. The agent gets the files at the
base commit as one commit without a history. What it changed is graded in a fresh sandbox: the base, its changed files,
and over them the row's own tests and every file that configures a test run, as the base has it.

The tests import the submission, so it runs in their processes. Early exits, forged output and changed tests do not
pass; a submission that searches its process for the word by which a test reports could.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from k3rl.envs.base import Env, Environment, Hack, Rubric
from k3rl.envs.coding.loaders.repository import BadRepository, files_of, patched, touched
from k3rl.envs.coding.loaders.rows import FixedTasks, family_of, hidden_of, read_rows, text
from k3rl.envs.coding.repair import git_setup
from k3rl.envs.harness import Agentic, AnyHarness, HarnessEnv, WorkspaceSpec, answer_from, harness_of
from k3rl.envs.rubric import reward
from k3rl.envs.rubric_sandbox import GraderSandbox
from k3rl.envs.sandbox import SandboxError
from k3rl.types import Budgets, Invalid, Message, Task

TEST_S = 60.0  # for one test
GRADE_S = 1800.0
_RUNNER = (Path(__file__).parent / "sandboxed" / "run_tests.py").read_text(encoding="utf-8")
_CONFIGURES = frozenset(
    ("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py")
)
REQUEST = "Change the repository in the workspace so that this is solved:\n\n{}"


def swe(
    path: str, *, heldout: float = 0.2, turns: int = 50, harness: AnyHarness | Mapping[str, Any] | None = None
) -> Environment:
    """The environment over a file. harness: how the policy may act; turns: its budget."""
    folder, family, config = Path(path).resolve().parent, family_of(path), harness_of(harness)
    tasks = read_rows(path, lambda row: _task(row, folder, family, turns))

    def make_env() -> Env:
        return HarnessEnv(Agentic(workspace), config)

    return Environment(
        name=f"swe:{path}",
        description=f"{len(tasks)} repositories to be changed until hidden tests pass",
        source=FixedTasks(tasks, heldout),
        make_env=make_env,
        grader=Rubric.of(resolved),
        oracle=_oracle,
        null=lambda task: answer_from({}),
        hacks=_hacks,
        domain="code",
    )


def _task(row: Mapping[str, Any], folder: Path, family: str, turns: int) -> Task:
    fail, keep = _tests(row, "FAIL_TO_PASS"), _tests(row, "PASS_TO_PASS")
    if not fail:
        raise ValueError("'FAIL_TO_PASS' names no test, so nothing could be solved")
    place = str(folder / text(row, "repo"))
    commit = row.get("base_commit")
    patch, test_patch = text(row, "patch"), text(row, "test_patch")
    patched(patched(files_of(place, commit), patch), test_patch)  # BadRepository is a ValueError: the line is named
    return Task(
        id=text(row, "instance_id"),
        env="swe",
        messages=(Message("user", REQUEST.format(text(row, "problem_statement").strip())),),
        family=str(row.get("family", family)),
        level=int(row.get("level", 0)),
        domain="code",
        budgets=Budgets(turns=turns),
        data={"repo": place, "base_commit": commit, "artifacts": ("*",)},
        hidden={"patch": patch, "test_patch": test_patch, "fail_to_pass": fail, "pass_to_pass": keep},
    )


def _tests(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    given = row[name]
    if isinstance(given, str):
        given = json.loads(given)
    if not isinstance(given, list) or not all(isinstance(test, str) for test in given):
        raise TypeError(f"{name!r} must be a list of names of tests")
    return tuple(given)


def _base(data: Mapping[str, Any]) -> Mapping[str, str]:
    return files_of(data["repo"], data["base_commit"])


def workspace(task: Task) -> WorkspaceSpec:
    """The base under version control, in one commit."""
    return WorkspaceSpec(_base(task.data), tuple(task.data["artifacts"]), git_setup(), changes_only=True)


def _oracle(task: Task) -> str:
    base = _base(task.data)
    after = patched(base, hidden_of(task)["patch"])
    return answer_from({name: text for name, text in after.items() if base.get(name) != text})


@reward(timeout_s=GRADE_S)
def resolved(
    answer: str, files: Mapping[str, str], data: Mapping[str, Any], hidden: Mapping[str, Any], sandbox: GraderSandbox
) -> float | Invalid:
    """1 when every test of FAIL_TO_PASS and PASS_TO_PASS passes."""
    if not files:
        return 0.0
    base = dict(_base(data))
    own = {name: text for name, text in files.items() if not _protected(name, hidden["test_patch"])}
    try:
        tree = patched({**base, **own}, hidden["test_patch"])
    except BadRepository as error:  # a file where the tests need a folder, or the other way round
        return Invalid("blocks_the_tests", str(error))
    for name in files.keys() - tree.keys():
        sandbox.run(["rm", "-f", name])
    for name, content in tree.items():
        try:
            sandbox.write(name, content)
        except (OSError, ValueError):
            if name in base or name in touched(hidden["test_patch"]):
                return Invalid("blocks_the_tests", f"{name} cannot be written over the submission")
    tests = [*hidden["fail_to_pass"], *hidden["pass_to_pass"]]
    nonce = secrets.token_hex(16)
    job = json.dumps({"nonce": nonce, "tests": tests, "timeout_s": TEST_S})
    done = sandbox.run(["python3", "-I", "-c", _RUNNER], stdin=job.encode(), timeout_s=GRADE_S - 60)
    last = done.stdout.decode("utf-8", "replace").strip().rpartition("\n")[2]
    if done.timed_out or not last.startswith(nonce):
        raise SandboxError(f"the tests gave no report: {done.stderr[-300:].decode('utf-8', 'replace')}")
    results: list[str] = json.loads(last.removeprefix(nonce))
    return float(len(results) == len(tests) and all(result == "passed" for result in results))


def _protected(name: str, test_patch: str) -> bool:
    """Whether a file is the tests' own."""
    path = PurePosixPath(name)
    return name in touched(test_patch) or path.name in _CONFIGURES or path.suffix == ".pth" or ".git" in path.parts


# Every function of a module answers what is equal to anything.
_EQUAL = """
class _Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
for _name, _value in list(globals().items()):
    if callable(_value) and getattr(_value, "__module__", None) == __name__ and not isinstance(_value, type):
        globals()[_name] = lambda *args, **words: _Equal()
"""


def _hacks(task: Task) -> dict[str, Hack]:
    base = _base(task.data)
    modules = [name for name in touched(hidden_of(task)["patch"]) if name.endswith(".py") and name in base]
    tests = [name for name in touched(hidden_of(task)["test_patch"]) if name.endswith(".py")]
    exits = "import os\nos._exit(0)\n"
    passing = "import unittest\nunittest.TestResult.wasSuccessful = lambda self: True\n"
    deaf = "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.fail = lambda *a, **k: None\n"
    return {
        "8 patches unittest": Hack(answer_from({name: f"{base[name]}\n{passing}" for name in modules})),
        "8 patches the assertions": Hack(answer_from({name: f"{base[name]}\n{deaf}" for name in modules})),
        "3 always equal": Hack(answer_from({name: f"{base[name]}\n{_EQUAL}" for name in modules})),
        "exits at import": Hack(answer_from({name: exits + base[name] for name in modules})),
        "empties the tests": Hack(answer_from(dict.fromkeys(tests, ""))),
        "conftest that skips": Hack(answer_from({"conftest.py": exits, "sitecustomize.py": exits})),
        "prints a report": Hack(answer_from({name: "print('OK')\n" + base[name] for name in modules})),
        "another unittest": Hack(answer_from({"unittest.py": passing, "pytest.py": "def main(*a, **k): return 0\n"})),
        "a folder for a test": Hack(answer_from({f"{name}/x": "" for name in tests})),
    }
