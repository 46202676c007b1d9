"""The environments of this package as the registry makes them; each is imported when it is asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

from k3rl.envs.base import Environment


def coding_lists(**options: Any) -> Environment:
    """Short programs over lists."""
    from k3rl.envs.coding import coding_lists as make

    return make(**options)


def coding_repair(**options: Any) -> Environment:
    """Small packages to be repaired by an agent."""
    from k3rl.envs.coding.repair import coding_repair as make

    return make(**options)


def chip(**options: Any) -> Environment:
    """Hardware in Verilog. The reference meets itself, which is worth ORACLE_REWARD."""
    from k3rl.envs import chip as room

    environment = room.environment(**options)
    return dataclasses.replace(environment, null=room.null, hacks=room.hacks, oracle_expected=room.ORACLE_REWARD)


def compiler(**options: Any) -> Environment:
    """A compiler for a tile language, in milestones."""
    from k3rl.envs import compiler as room

    environment = room.environment(**options)
    return dataclasses.replace(environment, null=room.null, hacks=room.hacks, oracle_expected=room.oracle_expected)


def kernel(**options: Any) -> Environment:
    """Operators to be made faster."""
    from k3rl.envs.kernel import environment as make

    return make(**options)


def humaneval(path: str, **options: Any) -> Environment:
    """Functions to be completed, from a JSONL file."""
    from k3rl.envs.coding.loaders.humaneval import humaneval as make

    return make(path, **options)


def swe(path: str, **options: Any) -> Environment:
    """Repositories to be changed until tests pass, from a JSONL file."""
    from k3rl.envs.coding.loaders.swe import swe as make

    return make(path, **options)


def harbor(path: str, **options: Any) -> Environment:
    """Task directories of Harbor and terminal-bench."""
    from k3rl.envs.coding.loaders.harbor import harbor as make

    return make(path, **options)
