"""One episode of an environment of another system, with turns that are written here.

    python examples/adapters/play.py gymnasium --python ~/envs/gym/bin/python
    python examples/adapters/play.py openenv --url http://127.0.0.1:8000     (after: python openenv_server.py 8000)

Each system wants its own package: gymnasium, reasoning-gym, textarena, skyrl-gym, verifiers (and uv, with which it
prepares its chat program), openenv. Without --python they are looked for in this Python. Prints what was said, and the
score; --json prints the score alone as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3rl.config import K3Error
from k3rl.envs import Environment, EpisodeContext, make
from k3rl.envs.rollout import gradable, run_episode
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Completion, Episode, Message, SamplingParams, Score, StopReason, Task, ToolCall

HERE = Path(__file__).resolve().parent
TOKENIZER = Tokenizer.builtin()
Turns = Callable[[Environment, Task], list[Message]]


def says(*texts: str) -> Turns:
    """The same texts whatever the task is."""
    return lambda environment, task: [Message("assistant", text) for text in texts]


def right_answer(environment: Environment, task: Task) -> list[Message]:
    """What the environment itself takes for right."""
    return [Message("assistant", environment.oracle(task))]


def every_digit(environment: Environment, task: Task) -> list[Message]:
    """One of them is it."""
    return [Message("assistant", str(digit)) for digit in range(10)]


def twice_doubled(environment: Environment, task: Task) -> list[Message]:
    """Calls of the taskset's tool, then the answer."""
    number = task.data["index"]
    calls = [ToolCall("doubler_double", {"number": one}) for one in (number, 2 * number)]
    return [*(Message("assistant", "", tool_calls=(call,)) for call in calls), Message("assistant", str(4 * number))]


# name, options and turns of each example
EXAMPLES: dict[str, tuple[str, dict[str, Any], Turns]] = {
    # Down, down, right, right, down, right: around the holes of the map that does not change.
    "gymnasium": (
        "gymnasium:FrozenLake-v1",
        {
            "kwargs": {"is_slippery": False},
            "observe": f"{HERE / 'frozen_lake.py'}:observe",
            "act": f"{HERE / 'frozen_lake.py'}:act",
            "instructions": "Walk over the ice from S to G. Answer with left, down, right or up.",
            "reward_range": (0.0, 1.0),
        },
        says("down", "down", "right", "right", "down", "right"),
    ),
    "reasoning-gym": ("reasoning-gym:leg_counting", {}, right_answer),
    "textarena": (
        "textarena:TowerOfHanoi-v0",
        {},
        says("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"),
    ),
    "skyrl-gym": (
        "skyrl-gym:gsm8k",
        {"data": {"train": str(HERE / "gsm8k_rows.jsonl")}},
        says("Half of 48 is 24, and 48 + 24 = 72.\n#### 72"),
    ),
    "verifiers": ("verifiers:doubling_taskset", {"paths": [str(HERE)]}, twice_doubled),
    "openenv": ("openenv:", {"field": "message", "show": "text"}, every_digit),
}


class Script:
    """A policy that says these turns, as the tokens that a model would sample for them."""

    def __init__(self, turns: Sequence[Message]) -> None:
        self._turns = list(turns)

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        turn = self._turns.pop(0)
        rendered = xtml.render_trained([Message("user", "-"), turn], thinking=False, add_generation_prompt=False)
        own = [segment for segment, sampled in zip(*rendered, strict=True) if sampled]
        ids = tuple(TOKENIZER.encode_segments(own))
        return Completion(ids, (0.0,) * len(ids), StopReason.STOP, weight_version=1, first_version=1)


def play(environment: Environment, turns: Turns, index: int = 3) -> tuple[Episode, Score]:
    """One episode of a training task, and its score."""
    length = environment.source.length("train")
    task = environment.source.get("train", index if length is None else index % length)
    episode = asyncio.run(
        run_episode(
            environment.make_env(),
            task.public(),
            Script(turns(environment, task)),
            TOKENIZER,
            episode_id="example",
            sampling=SamplingParams(max_tokens=4000),
            context=EpisodeContext(),
        )
    )
    if not gradable(episode):
        return episode, episode.score
    rubric = environment.grader()
    try:
        return episode, rubric.score_batch([(task, episode.answer)])[0]
    finally:
        rubric.close()


def main() -> None:
    """Play one example."""
    parser = argparse.ArgumentParser(description="one episode of an environment of another system")
    parser.add_argument("system", choices=sorted(EXAMPLES))
    parser.add_argument("--python", default="", help="bin/python of the virtual environment that has the package")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the OpenEnv server is")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    name, options, turns = EXAMPLES[chosen.system]
    if chosen.system == "openenv":
        name += chosen.url
    elif chosen.python:
        options = {**options, "python": chosen.python}
    try:
        episode, score = play(make(name, **options), turns)
    except K3Error as error:
        raise SystemExit(f"{error}") from None
    if chosen.json:
        print(json.dumps({"name": name, "score": dataclasses.asdict(score), "stop_reason": episode.stop_reason}))
        return
    for message in episode.messages:
        calls = ", ".join(f"{call.name}{dict(call.arguments)}" for call in message.tool_calls)  # type: ignore[arg-type]
        print(f"{message.role}: {calls or message.content}")
    print(f"{episode.stop_reason}: {score}")


if __name__ == "__main__":
    main()
