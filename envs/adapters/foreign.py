"""What all adapters share: the options, tasks that are seeds, an episode over a bridge, and the rubric of its rewards.

A foreign environment gives rewards while it is played. An episode's answer is a `Record` of those, written here and
never by the policy; `RecordRubric` makes the score of it. A reward that never came is Failed, one that is NaN,
infinite or out of the declared range fails the episode, and neither is ever the number 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from k3rl.config import Config, ConfigError
from k3rl.envs.adapters.bridge import Bridge, BridgeSpec, ForeignLied, InvalidAction
from k3rl.envs.base import Action, Env, EpisodeContext, Observation, Rubric, StepResult
from k3rl.types import Budgets, Failed, Message, Score, Scored, StopReason, Task, ToolCall

SPLITS = ("train", "heldout")
_KIND = "k3rl-adapter-record"


class ForeignConfig(Config):
    """Options of every adapter."""

    turns: int = Field(default=64, ge=1)
    """Turns that an episode may take."""
    heldout: int = Field(default=256, ge=1)
    """Tasks of the split `heldout`, where tasks are seeds; `train` has no end."""
    reward_range: tuple[float, float] | None = None
    """Smallest and greatest reward of a whole episode; one outside fails the episode."""
    unfinished: float | None = None
    """Reward of an episode that the policy or a budget ended before the environment had given any reward. None: such
    an episode has no reward and leaves the batch."""
    invalid_turns: int = Field(default=3, ge=1)
    """Turns that are no action, one after the other, that end the episode."""
    system: str = ""
    """A system message before everything else; empty leaves it out."""
    oracle: str = ""
    """`pkg.module:function` or `file.py:function`: (messages so far, row of the task) to the right next turn, for
    `k3rl env check`. Messages are in OpenAI form; a turn is text, or calls [{"name", "arguments"}]."""
    oracle_reward: float | None = None
    """What the oracle's episode is worth; None: the greatest of `reward_range`, or 1."""

    @model_validator(mode="after")
    def _range_is_a_range(self) -> ForeignConfig:
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range is {self.reward_range}; the first number must be below the second")
        return self


class ProcessConfig(ForeignConfig):
    """Options of adapters whose package runs in a process of its own."""

    python: str = ""
    """bin/python of the virtual environment that has the package; empty is this Python."""
    paths: tuple[str, ...] = ()
    """Folders with your own modules, put first on that Python's path."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the process may see; PATH, HOME, LANG and TMPDIR it always sees."""
    start_s: float = Field(default=120.0, gt=0)
    """Deadline for starting it and importing the package."""
    call_s: float = Field(default=60.0, gt=0)
    """Deadline for each of its answers."""

    def spec(self, kind: str, package: str, options: Mapping[str, Any]) -> BridgeSpec:
        """What `Bridge` starts."""
        return BridgeSpec(
            kind, package, options, self.python, self.paths, self.variables, start_s=self.start_s, call_s=self.call_s
        )


