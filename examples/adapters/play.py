"""One episode of an environment of another system, acted out by its oracle.

    python examples/adapters/play.py gymnasium --python ~/envs/gym/bin/python
    python examples/adapters/play.py openenv --url http://127.0.0.1:8000     (after: python openenv_server.py 8000)

The environments are those of the TOML files of this folder, which `k3rl env check @ FILE`, `k3rl env play @ FILE` and
`k3rl rl @ FILE` take too. Without --python a package is looked for in this Python. Prints what was said, and the score;
--json prints the score alone as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
from pathlib import Path

from k3rl.config import K3Error, read_toml
from k3rl.envs import Environment, EpisodeContext, make
from k3rl.envs.played import acted, play
from k3rl.envs.rollout import gradable
from k3rl.types import Episode, Score

HERE = Path(__file__).resolve().parent
SYSTEMS = ("gymnasium", "openenv", "reasoning-gym", "skyrl-gym", "textarena", "verifiers")


def played(environment: Environment, index: int = 3) -> tuple[Episode, Score]:
    """One episode of a training task, and its score."""
    length = environment.source.length("train")
    task = environment.source.get("train", index if length is None else index % length)
    turn = environment.oracle_turn
    says = acted(environment.right_answer(task)) if turn is None else lambda said, tools: turn(task, said)
    episode = asyncio.run(play(environment, task, says, EpisodeContext()))
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
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--python", default="", help="bin/python of the virtual environment that has the package")
    parser.add_argument("--url", default="", help="where the OpenEnv server is")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    os.chdir(HERE)  # the files name each other
    given = read_toml(Path(f"{chosen.system}.toml"))["env"]
    name, options = given["name"], given["args"]
    if chosen.url:
        name = f"openenv:{chosen.url}"
    if chosen.python:
        options["python"] = str(Path(chosen.python).expanduser())
    try:
        episode, score = played(make(name, **options))
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
