"""Golden checkpoints and small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3rl.model import K3Config, K3ForCausalLM

GOLDEN = Path(__file__).parents[1] / "golden" / "k3"


@pytest.fixture
def golden_dir() -> Callable[[str], Path]:
    return lambda case: GOLDEN / f"case_{case}"


@pytest.fixture
def nano() -> Callable[[int], K3ForCausalLM]:
    """k3-nano with four experts, so that files are few kilobytes."""

    def build(seed: int) -> K3ForCausalLM:
        model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4), dtype=torch.float32)
        model.init_weights(seed)
        return model

    return build
