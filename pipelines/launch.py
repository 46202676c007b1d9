"""From a validated config to a finished run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from k3rl.actors.cluster import ClusterConfig, cluster
from k3rl.actors.fleet import fleet
from k3rl.checkpoint import add_to_card
from k3rl.config import Config, ConfigError
from k3rl.envs.sandbox import provider_named
from k3rl.pipelines import distill, quickstart, rl, sft
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
from k3rl.pipelines.recovery import with_restarts
from k3rl.pipelines.session import Session, session
from k3rl.pipelines.stage import StageResult, resolve_start
from k3rl.pipelines.weights import check_start
from k3rl.run import RunOptions


def run(pipeline: str, config: Config, options: RunOptions) -> dict[str, Any]:
    """Runs the config's pipeline. `options.seed`, when given, replaces the config's."""
    if options.seed is not None:
        config = config.replace(seed=options.seed)
    if isinstance(config, QuickstartConfig):
        return quickstart.run(config, options)
    if not isinstance(config, StageConfig):
        raise ConfigError(f"{type(config).__name__} is not a pipeline's config", key=pipeline)
    check_start(config)
    started = time.monotonic()
    opened = session(
        pipeline,
        config,
        options,
        env=config.env,
        cluster_config=config.cluster,
        max_running=config.evaluation.max_running,
        seed=config.seed,
    )
    with opened as job:
        result = _train(job, config)
        measured = evaluate_on(job.fleet.rollouts, result.checkpoint, config.evaluation)
        add_to_card(result.checkpoint, measured.facts(config.env.name))
        report = {
            "run": str(job.run.root),
            "checkpoint": result.checkpoint,
            "env": config.env.name,
            "steps": result.steps,
            "reward": measured.pass_at_1,
            "evaluation": measured.to_json(),
        }
    return report | {"seconds": round(time.monotonic() - started, 1), "peak_rss_mb": round(job.memory.peak_mb)}


def _train(job: Session, config: StageConfig) -> StageResult:
    match config:
        case SFTConfig():
            return with_restarts(job, lambda session: sft.train(session, config))
        case RLConfig():
            return with_restarts(job, lambda session: rl.train(session, config))
        case DistillConfig():
            return with_restarts(job, lambda session: distill.train(session, config))
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
        raise ConfigError(f"{checkpoint} holds no checkpoint (no config.json)", key="CHECKPOINT", got=checkpoint)
    chosen = EnvConfig(name=env, args=env_args or {})
    provider_named(chosen.sandbox).check()
    with (
        cluster(cluster_config),
        fleet(
            cluster_config,
            env=chosen.name,
            env_args=chosen.args,
            sandbox=chosen.sandbox,
            max_running=evaluation.max_running,
            seed=0,
            learner=False,
        ) as members,
    ):
        measured = evaluate_on(members.rollouts, str(Path(checkpoint).resolve()), evaluation)
    return {"checkpoint": checkpoint, "env": env, **measured.to_json()}
