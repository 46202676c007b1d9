"""The policy loop of RL and distillation: sample groups, grade them, step on them, publish, repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from k3rl.actors import LearnerGroup
from k3rl.data import BatchPlan, PlayedGroup
from k3rl.envs import make
from k3rl.parallel import Loss
from k3rl.pipelines.configs import DistillConfig, RLConfig, RolloutStageConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.pipelines.distill import Distillation
from k3rl.pipelines.evaluation import RunEvaluations, run_evaluations
from k3rl.pipelines.guard import Guard, drifted
from k3rl.pipelines.rl import Reinforcement
from k3rl.pipelines.rollout_buffer import RolloutBuffer
from k3rl.pipelines.rollout_metrics import (
    advantage_metrics,
    check_failures,
    fitting,
    replay_metrics,
    rollout_metrics,
    too_long_metrics,
)
from k3rl.pipelines.session import Session
from k3rl.pipelines.stage import Stage, StageResult
from k3rl.pipelines.start import start_policy, with_routes
from k3rl.run import Accumulator


class Algorithm(Protocol):
    """What one algorithm adds to the loop. name: of its stage; loss: of every optimizer step."""

    name: str

    @property
    def loss(self) -> Loss: ...

    def prepare(self, learner: LearnerGroup) -> None:
        """Gives the learner what it needs beside the policy."""
        ...

    def regraded(self, groups: list[PlayedGroup], step: int) -> list[PlayedGroup]:
        """The groups with the scores that are trained on."""
        ...

    def batches(self, groups: Sequence[PlayedGroup], stage: Stage) -> list[BatchPlan]:
        """One batch for each optimizer step, scored by whatever else the loss needs."""
        ...

    def shown(self, values: Mapping[str, float]) -> dict[str, float]:
        """What the progress line says of a step's metrics, by label."""
        ...

    def notes(self, curriculum: Curriculum) -> dict[str, Any]:
        """What the checkpoint's card says."""
        ...


def algorithm_of(config: RLConfig | DistillConfig) -> Algorithm:
    """The algorithm of a stage."""
    return Reinforcement(config) if isinstance(config, RLConfig) else Distillation(config)


def train(session: Session, config: RLConfig | DistillConfig) -> StageResult:
    """Runs the stage and returns its result; a finished stage of a resumed run is returned as it was."""
    config = with_routes(config, session.cluster)
    algorithm = algorithm_of(config)
    stage = Stage(session, algorithm.name, config, config.steps)
    if (result := stage.finished()) is not None:
        return result
    learner, workers = session.fleet.learner, session.fleet.rollouts
    start_policy(session.fleet, config)
    algorithm.prepare(learner)
    stage.note_slow_paths()
    curriculum = Curriculum(config.env, config.seed, make(config.env.name, **config.env.args).source)
    guard, evaluations = Guard(config.guard), run_evaluations(config)
    if (state := stage.restore()) is not None:
        curriculum.restore(state)
        guard.restore(state.get("guard", {}))
        evaluations.restore(state.get("best_evaluation"))
        if curriculum.left_out:
            session.progress.note(f"{stage.name}: families left out before stay so: {', '.join(curriculum.left_out)}")
    if config.cluster.learner_device == "cuda":  # while the first episodes run
        routes, teacher = bool(config.sampling.replay_routes), isinstance(config, DistillConfig)
        learner.start_warm_up(algorithm.loss, config.sampling.temperature, routes=routes, teacher=teacher)
    buffer = RolloutBuffer(stage, config, curriculum, evaluations)
    schedule, temperature = config.schedule.build(config.steps), config.sampling.temperature

    for step in stage.steps():
        if buffer.empty:
            buffer.fill(off_policy_steps=0)
        with stage.clock("wait_for_batch"):
            batch = buffer.take()
        more = stage.more()
        check_failures(batch.groups, config.failure_limit)
        version = batch.version + batch.off_policy_steps
        metrics = workers.take_metrics()
        groups = algorithm.regraded(batch.groups, step)
        curriculum.update(groups)
        if more and config.max_staleness:  # sampled while the learner trains on this batch
            buffer.fill(off_policy_steps=config.max_staleness)
        batches = algorithm.batches(_trainable(groups, stage, config, metrics), stage)
        started = learner.start_training(batches, algorithm.loss, schedule.at(step), temperature)
        session.record(groups, step)  # this, and what the batch says, while the learner trains
        metrics.merge(rollout_metrics(batch.groups, workers.env, version))
        metrics.merge(replay_metrics(batches))
        with stage.clock("wait_for_policy"):
            metrics.merge(learner.trained(started))
        session.annotate(stage.name, step, batches, *learner.annotations(), version)
        metrics.merge(advantage_metrics(batches))
        if evaluations.due(step + 1):
            buffer.evaluate(step + 1)
        if more and not config.max_staleness:
            buffer.fill(off_policy_steps=0)
        metrics.merge(buffer.take_metrics())
        metrics.merge(_evaluated(stage, evaluations, buffer.take_evaluations(last=not more)))
        drifts, found = guard.look(metrics.values(), groups)
        metrics.merge(found)
        values = metrics.values()
        reward = values.get(f"reward/{workers.env}/mean")  # None: no episode of the step has one
        trained, shown = sum(batch.target_tokens for batch in batches), algorithm.shown(values)
        state = curriculum.state() | {"guard": guard.state(), "best_evaluation": evaluations.state()}
        for note in guard.news(drifts):
            session.progress.note(f"{stage.name}, step {step}: {note}")
        stage.done(metrics, state, trained_tokens=trained, rollouts=buffer, reward=reward, shown=shown)
        if drifts and config.guard.at_limit == "stop":
            stage.save(state, buffer)
            stage.saved()
            raise drifted(drifts, stage.name, stage.step)
        if not more:
            break
    buffer.close()
    return stage.finish(curriculum.state(), algorithm.notes(curriculum) | evaluations.notes())


def _evaluated(
    stage: Stage, evaluations: RunEvaluations, measured: Sequence[tuple[int, list[float | None]]]
) -> Accumulator:
    """Metrics of the newest of these evaluations; each is said."""
    metrics = Accumulator()
    for trained, rewards in measured:
        metrics, said = evaluations.taken(stage.session.fleet.rollouts.env, trained, rewards)
        stage.session.progress.note(f"{stage.name}: {said}")
    return metrics


def _trainable(
    groups: Sequence[PlayedGroup], stage: Stage, config: RolloutStageConfig, metrics: Accumulator
) -> Sequence[PlayedGroup]:
    """The groups without what no micro-batch holds, which is counted and said."""
    budget = config.trainer.micro_batch_tokens * config.trainer.context_parallel
    kept, long = fitting(groups, budget)
    metrics.merge(too_long_metrics(long))
    if long:
        stage.session.progress.note(
            f"{stage.name}, step {stage.step}: {len(long)} episodes have more than {budget} tokens in a sequence and "
            "are not trained on; raise --trainer.micro-batch-tokens or context_parallel, or lower what may be sampled"
        )
    return kept