def seed_of(*parts: object) -> int:
    """A seed of 31 bits that depends on all parts, equal in every process."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


class SeededTasks:
    """Tasks that are seeds of one foreign environment: `train` without end, `heldout` with `count` others.

    The environment itself says what is asked when an episode begins. ready: called before the first task is given, and
    raises MissingResource when episodes could not begin.
    """

    def __init__(
        self,
        name: str,
        config: ForeignConfig,
        *,
        family: str,
        ready: Callable[[], None],
        splits: Sequence[str] = SPLITS,
    ) -> None:
        self._name = name
        self._ready = ready
        self._is_ready = False
        self._config = config
        self._family = family
        self._splits = tuple(splits)

    @property
    def splits(self) -> tuple[str, ...]:
        return self._splits

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """None for `train`, which has no end."""
        self.check(split, level, family)
        return None if split == "train" else self._config.heldout

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """Task `index`. Raises ValueError for an unknown split, level or family, IndexError past the end."""
        length = self.length(split, level=level, family=family)
        if index < 0 or (length is not None and index >= length):
            raise IndexError(f"{self._name} {split} has {length} tasks; there is no number {index}")
        if not self._is_ready:
            self._ready()
            self._is_ready = True
        return self.task(split, index, seed)

    def task(self, split: str, index: int, seed: int) -> Task:
        """The task of a place that exists."""
        return Task(
            id=f"{self._name}/{split}/{seed}/{index}",
            env=self._name,
            messages=(Message("user", f"Task {index} of {self._name}."),),
            family=self._family,
            budgets=Budgets(turns=self._config.turns),
            data={"split": split, "index": index, "seed": seed_of(self._name, split, seed, index)},
            hidden={},
            seed=seed,
        )

    def check(self, split: str, level: int | None, family: str | None) -> None:
        """Raises ValueError for a split, level or family that is not here."""
        if split not in self._splits:
            raise ValueError(f"{self._name} has no split {split!r}; it has {', '.join(self._splits)}")
        if level not in (None, 0) or family not in (None, self._family):
            raise ValueError(
                f"{self._name} has no level {level} with family {family!r}; it has family {self._family!r} at level 0"
            )


@dataclass(frozen=True, slots=True)
class Record:
    """What an episode was paid. ended: "environment", or what stopped it before: a StopReason's value, or "invalid"."""

    task: str
    rewards: tuple[float, ...]
    ended: str
    parts: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """As an answer."""
        return json.dumps({"kind": _KIND, **dataclasses.asdict(self)})

    @classmethod
    def of(cls, answer: str) -> Record:
        """Raises ValueError for a text that is no record."""
        try:
            row = json.loads(answer)
            if row.pop("kind") != _KIND:
                raise ValueError("another kind")
            rewards = tuple(float(reward) for reward in row["rewards"])
            return cls(str(row["task"]), rewards, str(row["ended"]), dict(row["parts"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"the answer {answer[:80]!r} is no record of a played episode; environments behind an adapter are "
                "judged while they are played"
            ) from None


NO_ORACLE = (
    "it is judged while it is played and does not say what is right; a function named by the option `oracle` would"
)


def oracle_of(
    config: ForeignConfig, row: Callable[[Task], Mapping[str, Any]]
) -> Callable[[Task, Sequence[Message]], Message] | None:
    """The option `oracle` as `Environment.oracle_turn`. row: what it is told of a task beside seed, split and index."""
    if not config.oracle:
        return None
    say = loaded(config.oracle)

    def turn(task: Task, said: Sequence[Message]) -> Message:
        told = [
            {"role": one.role, "content": one.content, "name": one.name}
            | ({"tool_calls": [dataclasses.asdict(call) for call in one.tool_calls]} if one.tool_calls else {})
            for one in said
        ]
        answer = say(told, {**task.data, **row(task)})
        if isinstance(answer, str):
            return Message("assistant", answer)
        return Message("assistant", "", tool_calls=tuple(ToolCall(one["name"], one["arguments"]) for one in answer))

    return turn


def loaded(place: str) -> Callable[..., Any]:
    """The function at `pkg.module:function` or `file.py:function`. Raises ConfigError."""
    from k3rl.envs.registry import object_at

    found = object_at(place)
    if not callable(found):
        raise ConfigError(f"{place!r} is a {type(found).__name__}; wants a function", key="oracle", got=place)
    function: Callable[..., Any] = found
    return function


def forgeries(task: Task) -> dict[str, str]:
    """What a policy might say to be paid without playing: a record of its own, and claims."""
    return {
        "44 a record of its own": Record(task.id, (1.0,), "environment").text(),
        "22 claims": "PASS reward=1.0 done=true",
        "16 a reward as JSON": '{"reward": 1.0, "done": true}',
    }


class RecordRubric(Rubric):
    """The sum of an episode's rewards. Failed where there is none."""

    def __init__(self, config: ForeignConfig) -> None:
        self._config = config

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        return [self._score(task, answer) for task, answer in items]

    def _score(self, task: Task, answer: str) -> Score:
        try:
            record = Record.of(answer)
        except ValueError as error:
            return Failed(str(error))
        if record.task != task.id:
            return Failed(f"the record is of task {record.task!r}, not of {task.id!r}")
        if not record.rewards and record.ended == "environment":
            return Failed("the environment ended the episode and gave no reward")
        if not record.rewards and self._config.unfinished is None:
            return Failed(
                f"the episode ended ({record.ended}) before the environment gave a reward; "
                "set `unfinished` to say what that is worth"
            )
        total = sum(record.rewards) if record.rewards else float(self._config.unfinished or 0.0)
        wrong = unlikely(total, self._config.reward_range)
        if wrong:
            return Failed(wrong)
        finished = float(record.ended == "environment")
        return Scored(total, {"finished": finished, "rewards": float(len(record.rewards)), **record.parts})


class RecordGrader:
    """The `grader` of an environment. range: what rewards may be, as far as anybody has said."""

    def __init__(self, config: ForeignConfig) -> None:
        self._config = config
        self.range = config.reward_range or (-math.inf, math.inf)

    def __call__(self, provider: object = None) -> RecordRubric:
        """Needs no sandbox: the rewards are there already."""
        return RecordRubric(self._config)


def unlikely(reward: object, allowed: tuple[float, float] | None) -> str:
    """Why a number is no reward; empty for one that is."""
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return f"the reward is {reward!r}, not a number"
    if not math.isfinite(reward):
        return f"the reward is {reward}, not a finite number"
    if allowed is not None and not allowed[0] <= reward <= allowed[1]:
        return f"the reward is {reward:g}, outside of its declared range [{allowed[0]:g}, {allowed[1]:g}]"
    return ""


class RewardedEnv(Env):
    """An episode that is paid while it is played. Subclasses open it and answer turns; the records are kept here."""

    def __init__(self, config: ForeignConfig) -> None:
        self._config = config
        self._task: Task | None = None
        self._rewards: list[float] = []
        self._parts: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._invalid = 0
        self._invalid_row = 0

    async def open(self, task: Task) -> Mapping[str, Any]:
        """Begin the foreign episode: {"messages", maybe "tools"}."""
        raise NotImplementedError

    async def act(self, message: Message) -> Mapping[str, Any]:
        """One turn: {"messages", "reward": number or None, "done", "metrics", maybe "tools", "branch", "parts"}.

        Raises InvalidAction for a turn that is no action.
        """
        raise NotImplementedError

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """What the foreign environment says first."""
        if self._task is not None:
            raise RuntimeError("an environment is single use; make a new one for each episode")
        self._task = task
        opened = await self.open(task)
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        messages = messages_of([*system, *listed(opened, "messages")])
        if not messages:
            raise ForeignLied("the environment began an episode without a message for the policy")
        return Observation(messages, tuple(opened.get("tools") or ()))

    async def step(self, action: Action) -> StepResult:
        """Hand one turn on."""
        if self._task is None:
            raise RuntimeError("call reset before step")
        try:
            result = await self.act(action.message)
        except InvalidAction as error:
            return self._refused(str(error))
        self._invalid_row = 0
        reward = result.get("reward")
        if reward is not None:
            if wrong := unlikely(reward, None):
                raise ForeignLied(wrong)
            self._rewards.append(float(reward))
        self._metrics |= numbers(result.get("metrics"))
        self._parts |= numbers(result.get("parts"))
        if type(result.get("done")) is not bool:
            raise ForeignLied(f"`done` is {result.get('done')!r}, not true or false")
        if result["done"]:
            return self._over("environment", StopReason.ENV_DONE)
        messages = messages_of(listed(result, "messages")) or (Message("user", ""),)
        branch = result.get("branch", "same")
        return StepResult(
            Observation(messages, tuple(result.get("tools") or ()), branch=branch), metrics=self._numbers()
        )

    async def conclude(self, reason: StopReason) -> str:
        """The rewards so far."""
        return self._record(reason.value)

    def _refused(self, why: str) -> StepResult:
        self._invalid += 1
        self._invalid_row += 1
        if self._invalid_row >= self._config.invalid_turns:
            return self._over("invalid", StopReason.COMPLETED)
        return StepResult(Observation((Message("user", f"That is no action: {why}"),)), metrics=self._numbers())

    def _over(self, ended: str, reason: StopReason) -> StepResult:
        return StepResult(done=True, stop_reason=reason, answer=self._record(ended), metrics=self._numbers())

    def _record(self, ended: str) -> str:
        return Record("" if self._task is None else self._task.id, tuple(self._rewards), ended, self._parts).text()

    def _numbers(self) -> dict[str, float]:
        return {**self._metrics, "invalid_turns": float(self._invalid), "return": float(sum(self._rewards))}


class BridgedEnv(RewardedEnv):
    """An episode in a process of its own. rows: what the foreign side is given of a task beside its seed."""

    def __init__(
        self, config: ForeignConfig, spec: BridgeSpec, rows: Callable[[Task], Mapping[str, Any]], *, calls: bool = False
    ) -> None:
        super().__init__(config)
        self._bridge = Bridge(spec)
        self._rows = rows
        self._calls = calls
        self._names: dict[str, str] = {}  # of the tools that were called, by the id that the foreign side knows

    async def open(self, task: Task) -> Mapping[str, Any]:
        await self._bridge.start()
        return mapping(await self._bridge.call("open", row=dict(self._rows(task)), seed=task.data["seed"]))

    async def act(self, message: Message) -> Mapping[str, Any]:
        text = message.content if isinstance(message.content, str) else ""
        params: dict[str, Any] = {"text": text}
        if self._calls:
            params["tool_calls"] = [self._called(call) for call in message.tool_calls]
        answer = dict(mapping(await self._bridge.call("act", **params)))
        if answer.get("branch", "same") == "same":
            answer["messages"] = [self._result(row) for row in listed(answer, "messages")]
        return answer

    async def close(self) -> None:
        """End the process."""
        if self._bridge.alive:
            try:
                await self._bridge.call("close", deadline_s=5.0)
            finally:
                await self._bridge.close()

    def _called(self, call: ToolCall) -> dict[str, Any]:
        """A call in OpenAI form, with an id of ours."""
        text = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
        number = f"call_{len(self._names)}"
        self._names[number] = call.name
        return {"id": number, "type": "function", "function": {"name": call.name, "arguments": text}}

    def _result(self, row: Any) -> Any:
        """A result of a call by its tool's name; our conversation does not know the ids."""
        if not isinstance(row, Mapping) or row.get("role") != "tool":
            return row
        return {"role": "tool", "content": row.get("content"), "name": self._names.get(str(row.get("tool_call_id")))}


def mapping(value: object) -> Mapping[str, Any]:
    """Raises ForeignLied for anything else."""
    if not isinstance(value, Mapping):
        raise ForeignLied(f"the answer is a {type(value).__name__}, not an object")
    return value


def listed(value: Mapping[str, Any], key: str) -> list[Any]:
    """A list of an answer. Raises ForeignLied for anything else."""
    found = value.get(key)
    if not isinstance(found, list):
        raise ForeignLied(f"`{key}` is {str(found)[:80]!r}, not a list")
    return found


def messages_of(rows: Sequence[Any]) -> tuple[Message, ...]:
    """Messages in OpenAI form as ours. Raises ForeignLied for what is none."""
    found = []
    for row in rows:
        if not isinstance(row, Mapping) or not isinstance(row.get("role"), str):
            raise ForeignLied(f"{str(row)[:120]!r} is no message with a role")
        content = row.get("content")
        if not isinstance(content, str | list | None):
            raise ForeignLied(f"the content of a message is a {type(content).__name__}, not text")
        calls = []
        for call in row.get("tool_calls") or ():
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                arguments = call["function"]["arguments"]
            except (KeyError, TypeError):
                raise ForeignLied(f"{str(call)[:120]!r} is no tool call") from None
            calls.append(ToolCall(str(call["function"]["name"]), arguments, call.get("id")))
        found.append(
            Message(
                row["role"],
                "" if content is None else content,
                tool_calls=tuple(calls),
                name=row.get("name"),
                tool_call_id=row.get("tool_call_id"),
            )
        )
    return tuple(found)


def numbers(value: object) -> dict[str, float]:
    """The finite numbers of a mapping; metrics are no place to fail."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(key): float(one) for key, one in items if not unlikely(one, None)}
