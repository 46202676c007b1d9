"""How an agent may act: one harness, or several of which each group of episodes gets one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from k3rl.config import Config, as_config_error
from k3rl.envs.harness.context import ContextConfig, Everything
from k3rl.envs.harness.modules import Memory, Module, Skills, read_skills

SYSTEM = (
    "You work in a sandbox whose current folder is the workspace of the task. Act by calling tools. "
    "Call submit when the work is done; only the files that the task names are judged, by tests you do not see."
)
ToolName: TypeAlias = Literal["bash", "read_file", "write_file", "edit", "submit"]


class HarnessConfig(Config):
    """How an agent may act; a policy that is trained with several of these does not fit only one."""

    system: str = SYSTEM
    """The system message; empty leaves it out."""
    tools: tuple[ToolName, ...] = ("bash", "read_file", "write_file", "edit", "submit")
    """Tools that are declared and answered."""
    declare_tools: bool = True
    """Put the declarations into the prompt; a policy that knows the tools needs none."""
    context: ContextConfig = Everything()
    """What becomes of a conversation that grows too long."""
    show_budget: bool = True
    """Tell after each turn what is left."""
    command_timeout_s: float = Field(default=60.0, gt=0)
    """For one command of bash."""
    output_chars: int = Field(default=8_000, ge=100)
    """Kept of what one tool says."""
    token_s: float = Field(default=0.02, ge=0)
    """Virtual seconds that one sampled token takes."""
    sub_agents: int = Field(default=0, ge=0)
    """How many times `delegate` may hand a piece of work to a fresh conversation; 0 leaves the tool out."""
    idle_turns: int = Field(default=2, ge=1)
    """Turns without a call, one after the other, that end the episode."""
    memory: int = Field(default=0, ge=0)
    """Notes that the policy may keep beside the conversation, with memory_write and memory_read; 0 leaves them out."""
    skills: str | None = None
    """A folder of NAME/SKILL.md or NAME.md, listed in the system message and shown by load_skill; None: no skills."""

    def modules(self) -> dict[str, Module]:
        """The parts beyond the tools, fresh for an episode, by name. Raises ConfigError."""
        parts: dict[str, Module] = {"memory": Memory(self.memory)} if self.memory else {}
        return parts | ({"skills": Skills(read_skills(Path(self.skills)))} if self.skills is not None else {})


class HarnessVariant(Config):
    """One of several harnesses."""

    share: float = Field(default=1.0, gt=0)
    """How often it is drawn, relative to the others."""
    harness: HarnessConfig = HarnessConfig()


class HarnessMixture(Config):
    """Harnesses of which each group of episodes gets one, so that a policy does not fit a single harness."""

    variants: tuple[HarnessVariant, ...] = Field(min_length=1)
    seed: int = 0
    """Which group gets which follows from it and from the group's name alone."""

    def pick(self, group: str) -> int:
        """The number of the variant of a group."""
        shares = [variant.share for variant in self.variants]
        return random.Random(f"harness/{self.seed}/{group}").choices(range(len(shares)), shares)[0]


AnyHarness: TypeAlias = HarnessConfig | HarnessMixture


def harness_of(given: AnyHarness | Mapping[str, Any] | None) -> AnyHarness:
    """A config of either kind, from its fields: with `variants` a mixture. Raises ConfigError, for skills too."""
    if isinstance(given, HarnessConfig | HarnessMixture):
        harness = given
    else:
        fields = dict(given or {})
        kind: type[HarnessConfig] | type[HarnessMixture] = HarnessMixture if "variants" in fields else HarnessConfig
        try:
            harness = kind.model_validate(fields)
        except ValidationError as error:
            raise as_config_error(error, kind) from None
    variants = [harness] if isinstance(harness, HarnessConfig) else [one.harness for one in harness.variants]
    for variant in variants:
        variant.modules()
    return harness
