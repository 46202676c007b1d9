"""`k3rl env play`: a person is the policy. The episode runs as any other, so its rules are the same."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from k3rl.config import ConfigError, MissingResource
from k3rl.envs import (
    MAX_TURN_TOKENS,
    BrokenState,
    Budgets,
    Env,
    Environment,
    EpisodeContext,
    EpisodeState,
    NoSnapshot,
    Observation,
    ObservedEnv,
    Task,
    TurnSettings,
    run_episode,
    sampled,
)
from k3rl.envs.sandbox import ProgramRunner, provider_named
from k3rl.run import framed
from k3rl.tokens import Tokenizer, shown_text
from k3rl.types import Completion, EncodedImage, Episode, Message, SamplingParams, StopReason, ToolCall

HELP = """\
Type your turn and end it with a line that holds a single dot. Instead of text:
  /TOOL {"argument": ...}   calls a tool            /TOOL words   when it wants one piece of text
  /TOOL                     the same, its text on the lines up to the dot
  /file PATH                the text of a file is your answer
  /quit                     aborts the episode"""
LATER = "  /later                    pauses the episode and keeps it in %s; so does the end of the input"


def play(
    environment: Environment,
    task: Task,
    source: TextIO,
    shown: TextIO,
    *,
    state: Path | None = None,
    clocks: bool = False,
) -> Episode:
    """One episode whose turns are read from `source`; what the policy would see goes to `shown`.

    Budgets of tokens are the machine's and do not bind a person; those of time do with `clocks`. At the end of
    `source` the episode is ABORTED and its answer empty.

    state: a file that is written before each turn and holds the episode and its workspace. Where it exists the episode
    goes on from there, also after this process was killed. It is removed when the episode is over; the end of `source`
    leaves it, and the episode is PAUSED. Raises ConfigError for a file of another task or of no episode, and for an
    environment whose episodes cannot be paused or are played by a program.
    """
    if environment.make_harness is not None:
        raise ConfigError(f"{environment.name} is played by an agent program of its own, not turn by turn", key="env")
    budgets = dataclasses.replace(task.budgets, tokens=None, tokens_per_turn=None)
    if not clocks:
        budgets = dataclasses.replace(budgets, wall_s=None, virtual_s=None)
    provider = provider_named("bwrap")
    programs = ProgramRunner(provider) if environment.needs_programs else None
    person = _Person(source, shown)
    file = None if state is None else _StateFile(state, task, person)
    print(HELP if state is None else f"{HELP}\n{LATER % state}", file=shown)
    try:
        resume = None if file is None else file.read()
        env = _ShownEnv(environment.make_env(), person)
        episode = asyncio.run(
            run_episode(
                env,
                dataclasses.replace(task, budgets=budgets),
                person,
                TurnSettings(person.tokenizer, SamplingParams(max_tokens=MAX_TURN_TOKENS)),
                episode_id="by-hand",
                context=EpisodeContext(seed=task.seed, budgets=Budgets(), programs=programs, sandboxes=provider),
                resume=resume,
                before_turn=None if file is None else file.write,
            )
        )
    finally:
        if programs is not None:
            programs.close()
    if file is None:
        return episode
    if episode.stop_reason is StopReason.CANCELLED and not person.quit and file.path.exists():
        used = {**episode.budgets_used, "turns": episode.budgets_used["turns"] - 1}  # the last one said nothing
        return dataclasses.replace(episode, stop_reason=StopReason.PAUSED, budgets_used=used)
    file.path.unlink(missing_ok=True)
    return episode


class _StateFile:
    """The file of an episode: a line of JSON, the tools that were declared last, and the episode's own bytes."""

    def __init__(self, path: Path, task: Task, person: _Person) -> None:
        self.path = path
        self._task, self._person = task, person

    def read(self) -> EpisodeState | None:
        """The episode to go on with, None where there is no file. Shows what was said last."""
        if not self.path.exists():
            return None
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
            tools = tuple(json.loads(head)["tools"])
            state = EpisodeState.from_bytes(body)
        except OSError as error:
            raise MissingResource(f"cannot read {self.path}: {error.strerror}") from None
        except (BrokenState, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path} holds no episode that can go on: {error}", key="--state") from None
        if state.task_id != self._task.id:
            raise ConfigError(
                f"{self.path} holds an episode of task {state.task_id}, not of {self._task.id}", key="--state"
            )
        self._person.tools = tools
        last = max((n for n, one in enumerate(state.messages) if one.role == "assistant"), default=-1)
        self._person.show([*state.messages[:1], *state.messages[last:]] if last > 0 else state.messages)
        return state

    def write(self, state: EpisodeState) -> bool:
        """Write it, and go on with the episode; the file is whole or as it was."""
        head = json.dumps({"tools": self._person.tools}, default=dict).encode()
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_bytes(head + b"\n" + state.to_bytes())
        with fresh.open("rb") as written:
            os.fsync(written.fileno())
        fresh.replace(self.path)
        return False


class _ShownEnv(ObservedEnv):
    """What a person sees; an environment that cannot be paused says so in the words of the command."""

    def __init__(self, env: Env, person: _Person) -> None:
        super().__init__(env, person.see)

    async def snapshot(self) -> bytes:
        """See `Env.snapshot`. Raises ConfigError."""
        try:
            return await super().snapshot()
        except NoSnapshot as error:
            raise ConfigError(f"{error}; play it without --state", key="--state") from None


class _Person:
    """The policy: what a person types, as the tokens a model would have sampled."""

    def __init__(self, source: TextIO, shown: TextIO) -> None:
        self.tokenizer = Tokenizer.builtin()
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.quit = False
        self._lines = iter(source.readline, "")
        self._shown = shown

    def see(self, observation: Observation) -> None:
        """Show what the environment said, and know its tools."""
        self.show(observation.messages)
        self.tools = observation.tools or self.tools

    def show(self, messages: Sequence[Message]) -> None:
        for message in messages:
            print(f"[{message.role}]\n{framed(shown_text(message.content), '  ')}", file=self._shown)

    async def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        """The next turn; `params` do not bind a person, who sees `images` as the messages show them."""
        message = self._turn()
        ids = () if message is None else sampled(message, self.tokenizer)
        stop = StopReason.ABORTED if message is None else StopReason.STOP
        return Completion(ids, (0.0,) * len(ids), stop, weight_version=0, first_version=0)

    def _turn(self) -> Message | None:
        """What the person says, None to abort or pause the episode. A mistake is explained and asked for again."""
        print("[you]", file=self._shown, flush=True)
        for line in self._lines:
            try:
                if line.strip() in ("/quit", "/later"):
                    self.quit = line.strip() == "/quit"
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
