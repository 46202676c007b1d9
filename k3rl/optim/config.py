"""The configuration of the optimizer: its rates, and how its state is stored between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from k3rl.optim.offload import StateStorage

Variant = Literal["per_head_muon", "muon_whole", "adamw"]
Scaling = Literal["rms", "width"]

ADAMW_BETAS = (0.9, 0.95)  # k3.md 8.4
ADAMW_EPS = 1e-8


@dataclass(frozen=True)
class MuonConfig:
    """How `PerHeadMuon` moves parameters (k3.md 8.1-8.4). Raises ValueError for rates that no optimizer can take.

    lr: Muon's learning rate; adamw_lr: that of everything that is no matrix, and of everything with variant "adamw".
    momentum, nesterov: M <- momentum M + G, and the direction is G + momentum M with Nesterov, else M.
    weight_decay: decoupled, times the learning rate; vectors have none.
    variant: "per_head_muon" (K3's), "muon_whole" (matrices are not cut along heads) or "adamw" (AdamW for all).
    scaling: what a rate means for a matrix of C columns. "rms": as it stands (k3.md 8.2). "width": for 64 columns;
    Muon's updates shrink as 1 / sqrt(C), as fresh weights do, AdamW's of matrices that read hidden rows as 1 / C, so
    that a step moves what they give by as much at every width. Decay is not scaled.
    storage: where state lies between steps, and the dtype of Muon's momentum there.
    """

    lr: float
    adamw_lr: float
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    variant: Variant = "per_head_muon"
    scaling: Scaling = "rms"
    storage: StateStorage = field(default_factory=StateStorage)

    def __post_init__(self) -> None:
        for name in ("lr", "adamw_lr", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number of 0 or more")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it must be at least 0 and below 1")
        if self.variant not in ("per_head_muon", "muon_whole", "adamw"):
            raise ValueError(f"variant is {self.variant!r}; it must be one of per_head_muon, muon_whole, adamw")
