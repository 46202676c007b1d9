"""What an environment is: tasks, an episode's rules, and a rubric. No torch and no ray here.

Task source   -> Task with its hidden part (deterministic in split, index and seed, so a run can resume)
Env           -> what a policy sees and may do; single use, made by a factory, given `task.public()` only
Rubric        -> scores answers with the hidden part, away from the agent
Environment   -> the three of them under one name, demonstrations for a warm start, and what `k3rl env check` tries
Hack          -> a submission that must not pay
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from k3rl.config import ConfigError
from k3rl.types import Budgets, Episode, Invalid, Message, Score, Scored, StopReason, Task

if TYPE_CHECKING:
    from k3rl.envs.gateway import Harness
    from k3rl.envs.rubric import FunctionGrader, RewardFunction
    from k3rl.envs.sandbox import SandboxProvider


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages to append to the conversation, and the tools the next assistant turn may call.

    `tool_choice` as in `k3rl.tokens.xtml.render`: None, "required" or "none".

    branch: "same" appends. With "new" and "child" the messages are a whole conversation of its own, whose prompt is
    rendered anew: "new" takes the place of the one so far, "child" lets it wait. "parent" ends a child and appends
    to the conversation that waits, exactly where it stood.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | None = None
    branch: Literal["same", "new", "child", "parent"] = "same"


@dataclass(frozen=True, slots=True)
class Action:
    """One assistant turn, as a message and as the ids that were sampled; `context_tokens`: prompt and sampled ids, an
    image counted as all its rows."""

    message: Message
    token_ids: tuple[int, ...] = ()
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the environment answers. When `done`, `answer` is what the rubric will score.

    `metrics` are of the whole episode so far; those of the last step are kept.
    """

    observation: Observation | None = None
    done: bool = False
    stop_reason: StopReason | None = None
    answer: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.done and self.observation is None:
            raise ValueError("a step that does not end the episode needs an observation for the next turn")


class ProgramService(Protocol):
    """Runs many small programs apart from everything else; see `k3rl.envs.sandbox.programs`."""

    async def run(self, jobs: Sequence[Any]) -> list[Any]:
        """One outcome per `ProgramJob`, in order. Raises SandboxDied when the sandbox, not a program, failed."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """What an episode may use: its seed, its budgets, programs run in a sandbox, and sandboxes of its own.

    None where nobody gives them; `programs` comes where the environment's `needs_programs` says so. group: names the
    episodes that belong together, so that they can share a choice.
    """

    seed: int = 0
    group: str = ""
    budgets: Budgets = field(default_factory=Budgets)
    programs: ProgramService | None = None
    sandboxes: SandboxProvider | None = None


class NoOracle(ConfigError):
    """This environment does not say what the right answer is."""


class NoSnapshot(RuntimeError):
    """This environment cannot be paused and resumed."""


def tighter(one: Budgets, other: Budgets) -> Budgets:
    """The smaller of each limit; None is no limit."""
    limits = {}
    for item in dataclasses.fields(Budgets):
        values = [value for value in (getattr(one, item.name), getattr(other, item.name)) if value is not None]
        limits[item.name] = min(values, default=None)
    return Budgets(**limits)


class Env(ABC):
    """The rules of one episode. Single use: `reset` once, `step` until done, `close` always (idempotent)."""

    @abstractmethod
    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """The first messages. `task.hidden` is None here: an environment cannot leak what it does not have."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answer one assistant turn."""

    async def conclude(self, reason: StopReason) -> str:
        """The answer of an episode that a budget or a broken turn has ended; no turn follows. By default none."""
        return ""

    async def snapshot(self) -> bytes:
        """Everything that `restore` needs to go on from this turn. Raises NoSnapshot where that is not possible."""
        raise NoSnapshot(f"{type(self).__name__} cannot be paused; episodes of it start again")

    async def restore(self, task: Task, context: EpisodeContext, snapshot: bytes) -> None:
        """In place of `reset`: go on where an episode of the same task was when `snapshot` was taken."""
        raise NoSnapshot(f"{type(self).__name__} cannot be resumed; episodes of it start again")

    async def close(self) -> None:
        """Give back whatever the episode holds. Called once or more, also after an error."""
        return None


class TaskSource(Protocol):
    """Where tasks come from; finite, lazy or endless."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits; training on any but "train" is the caller's mistake."""
        ...

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """How many tasks the split has, or None when it has no end."""
        ...

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """The task WITH its hidden part. Equal arguments give equal tasks, in any process."""
        ...


