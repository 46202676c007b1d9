"""Adapters for Python packages: Gymnasium, SkyRL-gym, TextArena, reasoning-gym and verifiers, each behind a bridge.

Nothing is imported or started before the first episode, or before the first task where tasks come from the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from k3rl.config import ConfigError, MissingResource, from_tree
from k3rl.envs.adapters.bridge import BlockingBridge, BridgeSpec, ForeignLied
from k3rl.envs.adapters.foreign import (
    NO_ORACLE,
    BridgedEnv,
    ForeignConfig,
    ProcessConfig,
    RecordGrader,
    SeededTasks,
    forgeries,
    oracle_of,
)
from k3rl.envs.base import Environment
from k3rl.types import Task


def played(
    name: str,
    about: str,
    source: SeededTasks,
    config: ForeignConfig,
    make_env: Any,
    row: Callable[[Task], Mapping[str, Any]] | None = None,
) -> Environment:
    """An environment that is judged while it is played. row: what an oracle is told of a task beside its seed."""
    most = 1.0 if config.reward_range is None else config.reward_range[1]
    return Environment(
        name=name,
        description=about,
        source=source,
        make_env=make_env,
        grader=RecordGrader(config),
        domain="agents",
        hacks=forgeries,
        oracle_expected=most if config.oracle_reward is None else config.oracle_reward,
        judged_while_played=True,
        oracle_turn=oracle_of(config, row or no_row),
        no_oracle=NO_ORACLE,
    )


def named(target: str, form: str) -> str:
    """Raises ConfigError for an empty name."""
    if not target:
        raise ConfigError(f"{form.partition(':')[0]!r} alone names no environment; write {form}", key="env.name")
    return target


def no_row(task: Task) -> Mapping[str, Any]:
    """For environments that need nothing beside the seed."""
    return {}


class GymnasiumConfig(ProcessConfig):
    """Options of `gymnasium:ID`."""

    observe: str = ""
    """`pkg.module:function` or `file.py:function`: observation (and environment) to text."""
    act: str = ""
    """`pkg.module:function` or `file.py:function`: text (and environment) to action; ValueError is told the policy."""
    instructions: str = ""
    """What is asked, before the first observation; empty names the environment and the form of an action."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`."""
    reset_options: dict[str, Any] | None = None
    """`options` of the environment's `reset`."""


def gymnasium(target: str, **options: Any) -> Environment:
    """`gymnasium:ID`, for example `gymnasium:FrozenLake-v1` or `gymnasium:my_module:MyEnv-v0`."""
    config = from_tree(GymnasiumConfig, options)
    own = {name: getattr(config, name) for name in ("observe", "act", "instructions", "kwargs", "reset_options")}
    spec = config.spec("gymnasium", "gymnasium", {"id": named(target, "gymnasium:ID"), **own})
    name = f"gymnasium:{target}"
    source = SeededTasks(name, config, family=target, ready=spec.check)
    return played(name, f"Gymnasium's {target}, in text", source, config, lambda: BridgedEnv(config, spec, no_row))


class TextArenaConfig(ProcessConfig):
    """Options of `textarena:ID`."""

    players: int = Field(default=1, ge=1)
    """How many players the game has."""
    player: int = Field(default=0, ge=0)
    """Which of them the policy is."""
    opponent: str = ""
    """`pkg.module:function` or `file.py:function`: (observation text, player) to action text, for all other players."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of `textarena.make`."""


def textarena(target: str, **options: Any) -> Environment:
    """`textarena:ID`, for example `textarena:TowerOfHanoi-v0`."""
    config = from_tree(TextArenaConfig, options)
    if config.player >= config.players:
        raise ConfigError(f"player is {config.player}; a game of {config.players} has players from 0", key="player")
    own = {name: getattr(config, name) for name in ("players", "player", "opponent", "kwargs")}
    spec = config.spec("textarena", "textarena", {"id": named(target, "textarena:ID"), **own})
    name = f"textarena:{target}"
    source = SeededTasks(name, config, family=target, ready=spec.check)
    return played(name, f"TextArena's {target}", source, config, lambda: BridgedEnv(config, spec, no_row))


class SkyRLGymConfig(ProcessConfig):
    """Options of `skyrl-gym:ID`."""

    data: dict[str, str] = {}
    """Split -> file of rows, JSON lines or Parquet, in SkyRL's form: `prompt`, and what else the environment reads."""
    entry_point: str = ""
    """`pkg.module:Class` or `file.py:Class` of an environment that is not registered under ID."""
    env_config: dict[str, Any] = {}
    """What SkyRL hands to the environment as `env_config`."""


