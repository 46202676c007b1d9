"""Quantile Balancing: the router bias that gives every expert its share of the tokens (k3.md 5).

A token i reaches expert j when the biased score s_ij + b_j beats the token's cutoff alpha_i, its (k+1)-th largest
biased score; so it needs a bias of r_ij = alpha_i - s_ij. Over the m tokens of a global batch the bias that lets
q = m k / n tokens through is the k/n quantile of r_.j, read off a histogram of 1000 bins. No learning rate, no
auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.moe import load_counts

BINS = 1000
_TOGETHER = 1 << 24  # counts that an update looks at at once: 128 MiB as int64


class BalanceError(ValueError):
    """Scores, biases or a call order that Quantile Balancing cannot use; the message says what to change."""


def _grid(bias: Tensor) -> tuple[Tensor, Tensor]:
    """(lower edge, bin width) of the histogram under biases [..., E], float64 [...]."""
    low, high = bias.detach().double().aminmax(dim=-1)
    return low - 1, (high - low + 2) / BINS


class QuantileBalancer:
    """Histograms of required biases for every MoE layer, and the update made from them once a step.

    `counts` [L, E, 1000] int32 and `loads` [L, E] int64 are sums over tokens: add those of other ranks or micro-batches
    (`all_reduce`) before `update`. L counts MoE layers in depth order, as in `routes`.

    Raises BalanceError when top_k is not below n_experts: then every token goes everywhere and there is no cutoff.
    """

    def __init__(self, n_experts: int, top_k: int, n_layers: int, *, device: torch.device | str = "cpu") -> None:
        if not 1 <= top_k < n_experts:
            raise BalanceError(f"top_k is {top_k} of {n_experts} experts; balancing needs 1 <= top_k < n_experts")
        self.n_experts = n_experts
        self.top_k = top_k
        self.n_layers = n_layers
        self.counts = torch.zeros(n_layers, n_experts, BINS, dtype=torch.int32, device=device)
        self.loads = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device)
        self._biases: Tensor | None = None  # [L, E] of the layers seen since the last update, which are those:
        self._kept: list[Tensor] | None = None  # see `mark`
        self._seen = torch.zeros(n_layers, dtype=torch.bool, device=device)
        # Faults of a layer since the last update, kept as tensors so that observing never waits: [L] bool each.
        self._changed = torch.zeros(n_layers, dtype=torch.bool, device=device)  # a bias moved between observations
        self._nan = torch.zeros(n_layers, dtype=torch.bool, device=device)  # a score was NaN

    @torch.no_grad()
    def observe(self, layer: int, scores: Tensor, cutoff: Tensor, bias: Tensor, valid: Tensor | None = None) -> None:
        """Count the tokens of one forward pass of one layer.

        scores [N, E]: sigmoid scores before the bias; cutoff [N]: each token's (k+1)-th largest of scores + bias, as
        the router computed it; bias [E]: the bias it used; valid bool [N]: False for padding, which is not counted.
        The bias must stay the same until `update`, as the histogram's grid depends on it; `update` checks that, and
        that no score was NaN. Raises BalanceError for shapes that do not fit.
        """
        if bias.shape != (self.n_experts,) or scores.shape[1:] != bias.shape or cutoff.shape != scores.shape[:1]:
            raise BalanceError(
                f"scores {tuple(scores.shape)}, cutoff {tuple(cutoff.shape)} and bias {tuple(bias.shape)} do not fit; "
                f"wanted [N, {self.n_experts}], [N] and [{self.n_experts}]"
            )
        if self.counts.device != scores.device:
            self.counts, self.loads = self.counts.to(scores.device), self.loads.to(scores.device)
            self._changed, self._nan = self._changed.to(scores.device), self._nan.to(scores.device)
            self._seen, self._biases = self._seen.to(scores.device), None
        if self._biases is None:
            self._biases = torch.zeros(self.n_layers, self.n_experts, dtype=bias.dtype, device=scores.device)
        flags = (flag[layer : layer + 1] for flag in (self._seen, self._changed, self._nan))
        sums = load_counts.Sums(self.counts[layer], self.loads[layer], self._biases[layer], *flags)
        if scores.device.type != "cpu" and limits.LOAD_COUNTS.takes(scores, cutoff, bias, sums):
            load_counts.count(scores, cutoff, bias, valid, sums)
            return
        before = torch.where(self._seen[layer], self._biases[layer], bias)
        self._changed[layer] |= (before != bias).any()
        self._biases[layer] = before
        self._seen[layer].fill_(True)
        low, width = _grid(bias)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        cutoff = cutoff.to(scores.dtype).unsqueeze(-1)
        over = scores + bias.to(scores.dtype) > cutoff
        self.loads[layer] += (over if valid is None else over & valid.unsqueeze(-1)).sum(0)
        position = (cutoff - scores).sub_(low).div_(width)
        if valid is not None:
            position.masked_fill_(torch.logical_not(valid).unsqueeze(-1), 0.0)
        self._nan[layer] |= position.sum().isnan()
        bins = position.floor_().clamp_(0, BINS - 1).nan_to_num_(0.0).to(torch.int64)
        bins += torch.arange(self.n_experts, device=bins.device) * BINS
        if bins.device.type == "cpu" and valid is None:
            counted = torch.bincount(bins.view(-1), minlength=self.n_experts * BINS)
        else:  # bincount would make the host wait for the largest bin
            counted = torch.zeros(self.n_experts * BINS, dtype=self.counts.dtype, device=bins.device)
            ones = counted.new_ones(()) if valid is None else valid.to(counted.dtype).unsqueeze(-1)
            counted.scatter_add_(0, bins.view(-1), ones.expand(bins.shape).reshape(-1))
        self.counts[layer] += counted.view(self.n_experts, BINS)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(counts, loads): what is summed over ranks, in place, once a step before `update`."""
        return self.counts, self.loads

    @torch.no_grad()
    def all_reduce(self, add: Callable[[Tensor], None]) -> None:
        """Sum counts and loads over ranks with one call of `add`, which sums an int32 tensor over them in place."""
        flat = torch.cat([self.counts.flatten(), self.loads.flatten().to(torch.int32)])
        add(flat)
        counts, loads = flat.split([self.counts.numel(), self.loads.numel()])
        self.counts.copy_(counts.view_as(self.counts))
        self.loads.copy_(loads.view_as(self.loads))

    @torch.no_grad()
    def update(self, biases: Sequence[Tensor]) -> list[Tensor]:
        """Current biases, L of [E] -> the biases of the next step, same dtypes; clears the counts.

        A layer without tokens keeps its bias. Raises BalanceError when a bias is not the one that was observed or a
        score was NaN.
        """
        if len(biases) != self.n_layers:
            raise BalanceError(f"got {len(biases)} biases; this model has {self.n_layers} MoE layers")
        if not biases:
            return []
        other = self._changed
        if self._biases is not None:
            now = torch.stack([bias.detach() for bias in biases]).to(self._biases.device)
            other = other | ((now != self._biases).any(1) & self._seen)
        faults = torch.stack([other, self._nan]).tolist()  # read once
        tokens = self.counts[:, 0].sum(-1).tolist()
        for layer, (changed, nan) in enumerate(zip(*faults, strict=True)):
            if changed:
                raise BalanceError(
                    f"the bias of MoE layer {layer} changed while its tokens were counted; write the result of "
                    "`update` into the model only after the last forward pass of a step"
                )
            if nan:
                raise BalanceError(f"router scores of MoE layer {layer} were NaN; `clear` this step's counts")
        new = [bias.detach().clone() for bias in biases]
        moved = [layer for layer in range(self.n_layers) if tokens[layer]]
        together = max(1, _TOGETHER // (self.n_experts * BINS))
        for start in range(0, len(moved), together):
            layers = moved[start : start + together]
            found = self._balanced(layers, torch.stack([new[n] for n in layers]), [tokens[n] for n in layers])
            for layer, bias in zip(layers, found, strict=True):
                new[layer] = bias
        self.clear()
        return new

    def _balanced(self, layers: list[int], biases: Tensor, tokens: list[int]) -> Tensor:
        """New biases [L, E] of some layers, from their biases and the tokens that each has seen."""
        counts = torch.stack([self.counts[layer] for layer in layers]).to(torch.int64)
        low, width = _grid(biases)
        share = [count * self.top_k / self.n_experts for count in tokens]
        above = [-(-count * self.top_k // self.n_experts) for count in tokens]  # ceil(q), in integers
        wanted = torch.tensor(share, dtype=torch.float64).view(-1, 1, 1).to(counts.device)
        whole = torch.tensor(above).view(-1, 1, 1).to(counts.device)
        cumulative = counts.cumsum(-1)
        bins = (cumulative < whole).sum(-1, keepdim=True)  # the first bin with cumulative >= ceil(q)
        inside = counts.gather(-1, bins).double()
        before = cumulative.gather(-1, bins).double() - inside
        reached = (bins + ((wanted - before) / inside).clamp(0, 1)).squeeze(-1)
        quantile = low.unsqueeze(-1) + reached * width.unsqueeze(-1)
        return (quantile - quantile.mean(-1, keepdim=True)).to(biases.dtype)

    @torch.no_grad()
    def mark(self) -> None:
        """Keeps what was counted so far, for `back`; on the device, without a wait."""
        self._kept = [tensor.clone() for tensor in self._sums()]

    @torch.no_grad()
    def back(self) -> None:
        """Forgets what was counted since `mark`, or everything without one."""
        kept, self._kept = self._kept, None
        if kept is None:
            self.clear()
            return
        for tensor, value in zip(self._sums(), kept, strict=True):
            tensor.copy_(value)

    def _sums(self) -> list[Tensor]:
        return [self.counts, self.loads, self._seen, self._changed, self._nan]

    def clear(self) -> None:
        """Forget what was counted, as after an update that is not wanted."""
        self._kept = None
        self.counts.zero_()
        self.loads.zero_()
        self._seen.zero_()
        self._changed.zero_()
        self._nan.zero_()

    def max_violation(self) -> list[float]:
        """(busiest load - balanced load) / balanced load of every layer that has seen tokens since the last update."""
        values = []
        for loads in self.loads.cpu().double():  # read once
            balanced = loads.mean()
            if balanced > 0:
                values.append(float((loads.max() - balanced) / balanced))
        return values