class Rubric(ABC):
    """Scores answers. Wrong is Scored(0.0), cheating is Invalid, a broken grader is Failed; never mixed up.

    `Rubric.of(function, ...)` makes the grader of an environment from plain functions; see `k3rl.envs.rubric`.
    """

    @abstractmethod
    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in the order given."""

    def score_episodes(self, items: Sequence[tuple[Task, Episode]]) -> list[Score]:
        """One score per (task with hidden part, episode), in the order given; by default from the answers alone."""
        return self.score_batch([(task, episode.answer) for task, episode in items])

    @staticmethod
    def of(*functions: Callable[..., Any] | RewardFunction) -> FunctionGrader:
        """A grader whose reward functions get their arguments by name. Raises ConfigError for what cannot work."""
        from k3rl.envs.rubric import rubric_of

        return rubric_of(functions)

    def close(self) -> None:
        """Give back sandboxes. Idempotent."""
        return None


@dataclass(frozen=True, slots=True)
class Hack:
    """A submission that tries to be paid without solving its task.

    kind: "cheat" must be Invalid or score no better than the null agent; "hardcode" knows the visible cases and may
    score up to `visible_share`, the reward that the visible cases alone are worth.
    """

    submission: str
    kind: Literal["cheat", "hardcode"] = "cheat"
    visible_share: float = 0.0

    def refused(self, score: Score, null_reward: float) -> bool:
        """Whether this score keeps the hack from paying. Failed is not a refusal: nobody judged it."""
        if isinstance(score, Invalid):
            return True
        allowed = max(null_reward, self.visible_share) if self.kind == "hardcode" else null_reward
        return isinstance(score, Scored) and score.reward <= allowed


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment under its name.

    make_env: a fresh `Env` for one episode. grader: keyword arguments -> a `Rubric` (for sandboxed ones
    `provider=` and `workers=`). demonstrations: (seed, n, split="train") -> chat examples, dicts with
    "messages" in OpenAI form and, where used, "tools". oracle: task with hidden part -> the right answer.

    judged_while_played: rewards come from what is done in an episode, so there is no answer to grade by itself; in
    place of `oracle` there is oracle_turn: (task with hidden part, all messages so far) -> the right next turn.
    no_oracle: why there is neither, for the report of a check; `oracle` may raise NoOracle for a single task.

    What `k3rl env check` tries, each given the task with its hidden part: oracle_expected, the oracle's reward
    (where it is not the same for all tasks, a function); null, the answer of an agent that does nothing; hacks,
    submissions by name that must not pay (plain text is a `Hack` of kind "cheat"; where judged while
    played, what is said in every turn).

    reward_range: what rewards may be; one outside of it, NaN or infinite makes the score Failed. make_harness: a
    fresh agent program for one episode, which then plays it through the gateway in the place of `make_env`.
    """

    name: str
    description: str
    source: TaskSource
    make_env: Callable[[], Env]
    grader: Callable[..., Rubric]
    oracle: Callable[[Task], str] | None = None
    demonstrations: Callable[..., list[dict[str, Any]]] | None = None
    needs_programs: bool = False
    domain: str = "general"
    version: int = 1
    null: Callable[[Task], str] | None = None
    hacks: Callable[[Task], Mapping[str, Hack | str]] | None = None
    oracle_expected: Callable[[Task], float] | float = 1.0
    reward_range: tuple[float, float] | None = None
    make_harness: Callable[[], Harness] | None = None
    judged_while_played: bool = False
    oracle_turn: Callable[[Task, Sequence[Message]], Message] | None = None
    no_oracle: str = ""

    def right_answer(self, task: Task) -> str:
        """What `oracle` gives. Raises NoOracle where there is none, with the reason."""
        if self.oracle is None:
            raise NoOracle(f"{self.name} has no right answer to show: {self.no_oracle or 'nobody gave one'}")
        return self.oracle(task)

    @property
    def reward_limits(self) -> tuple[float, float]:
        """Least and greatest reward: `reward_range`, else what a rubric of functions declares, else 0 and 1."""
        if self.reward_range is not None:
            return self.reward_range
        declared: tuple[float, float] = getattr(self.grader, "range", (0.0, 1.0))
        return declared

    @property
    def compares(self) -> bool:
        """Whether a reward depends on the other answers of a group, which are then graded together."""
        return bool(getattr(self.grader, "compares", False))

    def tasks(self, split: str, seed: int = 0, limit: int | None = None) -> Iterator[Task]:
        """The first `limit` tasks of a split, or all of a finite one."""
        length = self.source.length(split)
        count = limit if length is None else length if limit is None else min(limit, length)
        if count is None:
            raise ValueError(f"split {split!r} of {self.name} has no end; give a limit")
        for index in range(count):
            yield self.source.get(split, index, seed)
