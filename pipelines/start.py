"""How a stage starts: which weights and teachers it takes, and what refuses it before any actor does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from k3rl.actors import ClusterConfig, Fleet, LearnerGroup
from k3rl.actors.weight_sync import POLICY
from k3rl.checkpoint import is_adapter, read_adapter_config, weights_of
from k3rl.config import ConfigError
from k3rl.model import K3Config
from k3rl.parallel import TrainerConfig, check_slices, data_degree, expert_run
from k3rl.pipelines.configs import AblationChoices, DistillConfig, RolloutStageConfig, StageConfig
from k3rl.tokens import Tokenizer
from k3rl.types import SamplingParams


def resolve_start(start: str) -> Path | None:
    """The directory of a checkpoint or an adapter that `model.start` names, or None for a named size.

    It is absolute, because actors have another working directory.
    """
    path = Path(start).absolute()
    return path if (path / "config.json").is_file() or is_adapter(path) else None


Policy = TypeVar("Policy", bound=RolloutStageConfig)
_FRESH = {"weights": "mxfp4", "activations": "mxfp8", "scale_rule": "ceil"}


def _chosen(config: StageConfig) -> dict[str, str]:
    """The keys of `model.quantization` that are set."""
    return config.model.quantization.model_dump(exclude_none=True)


def quantization_of(config: StageConfig) -> dict[str, str]:
    """What experts are computed with instead of what the checkpoint says: keys for `load_checkpoint`.

    A checkpoint with MXFP4 experts that says nothing of its own is trained with MXFP8 inputs. Plain experts of Kimi
    Linear become MXFP4 where that is asked for. Raises ConfigError where the configuration asks for weights or scales
    that the checkpoint does not have.
    """
    start = resolve_start(config.model.start)
    if start is None:
        return {}
    file = weights_of(start) / "config.json"
    model, chosen = K3Config.from_json(file), _chosen(config)
    found = model.quantization
    if model.flat and found.weights == "none" and chosen.get("weights", "none") != "none":
        return chosen
    for key in ("weights", "scale_rule"):
        if chosen.get(key, getattr(found, key)) != getattr(found, key):
            raise ConfigError(
                f"model.quantization.{key} is {chosen[key]}, and {config.model.start} was made with "
                f"{getattr(found, key)}; leave the key out, or train fresh weights",
                key=f"model.quantization.{key}",
                got=chosen[key],
                wanted=getattr(found, key),
            )
    if "activations" in chosen:
        return {"activations": chosen["activations"]}
    says = "k3rl_quantization" in json.loads(file.read_text(encoding="utf-8"))
    return {} if says or found.weights != "mxfp4" else {"activations": _FRESH["activations"]}


def tokenizer_of(start: str) -> Tokenizer:
    """That of the checkpoint which `model.start` names; the one of the small sizes for fresh weights."""
    directory = resolve_start(start)
    return Tokenizer.builtin() if directory is None else Tokenizer.load(str(directory))


def trainer_of(config: StageConfig) -> TrainerConfig:
    """How the stage trains, with a choice for what depends on the model (`TrainerConfig.settled`)."""
    start = resolve_start(config.model.start)
    model = model_config(config) if start is None else K3Config.from_json(weights_of(start) / "config.json")
    return config.trainer.settled(model.flat, samples=isinstance(config, RolloutStageConfig))


def start_learner(learner: LearnerGroup, config: StageConfig) -> None:
    """Fresh weights of a named size, or a checkpoint's, with fresh optimizer state."""
    directory = resolve_start(config.model.start)
    if directory is not None:
        learner.load(str(directory), trainer_of(config), config.learner, quantization_of(config))
        return
    learner.create(model_config(config).to_dict(), trainer_of(config), config.seed, config.learner)


def check_start(config: StageConfig) -> None:
    """Refuses a stage that cannot start, before anything is started. Raises ConfigError.

    A policy of random weights samples no answer that a reward could tell apart, so rollout stages need a checkpoint.
    """
    check_layout(config.cluster, config)
    check_adapter(config)
    check_experts(config)
    if not isinstance(config, RolloutStageConfig):
        if resolve_start(config.model.start) is None:
            model_config(config)
        quantization_of(config)
        return
    if resolve_start(config.model.start) is None:
        raise ConfigError(
            f"model.start is {config.model.start!r}; RL and distillation start from a checkpoint directory. "
            "Run `k3rl sft` first and name its export, or run `k3rl rl quickstart`",
            key="model.start",
            got=config.model.start,
        )
    if isinstance(config, DistillConfig):
        check_teachers(config)
    quantization_of(config)


def check_experts(config: StageConfig, *later: StageConfig) -> None:
    """Refuses more expert ranks than the model has experts, in this stage and later ones. Raises ConfigError."""
    start, ranks = resolve_start(config.model.start), max(s.trainer.expert_parallel for s in (config, *later))
    if ranks > 1 and (start is not None or not isinstance(config, RolloutStageConfig)):
        built = model_config(config) if start is None else K3Config.from_json(weights_of(start) / "config.json")
        expert_run(built.num_experts, 0, ranks)


