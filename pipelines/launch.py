"""From a validated config to a finished run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from k3rl.actors import ClusterConfig, FleetConfig, start_fleet, start_ray
from k3rl.checkpoint import add_to_card
from k3rl.config import NO_CHECKPOINT, Config, ConfigError, MissingResource
from k3rl.envs.sandbox import provider_named
from k3rl.pipelines import policy, quickstart, sft
from k3rl.pipelines.chat_data import check_data
from k3rl.pipelines.configs import (
    DistillConfig,
    EnvConfig,
    EvalConfig,
    QuickstartConfig,
    RLConfig,
    SFTConfig,
    StageConfig,
)
from k3rl.pipelines.evaluation import evaluate as evaluate_on
from k3rl.pipelines.evaluation import held_out
from k3rl.pipelines.session import Session, open_session, with_restarts
from k3rl.pipelines.stage import StageResult, cut_notes
from k3rl.pipelines.start import check_start, resolve_start
from k3rl.run import RunOptions, StageSummary, print_summary, visible


def run(pipeline: str, config: Config, options: RunOptions) -> dict[str, Any]:
    """Runs the config's pipeline. `options.seed`, when given, replaces the config's."""
    if options.seed is not None:
        config = config.replace(seed=options.seed)
    if isinstance(config, QuickstartConfig):
        return quickstart.run(config, options)
    if not isinstance(config, StageConfig):
        raise ConfigError(f"{type(config).__name__} is not a pipeline's config", key=pipeline)
    check_start(config)
    if isinstance(config, SFTConfig):
        check_data(config, lambda text: print(visible(text), file=sys.stderr))
    tasks = held_out(config.env, config.evaluation, required=False)
    started = time.monotonic()
    with open_session(pipeline, config, options) as job:
        result = _train(job, config)
        report = {
            "run": str(job.run.root),
            "checkpoint": result.checkpoint,
            "env": config.env.name,
            "steps": result.steps,
            **with_restarts(job, lambda session: _measured(session, config, result.checkpoint, tasks)),
        }
    _print(job, result, report)
    return report | {"seconds": round(time.monotonic() - started, 1), "peak_rss_mb": round(job.memory.peak_mb)}


def _print(job: Session, result: StageResult, report: dict[str, Any]) -> None:
    """The stage's row, on standard error: standard output is for results."""
    measured = report["evaluation"]
    row = StageSummary(
        stage=result.name,
        steps=result.steps,
        tokens=int(result.trained_tokens + result.sampled_tokens),
        reward_before=None,
        reward_after=report["reward"],
        seconds=result.seconds,
        note=f"greedy {measured['greedy']:.3f}" if measured else "",
    )
    paths = {"run": job.run.root, "checkpoint": report["checkpoint"]}
    print_summary([row], Console(stderr=True), paths=paths, notes=cut_notes([result]))


def _measured(job: Session, config: StageConfig, checkpoint: str, tasks: dict[str, int]) -> dict[str, Any]:
    """`reward` and `evaluation` of a report; None for an environment that has nothing held out."""
    if not tasks:
        job.progress.note(f"{config.env.name} has no split heldout, so the policy is not measured")
        return {"reward": None, "evaluation": None}
    job.progress.note(f"measuring on {', '.join(f'{n} tasks of {split}' for split, n in tasks.items())}")
    measured = evaluate_on(job.fleet.rollouts, checkpoint, config.evaluation, tasks)
    add_to_card(checkpoint, measured.facts(config.env.name))
    return {"reward": measured.pass_at_1, "evaluation": measured.to_json()}


def _train(job: Session, config: StageConfig) -> StageResult:
    match config:
        case SFTConfig():
            return with_restarts(job, lambda session: sft.train(session, config))
        case RLConfig() | DistillConfig():
            return with_restarts(job, lambda session: policy.train(session, config))
    raise ConfigError(f"no loop for {type(config).__name__}")


def evaluate(
    checkpoint: str,
    env: str,
    *,
    evaluation: EvalConfig | None = None,
    cluster_config: ClusterConfig | None = None,
    env_args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`k3rl eval`: engines, environments and graders, without a learner. The same call gives the same figures."""
    evaluation, cluster_config = evaluation or EvalConfig(), cluster_config or ClusterConfig()
    if resolve_start(checkpoint) is None:
        raise MissingResource(f"{checkpoint} {NO_CHECKPOINT}")
    chosen = EnvConfig(name=env, args=env_args or {})
    tasks = held_out(chosen, evaluation)
    provider_named(chosen.sandbox, **chosen.sandbox_args).check()
    actors = FleetConfig(cluster_config, chosen, evaluation.max_running, learner=False)
    with start_ray(cluster_config), start_fleet(actors) as members:
        measured = evaluate_on(members.rollouts, str(Path(checkpoint).resolve()), evaluation, tasks)
    return {"checkpoint": checkpoint, "env": env, **measured.to_json()}
