"""Environments: what a policy is asked, what it may do, and what it is worth. No torch, no ray.

base      Task, Env, Rubric, Environment, Hack: the interface; config: the environment of a run
rubric    rubrics from plain reward functions, run in rubric_worker, which may ask for a rubric_sandbox
registry  register and make, by name, `pkg.module:Object`, file, folder or entry point; shipped: what is here
recording turns, branches and the record of an episode; rollout: one episode of a policy in an environment, turn by
          turn; episode_state: an episode between two turns, from which a paused one is resumed
check     whether an environment keeps its promises; leaks: what work leaves behind; scaffold: a new package;
          played: episodes that a script plays
sandbox/  where programs that a model wrote run
harness/  an agent with tools in a workspace: context, budgets, sub-agents, memory, skills
gateway/  agent programs that own their loop; judge/: answers of a group compared by a model
faults    retries, honest scores, the circuit breaker; guard: code of an environment under a watch
adapters/ environments of other systems: Gymnasium, OpenEnv, reasoning-gym, SkyRL-gym, TextArena, verifiers
coding/   coding-lists, the environment of the quickstart, and coding-repair; chip/, compiler/,
          kernel/: the long tasks
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from k3rl.envs.base import (
    Action,
    Env,
    Environment,
    EpisodeContext,
    Hack,
    NoOracle,
    NoSnapshot,
    Observation,
    Rubric,
    StepResult,
    TaskSource,
    tighter,
)
from k3rl.envs.config import EnvConfig
from k3rl.envs.episode_state import BrokenState, EpisodeState, KeptState
from k3rl.envs.faults import (
    Breaker,
    EngineFailed,
    EnvironmentTripped,
    FaultConfig,
    grade,
    honest,
)
from k3rl.envs.recording import (
    NOT_GRADED,
    ContextOutgrown,
    EpisodeRecorder,
    Policy,
    PromptCache,
    TurnSettings,
    prompt_rows,
)
from k3rl.envs.registry import BrokenEnvironment, UnknownEnvironment, builtin_names, made, make, names, register
from k3rl.envs.rollout import gradable, run_episode
from k3rl.envs.rubric import RewardFunction, reward
from k3rl.types import Budgets, Message, Task

if TYPE_CHECKING:
    from k3rl.envs import check
    from k3rl.envs.guard import BlockWatch, GuardedEnv, GuardedHarness
    from k3rl.envs.leaks import Census, watched
    from k3rl.envs.played import MAX_TURN_TOKENS, ObservedEnv, acted, play, sampled
    from k3rl.envs.scaffold import write_package

__all__ = [
    "MAX_TURN_TOKENS",
    "NOT_GRADED",
    "Action",
    "BlockWatch",
    "Breaker",
    "BrokenEnvironment",
    "BrokenState",
    "Budgets",
    "Census",
    "ContextOutgrown",
    "EngineFailed",
    "Env",
    "EnvConfig",
    "Environment",
    "EnvironmentTripped",
    "EpisodeContext",
    "EpisodeRecorder",
    "EpisodeState",
    "FaultConfig",
    "GuardedEnv",
    "GuardedHarness",
    "Hack",
    "KeptState",
    "Message",
    "NoOracle",
    "NoSnapshot",
    "Observation",
    "ObservedEnv",
    "Policy",
    "PromptCache",
    "RewardFunction",
    "Rubric",
    "StepResult",
    "Task",
    "TaskSource",
    "TurnSettings",
    "UnknownEnvironment",
    "acted",
    "builtin_names",
    "check",
    "gradable",
    "grade",
    "honest",
    "made",
    "make",
    "names",
    "play",
    "prompt_rows",
    "register",
    "reward",
    "run_episode",
    "sampled",
    "tighter",
    "watched",
    "write_package",
]

# Modules that import the rooms below this one (gateway, harness) or much else: named here, imported when asked for.
_LATER = {
    **dict.fromkeys(("BlockWatch", "GuardedEnv", "GuardedHarness"), "guard"),
    **dict.fromkeys(("Census", "watched"), "leaks"),
    **dict.fromkeys(("MAX_TURN_TOKENS", "ObservedEnv", "acted", "play", "sampled"), "played"),
    "write_package": "scaffold",
}


def __getattr__(name: str) -> Any:
    if name == "check":
        return import_module(f"{__name__}.check")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
