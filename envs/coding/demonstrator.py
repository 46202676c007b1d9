"""Demonstrations of mixed quality for `coding-lists`: an author with careless habits, said openly.

The author gets half of the operations wrong most of the time, always in the same way (`>=` for `>`, the first for
the last, a forgotten reversal), and the others now and then. A policy that imitates such data is wrong by habit,
also when it answers greedily; rewards from executed programs can correct it.
In `probe` the author tries a first guess and obeys a bad result half of the time.
No training demonstration ever shows a program that is held out, mistaken ones included.
"""

from __future__ import annotations

import json
import random
from typing import Any

from k3rl.envs.coding.operations import evaluate, program
from k3rl.envs.coding.tasks import Drawn, allowed_in_training, draw_training, held_out_tasks

OBEYS = 0.5


def demonstrations(
    seed: int, n: int, split: str = "train", *, level: int | None = None, family: str | None = None
) -> list[dict[str, Any]]:
    """`n` chat examples: {"messages" (OpenAI form), "task_id", "family", "level"}.

    Task i is task i of the split with this seed. A held-out split gives the same author's answers to tasks that
    are never trained on, for a validation loss; its length limits `n`, and `level` and `family` are for training.
    """
    rng = random.Random(f"demonstrator/{split}/{seed}")
    if split == "train":
        drawn = (draw_training(index, seed, level, family) for index in range(n))
        return [_example(item, name, rng, training=True) for item, name in drawn]
    tasks = held_out_tasks(split, seed, n)
    if n > len(tasks) or level is not None or family is not None:
        raise ValueError(f"split {split!r} gives at most {len(tasks)} demonstrations, not narrowed by level or family")
    return [
        _example(item, f"coding-lists/{split}/{seed}/{index}", rng, training=False) for index, item in enumerate(tasks)
    ]


def careless(drawn: Drawn, rng: random.Random, *, training: bool = True) -> list[str]:
    """Expressions as the author writes them: each step wrong with its own probability."""
    while True:
        written = [item.wrong if rng.random() < item.error else item.right for item in drawn.steps]
        if not training or allowed_in_training(written):
            return written


def _example(drawn: Drawn, name: str, rng: random.Random, *, training: bool) -> dict[str, Any]:
    first = careless(drawn, rng, training=training)
    example: dict[str, Any] = {"task_id": name, "family": drawn.family, "level": drawn.level}
    messages: list[dict[str, Any]] = [{"role": "user", "content": drawn.prompt}]
    if drawn.family != "probe":
        return {**example, "messages": [*messages, {"role": "assistant", "content": program(first)}]}
    good = all(evaluate(first, values) == wanted for values, wanted in drawn.examples)
    last = drawn.right if not good and rng.random() < OBEYS else first
    call = {"name": "run", "arguments": json.dumps({"code": program(first)})}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "name": "run", "content": "ok" if good else "bad"},
        {"role": "assistant", "content": program(last)},
    ]
    return {**example, "messages": messages}


def training_text(seed: int, n: int) -> str:
    """Bodies of `n` demonstrations' prompts, calls and answers, one after the other: what a tokenizer is made from."""
    bodies: list[str] = []
    for example in demonstrations(seed, n):
        for message in example["messages"]:
            for call in message.get("tool_calls", ()):
                bodies.append(call["function"]["name"])
                for name, value in json.loads(call["function"]["arguments"]).items():
                    bodies += [name, value]
            if message["content"]:
                bodies.append(message["content"])
    return "\n".join(bodies) + "\n"
