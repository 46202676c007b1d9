"""Episodes in K2's chat form: every prompt begins with the tokens before it, in the loop and behind the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from k3rl.envs import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.envs.gateway import GatewaySession, answer
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import run_episode
from k3rl.tokens import Special, Tokenizer, chat_format
from k3rl.types import Budgets, Completion, Message, SamplingParams, StopReason, Task, ToolCall

TOKENIZER = Tokenizer.builtin("k2")
CHAT = chat_format(TOKENIZER)
SETTINGS = TurnSettings(TOKENIZER, SamplingParams(max_tokens=4000))
TASK = Task("t/0", "t", (Message("user", "work"),), "f")
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
TURNS = (
    Message("assistant", "first", tool_calls=(ToolCall("run", {"n": 1}, "functions.run:7", '{"n":1}'),)),
    Message("assistant", "", tool_calls=(ToolCall("run", {}, "functions.run:7", "{}"),)),
    Message("assistant", "done"),
)


class Script:
    """Samples these turns one byte a token, as no tokenizer would."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.sampled: list[tuple[int, ...]] = []

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        assert params.stop_ids == (CHAT.stop_id,)
        ids: list[int] = []
        for segment in CHAT.sampled(TURNS[len(self.prompts)]):
            special = isinstance(segment, Special)
            ids += [TOKENIZER.special(segment.name)] if special else list(segment.text.encode())
        self.prompts.append(tuple(prompt_ids))
        self.sampled.append(tuple(ids))
        return Completion(tuple(ids), (0.0,) * len(ids), StopReason.STOP, weight_version=0, first_version=0)

    def check(self) -> None:
        """Each prompt is the one before it, what was sampled, and the result with the id that was sampled."""
        begin = TOKENIZER.encode_segments(CHAT.render(TASK.messages, tools=[TOOL]))
        assert list(self.prompts[0]) == begin
        for turn in (1, 2):
            before = (*self.prompts[turn - 1], *self.sampled[turn - 1])
            assert self.prompts[turn][: len(before)] == before
            added = TOKENIZER.decode(self.prompts[turn][len(before) :])
            assert added == (
                f"<|im_system|>tool<|im_middle|>## Return of functions.run:7\nresult {turn}<|im_end|>"
                "<|im_assistant|>assistant<|im_middle|>"
            )


class Tools(Env):
    """Answers each call, by position or by id."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        return Observation(task.messages, (TOOL,))

    async def step(self, action: Action) -> StepResult:
        calls = action.message.tool_calls
        self.calls += calls
        if not calls:
            return StepResult(done=True, stop_reason=StopReason.COMPLETED, answer=action.message.content)
        told = Message("tool", f"result {len(self.calls)}", tool_call_id=calls[0].id if len(self.calls) > 1 else None)
        return StepResult(Observation((told,), (TOOL,)))


def test_an_episode_of_the_loop_extends_its_tokens() -> None:
    policy, env = Script(), Tools()
    episode = asyncio.run(run_episode(env, TASK, policy, SETTINGS, episode_id="e"))
    policy.check()
    assert episode.answer == "done"
    assert [call.arguments for call in env.calls] == [{"n": 1}, {}]
    (branch,) = episode.branches
    assert [tuple(turn.sampled_ids) for turn in branch.turns] == policy.sampled


def test_a_program_behind_the_gateway_extends_them_too() -> None:
    async def program() -> Script:
        policy = Script()
        session = GatewaySession(TASK, policy, SETTINGS, budgets=Budgets())
        messages: list[dict[str, Any]] = [{"role": "user", "content": "work"}]
        for turn in range(3):
            body = {"model": "x", "messages": messages, "tools": [TOOL]}
            given = await answer(session, json.dumps(body).encode())
            assert given.status == 200, given.body
            said = given.body["choices"][0]["message"]
            messages.append(said)
            for call in said.get("tool_calls", ()):
                assert call["function"]["arguments"] == TURNS[turn].tool_calls[0].text
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {turn + 1}"})
        assert len(session.episode("e", StopReason.COMPLETED).branches) == 1
        refused = await answer(session, json.dumps({"messages": messages, "tool_choice": "required"}).encode())
        assert refused.status == 400
        assert "has no words in the K2 chat form" in refused.body["error"]["message"]
        return policy

    asyncio.run(program()).check()
