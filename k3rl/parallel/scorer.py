"""A frozen policy that scores tokens: a forward pass on one process, and nothing beside it that training would need."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from k3rl.config import Config
from k3rl.data import TrainBatch
from k3rl.model import K3ForCausalLM
from k3rl.parallel.context import ContextShare
from k3rl.parallel.model_on_mesh import scored_targets
from k3rl.parallel.nonfinite import NonFiniteLogprobs, listed


class ScorerConfig(Config):
    """How a frozen policy scores what another one sampled."""

    micro_batch_tokens: int = Field(6144, ge=1)
    """Token budget of one forward pass. A sequence that is longer has a pass of its own."""
    support: Literal["full", "sampled"] = "full"
    """What a token's probability is a share of, where top-p, top-k or min-p cut the distribution that it was drawn
    from: everything the scoring policy may say, or those tokens alone that it was drawn from. `sampled` is blind to
    what was cut: of the only token that is left it always says 1."""


class Scorer:
    """Logprobs of target tokens by a model that stays as it is; its adapter, if it has one, takes part.

    It routes by itself, whatever routes a batch records.
    """

    def __init__(self, model: K3ForCausalLM, config: ScorerConfig) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.model, self.config = model, config

    def _head(self) -> torch.Tensor:
        return self.model.language_model.lm_head.weight

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> np.ndarray:
        """float32 [N]: the logprob of each target token, 0 elsewhere.

        Raises BatchError for what the model has no id for, and NonFiniteLogprobs.
        """
        config = self.model.config
        cut = None if self.config.support == "full" else batch.sampling_mask
        batch = dataclasses.replace(batch, routes=None, sampling_mask=cut)
        batch.check_fits(config.vocab_size, config.num_experts)
        first = dict(zip(batch.sequence_ids, batch.cu_seqlens[:-1].tolist(), strict=True))
        out = np.zeros(batch.input_ids.size, np.float32)
        for micro in batch.split(max(self.config.micro_batch_tokens, int(batch.row_lengths.max()))):
            share = ContextShare.of(micro, config.media_placeholder_token_id, slice(0, micro.tokens))
            logprobs, _ = scored_targets(self.model, micro, share, self._head, temperature)
            values = logprobs.float().cpu().numpy()
            if not np.isfinite(values).all():
                raise NonFiniteLogprobs(
                    f"the logprobs of a frozen policy are not finite in {listed(micro.sequence_ids)}; wanted numbers. "
                    "Its checkpoint is damaged, or was trained to such values: score with another one"
                )
            owner = np.searchsorted(micro.cu_seqlens, share.targets, side="right") - 1
            starts = np.array([first[name] for name in micro.sequence_ids], np.int64)
            out[starts[owner] + share.targets - micro.cu_seqlens[owner]] = values
        return out
