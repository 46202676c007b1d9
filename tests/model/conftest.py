"""Golden cases of the official code, and small models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3rl.checkpoint import load_checkpoint
from k3rl.model import K3Config, K3ForCausalLM, QuantizationConfig

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Golden:
    """One tiny checkpoint in the official layout with what the official code computes with it in float64."""

    directory: Path
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    meta: dict[str, Any]

    def load(self, dtype: torch.dtype) -> K3ForCausalLM:
        return load_checkpoint(self.directory, dtype=dtype)

    def gradients(self) -> dict[str, Tensor]:
        return load_file(self.directory / "grads.safetensors")


@lru_cache
def _golden(case: str) -> Golden:
    directory = GOLDEN / "k3" / f"case_{case}"
    return Golden(
        directory,
        load_file(directory / "inputs.safetensors"),
        load_file(directory / "expected.safetensors"),
        json.loads((directory / "meta.json").read_text()),
    )


@pytest.fixture
def golden() -> Callable[[str], Golden]:
    return _golden


@pytest.fixture
def kda_golden() -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(GOLDEN / "kda" / "kda.safetensors"), json.loads((GOLDEN / "kda" / "meta.json").read_text())


@pytest.fixture
def nano() -> Callable[..., K3ForCausalLM]:
    """A k3-nano with fresh weights; activations plain unless asked for."""

    def build(
        seed: int = 1, dtype: torch.dtype = torch.float64, activations: str = "none", **changes: Any
    ) -> K3ForCausalLM:
        config = K3Config.named("k3-nano").replace(quantization=QuantizationConfig(activations=activations), **changes)
        model = K3ForCausalLM(config, dtype=dtype)
        model.init_weights(seed)
        return model

    return build
