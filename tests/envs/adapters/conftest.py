"""Episodes of adapted environments, played by a policy that says given turns as real tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from k3rl.envs import Environment, EpisodeContext, make
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import gradable, run_episode
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Budgets, Completion, Episode, Message, SamplingParams, Score, StopReason, Task

FAKES = Path(__file__).with_name("fakes")
TOKENIZER = Tokenizer.builtin()
Play = Callable[..., tuple[Episode, Score]]


class Script:
    """Says these turns; the text of each prompt is kept."""

    def __init__(self, turns: Sequence[str | Message]) -> None:
        self.turns = [Message("assistant", turn) if isinstance(turn, str) else turn for turn in turns]
        self.prompts: list[str] = []

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.prompts.append(TOKENIZER.decode(list(prompt_ids)))
        turn = self.turns[len(self.prompts) - 1]
        rendered = xtml.render_trained([Message("user", "-"), turn], thinking=False, add_generation_prompt=False)
        own = [segment for segment, sampled in zip(*rendered, strict=True) if sampled]
        ids = tuple(TOKENIZER.encode_segments(own))
        return Completion(ids, (0.0,) * len(ids), StopReason.STOP, weight_version=1, first_version=1)


@pytest.fixture
def fake() -> Callable[..., Environment]:
    """An environment whose package is the stand-in of this folder."""

    def made(name: str, **options: Any) -> Environment:
        return make(name, paths=(str(FAKES),), **options)

    return made


async def episode_of(
    environment: Environment, task: Task, script: Script, wall_s: float | None = None
) -> tuple[Episode, Score]:
    context = EpisodeContext(budgets=Budgets(wall_s=wall_s))
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=4000))
    episode = await run_episode(environment.make_env(), task, script, settings, episode_id="e", context=context)
    if not gradable(episode):
        return episode, episode.score
    rubric = environment.grader()
    try:
        return episode, rubric.score_batch([(task, episode.answer)])[0]
    finally:
        rubric.close()


@pytest.fixture
def play() -> Play:
    """(episode, score) of a task, the first one by default."""

    def played(
        environment: Environment, *turns: str | Message, task: Task | None = None, wall_s: float | None = None
    ) -> tuple[Episode, Score]:
        chosen = task or environment.source.get("train", 0)
        return asyncio.run(episode_of(environment, chosen, Script(turns), wall_s))

    return played
