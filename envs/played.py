"""Episodes that a script plays, as a run plays them: an answer, acted out under an environment's rules.

What a script says reaches the environment as the tokens that a model would have sampled for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from k3rl.envs.base import Action, Env, Environment, EpisodeContext, Observation, StepResult
from k3rl.envs.gateway import run_program
from k3rl.envs.harness import files_from
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import run_episode
from k3rl.tokens import Tokenizer, chat_format
from k3rl.types import Completion, EncodedImage, Episode, Message, SamplingParams, StopReason, Task, ToolCall

Says: TypeAlias = Callable[[Sequence[Message], Sequence[str]], Message]  # (said so far, names of tools) -> next turn
MAX_TURN_TOKENS = 2_000_000


def called(tool: str, **arguments: Any) -> Message:
    """A turn that calls one tool."""
    return Message("assistant", "", tool_calls=(ToolCall(tool, arguments),))


def acted(answer: str) -> Says:
    """An answer in turns: its files are written and submitted where there are tools for that, else it is said.

    After `submit` nothing is called any more, so an episode that goes on then ends by itself.
    """
    files = files_from(answer)

    def says(said: Sequence[Message], tools: Sequence[str]) -> Message:
        if files is None or not {"write_file", "submit"} <= set(tools):
            return Message("assistant", answer)
        turns = [called("write_file", path=path, content=text) for path, text in files.items()] + [called("submit")]
        number = sum(message.role == "assistant" for message in said)
        return turns[number] if number < len(turns) else Message("assistant", "")

    return says


async def play(environment: Environment, task: Task, says: Says, context: EpisodeContext) -> Episode:
    """One ungraded episode, by `run_episode` or `run_program`. An `Env` is closed twice, which must not matter.

    Budgets of tokens and of task time depend on a model and do not bind a script.
    """
    budgets = dataclasses.replace(task.budgets, tokens=None, tokens_per_turn=None, virtual_s=None)
    task = dataclasses.replace(task.public(), budgets=budgets)
    script = Script(says)
    settings = TurnSettings(script.tokenizer, SamplingParams(max_tokens=MAX_TURN_TOKENS))
    if environment.make_harness is not None:
        harness = environment.make_harness()
        return await run_program(harness, task, script, settings, episode_id="scripted", context=context)
    env = ObservedEnv(environment.make_env(), script.see)
    try:
        return await run_episode(env, task, script, settings, episode_id="scripted", context=context)
    finally:
        await env.close()


class Script:
    """The policy: turns that are written, as the tokens a model would have sampled."""

    def __init__(self, says: Says) -> None:
        self.tokenizer = Tokenizer.builtin()
        self._says = says
        self._said: list[Message] = []
        self._tools: tuple[str, ...] = ()

    def see(self, observation: Observation) -> None:
        """What the environment said."""
        self._said += observation.messages
        self._tools = tuple(tool["function"]["name"] for tool in observation.tools) or self._tools

    async def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        """The next turn."""
        turn = self._says(self._said, self._tools)
        self._said.append(turn)
        ids = sampled(turn, self.tokenizer)
        return Completion(ids, (0.0,) * len(ids), StopReason.STOP, weight_version=0, first_version=0)


def sampled(turn: Message, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of an assistant turn, without the prompt before it."""
    segments, own = chat_format(tokenizer).render_trained([Message("user", "-"), turn])
    return tuple(tokenizer.encode_segments([one for one, mine in zip(segments, own, strict=True) if mine]))


class ObservedEnv(Env):
    """An environment whose observations somebody else sees too."""

    def __init__(self, env: Env, see: Callable[[Observation], None]) -> None:
        self._env = env
        self._see = see

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """See `Env.reset`."""
        observation = await self._env.reset(task, context)
        self._see(observation)
        return observation

    async def step(self, action: Action) -> StepResult:
        """See `Env.step`."""
        result = await self._env.step(action)
        if result.observation is not None:
            self._see(result.observation)
        return result

    async def conclude(self, reason: StopReason) -> str:
        """See `Env.conclude`."""
        return await self._env.conclude(reason)

    async def snapshot(self) -> bytes:
        """See `Env.snapshot`."""
        return await self._env.snapshot()

    async def restore(self, task: Task, context: EpisodeContext, snapshot: bytes) -> None:
        """See `Env.restore`."""
        await self._env.restore(task, context, snapshot)

    async def close(self) -> None:
        """See `Env.close`."""
        await self._env.close()


def conduct(episode: Episode) -> Mapping[str, Any]:
    """What of an episode must not depend on others beside it; times that tools tell a policy may."""
    begun = next((n for n, message in enumerate(episode.messages) if message.role == "assistant"), None)
    return {
        "begin": episode.messages[:begun],
        "turns": sum(len(branch.turns) for branch in episode.branches),
        "stop_reason": episode.stop_reason,
        "answer": episode.answer,
    }
