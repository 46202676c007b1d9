"""Small runs as the product writes them, and a server over them; loaded by path, as test folders are no packages."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import uvicorn

from k3rl.config import Config
from k3rl.dashboard import DashboardOptions, create_app
from k3rl.data import AnnotationWriter, SequenceScores, TrainBatch, TrainSequence
from k3rl.run import Accumulator, MetricsWriter, Recorder, RunDirectory, RunOptions
from k3rl.types import Branch, Episode, Scored, StopReason, Turn

TOKEN = "a-token-of-tests"


class Settings(Config):
    """A configuration of nothing."""

    seed: int = 0


def words(ids) -> list[str]:
    """A token's text is its id in letters of its own kind: 1 is " w1"."""
    return [f" w{token}" for token in ids]


def an_episode(name="rl-0-0-0", reward=1.0, *, score=None, sampled=(5, 6), task="t/1", turns=1, answer="") -> Episode:
    """Turns of one branch; each prompt adds the tokens 1, 2 to what came before."""
    made, known = [], ()
    for number in range(turns):
        prompt = (*known, 1, 2)
        made.append(
            Turn(prompt, sampled, [-0.5] * len(sampled), StopReason.STOP, 3, 3 + number, model_s=0.5, env_s=0.1)
        )
        known = (*prompt, *sampled)
    branch = Branch(f"{name}/0", tuple(made))
    score = score if score is not None else Scored(reward, {"tests": reward})
    return Episode(name, task, "env", "list", 1, (branch,), StopReason.COMPLETED, score, answer)


def a_batch(episodes, advantages) -> TrainBatch:
    """The batch of one-turn episodes, whose sampler logprobs are -0.5."""
    sequences = []
    for episode, advantage in zip(episodes, advantages, strict=True):
        ids, mask, logprobs = episode.branches[0].tokens()
        name = f"{episode.id}/{episode.branches[0].id}"
        sequences.append(TrainSequence(name, ids, mask, logprobs, np.where(mask, advantage, 0).astype(np.float32)))
    return TrainBatch.pack(sequences)


class Written:
    """A run that is being written, step by step."""

    def __init__(self, root: Path, options: RunOptions | None = None) -> None:
        self.root = root
        self.run = RunDirectory.create(root, Settings(), "rl", options or RunOptions(argv=("k3rl", "rl")))
        self.attempt = self.run.info.attempt
        self.metrics = MetricsWriter(self.run.metrics_path, run_id=self.run.info.id, attempt=self.attempt)
        self.recorder = Recorder(self.run.traces_dir, attempt=self.attempt)

    def step(self, number: int, episodes, *, trained=True, pieces=words, **values) -> None:
        """Records the episodes, trains on them in words, and writes the step's metrics."""
        for episode in episodes:
            self.recorder.episode(episode, number, pieces, group=episode.id.rpartition("-")[0])
        if trained:
            batch = a_batch(episodes, [float(i) - 0.5 for i in range(len(episodes))])
            lengths = batch.lengths.tolist()
            scores = {
                name: SequenceScores(np.full(n, -0.25, np.float32), np.full(n, 0.75, np.float32))
                for name, n in zip(batch.sequence_ids, lengths, strict=True)
            }
            load = np.array([[3.0, 1.0], [2.0, 2.0]])
            AnnotationWriter(self.run.traces_dir / "annotations", attempt=self.attempt).write(
                "rl", number, [batch], scores, load, 5
            )
        metrics = Accumulator()
        metrics.update({name.replace("__", "/"): (value, 1.0) for name, value in values.items()})
        metrics.add("reward/env/mean", 0.1 * number)
        metrics.add("time/step", 2.0)
        metrics.add("time/wait_for_batch", 0.5)
        self.metrics.write(number, "rl", metrics)

    def end(self, status: str | None = "finished") -> Path:
        """Ends the attempt; None leaves it as a kill does."""
        self.recorder.close()
        self.metrics.close()
        if status is not None:
            self.run.finish(status)
        else:
            self.run._lock.close()
        return self.root


class Served:
    """A server in a thread of this process."""

    def __init__(self, root: Path) -> None:
        self.app = create_app(root, DashboardOptions(token=TOKEN))
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> Served:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            self.thread.join(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_) -> None:
        self.app.dashboard.watcher.close()
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()
