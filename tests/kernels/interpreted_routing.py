"""Routing of many tokens, what the balancer counts of it, and MLA's heads, under Triton's interpreter, against torch.

TRITON_INTERPRET=1 python tests/kernels/interpreted_routing.py
"""

from __future__ import annotations

import torch
from interpreted import poison, require, require_equal

from k3rl.kernels.mla import heads, heads_kernels
from k3rl.kernels.moe import decode_routing, load_counts, load_counts_kernels, train_routing, train_routing_kernels
from k3rl.optim import QuantileBalancer


def choices() -> None:
    """Ties, NaN, strided rows, tails of tiles: ids as the reference's, weights and gradients as autograd's."""
    for n, experts, k in ((37, 64, 8), (2, 300, 9)):
        # Quarters: equal scores are many, and others lie further apart than any rounding.
        logits = torch.cat([torch.randint(-12, 12, (n, experts)) / 4, torch.full((n, 5), float("nan"))], 1)[:, :experts]
        bias = torch.randint(-1, 2, (experts,)) / 8
        for renormalize, scaling in ((True, 2.5), (False, 1.0)):
            found = train_routing_kernels.choose(logits, bias, k, renormalize, scaling)
            wanted = train_routing.chosen_reference(logits, bias, k, renormalize, scaling)
            require_equal("ids", [found[1]], [wanted.ids])
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
            again = train_routing_kernels.choose(logits, bias, k, renormalize, scaling, found[1].to(torch.int16))
            require_equal("recorded", again, found)
            leaf, grad = logits.clone().requires_grad_(), torch.randn(n, k)
            decode_routing.choose_reference(leaf, bias, k, renormalize, scaling, wanted.ids)[0].backward(grad)
            for kind, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)):
                got = train_routing_kernels.choose_gradient(grad, logits, wanted.ids, renormalize, scaling, kind)
                torch.testing.assert_close(got.float(), leaf.grad, atol=1e-5, rtol=bound)
            reference = train_routing.gradient_reference(grad, logits, wanted.ids, renormalize, scaling, torch.float32)
            torch.testing.assert_close(reference, leaf.grad, atol=1e-5, rtol=1e-5)
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    found = train_routing_kernels.choose(logits, torch.zeros(4), 2, True, 1.0)
    require_equal("NaN before others, then the lowest", [found[1]], [torch.tensor([[0, 1], [2, 0]])])


def order() -> None:
    """Experts without rows, one that has all, more blocks than one."""
    for n, experts, k in ((40, 16, 8), (1, 1, 1)):
        ids = torch.randint(experts, (n, k))
        for given in (ids, ids // 2):
            weights = torch.rand(n, k)
            *made, routed = train_routing_kernels.sort_many(given, experts, weights)
            wanted = decode_routing.sort_reference(given, experts)
            require_equal("order", made[1:4], (wanted.inverse, wanted.token, wanted.ends))
            require_equal("assignments", [given.view(-1)[made[0]]], [given.view(-1).sort().values])
            require_equal("weights", [routed], [weights.view(-1)[made[0]]])
            require_equal("inverse", [made[0][made[1]]], [torch.arange(n * k)])


def counts() -> None:
    """All that `observe` keeps, over three calls, with and without padding, a NaN, a bias that has moved."""
    for n, experts, k in ((40, 64, 8),):
        balancer = QuantileBalancer(experts, k, 1)
        bias = first = torch.randn(experts) / 4
        flags = (torch.zeros(1, dtype=torch.bool) for _ in range(3))
        counts = torch.zeros_like(balancer.counts[0]), torch.zeros_like(balancer.loads[0])
        sums = load_counts.Sums(*counts, torch.zeros(experts), *flags)
        for number in range(3):
            chosen = train_routing.chosen_reference(torch.randn(n, experts), bias, k, True, 1.0)
            scores, valid = chosen.scores, None if number == 0 else torch.rand(n) < 0.7
            if number == 2:
                scores = scores.clone()
                scores[int(valid.int().argmax()), 1] = float("nan")
                bias = bias + 1
            balancer.observe(0, scores, chosen.cutoff, bias, valid)
            load_counts_kernels.count(scores, chosen.cutoff, bias, valid, sums)
            require_equal("counts and loads", sums[:2], [balancer.counts[0], balancer.loads[0]])
            late = torch.tensor([number == 2])
            require_equal("bias that is counted under", [sums.bias], [first])
            require_equal("flags", [sums.seen, sums.changed, sums.nan], [torch.tensor([True]), late, late])


def of_heads() -> None:
    """Rows that fill no tile, strided ones, values narrower than keys."""
    for n, many, nope, rope, value in ((13, 3, 32, 16, 32), (5, 2, 24, 8, 20)):
        kv, k_r = torch.randn(n, many, nope + value + 4).bfloat16()[..., 2:-2], torch.randn(n, 2 * rope).bfloat16()
        k_r = k_r[:, rope:]
        require_equal("spread", heads_kernels.spread(kv, k_r, nope), heads.spread_reference(kv, k_r, nope))
        d_k, d_v = torch.randn(2, n, many, nope + rope).bfloat16().unbind()
        got, want = (run(d_k, d_v, nope, value) for run in (heads_kernels.collect, heads.collect_reference))
        require_equal("gradient of keys and values", got[:1], want[:1])
        require("gradient of the shared keys", got[1], want[1], 2.0**-8)
        for width in (nope, nope + rope + 8):
            require_equal("resized", [heads_kernels.resized(d_k, width)], [heads.resized_reference(d_k, width)])


if __name__ == "__main__":
    torch.manual_seed(0)
    poison()
    choices()
    order()
    counts()
    of_heads()
