"""The golden cases of Kimi Linear: checkpoints in the hub's layout, and what an oracle computes with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from k3rl.checkpoint import load_checkpoint
from k3rl.model import K3ForCausalLM

FOLDER = Path(__file__).parents[1] / "golden" / "kimi_linear"
CASES = ("a", "a128", "c")


@dataclass(frozen=True)
class Case:
    """One folder."""

    name: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"case_{self.name}"

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "golden.safetensors")

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "golden.json").read_text())

    def load(self, dtype: torch.dtype) -> K3ForCausalLM:
        return load_checkpoint(self.folder, dtype=dtype)

    def input(self, key: str) -> Tensor:
        """An input as golden.json names it: `ids.65`, or `ids.130[:, :17]`."""
        name, _, rest = key.partition("[")
        ids = self.tensors[name]
        return ids[:, : int(rest.rstrip("]").rpartition(":")[2])] if rest else ids

    def limit(self, what: str, dtype: torch.dtype, exact: float) -> float:
        """README.md of the cases: `exact` in float64; in float32 15 times the oracle's own error, within bounds."""
        if dtype == torch.float64:
            return exact
        return min(1e-3, max(1e-4, 15 * self.meta["float32_package_against_golden"][what]))
