"""What a step of RL costs its driver's process, with engine and learner made free: episodes by reference and by value.

    python benchmarks/driver_step.py [--episodes 4096] [--of-message 64] [--repeats 5] [--out FILE] [--json]

Episodes of one turn, a prompt of 17 tokens and 24 sampled ones, in groups of 8. `by reference` is what the loop does:
the driver unpickles headers, the dispatcher gathers and grades groups, metrics and advantages come from headers, and a
plan goes to the learner. `by value` is the same with whole episodes in the driver: it unpickles them, packs them, and
writes them as Parquet. The two take turns; figures are medians of CPU seconds of one process, without Ray. `elsewhere`
is what other processes do for the same step: encoding in environment workers, packing in the learner's rank, and the
recorder's decoding and Parquet.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from k3rl.actors.dispatcher import Dispatcher
from k3rl.actors.jobs import EpisodeJob, TaskRef
from k3rl.actors.payloads import contents, sent
from k3rl.actors.schedule import Header, Mode, Schedule
from k3rl.data import Payload, PlayedGroup, TrajectoryWriter, from_episodes, header_of, payload_of
from k3rl.losses import group_advantages
from k3rl.pipelines.presets import rl
from k3rl.pipelines.rl import policy_batches
from k3rl.pipelines.rollout_metrics import check_failures, fitting, reward_of, rollout_metrics
from k3rl.types import Branch, Episode, Group, Message, Scored, StopReason, Turn

SIZE, PROMPT, SAMPLED = 8, 17, 24
Times = dict[str, float]


def episode(name: str, rng: np.random.Generator) -> Episode:
    ids = rng.integers(0, 1000, PROMPT + SAMPLED)
    logprobs = -rng.random(SAMPLED).astype(np.float32)
    turn = Turn(ids[:PROMPT], ids[PROMPT:], logprobs, StopReason.LENGTH, 1, 1, model_s=0.5)
    said = (Message("user", "abcdefgh " * 4), Message("assistant", "abcdefgh" * 3))
    used = {"turns": 1.0, "tokens": float(SAMPLED), "tool_calls": 0.0, "wall_s": 1.0}
    branches = (Branch(f"{name}/0", (turn,)),)
    return Episode(
        name, "t", "letters", "letters", 0, branches, StopReason.COMPLETED, Scored(0.0), "abc", used, {}, said
    )


class Step:
    """A step's episodes, in messages of workers."""

    def __init__(self, episodes: int, of_message: int) -> None:
        rng = np.random.default_rng(0)
        self.groups = episodes // SIZE
        self.messages = []
        names = [f"rl-0-{number}-{member}" for number in range(self.groups) for member in range(SIZE)]
        for start in range(0, len(names), of_message):
            self.messages.append([episode(name, rng) for name in names[start : start + of_message]])
        self.scores = {name: Scored(float(reward)) for name, reward in zip(names, rng.random(len(names)), strict=True)}
        self.config = rl().replace(optimizer_steps=1)

    def jobs(self, number: int) -> list[EpisodeJob]:
        task = TaskRef("train", number, 0)
        return [EpisodeJob(f"rl-0-{number}-{member}", f"rl-0-{number}", task, member) for member in range(SIZE)]

    def dispatched(self, headers: list[list[Any]]) -> Any:
        """The groups of a dispatcher that is told of headers and of scores."""
        control = Dispatcher(Schedule(Mode.SYNCHRONOUS, self.groups, SIZE), self.jobs)
        control.start({0: 1 << 30})
        for message in headers:
            for header in message:
                control.ended(header, 0)
        control.graded(self.scores, dict.fromkeys(self.scores, 0))
        return control.take()


class Clock:
    """CPU seconds by name."""

    def __init__(self) -> None:
        self.times: Times = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = work()
        self.times[name] = self.times.get(name, 0.0) + time.process_time() - began
        return found


