"""Actors that stand where the engine stands.

They have a file of their own because every process that is given an actor imports the file of its class: this one is
without torch, whose import takes longer than a test.
"""

from __future__ import annotations

import asyncio

from k3rl.actors.answers import AnswerStreams
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Completion, SamplingParams, StopReason

TURN_STRIDE = 1_000_003  # a turn's seed is the episode's times this, plus the turn's number


class Echo(AnswerStreams):
    """One valid message for every prompt."""

    def __init__(self) -> None:
        super().__init__()
        tokenizer = Tokenizer.builtin()
        body = tokenizer.encode("a")
        ends = [tokenizer.special(name) for name in ("close", "sep", "end_of_msg")]
        close, sep, end = ends
        self._ids = (*body, close, *tokenizer.encode("response"), sep, close, *tokenizer.encode("message"), sep, end)

    def begin(self, requests: list) -> list[asyncio.Future[Completion]]:
        return [asyncio.ensure_future(self._complete()) for _ in requests]

    async def _complete(self) -> Completion:
        return Completion(self._ids, (-0.1,) * len(self._ids), StopReason.STOP, 1, 1)


class ScriptedRollout(AnswerStreams):
    """Says what it is told, by sampling seed of the episode."""

    def __init__(self, answers: dict[int, str]) -> None:
        super().__init__()
        self.texts = answers
        self.tokenizer = Tokenizer.builtin()

    def begin(self, requests: list[tuple[list[int], SamplingParams]]) -> list[asyncio.Future[Completion]]:
        return [asyncio.ensure_future(self._complete(params)) for _, params in requests]

    async def _complete(self, params: SamplingParams) -> Completion:
        message = {"role": "assistant", "content": self.texts[params.seed // TURN_STRIDE]}
        segments = xtml.render([message], thinking=False, add_generation_prompt=False)
        prefix = xtml.render([], thinking=False, add_generation_prompt=True)
        ids = tuple(self.tokenizer.encode_segments(segments[len(prefix) :]))
        return Completion(ids, (-0.5,) * len(ids), StopReason.STOP, 1, 1)
