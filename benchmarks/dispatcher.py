"""The driver's share of one core: its dispatcher under simulated actors, without Ray and without torch.

    python benchmarks/dispatcher.py [--workers 1000] [--live 100000] [--seconds-of-life 10] [--out FILE] [--json]

Every live episode ends after `--seconds-of-life` seconds in the mean, so `live / seconds_of_life` episodes end each
second, and as many start and are graded. Ten seconds is a short single-turn answer; an agent's episode lives minutes,
and costs the driver no more. Headers come from each environment worker in a pickled batch a `GATHER_S`, grades in
batches of `GRADED`; both are counted as the driver's work, with the draw of the jobs, the batches that the learner
takes, and publications. What Ray itself costs a message is not in it.

`share_of_core` is CPU time over the time that the simulated events take; `us_an_episode` is the same for one episode.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3rl.actors.dispatcher import Dispatcher
from k3rl.actors.jobs import EpisodeJob, TaskRef
from k3rl.actors.schedule import Grade, Header, Mode, Schedule, Start
from k3rl.data import EpisodeHeader, SequenceHeader
from k3rl.envs import NOT_GRADED
from k3rl.types import Scored, StopReason

GATHER_S = 0.1  # between two messages of a worker that has something to say
GRADED = 256  # episodes of one grade call
SIZE = 8  # episodes of a group
BAR = {"share_of_core": 0.5, "us_an_episode": 30.0}


class Simulation:
    """Workers that end episodes at a steady rate. cpu_s: what the driver's code took; episodes: that ended."""

    def __init__(self, mode: Mode, workers: int, live: int, in_flight: int | None, seed: int = 0) -> None:
        self.cpu_s, self.episodes, self.batches = 0.0, 0, 0
        self._live, self._rng = live, random.Random(seed)
        groups = live // SIZE if mode is Mode.PARTIAL else live // SIZE // 2  # asynchronous: one batch runs ahead
        bound = None if mode is Mode.PARTIAL else 1
        schedule = Schedule(mode, groups, SIZE, bound, 0.8 if mode is Mode.PARTIAL else 1.0, in_flight)
        self._dispatcher = Dispatcher(schedule, _jobs)
        self._running: list[list[Start]] = [[] for _ in range(workers)]
        for place in range(workers):
            self._dispatcher.open(place)
        self._grades: list[Grade] = []
        self._played = 0  # episodes in them
        self._fill()

    def play(self, episodes: int, of_message: int) -> None:
        """Until so many episodes have ended. of_message: headers that a worker sends together."""
        for place in itertools.cycle(range(len(self._running))):
            if self.episodes >= episodes:
                return
            message = pickle.dumps(list(self._ended(place, of_message)))
            began = time.process_time()
            for episode, score, attempt in pickle.loads(message):
                header = Header(episode.id, episode.tokens, episode.versions[0], score, None, episode)
                grades = self._dispatcher.ended(header, attempt)
                self._grades += grades
                self._played += len(grades)  # of one episode each
            self._grade()
            self.cpu_s += time.process_time() - began
            self._fill()

    def _ended(self, place: int, count: int) -> Iterator[tuple[EpisodeHeader, None, int]]:
        running = self._running[place]
        for _ in range(min(count, len(running))):
            pick = self._rng.randrange(len(running))
            running[pick], running[-1] = running[-1], running[pick]
            start = running.pop()
            self.episodes += 1
            tokens, version = self._rng.randint(1, 500), self._dispatcher.version
            versions, sequences = (version, version, version), (SequenceHeader(0, 20 + tokens, 20 + tokens, tokens),)
            name, about = start.job.episode_id, ("letters", "letters", 0, StopReason.COMPLETED, NOT_GRADED)
            yield EpisodeHeader(name, "t", *about, 1, tokens, 0, versions, 1, sequences), None, start.attempt

    def _grade(self) -> None:
        """The scores of what waits for them, as a reward worker sends them."""
        while self._grades and (self._played >= GRADED or self._dispatcher.phase_over or not self._dispatcher.running):
            mine, self._grades, self._played = self._grades, [], 0
            names = [header.episode_id for grade in mine for header in grade.headers]
            scores = pickle.loads(pickle.dumps({name: Scored(1.0, {"tests": 1.0}) for name in names}))
            attempts = {name: self._dispatcher.groups.attempt_of(name) for name in scores}
            known = {name: attempt for name, attempt in attempts.items() if attempt is not None}
            self._grades += self._dispatcher.graded({name: scores[name] for name in known}, known)

    def _fill(self) -> None:
        """A batch for the learner, new weights, and starts: what follows a message."""
        began = time.process_time()
        if self._dispatcher.ready:
            self._dispatcher.take()
            self.batches += 1
            self._dispatcher.published(self._dispatcher.version + 1)
        starts = self._dispatcher.start()
        self.cpu_s += time.process_time() - began
        for start in starts:
            self._running[start.worker].append(start)


def _jobs(number: int) -> list[EpisodeJob]:
    task = TaskRef("train", number, 0)
    return [EpisodeJob(f"rl-{number}-{k}", f"g{number}", task, number * SIZE + k) for k in range(SIZE)]


def measured(mode: Mode, workers: int, live: int, life_s: float, in_flight: int | None) -> dict[str, Any]:
    """One row: `episodes` ends of a steady state that was reached before."""
    rate = live / life_s
    simulation = Simulation(mode, workers, live, in_flight)
    of_message = max(1, round(rate * GATHER_S / workers))
    simulation.play(live // 4, of_message)
    before, cpu_s, batches = simulation.episodes, simulation.cpu_s, simulation.batches
    simulation.play(before + 2 * live, of_message)
    ended, cpu_s = simulation.episodes - before, simulation.cpu_s - cpu_s
    return {
        "name": "dispatcher",
        "shape": f"{mode}, {workers:,} workers, {live:,} live" + (", bounded in flight" if in_flight else ""),
        "regime": "cpu",
        "episodes_a_second": rate,
        "headers_a_message": of_message,
        "us_an_episode": round(1e6 * cpu_s / ended, 2),
        "share_of_core": round(cpu_s / (ended / rate), 4),
        "batches": simulation.batches - batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--live", type=int, default=100_000)
    parser.add_argument("--seconds-of-life", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [
        measured(mode, given.workers, given.live, given.seconds_of_life, bound)
        for mode, bound in (
            (Mode.ASYNCHRONOUS, None),
            (Mode.ASYNCHRONOUS, given.live // 2),
            (Mode.PARTIAL, None),
        )
    ]
    about = {"processor": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    report = {"machine": about, "versions": {"python": platform.python_version()}, "bar": BAR, "results": rows}
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.json:
        print(json.dumps(report))
        return
    for row in rows:
        print(f"{row['shape']}: {row['us_an_episode']} us an episode, {row['share_of_core']:.1%} of a core")


if __name__ == "__main__":
    main()
