"""One episode through the loop: exact tokens, typed ends, budgets, and environments that misbehave."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.envs import Action, Env, EpisodeContext, Observation, StepResult, make
from k3rl.envs.base import tighter
from k3rl.envs.recording import NOT_GRADED, ContextOutgrown, PromptCache, TurnSettings
from k3rl.envs.rollout import gradable, run_episode
from k3rl.envs.sandbox import ProgramRunner
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import (
    Budgets,
    Completion,
    Episode,
    Failed,
    Message,
    SamplingParams,
    StopReason,
    Task,
    ToolCall,
)

TOKENIZER = Tokenizer.builtin()
ENVIRONMENT = make("coding-lists")
PROBE = ENVIRONMENT.source.get("train", 0, 1, family="probe", level=1)
LIST = ENVIRONMENT.source.get("train", 0, 1, family="list", level=2)


def sampled(message: Message) -> list[int]:
    """The ids a policy would sample for this turn: the whole conversation less the prompt before it."""
    user = Message("user", "x")
    prompt = TOKENIZER.encode_segments(xtml.render([user], thinking=False))
    whole = TOKENIZER.encode_segments(xtml.render([user, message], thinking=False, add_generation_prompt=False))
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def answer(text: str) -> list[int]:
    return sampled(Message("assistant", text))


def call(code: str, name: str = "run", **others: Any) -> list[int]:
    return sampled(Message("assistant", "", tool_calls=(ToolCall(name, {"code": code, **others}),)))


class Script:
    """A policy that says what it is told, cut at max_tokens, and remembers what it was asked."""

    def __init__(self, *turns: Sequence[int], stop: StopReason = StopReason.STOP) -> None:
        self.turns = list(turns)
        self.stop = stop
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.asked.append((tuple(prompt_ids), params))
        ids = tuple(self.turns[len(self.asked) - 1])
        kept = ids[: params.max_tokens]
        logprobs = tuple(-0.5 - number / 8 for number in range(len(kept)))
        stop = self.stop if len(kept) == len(ids) else StopReason.LENGTH
        drawn = tuple(np.array([token, token + 1], np.int32) for token in kept) if params.top_k else None
        return Completion(kept, logprobs, stop, weight_version=4, first_version=3, sampling_mask=drawn)


def play(
    policy: Script, task: Task = LIST, env: Env | None = None, budgets: Budgets | None = None, **options: Any
) -> Episode:
    context = EpisodeContext(budgets=budgets or Budgets(), programs=options.pop("programs", None))
    settings = TurnSettings(TOKENIZER, options.pop("sampling", SamplingParams(max_tokens=200)))
    made = env or ENVIRONMENT.make_env()
    return asyncio.run(run_episode(made, task, policy, settings, episode_id="e1", context=context, **options))


def program(task: Task) -> str:
    assert task.hidden is not None
    return str(task.hidden["program"])


def test_a_prompt_that_was_rendered_before_is_the_same_prompt_and_thinking_is_part_of_it(monkeypatch) -> None:
    rendered, render = [], xtml.render
    monkeypatch.setattr(xtml, "render", lambda *args, **more: rendered.append(1) or render(*args, **more))
    cache, params = PromptCache(size=2), SamplingParams()
    for thinking in (False, False, True, True):
        known = TurnSettings(TOKENIZER, params, thinking, prompts=cache).prompt(LIST.messages)
        assert known == TurnSettings(TOKENIZER, params, thinking).prompt(LIST.messages)
    assert len(rendered) == 2 + 4
    for word in "ab":  # two newer ones
        TurnSettings(TOKENIZER, params, prompts=cache).prompt([Message("user", word)])
    TurnSettings(TOKENIZER, params, prompts=cache).prompt(LIST.messages)
    assert len(rendered) == 2 + 4 + 3, "the oldest is forgotten"


def test_a_single_turn_is_recorded_as_it_was_sampled() -> None:
    said = answer("def f(a):\n return a")
    episode = play(Script(said))
    prompt = TOKENIZER.encode_segments(xtml.render(LIST.messages, thinking=False))
    (branch,) = episode.branches
    (turn,) = branch.turns
    assert list(turn.prompt_ids) == prompt
    assert list(turn.sampled_ids) == said
    assert (turn.first_version, turn.last_version) == (3, 4)
    ids, mask, logprobs = branch.tokens()
    assert ids.tolist() == prompt + said
    assert mask.tolist() == [False] * len(prompt) + [True] * len(said)
    assert logprobs[len(prompt) + 2] == -0.75
    assert (episode.answer, episode.stop_reason) == ("def f(a):\n return a", StopReason.COMPLETED)
    assert episode.score == NOT_GRADED
    assert gradable(episode)
    assert (episode.family, episode.level, episode.task_id) == (LIST.family, LIST.level, LIST.id)
    assert episode.budgets_used["tokens"] == len(said)
    assert [message.role for message in episode.messages] == ["user", "assistant"]


def test_what_each_token_was_drawn_from_is_recorded_with_its_turn() -> None:
    said = answer("def f(a):\n return a")
    (branch,) = play(Script(said), sampling=SamplingParams(top_k=2, max_tokens=200)).branches
    kept = branch.sampling_mask
    assert kept is not None
    prompt = len(kept) - len(said)
    assert (kept.which[:prompt] == -1).all()
    assert [kept.set(number).tolist() for number in kept.which[prompt:]] == [[token, token + 1] for token in said]


def test_a_tool_turn_extends_the_tokens_and_equals_the_rendered_conversation(runner: ProgramRunner) -> None:
    right = program(PROBE)
    first, last = call(right), answer(right)
    policy = Script(first, last)
    episode = play(policy, PROBE, programs=runner)
    (branch,) = episode.branches
    ids, mask, _ = branch.tokens()
    conversation = [
        *PROBE.messages,
        Message("assistant", "", tool_calls=(ToolCall("run", {"code": right}),)),
        Message("tool", "ok", name="run"),
        Message("assistant", right),
    ]
    whole = TOKENIZER.encode_segments(xtml.render(conversation, thinking=False, add_generation_prompt=False))
    assert ids.tolist() == whole
    assert ids[mask].tolist() == first + last
    assert policy.asked[1][0][: len(policy.asked[0][0])] == policy.asked[0][0]
    assert episode.answer == right
    assert episode.metrics == {"tool_calls": 1.0, "first_ok": 1.0}
    assert episode.budgets_used["tool_calls"] == 1


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (call("def f(a):\n return 0"), "bad"),
        (call("def f(a"), "error"),
        (call("while True: pass"), "error"),
        (call(program(PROBE), name="other"), "error"),
        (sampled(Message("assistant", "", tool_calls=(ToolCall("run", {"text": "x"}),))), "error"),
        (sampled(Message("assistant", "", tool_calls=(ToolCall("run", {"code": 3}),))), "error"),
    ],
)
def test_the_tool_answers_in_one_word(said: list[int], result: str, runner: ProgramRunner) -> None:
    episode = play(Script(said, answer("x")), PROBE, programs=runner)
    assert [message.content for message in episode.messages if message.role == "tool"] == [result]
    assert episode.metrics["first_ok"] == 0.0
    assert episode.stop_reason is StopReason.COMPLETED


def test_a_tool_call_where_there_is_no_tool_is_an_empty_answer() -> None:
    episode = play(Script(call(program(LIST))), dataclasses.replace(LIST, budgets=Budgets()))
    assert (episode.stop_reason, episode.answer) == (StopReason.COMPLETED, "")


def test_what_is_not_a_message_ends_the_episode_without_an_answer() -> None:
    said = [*answer("def f(a):\n return a")[:-3], TOKENIZER.special("open"), TOKENIZER.special("end_of_msg")]
    episode = play(Script(said))
    assert (episode.stop_reason, episode.answer) == (StopReason.PARSE_ERROR, "")
    assert gradable(episode)
    assert episode.branches[0].tokens()[1].sum() == len(said)


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_any_tokens_at_all_end_an_episode_in_a_typed_way(said: list[int]) -> None:
    episode = play(Script(said))
    assert episode.stop_reason in (StopReason.PARSE_ERROR, StopReason.COMPLETED)
    assert episode.branches[0].turns[0].sampled_ids == tuple(said)


@pytest.mark.parametrize(
    ("budgets", "task_budgets", "max_tokens", "expected", "limit"),
    [
        (Budgets(tokens_per_turn=5), Budgets(), 200, StopReason.LENGTH, 5),
        (Budgets(), Budgets(tokens_per_turn=6), 200, StopReason.LENGTH, 6),
        (Budgets(tokens=7), Budgets(tokens=9), 200, StopReason.MAX_TOKENS, 7),
        (Budgets(), Budgets(), 8, StopReason.LENGTH, 8),
        (Budgets(turns=0), Budgets(), 200, StopReason.MAX_TURNS, 0),
        (Budgets(wall_s=0.0), Budgets(), 200, StopReason.WALL_TIMEOUT, 0),
    ],
)
def test_budgets_end_an_episode(
    budgets: Budgets, task_budgets: Budgets, max_tokens: int, expected: StopReason, limit: int
) -> None:
    task = dataclasses.replace(LIST, budgets=task_budgets)
    policy = Script(answer("def f(a):\n return a"))
    episode = play(policy, task, budgets=budgets, sampling=SamplingParams(max_tokens=max_tokens))
    assert (episode.stop_reason, episode.answer) == (expected, "")
    assert episode.budgets_used["tokens"] == limit
    assert gradable(episode)


def test_turns_and_tool_calls_are_counted(runner: ProgramRunner) -> None:
    again = call("def f(a):\n return 0")
    assert play(Script(again, again), PROBE, programs=runner).stop_reason is StopReason.MAX_TOOL_CALLS
    free = dataclasses.replace(PROBE, budgets=Budgets(turns=3))
    episode = play(Script(again, again, again), free, programs=runner)
    assert episode.stop_reason is StopReason.MAX_TURNS
    assert episode.metrics["tool_calls"] == 3


def test_tighter_takes_the_smaller_of_each() -> None:
    one = Budgets(turns=3, tokens=None, wall_s=2.0)
    other = Budgets(turns=5, tokens=7, wall_s=1.0)
    assert tighter(one, other) == tighter(other, one) == Budgets(turns=3, tokens=7, wall_s=1.0)


def test_sampling_gets_the_stop_id_and_a_seed_per_turn(runner: ProgramRunner) -> None:
    policy = Script(call(program(PROBE)), answer("x"))
    play(policy, PROBE, programs=runner, sampling=SamplingParams(max_tokens=200, seed=5, temperature=0.7))
    first, second = (params for _, params in policy.asked)
    assert first.stop_ids == second.stop_ids == (xtml.stop_id(TOKENIZER),)
    assert first.seed != second.seed
    assert (first.temperature, first.max_tokens) == (0.7, 72)


@pytest.mark.parametrize(
    ("reason", "expected", "may_grade"),
    [
        (StopReason.ABORTED, StopReason.CANCELLED, False),
        (StopReason.CONTEXT_OVERFLOW, StopReason.CONTEXT_OVERFLOW, True),
    ],
)
def test_a_completion_that_was_cut_gives_the_reason(reason: StopReason, expected: StopReason, may_grade: bool) -> None:
    episode = play(Script(answer("def f(a):\n return a"), stop=reason))
    assert (episode.stop_reason, episode.answer) == (expected, "")
    assert gradable(episode) is may_grade


class Short(Script):
    """A policy with a context of so many tokens."""

    context = 0

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if len(prompt_ids) + params.max_tokens > self.context:
            raise ContextOutgrown(f"{len(prompt_ids)} and {params.max_tokens} are more than {self.context}")
        return await super().complete(prompt_ids, params)


def test_a_conversation_that_outgrows_the_policy_keeps_its_turns_and_one_that_never_fits_is_raised(
    runner: ProgramRunner,
) -> None:
    policy, sampling = Short(call(program(PROBE)), answer("x")), SamplingParams(max_tokens=72)
    policy.context = len(TOKENIZER.encode_segments(xtml.render(PROBE.messages, thinking=False))) + 72
    episode = play(policy, PROBE, programs=runner, sampling=sampling)
    assert (episode.stop_reason, episode.answer) == (StopReason.CONTEXT_OVERFLOW, "")
    assert [turn.sampled_ids for turn in episode.branches[0].turns] == [tuple(call(program(PROBE)))]
    assert gradable(episode)
    policy.context -= 1
    policy.asked.clear()
    with pytest.raises(ContextOutgrown):
        play(policy, PROBE, programs=runner, sampling=sampling)


class Misbehaving(Env):
    """Does one wrong thing, and remembers what it was given and whether it was closed."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.closed = 0
        self.task: Task | None = None

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        self.task = task
        if self.fault == "reset":
            raise ValueError("no reset today")
        if self.fault == "role":
            return Observation((Message("wizard", "hello"),))
        return Observation(task.messages)

    async def step(self, action: Action) -> StepResult:
        if self.fault == "step":
            raise TimeoutError("a tool's own timeout")
        if self.fault == "hang":
            await asyncio.sleep(60)
        if self.fault == "surrogate":
            return StepResult(Observation((Message("user", "\ud800"),)))
        return StepResult(done=True, answer="fine")

    async def close(self) -> None:
        self.closed += 1
        if self.fault == "close":
            raise OSError("no close today")


