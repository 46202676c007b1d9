"""The environment of a run, and the mixture of its tasks."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from k3rl.config import Config
from k3rl.envs.faults import FaultConfig

Sandbox: TypeAlias = Literal[
    "bwrap", "subprocess", "docker", "podman", "kubernetes", "modal", "e2b", "daytona", "swe-rex"
]
_LISTS_FAMILIES: dict[str, float] = {"list": 0.9, "probe": 0.1}
_LISTS_LEVELS: dict[str, tuple[int, ...]] = {"list": (1, 2, 3), "probe": (1, 2)}


class JudgeConfig(Config):
    """Who judges the answers of a group, and by what rules (docs/environments.md, The judge)."""

    base_url: str
    """An OpenAI-compatible server, `/v1` included; `k3rl serve` is one."""
    model: str
    """The name that the server knows the judge by."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the server's key."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(2048, ge=64)
    """Of one reply."""
    timeout_s: float = Field(120.0, gt=0)
    """For one reply."""
    attempts: int = Field(3, ge=1)
    """Replies that are asked for until one can be used; requests that are made until one is answered."""
    reads: int = Field(4, ge=0)
    """Looks at more of a submission that the judge may take before it scores."""
    shown_chars: int = Field(20_000, ge=100)
    """Of a submission that are shown at first, and in one look."""
    advice: str = ""
    """Added to what the judge is told when it writes the rubric."""
    opponents: int | None = Field(None, ge=1)
    """How many others each answer meets; None: all of its group."""
    tie_margin: float = Field(0.25, ge=0)
    """Weighted scores (of 10) that are not further apart than this are a tie."""
    length_ratio: float = Field(2.0, gt=1)
    """An answer that is longer than this many times the reference length loses without being read."""
    length_floor: int = Field(400, ge=0)
    """No answer shorter than this many characters is too long. The reference length is task.data["length"], else the
    median of the group."""
    reward: Literal["win_rate", "bradley_terry"] = "win_rate"
    concurrency: int = Field(8, ge=1)
    """Games that are judged at the same time."""
    seed: int = 0
    """Draws who meets whom."""


class EnvConfig(Config):
    """The environment and the mixture of its tasks."""

    name: str = "coding-lists"
    """A registered name, `pkg.module:Object`, a .py file or a directory."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment's factory."""
    sandbox: Sandbox = "bwrap"
    """Where commands and programs of the policy run (docs/sandboxes.md). `subprocess` is no sandbox and is meant for
    code that you trust. With one that is remote, graders and programs of a few milliseconds run in bwrap."""
    sandbox_args: dict[str, Any] = {}
    """Options of the sandbox's provider, such as `image` of docker."""
    families: dict[str, float] = _LISTS_FAMILIES
    """Share of each family among training tasks; empty leaves the mixture to the environment. This default is meant
    for coding-lists; for any other environment it is the same as empty."""
    levels: dict[str, tuple[int, ...]] = _LISTS_LEVELS
    """The ladder of a family, drawn in proportion to p(1 - p) of each level's recent pass rate p. A family that is
    not named leaves its levels to the environment, and this default too is meant for coding-lists."""
    judge: JudgeConfig | None = None
    """A model that compares the answers of a group which the environment's own grader scores above 0; the reward is
    then what it says. None leaves rewards to the environment."""
    faults: FaultConfig = FaultConfig()
    """What becomes of episodes whose environment misbehaves."""

    @property
    def local_sandbox(self) -> str:
        """That of graders and of programs of a few milliseconds, on the machine of whoever needs them."""
        return self.sandbox if self.sandbox in ("bwrap", "subprocess") else "bwrap"

    @model_validator(mode="after")
    def _defaults_are_of_one_environment(self) -> EnvConfig:
        """Tables merge, so a file or a flag that names another environment cannot take the default's entries away."""
        if self.name != "coding-lists":
            for field, default in (("families", _LISTS_FAMILIES), ("levels", _LISTS_LEVELS)):
                if getattr(self, field) == default:
                    self.__dict__[field] = {}  # of an object that nobody has seen yet
        return self

    @model_validator(mode="after")
    def _shares_are_positive(self) -> EnvConfig:
        if any(share <= 0 for share in self.families.values()):
            raise ValueError(f"families is {self.families}; give each family a share above 0, or leave it out")
        if empty := [family for family, levels in self.levels.items() if not levels]:
            raise ValueError(f"levels of {empty[0]} is empty; name at least one level of its ladder, or leave it out")
        return self
