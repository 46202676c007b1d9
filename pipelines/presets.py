"""Named runs: plain functions that return a whole config. `k3rl <pipeline> <preset>`."""

from __future__ import annotations

from collections.abc import Callable

from k3rl.config import Config
from k3rl.parallel import TrainerConfig
from k3rl.pipelines.configs import (
    DistillConfig,
    GRPOObjective,
    QuickstartConfig,
    RLConfig,
    ScheduleConfig,
    SFTConfig,
)


def quickstart() -> QuickstartConfig:
    """The main job on a laptop: about five minutes on two cores. A slower machine takes longer and gets the same."""
    return QuickstartConfig(sft=sft(), rl=rl().replace(steps=36), distill=distill())


def sft() -> SFTConfig:
    """Warm start of `k3-nano` on the environment's demonstrations."""
    return SFTConfig(
        trainer=TrainerConfig(muon_lr=0.02, adamw_lr=0.005),
        schedule=ScheduleConfig(warmup_steps=10),
        max_steps=260,
        min_gain=0.03,
        decay_steps=50,
    )


def rl() -> RLConfig:
    """K3's objective on `coding-lists`, 32 tasks of 8 episodes a step."""
    return RLConfig(max_staleness=1, trainer=TrainerConfig(muon_lr=0.001, adamw_lr=0.001))


def grpo() -> RLConfig:
    """The same with GRPO."""
    return rl().replace(objective=GRPOObjective())


def distill() -> DistillConfig:
    """From a teacher on the student's own tokens."""
    return DistillConfig(trainer=TrainerConfig(muon_lr=0.002, adamw_lr=0.002))


PRESETS: dict[str, dict[str, Callable[[], Config]]] = {
    "sft": {"default": sft},
    "rl": {"default": rl, "grpo": grpo, "quickstart": quickstart},
    "distill": {"default": distill},
}
