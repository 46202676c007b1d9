"""What a model reports while it trains, kept on its device, and the balancing that is made of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.data import TrainBatch
from k3rl.model import K3ForCausalLM
from k3rl.optim import QuantileBalancer, fixed_step
from k3rl.parallel.context import ContextShare
from k3rl.parallel.settings import TrainerConfig
from k3rl.parallel.token_scores import TokenScores
from k3rl.parallel.world import World
from k3rl.run import Accumulator

_NONE = float("-inf")


def fresh_tokens(micro: TrainBatch, balance: str) -> np.ndarray | None:
    """bool [N]: tokens that count in the load, the fresh ones with `balance` "fresh"; None for all."""
    if balance != "fresh":
        return None
    return np.ones(micro.tokens, bool) if micro.fresh is None else micro.fresh


class Statistics:
    """Collects what the model reports during training forwards (a `ForwardObserver`).

    counted: bool [rows] of the micro-batch, who counts in the load; None for all. Numbers are added in place, so that a
    CUDA graph that was captured with them goes on adding to them.
    """

    def __init__(self, model: K3ForCausalLM, balancer: QuantileBalancer) -> None:
        self._biases = dict(model.router_biases())
        self._index = {layer: i for i, layer in enumerate(self._biases)}
        self._balancer = balancer
        self.counted: Tensor | None = None
        self.scores = TokenScores()
        self.expert_load: np.ndarray | None = None
        """Of the last step, float [MoE layers, experts]: tokens that each expert got, over all ranks."""
        self._reduced = False  # whether `largest` is over all ranks
        self.layers = list(model.config.mla_layers)
        kind = torch.promote_types(model.dtype, torch.float32)  # what attention computes its logits in
        shape = len(self.layers), model.config.num_attention_heads
        self.largest = torch.full(shape, _NONE, dtype=kind, device=model.device)  # [MLA layers, H]

    def begin(self) -> None:
        """Forgets the largest logits, before a step."""
        self.largest.fill_(_NONE)
        self.counted, self._reduced = None, False

    def count(self, micro: TrainBatch, share: ContextShare, balance: str, metrics: Accumulator) -> None:
        """Sets `counted` for this rank's share of a micro-batch, by `TrainerConfig.balance`."""
        fresh, rows, self.counted = fresh_tokens(micro, balance), share.rows_per_token, None
        own = np.ones(len(rows), bool) if fresh is None else fresh[share.tokens]
        if share.counted and fresh is not None:
            metrics.add("moe/fresh_tokens", float(own.sum()), len(rows))
        if not share.counted or fresh is not None:
            device = self.largest.device
            self.counted = torch.from_numpy(np.repeat(own & share.counted, rows)).to(device)

    def router(self, layer: int, scores: Tensor, cutoff: Tensor) -> None:
        self._balancer.observe(self._index[layer], scores, cutoff, self._biases[layer], self.counted)

    def attention_logits(self, layer: int, maximum: Tensor) -> None:
        seen = self.largest[self.layers.index(layer)]
        torch.maximum(seen, maximum, out=seen)

    def reduce_logits(self, world: World) -> None:
        """Takes the largest logits over all ranks, once a step; a collective the first time."""
        if not self._reduced and world.size > 1 and self.layers:
            world.maximum(self.largest)
        self._reduced = True

    def max_logits(self) -> dict[int, Tensor]:
        """The largest attention logit of each head [H] by MLA layer, on the host; layers that saw no row are out."""
        return {n: row for n, row in zip(self.layers, self.largest.cpu(), strict=True) if bool((row != _NONE).any())}

    def tensors(self) -> list[Tensor]:
        """What is added to in place."""
        return [self.largest, *self._balancer.tensors()]


def balance_due(config: TrainerConfig, last_of_batch: bool) -> bool:
    """Whether router biases move with this step, by `TrainerConfig.balance`."""
    frozen = config.balance == "freeze" or config.balance_by in ("auxiliary_loss", "none") or config.lora is not None
    return not frozen and (config.balance == "step" or last_of_batch)


def balance(
    model: K3ForCausalLM, balancer: QuantileBalancer, config: TrainerConfig, metrics: Accumulator, *, due: bool
) -> None:
    """Moves the router biases by what was counted, over all ranks where it is `due` (`balance_due`)."""
    for violation in balancer.max_violation():  # one value a MoE layer
        metrics.add("moe/max_vio/mean", violation)
        metrics.maximum("moe/max_vio/max", violation)
    if due:
        biases = [bias for _, bias in model.router_biases()]
        if config.balance_by == "quantile":
            moved = balancer.update(biases)
        else:
            moved = fixed_step(biases, balancer.loads, config.balance_rate)
            balancer.clear()
        for bias, new in zip(biases, moved, strict=True):
            bias.copy_(new)
    elif not balance_due(config, True):
        balancer.clear()
