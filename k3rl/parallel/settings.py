"""How the learner updates weights: the configuration of a `Trainer`."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator

from k3rl.config import Config
from k3rl.model import LoraConfig
from k3rl.optim import MuonConfig, StateStorage


class TrainerConfig(Config):
    """How the learner updates weights."""

    optimizer: Literal["per_head_muon", "muon_whole", "adamw"] = "per_head_muon"
    """Muon with attention matrices cut per head (K3's), whole matrices, or AdamW for everything."""
    muon_lr: float = Field(0.02, gt=0)
    adamw_lr: float = Field(0.005, gt=0)
    scaling: Literal["width", "rms"] = "width"
    """What the rates mean. `width`: those of `k3-nano`, whose matrices have 64 columns; with C columns Muon's are
    multiplied by sqrt(64 / C), AdamW's of matrices that read hidden rows by 64 / C, so that one pair of rates serves
    every size. `rms`: as they stand, K3's own rule, every update of Muon with an RMS of 0.2 times its rate."""
    momentum: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it."""
    micro_batch_tokens: int = Field(6144, ge=1)
    """Token budget of one forward and backward pass; ranks that share it (context parallelism) have that many each."""
    balance: Literal["step", "batch", "fresh", "freeze"] = "step"
    """When the router bias moves: each optimizer step, once per batch of steps, once per batch from those tokens only
    that the newest weights sampled (`TrainBatch.fresh`), or never."""
    balance_by: Literal["quantile", "fixed_step", "auxiliary_loss", "none"] = "quantile"
    """K3's Quantile Balancing, or what it replaces: a bias moved by `balance_rate`, a loss on the router, nothing."""
    balance_rate: float = Field(0.001, gt=0)
    """Change of the bias a step with `fixed_step`."""
    auxiliary_weight: float = Field(0.01, ge=0)
    """Weight of the loss with `auxiliary_loss`."""
    qk_clip: float = Field(100.0, gt=0)
    """Largest pre-softmax logit of MLA before its query and key weights are scaled down."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that share the routed experts; each still has sequences of its own."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share each sequence. Data parallelism is what is left of the learner's ranks."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Whether a micro-batch runs as a step of fixed shapes, which a GPU captures as a CUDA graph and replays. With
    `auto` where the kernels take a bf16 model on a GPU and no other rank takes part in a forward, and not with `exact`,
    `lora` or the auxiliary loss. `on` also runs such steps, uncaptured, on a CPU, and refuses what rules them out."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether data ranks sum the gradients of a layer's experts while a captured backward is at the layers before it.
    `auto` where ranks are on several hosts: within one, the backward lost more to it than it hid."""
    recompute: tuple[Literal["attention", "mlp"], ...] = ()
    """Parts of each layer that keep only their inputs and run their forward again before their backward."""
    shard_optimizer: bool = True
    """Each master and its optimizer state is on one rank only; otherwise on every rank that has the parameter."""
    offload_optimizer: bool = False
    """Masters and optimizer state are stored in host memory and prefetched for a step, a bucket at a time: the same
    bits, for the time of the copies."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """How Muon's momentum is kept between steps. AdamW's moments stay float32."""
    lora: LoraConfig | None = None
    """Trains small matrices beside the weights instead of the weights, which then stay as they are to the bit: routers
    and their biases too, and QK-clip, which would scale weights, only reports. Neither factor of a pair is a matrix
    whose update Muon could orthogonalize, so adapters train with AdamW, at `adamw_lr`, whatever `optimizer` is."""
    packed_experts: bool = True
    """With `lora`: frozen MXFP4 experts stay the bytes that a checkpoint stores and are decoded a layer at a time, to
    the same bits. False keeps them in the compute dtype, which is faster and takes four to eight times the memory."""
    shard_frozen: int = Field(1, ge=1)
    """With `lora`: so many ranks next to each other, those of one node for example, each keep a slice of the frozen
    weights that are no routed experts, and all-gather a part of a layer where it runs. 1 keeps all on every rank."""
    exact: bool = False
    """Logprobs have the values of the exact forward, bit-equal to those of an engine with `exact`, and the gradients of
    the usual one. Many times slower."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is NaN or infinite changes nothing. It ends the run, or is skipped."""
    nonfinite_limit: int = Field(3, ge=0)
    """With `skip`: how many steps in a row may be skipped before the run ends all the same."""

    @property
    def packs(self) -> bool:
        """Whether routed experts may be kept packed: nothing trains them."""
        return self.lora is not None and self.packed_experts

    @property
    def storage(self) -> StateStorage:
        """How optimizer state is stored between steps."""
        return StateStorage(self.offload_optimizer, torch.bfloat16 if self.momentum_dtype == "bfloat16" else None)

    @property
    def muon(self) -> MuonConfig:
        """The configuration of the native optimizer."""
        return MuonConfig(
            lr=self.muon_lr,
            adamw_lr=self.adamw_lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            variant=self.optimizer,
            scaling=self.scaling,
            storage=self.storage,
        )

    @model_validator(mode="after")
    def _momentum_is_muons(self) -> TrainerConfig:
        if self.momentum_dtype == "bfloat16" and (self.optimizer == "adamw" or self.lora is not None):
            who = "an adapter trains with AdamW" if self.lora is not None else "optimizer is adamw"
            raise ValueError(f"momentum_dtype is Muon's, and {who}; leave it float32, or use offload_optimizer")
        return self

    @model_validator(mode="after")
    def _what_trains_is_not_frozen(self) -> TrainerConfig:
        if self.shard_frozen > 1 and self.lora is None:
            raise ValueError(
                f"shard_frozen is {self.shard_frozen} and lora is not set, so no weight is frozen; set lora, or leave "
                "shard_frozen 1"
            )
        return self

    @model_validator(mode="after")
    def _routers_count_once(self) -> TrainerConfig:
        if self.recompute and self.balance_by == "auxiliary_loss":
            raise ValueError(
                "recompute runs routers a second time, which the auxiliary loss on them would count twice; leave "
                "recompute empty, or use another balance_by"
            )
        return self

    @model_validator(mode="after")
    def _captured_steps_are_whole(self) -> TrainerConfig:
        others = {
            "exact": self.exact,
            "lora": self.lora is not None,
            "balance_by auxiliary_loss": self.balance_by == "auxiliary_loss",
            "expert_parallel": self.expert_parallel > 1,
            "context_parallel": self.context_parallel > 1,
        }
        if self.capture == "on" and any(others.values()):
            found = ", ".join(name for name, there in others.items() if there)
            raise ValueError(f"capture is on, and no captured step has {found}; set capture to auto, or leave that out")
        return self

    @model_validator(mode="after")
    def _exact_sequences_are_whole(self) -> TrainerConfig:
        if self.exact and self.expert_parallel * self.context_parallel > 1:
            raise ValueError(
                f"exact computes a sequence on one rank; expert_parallel is {self.expert_parallel} and "
                f"context_parallel {self.context_parallel}: set both to 1, or exact to false"
            )
        if self.exact and self.lora is not None:
            raise ValueError("exact does not compute adapters; set exact to false, or train without lora")
        return self