def by_reference(step: Step, folder: Path) -> tuple[Times, Times]:
    """(driver, elsewhere)."""
    driver, elsewhere = Clock(), Clock()
    held = elsewhere("environment workers", lambda: [payload_of(own) for own in step.messages])
    made = [[header_of(one, None, place) for place, one in enumerate(own)] for own in step.messages]
    wire = elsewhere("environment workers", lambda: [pickle.dumps(own, protocol=5) for own in made])
    payloads = [Payload(object(), object()) for _ in wire]
    headers = driver("headers, while engines generate", lambda: [pickle.loads(own) for own in wire])

    def told() -> Any:
        return step.dispatched(
            [
                [Header(e.id, e.tokens, e.versions[0], None, payload, e) for e in own]
                for own, payload in zip(headers, payloads, strict=True)
            ]
        )

    finished = driver("dispatcher, while engines generate", told)

    def whole() -> list[PlayedGroup]:
        return [
            PlayedGroup(g.group_id, "t", tuple(replace(h.episode, score=h.score, payload=h.payload) for h in g.headers))
            for g in finished
        ]

    groups = driver("groups", whole)
    check_failures(groups, 1.0)
    [plan] = driver("plan", lambda: policy_batches(fitting(groups, 1 << 20)[0], step.config))
    bare = replace(plan, payloads=())
    driver("to the learner", lambda: pickle.dumps(bare, protocol=5))
    driver("metrics, while it trains", lambda: rollout_metrics(groups, "letters", 2.0))
    moved, _ = driver("to the recorder, while it trains", lambda: sent(groups))
    driver("to the recorder, while it trains", lambda: pickle.dumps(moved, protocol=5))
    tokens = {id(one.tokens): own.tokens for one, own in zip(payloads, held, strict=True)}
    elsewhere("learner", lambda: plan.pack([tokens[id(one)] for one in plan.payloads]))
    writer = TrajectoryWriter(folder, actor="a", tokenizer_hash="h")
    parts = [part for own in held for part in own]
    elsewhere("recorder", lambda: writer.write(contents(moved, parts), generation=0))
    return driver.times, elsewhere.times


def by_value(step: Step, folder: Path) -> tuple[Times, Times]:
    """(driver, elsewhere)."""
    driver, elsewhere = Clock(), Clock()
    wire = elsewhere("environment workers", lambda: [pickle.dumps(own, protocol=5) for own in step.messages])
    found = driver("unpickle", lambda: [pickle.loads(own) for own in wire])
    played = {one.id: one for own in found for one in own}
    headers = [[Header(one.id, SAMPLED, 1) for one in own] for own in found]
    finished = driver("dispatcher, while engines generate", lambda: step.dispatched(headers))

    def whole() -> list[Group]:
        return [
            Group(g.group_id, "t", tuple(replace(played[h.episode_id], score=h.score) for h in g.headers))
            for g in finished
        ]

    groups = driver("groups", whole)

    def packed() -> Any:
        earned = {}
        for group in groups:
            advantages = group_advantages([reward_of(one) for one in group.episodes])
            earned |= dict(zip((one.id for one in group.episodes), advantages, strict=True))
        return from_episodes([one for group in groups for one in group.episodes], earned)

    batch = driver("pack", packed)
    driver("to the learner", lambda: pickle.dumps(batch, protocol=5))
    writer = TrajectoryWriter(folder, actor="b", tokenizer_hash="h")
    driver("Parquet, in a thread", lambda: writer.write(groups, generation=0))
    return driver.times, elsewhere.times


def medians(times: list[Times]) -> Times:
    return {name: round(statistics.median(each[name] for each in times), 4) for name in times[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--of-message", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    step = Step(given.episodes, given.of_message)
    found: dict[str, list[tuple[Times, Times]]] = {"by reference": [], "by value": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.repeats):
            for name, work in (("by reference", by_reference), ("by value", by_value)):
                found[name].append(work(step, Path(folder)))
    rows = []
    for name, runs in found.items():
        driver, elsewhere = medians([own for own, _ in runs]), medians([own for _, own in runs])
        awaited = sum(seconds for part, seconds in driver.items() if "while" not in part and "in a thread" not in part)
        shape = f"{given.episodes} episodes of {PROMPT} + {SAMPLED} tokens, {given.of_message} a message"
        rows.append(
            {"name": name, "shape": shape, "regime": "cpu", "driver_cpu_s": round(sum(driver.values()), 4)}
            | {"not_overlapped_cpu_s": round(awaited, 4), "driver": driver, "elsewhere": elsewhere}
        )
    about = {"processor": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    report = {"machine": about, "versions": versions, "results": rows}
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.json:
        print(json.dumps(report))
        return
    for row in rows:
        print(f"{row['name']}: {row['driver_cpu_s']} s of the driver, {row['not_overlapped_cpu_s']} s not overlapped")
        print(f"  driver: {row['driver']}\n  elsewhere: {row['elsewhere']}")


if __name__ == "__main__":
    main()
