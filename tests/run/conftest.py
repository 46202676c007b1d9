"""Episodes as an environment actor gives them."""

from __future__ import annotations

import pytest

from k3rl.types import Branch, Episode, Failed, Scored, StopReason, Turn


def make_episode(name: str = "e0", score=None, turns: int = 2) -> Episode:
    """One branch whose turn n samples the tokens 10n+5, 10n+6 after a prompt that extends the last one."""
    made, known = [], ()
    for number in range(turns):
        prompt = (*known, 10 * number + 1, 10 * number + 2)
        sampled = (10 * number + 5, 10 * number + 6)
        made.append(Turn(prompt, sampled, (-0.25, -0.123456789), StopReason.STOP, number, number + 1, env_s=0.5))
        known = (*prompt, *sampled)
    return Episode(
        id=name,
        task_id="list/train/7",
        env="coding-lists",
        family="list",
        level=2,
        branches=(Branch("main", tuple(made)),),
        stop_reason=StopReason.ENV_DONE,
        score=score if score is not None else Scored(1.0, {"tests": 1.0}),
        answer="return xs",
        metrics={"tool_calls": 1.0},
    )


@pytest.fixture
def episode():
    return make_episode


@pytest.fixture
def failed_episode():
    return make_episode("e1", Failed("sandbox died"))
