"""How a stage's learner gets its first weights."""

from __future__ import annotations

from k3rl.actors.cluster import ClusterConfig
from k3rl.actors.fleet import Fleet, Learner
from k3rl.config import ConfigError
from k3rl.model import K3Config
from k3rl.parallel import data_degree
from k3rl.pipelines.configs import DistillConfig, RolloutStageConfig, StageConfig
from k3rl.pipelines.stage import resolve_start


def start_learner(learner: Learner, config: StageConfig) -> None:
    """Fresh weights of a named size, or a checkpoint's, with fresh optimizer state."""
    directory = resolve_start(config.model.start)
    if directory is not None:
        learner.load(str(directory), config.trainer, config.learner)
        return
    learner.create(model_config(config).to_dict(), config.trainer, config.seed, config.learner)


def check_start(config: StageConfig) -> None:
    """Refuses a stage that cannot start, before anything is started. Raises ConfigError.

    A policy of random weights samples no answer that a reward could tell apart, so rollout stages need a checkpoint.
    """
    check_layout(config.cluster, config)
    if not isinstance(config, RolloutStageConfig):
        if resolve_start(config.model.start) is None:
            model_config(config)
        return
    if resolve_start(config.model.start) is None:
        raise ConfigError(
            f"model.start is {config.model.start!r}; RL and distillation start from a checkpoint directory. "
            "Run `k3rl sft` first and name its export, or run `k3rl rl quickstart`",
            key="model.start",
            got=config.model.start,
        )
    if isinstance(config, DistillConfig):
        teachers_of(config)


def check_layout(cluster: ClusterConfig, *stages: StageConfig) -> None:
    """Refuses degrees that do not divide the learner's ranks. Raises ConfigError."""
    for stage in stages:
        data_degree(cluster.learner_actors, stage.trainer.expert_parallel, stage.trainer.context_parallel)


def start_policy(fleet: Fleet, config: RolloutStageConfig) -> None:
    """The checkpoint that a rollout stage starts from, in the learner and in every engine."""
    fleet.learner.load(config.model.start, config.trainer, config.learner)
    fleet.learner.set_version(0)
    fleet.rollouts.load(config.model.start)


def teachers_of(config: DistillConfig) -> dict[str, str]:
    """Teacher directory by task family, `*` for the rest. Raises ConfigError when a family has none."""
    missing = [family for family in config.env.families if family not in config.teachers and "*" not in config.teachers]
    if missing:
        raise ConfigError(
            f"no teacher for {', '.join(missing)}; name one with --teachers.{missing[0]} DIR, "
            "or one for all with --teachers.* DIR",
            key="teachers",
            got=dict(config.teachers),
        )
    for domain, directory in config.teachers.items():
        if resolve_start(directory) is None:
            raise ConfigError(
                f"the teacher of {domain} is {directory!r}, which holds no checkpoint", key=f"teachers.{domain}"
            )
    return dict(config.teachers)


def model_config(config: StageConfig) -> K3Config:
    """The config of fresh weights. Raises ConfigError when `model.start` is neither a size nor a checkpoint."""
    try:
        named = K3Config.named(config.model.start)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"model.start is {config.model.start!r}: neither a named size nor a directory with a config.json ({error})",
            key="model.start",
            got=config.model.start,
        ) from error
    chosen = config.model
    return named.replace(
        quantization=type(named.quantization)(**chosen.quantization.model_dump()),
        ablation=type(named.ablation)(**chosen.ablation.model_dump()),
    )
