"""The adapter for reasoning-gym: questions by seed and index, judged by the dataset that made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from k3rl.config import from_tree
from k3rl.envs.adapters.bridge import BlockingBridge, BridgeError, BridgeSpec, ForeignLied
from k3rl.envs.adapters.foreign import ProcessConfig, SeededTasks, mapping, seed_of, unlikely
from k3rl.envs.adapters.packages import named
from k3rl.envs.base import Action, Env, Environment, EpisodeContext, Hack, NoOracle, Observation, Rubric, StepResult
from k3rl.types import Failed, Message, Score, Scored, StopReason, Task


class ReasoningConfig(ProcessConfig):
    """Options of `reasoning-gym:DATASET`."""

    size: int = Field(default=500, ge=1)
    """Entries of one dataset; a dataset of another seed follows where more are asked for."""
    tag: str = "answer"
    """The answer stands between <tag> and </tag>; empty judges the whole reply."""
    kwargs: dict[str, Any] = {}
    """Configuration of the dataset."""
    reward_range: tuple[float, float] | None = (0.0, 1.0)
    """Smallest and greatest reward; one outside is no reward."""


class ReasoningTasks(SeededTasks):
    """Questions with their answers hidden. The process that makes them starts with the first one."""

    def __init__(self, name: str, config: ReasoningConfig, family: str, spec: BridgeSpec) -> None:
        super().__init__(name, config, family=family, ready=spec.check)
        self._size, self._tag = config.size, config.tag
        self._bridge = BlockingBridge(spec)

    def task(self, split: str, index: int, seed: int) -> Task:
        plain = super().task(split, index, seed)
        chunk, inner = divmod(index, self._size)
        place = {"seed": seed_of(plain.env, split, seed, "dataset", chunk), "index": inner}
        found = mapping(self._bridge.call("entry", **place))
        question, answer = found.get("question"), found.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str | None):
            raise ForeignLied(f"entry {inner} of {plain.env} is {str(found)[:120]}; wants a question and an answer")
        asked = f"{question}\nGive your answer between <{self._tag}> and </{self._tag}>." if self._tag else question
        return Task(
            id=plain.id,
            env=plain.env,
            messages=(Message("user", asked),),
            family=plain.family,
            budgets=plain.budgets,
            hidden={**place, "answer": answer, "tag": self._tag},
            seed=seed,
        )


class OneAnswer(Env):
    """One question, one answer."""

    def __init__(self, system: str = "") -> None:
        self._task: Task | None = None
        self._system = system

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """The question."""
        if self._task is not None:
            raise RuntimeError("an environment is single use; make a new one for each episode")
        self._task = task
        system = (Message("system", self._system),) if self._system else ()
        return Observation((*system, *task.messages))

    async def step(self, action: Action) -> StepResult:
        """Take the turn as the answer."""
        if self._task is None:
            raise RuntimeError("call reset before step")
        text = action.message.content
        return StepResult(done=True, stop_reason=StopReason.COMPLETED, answer=text if isinstance(text, str) else "")


class ReasoningRubric(Rubric):
    """What the dataset's own `score_answer` says. A dataset that raises, hangs or lies is Failed."""

    def __init__(self, config: ReasoningConfig, spec: BridgeSpec) -> None:
        self._config = config
        self._bridge = BlockingBridge(spec)

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        return [self._score(task, answer) for task, answer in items]

    def _score(self, task: Task, answer: str) -> Score:
        if task.hidden is None:
            raise ValueError(f"task {task.id} came to the grader without its hidden part; get it from the task source")
        try:
            reward = self._bridge.call("score", seed=task.hidden["seed"], index=task.hidden["index"], answer=answer)
        except BridgeError as error:
            return Failed(str(error))
        wrong = "the dataset gave no reward" if reward is None else unlikely(reward, self._config.reward_range)
        return Failed(wrong) if wrong else Scored(float(reward), {"right": float(reward == 1.0)})

    def close(self) -> None:
        """End its process."""
        self._bridge.close()


class ReasoningGrader:
    """The `grader` of an environment; `range` is what rewards may be."""

    def __init__(self, config: ReasoningConfig, spec: BridgeSpec) -> None:
        self._config, self._spec = config, spec
        self.range = config.reward_range or (float("-inf"), float("inf"))

    def __call__(self, provider: object = None) -> ReasoningRubric:
        """The answers are text that is compared, never run, so there is no need for a sandbox."""
        return ReasoningRubric(self._config, self._spec)


def oracle(task: Task) -> str:
    """The entry's own answer. Some datasets have none, because many are right."""
    if task.hidden is None or task.hidden["answer"] is None:
        raise NoOracle(f"{task.id} has no answer of its own: many are right, and the dataset only judges them")
    return wrapped(task.hidden["answer"], task.hidden["tag"])


def wrapped(answer: str, tag: str) -> str:
    """An answer in the form that is asked for."""
    return f"<{tag}>{answer}</{tag}>" if tag else answer


def null(task: Task) -> str:
    """No answer."""
    return ""


def hacks(task: Task) -> dict[str, Hack | str]:
    """Answers that try to be paid for knowing nothing."""
    tag = (task.hidden or {}).get("tag", "")
    question = str(task.messages[-1].content)
    return {"empty_tag": wrapped("", tag), "the_question": wrapped(question, tag), "none": wrapped("None", tag)}


def reasoning_gym(target: str, **options: Any) -> Environment:
    """`reasoning-gym:DATASET`, for example `reasoning-gym:leg_counting`."""
    config = from_tree(ReasoningConfig, options)
    own = {name: getattr(config, name) for name in ("size", "tag", "kwargs")}
    spec = config.spec("reasoning_gym", "reasoning-gym", {"id": named(target, "reasoning-gym:DATASET"), **own})
    name = f"reasoning-gym:{target}"
    source = ReasoningTasks(name, config, target, spec)

    def demonstrations(seed: int, n: int, split: str = "train") -> list[dict[str, Any]]:
        tasks = [source.get(split, index, seed) for index in range(n)]
        return [
            {
                "messages": [
                    {"role": "user", "content": task.messages[-1].content},
                    {"role": "assistant", "content": oracle(task)},
                ]
            }
            for task in tasks
        ]

    return Environment(
        name=name,
        description=f"questions of reasoning-gym's {target}, judged by the dataset itself",
        source=source,
        make_env=lambda: OneAnswer(config.system),
        grader=ReasoningGrader(config, spec),
        oracle=oracle,
        demonstrations=demonstrations,
        domain="reasoning",
        null=null,
        hacks=hacks,
    )
