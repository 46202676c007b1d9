"""Environments: what a policy is asked, what it may do, and what it is worth. No torch, no ray.

base      Task, Env, Rubric, Environment, Hack: the interface
rubric    rubrics from plain reward functions, run in rubric_worker, which may ask for a rubric_sandbox
registry  register and make, by name, `pkg.module:Object`, file, folder or entry point; shipped: what is here
rollout   one episode of a policy in an environment, exact to the token; episode_state: put aside, taken up again
check     whether an environment keeps its promises; leaks: what work leaves behind; scaffold: a new package
sandbox/  where programs that a model wrote run
harness/  an agent with tools in a workspace: context, budgets, sub-agents, memory, skills
gateway/  agent programs that own their loop; judge/: answers of a group compared by a model
faults    retries, honest scores, the circuit breaker; guard: code of an environment under a watch
adapters/ environments of other systems: Gymnasium, OpenEnv, reasoning-gym, SkyRL-gym, TextArena, verifiers
coding/   coding-lists, the environment of the quickstart, and coding-repair; chip/, compiler/,
          kernel/: the long tasks
"""

from k3rl.envs.base import (
    Action,
    Env,
    Environment,
    EpisodeContext,
    Hack,
    Observation,
    Rubric,
    StepResult,
    TaskSource,
)
from k3rl.envs.registry import UnknownEnvironment, make, names, register
from k3rl.envs.rubric import RewardFunction, reward
from k3rl.types import Budgets, Message, Task

__all__ = [
    "Action",
    "Budgets",
    "Env",
    "Environment",
    "EpisodeContext",
    "Hack",
    "Message",
    "Observation",
    "RewardFunction",
    "Rubric",
    "StepResult",
    "Task",
    "TaskSource",
    "UnknownEnvironment",
    "make",
    "names",
    "register",
    "reward",
]
