"""An episode whose job says so begins its turns in the think channel."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from k3rl.actors import EnvironmentWorker, EpisodeJob, TaskRef
from k3rl.envs import EnvConfig, make
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import SamplingParams
from tests.actors.scripted_engines import Echo


class Asked(Echo):
    """Keeps the prompts."""

    def begin(self, requests):
        self.prompts = [request[0] for request in requests]
        return super().begin(requests)


@pytest.mark.parametrize(("thinking", "effort"), [(False, None), (True, None), (True, "high")])
def test_prompts_ask_for_thinking_and_effort_as_the_job_does(in_process, play, thinking, effort):
    engine = Asked()
    job = EpisodeJob("e", "g", TaskRef("train", 0, 0), 1)
    played = play(
        EnvironmentWorker(EnvConfig(), in_process(engine)),
        [replace(job, thinking=thinking, thinking_effort=effort)],
        SamplingParams(max_tokens=8),
    )
    asyncio.run(played)
    messages = make("coding-lists").source.get("train", 0, 0).messages
    rendered = xtml.render(list(messages), thinking=thinking, thinking_effort=effort)
    assert [list(prompt) for prompt in engine.prompts] == [Tokenizer.builtin().encode_segments(rendered)]
