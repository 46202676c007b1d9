"""Teachers for distillation: frozen policies, one for each domain of tasks, whole on each rank of the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from k3rl.checkpoint import load_checkpoint
from k3rl.data import TrainBatch
from k3rl.parallel import Scorer, ScorerConfig


class Teachers:
    """Frozen policies by domain; the one named `*` is of every domain that has none of its own."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._of: dict[str, Scorer] = {}

    def load(self, checkpoints: Mapping[str, str], config: ScorerConfig) -> None:
        """Loads a checkpoint or an adapter for each domain; domains that name one directory share its weights."""
        self.clear()  # before others come, so that both need not fit
        shared = {path: self._teacher(path, config) for path in sorted(set(checkpoints.values()))}
        self._of = {domain: shared[path] for domain, path in checkpoints.items()}

    def clear(self) -> None:
        """Lets all of them go."""
        self._of.clear()

    def _teacher(self, checkpoint: str, config: ScorerConfig) -> Scorer:
        return Scorer(load_checkpoint(checkpoint, self._dtype, self._device, packed="served"), config)

    def logprobs(self, batch: TrainBatch, domains: Sequence[str], temperature: float = 1.0) -> np.ndarray:
        """float32 [N]: each sequence scored by the teacher of its domain. Raises KeyError for one without a teacher."""
        chosen = [domain if domain in self._of else "*" for domain in domains]
        if missing := sorted(set(chosen) - set(self._of)):
            raise KeyError(f"no teacher for {missing}; there are {sorted(self._of)}")
        out = np.zeros(batch.input_ids.size, np.float32)
        for domain in sorted(set(chosen)):
            members = [i for i, name in enumerate(chosen) if name == domain]
            rows = np.concatenate([np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in members])
            out[rows] = self._of[domain].logprobs(batch.select(members), temperature)
        return out
