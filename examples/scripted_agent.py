"""An agent without a model: given turns, as the tokens that a model would sample, through the real tool loop.

    python examples/scripted_agent.py compiler --level 2
    python examples/scripted_agent.py chip --family mac

Writes the environment's own right answer into the workspace, hands it in, and prints what the grader says. Use it to
see what an episode looks like, or as a stand-in for a policy in tests of your own environment.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from k3rl.envs import Env, EpisodeContext, TurnSettings, make, run_episode
from k3rl.envs.harness import files_from
from k3rl.envs.sandbox import provider_named
from k3rl.tokens import Tokenizer, chat_format
from k3rl.types import Completion, Episode, Message, SamplingParams, StopReason, Task, ToolCall

TOKENIZER = Tokenizer.builtin()


def call(tool: str, **arguments: Any) -> Message:
    """A turn that calls one tool."""
    return Message("assistant", "", tool_calls=(ToolCall(tool, arguments),))


def writing(files: Mapping[str, str]) -> list[Message]:
    """A turn for each file."""
    return [call("write_file", path=path, content=text) for path, text in files.items()]


class ScriptedPolicy:
    """Says these turns, as the tokens that a model would sample for them."""

    def __init__(self, turns: Sequence[Message]) -> None:
        self._turns = list(turns)

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        turn = self._turns.pop(0)
        rendered = chat_format(TOKENIZER).render_trained([Message("user", "-"), turn])
        own = [segment for segment, sampled in zip(*rendered, strict=True) if sampled]
        ids = tuple(TOKENIZER.encode_segments(own))
        if len(ids) > params.max_tokens:
            raise ValueError(f"a scripted turn has {len(ids)} tokens, the limit is {params.max_tokens}")
        return Completion(ids, (0.0,) * len(ids), StopReason.STOP, weight_version=1, first_version=1)


def play(env: Env, task: Task, turns: Sequence[Message]) -> Episode:
    """One episode in a real sandbox."""
    context = EpisodeContext(sandboxes=provider_named("bwrap"))
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=200_000))
    return asyncio.run(run_episode(env, task, ScriptedPolicy(turns), settings, episode_id="e", context=context))


def tool_results(episode: Episode) -> list[str]:
    """What the tools said, in order."""
    return [str(message.content) for message in episode.messages if message.role == "tool"]


def main() -> None:
    """Play one task with its right answer."""
    parser = argparse.ArgumentParser(description="an agent without a model, in an environment with tools")
    parser.add_argument("env", choices=("compiler", "chip"))
    parser.add_argument("--level", type=int)
    parser.add_argument("--family")
    chosen = parser.parse_args()
    environment = make(chosen.env, harness={})
    task = environment.source.get("train", 0, level=chosen.level, family=chosen.family)
    answer = environment.oracle(task)
    turns = [call("bash", command="ls"), *writing(files_from(answer) or {"dut.v": answer}), call("submit")]
    turns += [Message("assistant", "done")] * 2  # where submitting is judged and does not end the episode
    episode = play(environment.make_env(), task, turns)
    rubric = environment.grader()
    score = rubric.score_batch([(task, episode.answer)])[0]
    rubric.close()
    for message in episode.messages:
        calls = ", ".join(one.name for one in message.tool_calls)
        print(f"{message.role:9} {calls or str(message.content)[:200]}")
    print(f"{task.id}: {episode.stop_reason}, {score}")


if __name__ == "__main__":
    main()
