"""The policy loop as a run, with a learner and rollout workers that answer at once: what ends it, in which order."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from k3rl.actors import ClusterConfig
from k3rl.pipelines import EvalConfig, RLConfig, policy
from k3rl.pipelines.configs import GuardConfig, RolloutsConfig
from k3rl.pipelines.guard import Drifted
from k3rl.pipelines.interrupts import Interrupts
from k3rl.run import Accumulator, MetricsWriter, Progress, RunDirectory, read_metrics
from k3rl.types import Branch, Episode, Failed, FailureKind, Group, Scored, StopReason, Turn

STEPS = 6
CONFIG = RLConfig(
    steps=STEPS,
    batch_size=4,
    group_size=2,
    optimizer_steps=1,
    guard=GuardConfig(window=1, at_limit="stop"),
    evaluation=EvalConfig(every=2, every_n=3),
)


def turn(sampled: int) -> Turn:
    return Turn((1, 2, 3), tuple(range(5, 5 + sampled)), (-0.5,) * sampled, StopReason.STOP, 1, 1)


class Learner:
    """Takes every step and says what it is told to of each."""

    def __init__(self, world: World) -> None:
        self.world, self.notes, self.states = world, [], []

    def start_training(self, batches, loss, lr_scale, temperature):
        self.world.trained += 1
        self.world.log.append(f"train {self.world.trained}")
        return batches

    def trained(self, batches) -> Accumulator:
        metrics = Accumulator()
        for name in ("mismatch/kl/mean", "policy/entropy/mean"):
            metrics.add(name, self.world.value(name))
        return metrics

    def annotations(self):
        return {}, None

    def save_state(self, directory, extra):
        self.states.append(extra)

    def __getattr__(self, name):
        return lambda *_: None


class Workers:
    """Rollout workers and their stream."""

    env, skipped_families = "lists", frozenset()

    def __init__(self, world: World) -> None:
        self.world = world

    def open(self, schedule, draw, sampling, **options):
        self.draw, self.number = draw, 0
        return self

    def states(self):
        return {}

    def take(self):
        groups = [self._group(self.draw(self.number + i)) for i in range(2)]
        self.number += 2
        return groups

    def _group(self, jobs) -> Group:
        sampled, parts = int(self.world.value("length")), self.world.parts()
        score = (
            [Scored(float(n % 2), parts) for n in range(len(jobs))] if self.world.rewarded else [TRIPPED] * len(jobs)
        )
        episodes = tuple(
            Episode(job.episode_id, "t", "lists", "list", 1, (Branch("b", (turn(sampled),)),), StopReason.COMPLETED, s)
            for job, s in zip(jobs, score, strict=True)
        )
        return Group(jobs[0].group_id, "t", episodes)

    def evaluate(self, jobs, sampling):
        self.world.log.append(f"evaluate {len(jobs)}")
        self.evaluated = jobs
        assert (sampling.temperature, {job.task.split for job in jobs}) == (1.0, {"heldout"})

    def evaluation(self):
        self.world.log.append("evaluated")
        rewards = [1.0, self.world.trained / 10, 0.0]
        return [
            Group(j.group_id, "t", (replace(EMPTY, id=j.episode_id, score=Scored(r)),))
            for j, r in zip(self.evaluated, rewards, strict=True)
        ]

    def drawn(self):
        return self.number, []

    def published(self, version):
        return None

    def take_metrics(self) -> Accumulator:
        return Accumulator()

    def __getattr__(self, name):
        return lambda *_: None


TRIPPED = Failed("skipped", FailureKind.TRIPPED)
EMPTY = Episode("e", "t", "lists", "list", 1, (), StopReason.COMPLETED, TRIPPED)


class World:
    """What a session is made of. changed: metric -> its value from the fourth step on."""

    STEADY = {"mismatch/kl/mean": 1e-4, "policy/entropy/mean": 1.0, "length": 4.0, "form": 0.5}

    def __init__(self, root, **changed: float) -> None:
        self.changed = {name.replace("_", "/"): value for name, value in changed.items()}
        self.trained, self.version, self.log, self.rewarded = 0, 0, [], True
        self.learner, self.rollouts = Learner(self), Workers(self)
        self.root, self.said = root, io.StringIO()

    def value(self, name: str) -> float:
        late = self.trained >= 3 if name in ("length", "form") else self.trained > 3
        return self.changed.get(name, self.STEADY[name]) if late else self.STEADY[name]

    def parts(self) -> dict[str, float]:
        return {"form": self.value("form"), "right": 1 - self.value("form")}

    def publish(self) -> dict[str, float]:
        self.version += 1
        self.log.append(f"publish {self.version}")
        return defaultdict(float, version=float(self.version))

    def run(self, config: RLConfig):
        with RunDirectory.create(self.root, config, "rl") as run, MetricsWriter(run.metrics_path) as metrics:
            session = SimpleNamespace(
                begun=0,
                run=run,
                metrics=metrics,
                interrupts=Interrupts(),
                progress=Progress(Console(file=self.said, width=300)),
                cluster=ClusterConfig(),
                tokenizer=SimpleNamespace(hash="none"),
                fleet=SimpleNamespace(learner=self.learner, rollouts=self.rollouts, publish=self.publish),
                record=lambda groups, step: None,
                annotate=lambda stage, step, batches, scores, expert_load, version: None,
                recorded=lambda: None,
                resume=False,
                restarts=0,
            )
            return policy.train(session, config)

    def rows(self) -> list[dict]:
        return [row for row in read_metrics(self.root / "metrics.jsonl") if row["source"] == "rl"]


@pytest.mark.parametrize(
    ("limit", "changed"),
    [
        ("kl", {"mismatch_kl_mean": 0.2}),
        ("entropy", {"policy_entropy_mean": 0.01}),
        ("length", {"length": 20.0}),
        ("part_share", {"form": 0.99}),
    ],
)
def test_a_run_stops_at_each_limit_of_the_guard_with_its_state_saved(tmp_path, limit, changed):
    world = World(tmp_path / "run", **changed)
    with pytest.raises(Drifted, match=f"after step 4.*\n.*beyond guard.{limit} "):
        world.run(CONFIG)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "stopped"
    assert f"guard.{limit}" in info["error"]
    assert world.learner.states[-1]["step"] == len(world.rows()) == 4
    assert world.rows()[-1]["guard/passed_limits"] == 1
    warned = World(tmp_path / "warned", **changed)
    assert warned.run(CONFIG.replace(guard=GuardConfig(window=1))).steps == STEPS
    assert warned.rows()[-1]["guard/passed_limits"] == 1


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_each_evaluation_is_of_one_version_and_ends_before_the_next_is_published(tmp_path, mode):
    world = World(tmp_path / "run")
    result = world.run(CONFIG.replace(rollouts=RolloutsConfig(mode=mode)))
    start = world.log.index("train 2")
    assert world.log[start : start + 6] == ["train 2", "publish 3", "evaluate 3", "train 3", "evaluated", "publish 4"]
    assert world.log.count("evaluate 3") == 2  # what follows the last step is the stage's own measurement
    rows = {row["eval/lists/step"]: row for row in world.rows() if "eval/lists/step" in row}
    assert list(rows) == [2, 4]
    assert rows[2]["eval/lists/mean"] == pytest.approx((1 + 0.3) / 3)  # after three trainings
    assert rows[4]["eval/lists/pass_rate"] == pytest.approx(1 / 3)
    assert rows[4]["eval/lists/best_step"] == 4
    assert result.notes["best_evaluation"] == {"step": 4, "mean": pytest.approx((1 + 0.5) / 3)}


def test_training_is_the_same_with_and_without_evaluations(tmp_path):
    plain, measured = World(tmp_path / "a"), World(tmp_path / "b")
    plain.run(CONFIG.replace(evaluation=EvalConfig()))
    measured.run(CONFIG)
    assert [entry for entry in measured.log if not entry.startswith("evaluat")] == plain.log


def test_every_step_says_its_goodput_and_one_without_rewards_ends_nothing(tmp_path):
    world = World(tmp_path / "run")
    world.run(CONFIG.replace(max_staleness=1))
    assert all(
        row["perf/goodput"] * row["counts"]["perf/goodput"] == pytest.approx(4 * 4) for row in world.rows()
    )  # four episodes of four sampled tokens
    silent = World(tmp_path / "silent")
    silent.rewarded = False
    assert silent.run(CONFIG).steps == STEPS
    assert all(row["perf/goodput"] == 0 for row in silent.rows())
    assert not any("reward/lists/mean" in row for row in silent.rows())
    assert np.isfinite([row["time/step"] for row in silent.rows()]).all()
