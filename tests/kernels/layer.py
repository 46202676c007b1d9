"""A KDA layer from its pieces over one sequence, prefill and decode in any order, of references or of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from k3rl.kernels.kda.decode import PendingRows

# What happens to a sequence: ("prefill" | "decode" | "deferred", tokens) in turn.
PLANS = st.lists(
    st.tuples(st.sampled_from(("prefill", "decode", "deferred")), st.integers(1, 24)), min_size=2, max_size=5
)


class Layer:
    """One head of D channels over T tokens; `conv`, `kda`, `norm`, `step` and `flush` are references or kernels."""

    def __init__(self, T: int, D: int, dtype: torch.dtype, conv, kda, norm, step: Callable, flush: Callable):
        new = functools.partial(torch.randn, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
        self.rows = [new(1, T, 1, D).to(dtype) for _ in range(5)]  # q, k, v, gate, output gate
        self.beta = new(1, T, 1).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.weights = [new(D, 4).to(wide) for _ in range(3)]
        self.A_log, self.dt_bias, self.norm_weight = 0.3 * new(1).to(wide), new(D).to(wide) - 1, new(D).to(wide)
        self.T, self.D, self.wide = T, D, wide
        self.conv, self.kda, self.norm, self.step, self.flush = conv, kda, norm, step, flush

    def run(self, plan: Sequence[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [1, T, 1, D] and the final state; prefill takes what the plan leaves over."""
        history = self.rows[0].new_zeros(1, 3, 3 * self.D)
        state = torch.zeros(1, 1, self.D, self.D, dtype=self.wide)
        at, outputs = 0, []
        for kind, tokens in [*plan, ("prefill", self.T)]:
            tokens = min(tokens, self.T - at)
            if tokens and kind == "prefill":
                y, history, state = self.prefill(at, at + tokens, history, state)
                outputs.append(y)
            elif tokens:
                outputs.append(self.decode(at, at + tokens, history, state, kind == "deferred"))
            at += tokens
        return torch.cat(outputs, 1), state

    def prefill(self, first: int, last: int, history, state):
        q, k, v, gate, z = (x[:, first:last].contiguous() for x in self.rows)
        mixed, history = self.conv([x.flatten(2) for x in (q, k, v)], self.weights, history)
        mixed = [x.view(q.shape) for x in mixed]
        o, state = self.kda(*mixed, gate, self.beta[:, first:last], self.A_log, self.dt_bias, state)
        return self.norm(o, z, self.norm_weight), history, state

    def decode(self, first: int, last: int, history, state, deferred: bool):
        slot = torch.zeros(1, dtype=torch.int32)
        pending = PendingRows.empty(state) if deferred else None
        if pending is not None:
            pending.begin(slot.long(), slot.long() + first)
        ys = []
        for t in range(first, last):
            q, k, v, gate, z = (x[:, t] for x in self.rows)
            shared = (self.weights, self.A_log, self.dt_bias, self.norm_weight)
            ys.append(self.step(q, k, v, gate, self.beta[:, t], z, *shared, history, state, slot, slot, pending))
        if pending is not None:
            self.flush(state, pending, slot)
        return torch.stack(ys, 1)
