"""An agent loop around a workspace: long tasks with tools, budgets and a context that is kept short.

workspace  the sandbox in which an agent works, and what is taken out of it
tools      bash, read_file, write_file, edit, submit
modules    parts beyond the tools: memory, skills
config     what a harness is made of, and mixtures that give each group another one
context    what becomes of a conversation that grows too long
budget     what an episode has spent, on two clocks, and how the policy is told
tasks      tasks of a source, changed for an agent with tools
env        HarnessEnv: all of it as an `Env`, so that `run_episode` drives it
"""

from k3rl.envs.harness.budget import Spending
from k3rl.envs.harness.config import AnyHarness, HarnessConfig, HarnessMixture, HarnessVariant, harness_of
from k3rl.envs.harness.context import ContextConfig, Discard, Everything, KeepLast, Summarize
from k3rl.envs.harness.env import Agentic, HarnessEnv, Validation
from k3rl.envs.harness.modules import Module, Skill, read_skills
from k3rl.envs.harness.tasks import ChangedTasks
from k3rl.envs.harness.tools import TOOLS, Tool, ToolError
from k3rl.envs.harness.workspace import Workspace, WorkspaceError, WorkspaceSpec, answer_from, files_from

__all__ = [
    "TOOLS",
    "Agentic",
    "AnyHarness",
    "ChangedTasks",
    "ContextConfig",
    "Discard",
    "Everything",
    "HarnessConfig",
    "HarnessEnv",
    "HarnessMixture",
    "HarnessVariant",
    "KeepLast",
    "Module",
    "Skill",
    "Spending",
    "Summarize",
    "Tool",
    "ToolError",
    "Validation",
    "Workspace",
    "WorkspaceError",
    "WorkspaceSpec",
    "answer_from",
    "files_from",
    "harness_of",
    "read_skills",
]
