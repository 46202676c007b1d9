"""Where a model computes, and in which precision: a CPU in float32, a GPU in bf16 with float32 inside (design.md 6)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from k3rl.config import MissingResource

DeviceName: TypeAlias = Literal["cpu", "cuda"]


def place_of(name: DeviceName) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of a model there. Raises MissingResource when this process sees no GPU."""
    if name == "cpu":
        return torch.device("cpu"), torch.float32
    if not torch.cuda.is_available():
        found = "none" if torch.version.cuda is None else f"CUDA {torch.version.cuda}, but no device"
        raise MissingResource(
            f"device is cuda and this process sees no GPU (torch {torch.__version__}: {found}); use device cpu, or a "
            "machine with a GPU and a torch that is built for it"
        )
    return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
