"""Which backend computes optimizer steps, and what DeepSpeed cannot train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from k3rl.config import Config, ConfigError
from k3rl.parallel.settings import TrainerConfig


class DeepSpeedConfig(Config):
    """What ZeRO shards and where it lies."""

    stage: Literal[1, 2, 3] = 2
    """1 shards masters and moments over the ranks, 2 gradients too, 3 also the parameters between their uses."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """What the model computes in. Masters and moments are float32 either way."""
    offload_optimizer: bool = False
    """Masters and moments in host memory, updated there."""
    build_timeout_s: float = Field(300.0, gt=0)
    """How long the C++ build at first use may take."""


class LearnerConfig(Config):
    """Which backend computes optimizer steps."""

    backend: Literal["native", "deepspeed"] = "native"
    """k3rl's own, or DeepSpeed ZeRO (AdamW only, for models whose experts fit one rank)."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()


def check_backend(learner: LearnerConfig, trainer: TrainerConfig) -> None:
    """Refuses what DeepSpeed cannot train. Raises ConfigError."""
    if learner.backend != "deepspeed":
        return
    if trainer.optimizer != "adamw":
        raise ConfigError(
            f"learner.backend is deepspeed and trainer.optimizer is {trainer.optimizer}: ZeRO lays parameters end to "
            "end and cuts them anywhere, so an optimizer that needs whole matrices or heads cannot run on its "
            "shards. Add --trainer.optimizer adamw, or leave the backend native",
            key="trainer.optimizer",
            got=trainer.optimizer,
            wanted="adamw",
        )
    if not trainer.shard_optimizer:
        raise ConfigError(
            "trainer.shard_optimizer is false and every ZeRO stage shards the optimizer; leave it true, or leave "
            "learner.backend native",
            key="trainer.shard_optimizer",
            got=False,
            wanted="true",
        )
    if trainer.capture == "on":
        raise ConfigError(
            "trainer.capture is on and ZeRO's micro-batches are no steps of fixed shapes; set it to auto or off, or "
            "leave learner.backend native",
            key="trainer.capture",
            got="on",
            wanted="auto or off",
        )
    for name, why in _REFUSED.items():
        if getattr(trainer, name):
            raise ConfigError(f"trainer.{name} {why}", key=f"trainer.{name}")
    if trainer.balance_by == "auxiliary_loss":
        raise ConfigError(
            "balance_by auxiliary_loss is not there with learner.backend deepspeed; use quantile or fixed_step",
            key="trainer.balance_by",
        )
    for axis in ("expert_parallel", "context_parallel"):
        if (degree := getattr(trainer, axis)) > 1:
            raise ConfigError(
                f"learner.backend is deepspeed and trainer.{axis} is {degree}: ZeRO cuts every parameter and gradient "
                "over all ranks alike, which experts of a group or rows of one sequence do not allow. Set it to 1, or "
                "leave the backend native",
                key=f"trainer.{axis}",
                got=degree,
                wanted="1",
            )


_REFUSED = {
    "lora": "trains matrices beside parameters that stay, which ZeRO does not know of; leave it out, or leave "
    "learner.backend native",
    "exact": "computes with whole parameters outside of the modules that ZeRO gathers; leave it false, or leave "
    "learner.backend native",
    "recompute": "runs parts of a forward a second time, which ZeRO does not expect; leave it empty, or leave "
    "learner.backend native",
    "offload_optimizer": "is the native trainer's; with learner.backend deepspeed set "
    "--learner.deepspeed.offload-optimizer true instead",
}