def check_adapter(config: StageConfig) -> None:
    """Refuses to start from an adapter that the stage would not go on training. Raises ConfigError."""
    start, wanted = config.model.start, config.trainer.lora
    if not is_adapter(start):
        return
    found, _ = read_adapter_config(start)
    if wanted is None or wanted.replace(seed=found.seed) != found:
        flags = f"--trainer.lora.rank {found.rank} --trainer.lora.alpha {found.alpha:g}"
        raise ConfigError(
            f"model.start is the adapter {start} of rank {found.rank}, alpha {found.alpha:g} and targets "
            f"{', '.join(found.targets)}; go on training it with {flags} and the same targets, or make a checkpoint of "
            "it first with `k3rl export --merge`",
            key="trainer.lora",
            got=None if wanted is None else wanted.model_dump(mode="json"),
        )


def check_layout(cluster: ClusterConfig, *stages: StageConfig) -> None:
    """Refuses degrees that do not divide the learner's ranks, and adapters for servers that serve none.

    Raises ConfigError.
    """
    for stage in stages:
        if stage.trainer.lora is not None and cluster.rollout.backend != "k3rl":
            raise ConfigError(
                "trainer.lora needs engines that serve adapters; set cluster.rollout.backend to k3rl, or train the "
                "weights",
                key="cluster.rollout.backend",
                got=cluster.rollout.backend,
            )
        if isinstance(stage, RolloutStageConfig) and stage.trainer.exact != cluster.engine.exact:
            raise ConfigError(
                f"trainer.exact is {stage.trainer.exact} and cluster.engine.exact is {cluster.engine.exact}: logprobs "
                "are bit-equal only where both compute exactly, and alone either is slow for nothing; set both to one",
                key="trainer.exact",
                got=stage.trainer.exact,
                wanted=f"the same as cluster.engine.exact, {cluster.engine.exact}",
            )
        if stage.trainer.exact and cluster.rollout.backend != "k3rl":
            raise ConfigError(
                "trainer.exact needs engines that compute exactly too; set cluster.rollout.backend to k3rl, or "
                "trainer.exact and cluster.engine.exact to false",
                key="cluster.rollout.backend",
                got=cluster.rollout.backend,
                wanted="k3rl",
            )
        data_degree(cluster.learner_actors, stage.trainer.expert_parallel, stage.trainer.context_parallel)
        check_slices(cluster.learner_actors, stage.trainer.shard_frozen)


def start_policy(fleet: Fleet, config: RolloutStageConfig) -> None:
    """The checkpoint that a rollout stage starts from, in the learner and in every engine.

    They load side by side, but where they share a GPU: an engine takes a share of what it finds free there.
    """
    start, quantization = str(resolve_start(config.model.start)), quantization_of(config)
    served = str(weights_of(start)) if config.trainer.lora else start
    waits = config.cluster.shares_gpu
    loading = [] if waits else fleet.rollouts.start_loading(served, quantization)
    fleet.learner.load(start, trainer_of(config), config.learner, quantization)
    fleet.learner.set_version(0)
    fleet.rollouts.loaded(fleet.rollouts.start_loading(served, quantization) if waits else loading)


def with_routes(config: Policy, cluster: ClusterConfig) -> Policy:
    """The configuration with `sampling.replay_routes` decided: on in bf16, where k3rl's engine records them."""
    if config.sampling.replay_routes is not None:
        return config
    zero = config.learner.backend == "deepspeed" and config.learner.deepspeed.dtype == "bf16"
    half = zero or "cuda" in (cluster.learner_device, cluster.rollout_device)
    replays = half and cluster.rollout.backend == "k3rl"
    return config.replace(sampling=config.sampling.replace(replay_routes=replays))


def policy_sampling(config: RolloutStageConfig) -> SamplingParams:
    """How rollouts sample: with the adapter that the learner trains and publishes, where it trains one."""
    chosen = config.sampling
    adapter = "" if config.trainer.lora is None else POLICY
    return SamplingParams(
        chosen.temperature,
        chosen.top_p,
        chosen.top_k,
        min_p=chosen.min_p,
        max_tokens=chosen.max_tokens,
        adapter=adapter,
        return_routes=bool(chosen.replay_routes),
    )


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
    return {domain: str(resolve_start(directory)) for domain, directory in config.teachers.items()}


def check_teachers(config: DistillConfig) -> None:
    """Refuses teachers that cannot score what the student samples. Raises ConfigError."""
    teachers = teachers_of(config)
    wanted = K3Config.from_json(weights_of(config.model.start) / "config.json").vocab_size
    for domain, directory in teachers.items():
        found = K3Config.from_json(weights_of(directory) / "config.json").vocab_size
        if found != wanted:
            raise ConfigError(
                f"the teacher of {domain}, {directory}, has a vocabulary of {found}, and the student one of {wanted}; "
                "a teacher scores the student's own tokens: name one with the same vocabulary",
                key=f"teachers.{domain}",
                got=found,
                wanted=str(wanted),
            )


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
    if named.flat:
        if config.model.ablation != AblationChoices():
            raise ConfigError(
                f"model.ablation replaces parts of K3, and {config.model.start} has its own; leave it out",
                key="model.ablation",
                got=config.model.ablation.model_dump(exclude_defaults=True),
            )
        return named.replace(quantization=replace(named.quantization, **_chosen(config)))
    return named.replace(
        quantization=type(named.quantization)(**_FRESH | _chosen(config)),
        ablation=type(named.ablation)(**config.model.ablation.model_dump()),
    )