@pytest.mark.parametrize("fault", ["reset", "role", "step", "surrogate"])
def test_a_fault_of_the_environment_is_failed_not_zero_and_does_not_escape(fault: str) -> None:
    env = Misbehaving(fault)
    episode = play(Script(answer("x")), env=env)
    assert episode.stop_reason is StopReason.INFRA_ERROR
    assert isinstance(episode.score, Failed)
    assert episode.score != NOT_GRADED
    assert episode.score.reason.startswith("environment: ")
    assert not gradable(episode)
    assert env.closed == 1


def test_an_environment_that_hangs_is_ended_by_the_wall_budget() -> None:
    episode = play(Script(answer("x")), env=Misbehaving("hang"), budgets=Budgets(wall_s=0.2))
    assert episode.stop_reason is StopReason.WALL_TIMEOUT


def test_a_failed_close_is_reported_and_the_result_stands() -> None:
    episode = play(Script(answer("x")), env=Misbehaving("close"))
    assert (episode.stop_reason, episode.answer) == (StopReason.ENV_DONE, "fine")
    assert episode.metrics["close_failed"] == 1.0


def test_the_environment_never_gets_the_hidden_part() -> None:
    env = Misbehaving()
    play(Script(answer("x")), env=env)
    assert env.task is not None
    assert env.task.hidden is None


