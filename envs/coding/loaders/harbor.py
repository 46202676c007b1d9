"""Task directories in the form of Harbor and terminal-bench 2: task.toml, instruction.md, environment/,
tests/test.sh, solution/solve.sh.

PATH is one such directory or a folder of them. No image is built: of environment/Dockerfile only FROM, WORKDIR, COPY,
ENV and LABEL are followed, over the tools of our sandbox; a task that needs more is named in a ConfigError, or left
out with `skip=True`. The task's own folders /app (or its WORKDIR), /tests, /solution and /logs are folders of the
workspace here, and written so in its texts. tests/test.sh runs in a fresh sandbox over what the agent changed and
writes /logs/verifier/reward.json (a number, or an object with "reward") or reward.txt.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3rl.config import ConfigError
from k3rl.envs.base import Env, Environment, Hack, Rubric
from k3rl.envs.coding.loaders.repository import files_of
from k3rl.envs.coding.loaders.rows import FixedTasks
from k3rl.envs.harness import (
    Agentic,
    AnyHarness,
    HarnessEnv,
    Workspace,
    WorkspaceError,
    WorkspaceSpec,
    answer_from,
    harness_of,
)
from k3rl.envs.rubric import reward
from k3rl.envs.rubric_sandbox import GraderSandbox
from k3rl.envs.sandbox import SandboxError, provider_named
from k3rl.types import Budgets, Message, Task

TESTS, SOLUTION, LOGS = ".tests", ".solution", ".logs"  # in the workspace
GRADE_S = 1800.0
_FOLLOWED = {"FROM", "WORKDIR", "COPY", "ENV", "LABEL"}


class _Unsupported(ValueError):
    """A directory that is no task, or one that needs more than our sandbox has."""


def harbor(
    path: str,
    *,
    heldout: float = 0.2,
    turns: int = 50,
    skip: bool = False,
    harness: AnyHarness | Mapping[str, Any] | None = None,
) -> Environment:
    """The environment over one task directory or a folder of them. skip: leave out what cannot be run here."""
    root, config = Path(path), harness_of(harness)
    folders = [root] if (root / "task.toml").is_file() else sorted(one.parent for one in root.glob("*/task.toml"))
    tasks: list[Task] = []
    wrong: list[str] = []
    for folder in folders:
        try:
            tasks.append(_task(folder, turns))
        except (_Unsupported, OSError, UnicodeDecodeError) as error:
            wrong.append(f"{folder}: {error}")
    if wrong and (not skip or not tasks):
        raise ConfigError("\n".join(wrong), key=path, got=wrong[0], wanted="tasks that this sandbox can run")
    if not tasks:
        raise ConfigError(f"{path} holds no task directory (task.toml)", key=path, got=path, wanted="task.toml")

    def make_env() -> Env:
        return HarnessEnv(Agentic(workspace), config)

    return Environment(
        name=f"harbor:{path}",
        description=f"{len(tasks)} tasks for an agent in a terminal",
        source=FixedTasks(tasks, heldout),
        make_env=make_env,
        grader=Rubric.of(verified),
        oracle=_oracle,
        null=lambda task: answer_from({}),
        hacks=_hacks,
        domain="code",
    )


def _task(folder: Path, turns: int) -> Task:
    try:
        table = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise _Unsupported(f"task.toml is not TOML: {error}") from None
    for needed in ("instruction.md", "tests/test.sh", "solution/solve.sh"):
        if not (folder / needed).is_file():
            raise _Unsupported(f"it has no {needed}")
    place, files = environment_of(folder / "environment")
    names = _Names(place)
    agent, verifier = table.get("agent", {}), table.get("verifier", {})
    name = str(table.get("task", {}).get("name") or folder.resolve().name)
    return Task(
        id=name,
        env="harbor",
        messages=(Message("user", names.of((folder / "instruction.md").read_text(encoding="utf-8")).strip()),),
        family=str(table.get("metadata", {}).get("category") or "harbor"),
        level=0,
        domain="code",
        budgets=Budgets(turns=turns, wall_s=_seconds(agent, "timeout_sec")),
        data={"files": files, "artifacts": tuple(_artifacts(table, names))},
        hidden={
            "tests": _texts(folder / "tests", names),
            "solution": _texts(folder / "solution", names),
            "timeout_s": _seconds(verifier, "timeout_sec") or 600.0,
        },
    )


def _seconds(table: Mapping[str, Any], name: str) -> float | None:
    value = table.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise _Unsupported(f"{name} is {value!r}; it must be seconds")
    return None if value is None else float(value)


def _artifacts(table: Mapping[str, Any], names: _Names) -> Sequence[str]:
    given = table.get("artifacts", [])
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise _Unsupported("artifacts must be a list of paths")
    own = [names.of(one).removeprefix("/box").lstrip("/") + ("*" if one.endswith("/") else "") for one in given]
    return own or ["*"]


class _Names:
    """A task's own absolute paths, as paths in a workspace."""

    def __init__(self, place: str) -> None:
        self._folders = {
            place: ".",
            "/app": ".",
            "/tests": TESTS,
            "/solution": SOLUTION,
            "/oracle": SOLUTION,
            "/logs": LOGS,
        }
        self._pattern = re.compile(
            r"(?<![\w./-])(" + "|".join(map(re.escape, sorted(self._folders))) + r")(?=/|\b)(?![\w-])"
        )

    def of(self, text: str) -> str:
        """The same text with the paths of a workspace at /box."""
        return self._pattern.sub(lambda found: _boxed(self._folders[found[1]]), text)


