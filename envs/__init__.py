"""Environments: what a policy is asked, what it may do, and what it is worth. No torch, no ray.

base      Task, Env, Rubric, Environment: the interface
registry  register and make, by name, `pkg.module:Object` or entry point
rollout   one episode of a policy in an environment, exact to the token
sandbox/  where programs that a model wrote run
coding/   the environment of the quickstart
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
    "Rubric",
    "StepResult",
    "Task",
    "TaskSource",
    "UnknownEnvironment",
    "make",
    "names",
    "register",
]
