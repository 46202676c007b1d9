"""What `k3rl plan` is asked about: a cluster and what of its peaks is reached, a workload, a training method, a
layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3rl.config import ConfigError
from k3rl.kernels import HEAD_DIMS
from k3rl.model import K3Config
from k3rl.parallel import TrainerConfig

GIB = 2**30


class PlanError(ConfigError):
    """A plan was asked for that cannot be made; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: memory in GiB, dense bf16 TFLOP/s, and GB/s of its memory, NVLink, network port and PCIe."""

    gib: float
    tflops: float
    hbm: float
    nvlink: float
    network: float
    pcie: float


GPUS = {
    "h100": Gpu(79, 989, 3350, 450, 50, 55),
    "h200": Gpu(139, 989, 4800, 450, 50, 55),
    "b200": Gpu(178, 2250, 8000, 900, 50, 55),
    "b300": Gpu(268, 2250, 8000, 900, 100, 110),
}


KERNEL_GPUS = ("h100", "h200")
"""What the kernels are compiled for (`k3rl.kernels.dispatch`)."""


def has_kernels(config: K3Config, gpu: str) -> bool:
    """Whether the kernels take this model on a device of `GPUS`."""
    return gpu in KERNEL_GPUS and config.linear_attn_config.head_dim in {key for key, _ in HEAD_DIMS}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Assumed shares of the peak: of matrix products in training and in the optimizer, of memory, and of links."""

    train: float = 0.35
    optimizer: float = 0.5
    hbm: float = 0.6
    link: float = 0.7


@dataclass(frozen=True, slots=True)
class Cluster:
    """`gpus` equal devices in nodes of `node`, with host_gib of memory a node; reserve_gib of each device are not ours.

    Raises PlanError when a device has nothing left.
    """

    gpus: int
    gpu: Gpu = GPUS["h200"]
    node: int = 8
    host_gib: float = 1900.0
    reserve_gib: float = 6.0
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        if not self.free_gib > 0:
            raise PlanError(
                f"a device has {self.gpu.gib:g} GiB, of which {self.reserve_gib:g} are for the driver and fragments",
                key="--gpu-gib", got=self.gpu.gib, wanted=f"more than {self.reserve_gib:g}",
            )  # fmt: skip

    @property
    def free_gib(self) -> float:
        """GiB of a device that are ours."""
        return self.gpu.gib - self.reserve_gib

    @property
    def train_rate(self) -> float:
        """Operations that a device does in a second of training or sampling."""
        return self.gpu.tflops * 1e12 * self.efficiency.train

    @property
    def memory_rate(self) -> float:
        """Bytes that a device reads or writes in a second."""
        return self.gpu.hbm * 1e9 * self.efficiency.hbm


@dataclass(frozen=True, slots=True)
class Workload:
    """One step: `prompts` groups of `group` sequences, of prompt_tokens and new_tokens each; "sft" samples none.

    micro_batch_tokens: packed tokens of one micro-batch on one device; a search may halve them up to three times with
    smaller_micro_batches, while the ranks of a context axis together still hold a sequence. rollout_gpus: devices that
    sample (None: chosen).
    publish_share: part of the stored bytes that a new weight version moves (below 1 with the delta form).
    """

    kind: Literal["sft", "rl", "distill"] = "rl"
    prompts: int = 64
    group: int = 8
    prompt_tokens: int = 2048
    new_tokens: int = 6144
    micro_batch_tokens: int = 8192
    rollout_gpus: int | None = None
    publish_share: float = 1.0
    smaller_micro_batches: bool = False

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def tokens(self) -> int:
        """Tokens that one step trains on."""
        return self.prompts * self.group * self.length


@dataclass(frozen=True, slots=True)
class Method:
    """How weights are trained. Bytes are of one number.

    lora_rank 0 trains everything; adapters train with AdamW beside packed experts. momentum_bytes: of Muon. offload:
    masters and momentum lie in host memory and are fetched for the step. recompute "layer" keeps the residual
    stream only and runs a layer's forward again before its backward. shard_frozen: neighbouring ranks that share the
    frozen weights beside the experts (LoRA only). kernels: devices run the kernels of `k3rl.kernels` in bf16, which
    keep less for a backward (`has_kernels`). capture: forward-backward and step are CUDA graphs where one rank holds
    all experts and whole documents; their memory then stays theirs.
    """

    lora_rank: int = 0
    optimizer: Literal["per_head_muon", "muon_whole", "adamw"] = "per_head_muon"
    weight_bytes: int = 2
    gradient_bytes: int = 4
    momentum_bytes: int = 4
    offload: bool = False
    recompute: Literal["none", "layer"] = "none"
    shard_optimizer: bool = True
    shard_frozen: int = 1
    kernels: bool = False
    capture: bool = False

    @classmethod
    def of(cls, settings: TrainerConfig, config: K3Config, gpu: str) -> Method:
        """How a trainer with these settings trains a model in bf16 on a device of `GPUS`."""
        kernels = has_kernels(config, gpu)
        return cls(
            0 if settings.lora is None else settings.lora.rank,
            settings.optimizer,
            momentum_bytes=2 if settings.momentum_dtype == "bfloat16" else 4,
            offload=settings.offload_optimizer,
            recompute="layer" if {"attention", "mlp"} <= set(settings.recompute) else "none",
            shard_optimizer=settings.shard_optimizer,
            shard_frozen=settings.shard_frozen,
            kernels=kernels,
            capture=kernels and settings.capture != "off",
        )

    def captures(self, layout: Layout) -> bool:
        """Whether forward-backward and step of this layout are CUDA graphs."""
        return self.capture and not self.lora_rank and layout.expert == layout.context == layout.pipeline == 1

    @property
    def words(self) -> str:
        """For a person."""
        name = f"LoRA of rank {self.lora_rank}" if self.lora_rank else "full weights"
        extras = [
            *(["momentum in bf16"] if self.momentum_bytes == 2 else []),
            *(["optimizer state on the host"] if self.offload else []),
            *(["recomputed layers"] if self.recompute == "layer" else []),
            *([f"frozen weights over {self.shard_frozen} ranks"] if self.shard_frozen > 1 else []),
        ]
        return ", ".join([name, *extras])


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of the learner; their product is its number of devices."""

    data: int = 1
    expert: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.expert * self.context * self.pipeline

    @property
    def stage_devices(self) -> int:
        """Ranks that hold the same layers."""
        return self.data * self.expert * self.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.data * self.context

    @property
    def unsupported(self) -> list[str]:
        """Degrees above 1 that k3rl does not run: pipeline stages are planned only."""
        return ["pipeline"] if self.pipeline > 1 else []