def _boxed(folder: str) -> str:
    return "/box" if folder == "." else f"/box/{folder}"


def _texts(folder: Path, names: _Names) -> dict[str, str]:
    return {name: names.of(text) for name, text in files_of(str(folder), None).items()}


def environment_of(folder: Path) -> tuple[str, dict[str, str]]:
    """(the working folder of a Dockerfile, files that it copies, by their path in that folder). Raises _Unsupported."""
    place = "/app"
    files: dict[str, str] = {}
    dockerfile = folder / "Dockerfile"
    if not dockerfile.is_file():
        return place, {}
    lines = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        if word.upper() not in _FOLLOWED:
            raise _Unsupported(f"its Dockerfile has `{line.strip()[:80]}`, which needs an image; only files are copied")
        if word.upper() == "WORKDIR":
            place = rest.strip().rstrip("/") or "/"
        if word.upper() == "COPY":
            files |= _copied(folder, place, rest)
    return place, files


def _copied(folder: Path, place: str, rest: str) -> dict[str, str]:
    *sources, target = shlex.split(rest)
    if not sources or any(one.startswith("--") for one in sources):
        raise _Unsupported(f"its Dockerfile has `COPY {rest[:80]}`, which is not followed")
    absolute = target if target.startswith("/") else f"{place}/{target}"
    inside = re.sub(r"/(\./)*", "/", f"{absolute}/" if target.endswith(("/", ".")) else absolute)
    if not f"{inside}/".startswith(f"{place.rstrip('/')}/"):
        raise _Unsupported(f"its Dockerfile copies to {target}, which is outside of its working folder {place}")
    own = inside.removeprefix(place).strip("/").removesuffix("/.")
    found: dict[str, str] = {}
    for source in sources:
        origin = (folder / source).resolve()
        if not origin.is_relative_to(folder.resolve()) or not origin.exists():
            raise _Unsupported(f"its Dockerfile copies {source}, which is not in environment/")
        if origin.is_dir():
            texts = {name: text for name, text in files_of(str(origin), None).items() if name != "Dockerfile"}
        else:
            alone = len(sources) == 1 and not inside.endswith("/")
            texts = {"" if alone else origin.name: origin.read_bytes().decode("utf-8", "surrogateescape")}
        found |= {"/".join(filter(None, (own, name))): text for name, text in texts.items()}
    return found


def workspace(task: Task) -> WorkspaceSpec:
    """What the Dockerfile copies."""
    return WorkspaceSpec(task.data["files"], tuple(task.data["artifacts"]), changes_only=True)


def _oracle(task: Task) -> str:
    return _solved(task.id, json.dumps([dict(task.data), dict(task.hidden or {})], default=list))


@lru_cache(maxsize=256)
def _solved(task_id: str, content: str) -> str:
    """What the given solution leaves in a workspace."""
    data, hidden = json.loads(content)

    async def solve() -> str:
        spec = WorkspaceSpec(data["files"], tuple(data["artifacts"]), changes_only=True)
        room = await Workspace.open(provider_named("bwrap"), spec)
        try:
            for name, text in hidden["solution"].items():
                await room.write(f"{SOLUTION}/{name}", text)
            done = await room.run(f"bash {SOLUTION}/solve.sh", GRADE_S)
            if done.returncode != 0:
                said = done.stderr.decode("utf-8", "replace")[-300:]
                raise WorkspaceError(f"the solution of {task_id} ended with {done.returncode}: {said}")
            return answer_from({n: t for n, t in (await room.artifacts()).items() if not _reserved(n)})
        finally:
            await room.close()

    return asyncio.run(solve())


def _reserved(name: str) -> bool:
    return name.split("/")[0] in (TESTS, SOLUTION, LOGS)


@reward(timeout_s=2 * GRADE_S)
def verified(
    files: Mapping[str, str], data: Mapping[str, Any], hidden: Mapping[str, Any], sandbox: GraderSandbox
) -> float:
    """What the task's own test.sh writes, over the task's files and what the agent changed."""
    for name in filter(_reserved, files):
        sandbox.run(["rm", "-rf", name.split("/")[0]])
    for name, text in data["files"].items():
        if name not in files:
            sandbox.write(name, text)
    for name, text in hidden["tests"].items():
        sandbox.write(f"{TESTS}/{name}", text)
    sandbox.run(["mkdir", "-p", f"{LOGS}/verifier"])
    done = sandbox.run(["bash", f"{TESTS}/test.sh"], timeout_s=hidden["timeout_s"])
    if done.timed_out:
        return 0.0  # what is tested did not come to an end in the task's own time
    for name in ("reward.json", "reward.txt"):
        try:
            written = sandbox.read(f"{LOGS}/verifier/{name}", 4096)
        except OSError:
            continue
        return _number(name, written)
    raise SandboxError(
        f"test.sh wrote no reward (status {done.returncode}): {done.stderr[-300:].decode('utf-8', 'replace')}"
    )


def _number(name: str, written: bytes) -> float:
    value: Any = json.loads(written) if name.endswith(".json") else float(written)
    if isinstance(value, dict):
        value = value["reward"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} holds {str(value)[:100]!r}; it must be a number")
    return float(value)


def _hacks(task: Task) -> dict[str, Hack]:
    reward_file = f"{LOGS}/verifier/reward.txt"
    return {
        "writes its reward": Hack(answer_from({reward_file: "1", f"{LOGS}/verifier/reward.json": "1"})),
        "brings its tests": Hack(answer_from({f"{TESTS}/test.sh": f"echo 1 > {reward_file}\n"})),
        "says it passed": Hack("PASS\n1 passed\n"),
    }
