"""Environments that were written for other systems, by name: `gymnasium:ID`, `openenv:URL`, and so on.

foreign    what they share: options, tasks that are seeds, paid episodes, records of rewards and their rubric
bridge     a process in the Python that has the package; sandboxed/ is its other side, which imports nothing of k3rl
packages   Gymnasium, SkyRL-gym, TextArena, verifiers;  reasoning: reasoning-gym;  client: OpenEnv, a client of servers
"""

from k3rl.envs.adapters.bridge import (
    BridgeError,
    ForeignDied,
    ForeignHung,
    ForeignLied,
    ForeignRaised,
    InvalidAction,
)
from k3rl.envs.adapters.client import openenv
from k3rl.envs.adapters.packages import gymnasium, skyrl_gym, textarena, verifiers
from k3rl.envs.adapters.reasoning import reasoning_gym

__all__ = [
    "BridgeError",
    "ForeignDied",
    "ForeignHung",
    "ForeignLied",
    "ForeignRaised",
    "InvalidAction",
    "gymnasium",
    "openenv",
    "reasoning_gym",
    "skyrl_gym",
    "textarena",
    "verifiers",
]
