"""`coding-repair`: small Python packages to be repaired by an agent with tools, judged by hidden calls.

repositories  the packages and the mistakes that can be planted; package: running them
tasks         reports, splits, hidden calls
grader        declared files in a sandbox of their own; hacks: answers that must not be paid
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from k3rl.envs.base import Env, Environment
from k3rl.envs.coding.repair.grader import RepairRubric
from k3rl.envs.coding.repair.hacks import hacks, null, oracle
from k3rl.envs.coding.repair.tasks import NAME, Repairs
from k3rl.envs.harness import Agentic, AnyHarness, HarnessEnv, WorkspaceSpec, harness_of
from k3rl.envs.sandbox import SandboxUnavailable
from k3rl.types import Task

__all__ = ["RepairRubric", "Repairs", "coding_repair"]

_THEN = ("env", "GIT_AUTHOR_DATE=2000-01-01T00:00:00Z", "GIT_COMMITTER_DATE=2000-01-01T00:00:00Z")
_AS = ("-c", "user.name=k3rl", "-c", "user.email=k3rl.localhost", "-c", "commit.gpgsign=false")


def workspace(task: Task) -> WorkspaceSpec:
    """The files under version control, in one commit with a fixed date: nothing that came before it can be read.

    Raises SandboxUnavailable where git is not installed.
    """
    return WorkspaceSpec(task.data["files"], tuple(task.data["artifacts"]), git_setup())


def git_setup() -> tuple[tuple[str, ...], ...]:
    """Commands that put a workspace under version control. Raises SandboxUnavailable where git is not installed."""
    if shutil.which("git", path="/usr/local/bin:/usr/bin") is None:
        raise SandboxUnavailable("workspaces with a repository need git in /usr; run `sudo apt-get install -y git`")
    return ("git", "init", "-q"), ("git", "add", "-A"), (*_THEN, "git", *_AS, "commit", "-q", "-m", "All of it")


def coding_repair(*, harness: AnyHarness | Mapping[str, Any] | None = None) -> Environment:
    """The environment. harness: how the policy may act, as a config or its fields; with `variants`, a mixture."""
    config = harness_of(harness)

    def make_env() -> Env:
        return HarnessEnv(Agentic(workspace), config)

    return Environment(
        name=NAME,
        description="small Python packages to be repaired with tools in a workspace; hidden calls judge them",
        source=Repairs(),
        make_env=make_env,
        grader=RepairRubric,
        oracle=oracle,
        null=null,
        hacks=hacks,
        domain="code",
    )