def test_an_error_of_the_policy_is_raised_and_the_environment_closed() -> None:
    class Broken(Script):
        async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            raise ConnectionError("engine gone")

    env = Misbehaving()
    with pytest.raises(ConnectionError, match="engine gone"):
        play(Broken(), env=env)
    assert env.closed == 1


def test_an_environment_is_single_use() -> None:
    env = ENVIRONMENT.make_env()
    play(Script(answer("x")), env=env)
    episode = play(Script(answer("x")), env=env)
    assert episode.stop_reason is StopReason.INFRA_ERROR


def test_sixty_four_episodes_at_once_keep_their_own_answers(runner: ProgramRunner) -> None:
    tasks = [ENVIRONMENT.source.get("train", index, 3) for index in range(64)]

    async def one(number: int, task: Task) -> Episode:
        turns = [call(program(task))] if task.family == "probe" else []
        policy = Script(*turns, answer(f"{program(task)}\n#{number}"))
        settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=300))
        free, context = dataclasses.replace(task, budgets=Budgets()), EpisodeContext(programs=runner)
        env = ENVIRONMENT.make_env()
        return await run_episode(env, free, policy, settings, episode_id=str(number), context=context)

    async def every() -> list[Episode]:
        return await asyncio.gather(*[one(number, task) for number, task in enumerate(tasks)])

    for number, (task, episode) in enumerate(zip(tasks, asyncio.run(every()), strict=True)):
        assert episode.answer == f"{program(task)}\n#{number}"
        assert episode.task_id == task.id
        assert episode.metrics.get("first_ok", 1.0) == 1.0
