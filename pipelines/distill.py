"""On-policy distillation: the student samples, the teacher of the task's domain scores every token it sampled."""

from __future__ import annotations

from dataclasses import replace

from k3rl.pipelines.batches import add_published, check_failures, distill_batches, rollout_metrics
from k3rl.pipelines.configs import DistillConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.pipelines.in_flight import InFlight
from k3rl.pipelines.record import record
from k3rl.pipelines.session import Session
from k3rl.pipelines.stage import Stage, StageResult
from k3rl.pipelines.weights import policy_sampling, start_policy, teachers_of


def train(session: Session, config: DistillConfig, *, name: str = "distill") -> StageResult:
    """Runs the stage and returns its result; a finished stage of a resumed run is returned as it was."""
    stage = Stage(session, name, config, config.steps)
    if (result := stage.finished()) is not None:
        return result
    learner, rollouts = session.fleet.learner, session.fleet.rollouts
    start_policy(session.fleet, config)
    learner.load_teachers(teachers_of(config), config.trainer)
    curriculum = Curriculum(config.env, config.seed)
    if (state := stage.restore()) is not None:
        curriculum.restore(state)
    loss, schedule = config.loss(), config.schedule.build(config.steps)
    sampling = policy_sampling(config)
    temperature = config.sampling.temperature
    published: dict[str, float] = {}

    def next_rollouts(step: int) -> InFlight:
        """Publishes the student so far and starts the rollouts of `step` with it."""
        with stage.clock("publish"):
            published.update(session.fleet.publish())
        curriculum.leave_out(rollouts.left_out)
        jobs = curriculum.jobs(step, config.batch_size // config.group_size, config.group_size, name)
        started = rollouts.start(jobs, sampling)
        return InFlight(lambda: rollouts.result(started), published)

    pending = stage.in_flight()
    for step in stage.steps():
        # Updates since these rollouts were given their weights: with staleness, the last step's.
        pending, ahead = (next_rollouts(step), 0) if pending is None else (pending, config.max_staleness)
        published["version"] = pending.published["version"]
        with stage.clock("wait_for_batch"):
            groups = pending.groups()
        more = stage.more()
        check_failures(groups, config.failure_limit)
        metrics = rollout_metrics(groups, rollouts.env, published["version"] + ahead)
        metrics.merge(rollouts.take_metrics())
        curriculum.update(groups)
        record(session, groups, step)
        if more and config.max_staleness:
            pending = next_rollouts(step + 1)
        batches, domains = distill_batches(groups, config)
        with stage.clock("teacher"):
            scored = [
                replace(batch, teacher_logprobs=learner.teacher_logprobs(batch, of, temperature))
                for batch, of in zip(batches, domains, strict=True)
            ]
        with stage.clock("wait_for_policy"):
            metrics.merge(learner.trained(learner.start_training(scored, loss, schedule.at(step), temperature)))
        if more and not config.max_staleness:
            pending = next_rollouts(step + 1)
        add_published(metrics, published)
        values = metrics.values()
        reward = values[f"reward/{rollouts.env}/mean"]
        shown = {"KL": values["distill/kl_reverse"]} if "distill/kl_reverse" in values else {}
        in_flight = pending if more else None
        stage.done(metrics, curriculum.state(), pending=in_flight, reward=reward, **shown)
        if not more:
            break
    return stage.finish(curriculum.state(), {"teachers": teachers_of(config)})