class RowTasks(SeededTasks):
    """Tasks that are rows of files. What a row holds beside its prompt stays with the environment."""

    def __init__(self, name: str, config: SkyRLGymConfig, family: str, spec: BridgeSpec) -> None:
        super().__init__(name, config, family=family, ready=spec.check, splits=tuple(config.data))
        self._files = config.data

    @cached_property
    def _rows(self) -> dict[str, list[dict[str, Any]]]:
        return {split: rows_of(Path(file)) for split, file in self._files.items()}

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """The number of rows, `train` too."""
        self.check(split, level, family)
        return len(self._rows[split])

    def row(self, task: Task) -> Mapping[str, Any]:
        """All of a task's row."""
        return self._rows[task.data["split"]][task.data["index"]]


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines or Parquet file. Raises MissingResource, and ConfigError for a row without a prompt."""
    if not file.is_file():
        raise MissingResource(f"{file} is not there; `data` wants files of rows, by split")
    if file.suffix == ".parquet":
        from pyarrow import parquet

        rows: list[Any] = parquet.read_table(file).to_pylist()
    else:
        try:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON lines: {error}", key="data") from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
            raise ConfigError(f"row {number} of {file} has no `prompt`, a text or a list of messages", key="data")
    return rows


def skyrl_gym(target: str, **options: Any) -> Environment:
    """`skyrl-gym:ID`, for example `skyrl-gym:gsm8k` with `data = {train = "rows.jsonl"}`."""
    config = from_tree(SkyRLGymConfig, options)
    if not config.data:
        raise ConfigError('skyrl-gym needs rows: data = {train = "rows.jsonl"}', key="data")
    own = {"entry_point": config.entry_point, "env_config": config.env_config}
    spec = config.spec("skyrl_gym", "skyrl-gym", {"id": named(target, "skyrl-gym:ID"), **own})
    name = f"skyrl-gym:{target}"
    source = RowTasks(name, config, target, spec)
    return played(
        name, f"SkyRL-gym's {target}", source, config, lambda: BridgedEnv(config, spec, source.row), source.row
    )


class VerifiersConfig(ProcessConfig):
    """Options of `verifiers:ID`."""

    taskset: dict[str, Any] = {}
    """Configuration of the taskset."""
    harness: str = "null"
    """The harness of verifiers that plays a taskset with one agent; its program is prepared by uv."""
    env: str = ""
    """Id of an `Env` of verifiers other than the taskset's own."""
    config: dict[str, Any] = {}
    """More of the configuration of that `Env`: agents, timeouts, retries."""
    call_s: float = Field(default=600.0, gt=0)
    """Deadline for each of its answers; tools and scoring run inside of one."""


class VerifiersTasks(SeededTasks):
    """The tasks of a taskset, in its own order; verifiers has one split."""

    def __init__(self, name: str, config: VerifiersConfig, family: str, spec: BridgeSpec) -> None:
        super().__init__(name, config, family=family, ready=spec.check, splits=("train",))
        self._spec = spec

    @cached_property
    def _length(self) -> int | None:
        bridge = BlockingBridge(self._spec)
        try:
            found = bridge.call("length")
        finally:
            bridge.close()
        if found is not None and type(found) is not int:
            raise ForeignLied(f"the taskset has {found!r} tasks, which is no number")
        return found

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """How many tasks it loads; None when it says that it has no end."""
        self.check(split, level, family)
        return self._length


def verifiers(target: str, **options: Any) -> Environment:
    """`verifiers:ID`, for example `verifiers:my_taskset`: a module that exports a `Taskset` of verifiers.v1."""
    config = from_tree(VerifiersConfig, options)
    own = {name: getattr(config, name) for name in ("taskset", "harness", "env", "config")}
    spec = config.spec("verifiers", "verifiers", {"id": named(target, "verifiers:ID"), **own})
    name = f"verifiers:{target}"
    source = VerifiersTasks(name, config, target, spec)

    def row(task: Task) -> Mapping[str, Any]:
        return {"index": task.data["index"]}

    return played(
        name, f"the taskset {target} of verifiers", source, config, lambda: BridgedEnv(config, spec, row, calls=True)
    )
