"""`k3rl env play`: a person is the policy. The episode runs as any other, so its rules are the same."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from k3rl.config import ConfigError
from k3rl.envs import Action, Budgets, Env, Environment, EpisodeContext, Observation, StepResult, Task
from k3rl.envs.rollout import run_episode
from k3rl.envs.sandbox import ProgramRunner, provider_named
from k3rl.run.terminal import framed
from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.images import shown_text
from k3rl.types import Completion, EncodedImage, Episode, Message, SamplingParams, StopReason, ToolCall

HELP = """\
Type your turn and end it with a line that holds a single dot. Instead of text:
  /TOOL {"argument": ...}   calls a tool            /TOOL words   when it wants one piece of text
  /TOOL                     the same, its text on the lines up to the dot
  /file PATH                the text of a file is your answer
  /quit                     gives up"""
MAX_TURN_TOKENS = 1_000_000


def play(environment: Environment, task: Task, source: TextIO, shown: TextIO) -> Episode:
    """One episode whose turns are read from `source`; what the policy would see goes to `shown`.

    Budgets of tokens and of time are the machine's and do not bind a person. The end of `source` gives up:
    the episode is ABORTED and its answer empty.
    """
    task = dataclasses.replace(
        task, budgets=dataclasses.replace(task.budgets, tokens=None, tokens_per_turn=None, wall_s=None, virtual_s=None)
    )
    provider = provider_named("bwrap")
    programs = ProgramRunner(provider) if environment.needs_programs else None
    person = _Person(source, shown)
    print(HELP, file=shown)
    try:
        return asyncio.run(
            run_episode(
                _Shown(environment.make_env(), person),
                task,
                person,
                person.tokenizer,
                episode_id="by-hand",
                sampling=SamplingParams(max_tokens=MAX_TURN_TOKENS),
                context=EpisodeContext(seed=task.seed, budgets=Budgets(), programs=programs, sandboxes=provider),
            )
        )
    finally:
        if programs is not None:
            programs.close()


class _Person:
    """The policy: what a person types, as the tokens a model would have sampled."""

    def __init__(self, source: TextIO, shown: TextIO) -> None:
        self.tokenizer = Tokenizer.builtin()
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self._lines = iter(source.readline, "")
        self._shown = shown

    def show(self, messages: Sequence[Message]) -> None:
        for message in messages:
            print(f"[{message.role}]\n{framed(shown_text(message.content), '  ')}", file=self._shown)

    async def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        """The next turn; `params` do not bind a person, who sees `images` as the messages show them."""
        message = self._turn()
        ids = () if message is None else self._sampled(message)
        stop = StopReason.ABORTED if message is None else StopReason.STOP
        return Completion(ids, (0.0,) * len(ids), stop, weight_version=0, first_version=0)

    def _sampled(self, message: Message) -> tuple[int, ...]:
        user = Message("user", "-")
        segments, sampled = xtml.render_trained([user, message], thinking=False, add_generation_prompt=False)
        return tuple(self.tokenizer.encode_segments([one for one, own in zip(segments, sampled, strict=True) if own]))

    def _turn(self) -> Message | None:
        """What the person says, None for giving up. A mistake is explained and asked for again."""
        print("[you]", file=self._shown, flush=True)
        for line in self._lines:
            try:
                if line.strip() == "/quit":
                    return None
                if not line.startswith("/"):
                    return Message("assistant", self._until_dot(line))
                name, _, rest = line[1:].strip().partition(" ")
                if name == "file":
                    return Message("assistant", Path(rest).read_text(encoding="utf-8"))
                return Message("assistant", "", tool_calls=(ToolCall(name, self._arguments(name, rest.strip())),))
            except (ConfigError, OSError, UnicodeDecodeError) as error:
                print(f"  {error}\n[you]", file=self._shown, flush=True)
        return None

    def _until_dot(self, first: str = "") -> str:
        lines: list[str] = []
        for line in _chained(first, self._lines):
            if line.rstrip("\n") == ".":
                break
            lines.append(line)
        return "".join(lines).removesuffix("\n")

    def _arguments(self, name: str, text: str) -> dict[str, Any]:
        """The arguments of a call as typed. Raises ConfigError when they are not what the tool wants."""
        if text.startswith("{"):
            try:
                arguments: dict[str, Any] = json.loads(text)
                return arguments
            except ValueError as error:
                raise ConfigError(f"these arguments are not JSON: {error}") from None
        declared = [tool["function"] for tool in self.tools]
        tool = next((one for one in declared if one["name"] == name), None)
        if tool is None:
            known = ", ".join(one["name"] for one in declared) or "no tool that is declared"
            raise ConfigError(f"{name!r} is not declared (there is {known}); give its arguments as JSON")
        wanted = tool.get("parameters", {}).get("required", [])
        if not wanted and not text:
            return {}
        if len(wanted) != 1:
            raise ConfigError(f"{name} wants {', '.join(wanted) or 'no arguments'}; give them as JSON")
        return {wanted[0]: text or self._until_dot()}


def _chained(first: str, lines: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from lines


class _Shown(Env):
    """An environment whose observations a person sees."""

    def __init__(self, env: Env, person: _Person) -> None:
        self._env = env
        self._person = person

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """See `Env.reset`."""
        return self._seen(await self._env.reset(task, context))

    async def step(self, action: Action) -> StepResult:
        """See `Env.step`."""
        result = await self._env.step(action)
        if result.observation is not None:
            self._seen(result.observation)
        return result

    async def close(self) -> None:
        """See `Env.close`."""
        await self._env.close()

    def _seen(self, observation: Observation) -> Observation:
        self._person.show(observation.messages)
        self._person.tools = observation.tools or self._person.tools
        return observation
