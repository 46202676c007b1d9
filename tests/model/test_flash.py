"""The way of MLA that a GPU takes, with the plain definition of its attention in the place of the kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from k3rl.kernels.mla import heads
from k3rl.model import flash
from k3rl.model.layout import FixedLayout, Layout

LENGTHS = [17, 1, 40]


@pytest.fixture
def forced(monkeypatch):
    """Both ways: `forced(True)` sends every MLA layer the packed way, `forced(False)` the way of a CPU."""
    return lambda on: monkeypatch.setattr(flash, "takes", lambda q: on)


def test_packed_attention_equals_the_grids_with_all_gradients(nano, forced):
    """float64, within the order of sums."""
    model, found = nano(), []
    ids = torch.randint(0, 500, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    for on in (True, False):
        forced(on)
        seen = _Seen()
        model.observer = seen
        model.zero_grad()
        hidden = model.hidden(ids, cu_seqlens=ends).hidden
        (hidden * torch.linspace(-1, 1, 64, dtype=torch.float64)).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((hidden.detach(), seen.largest, grads))
    (ours, our_logits, our_grads), (theirs, logits, grads) = found
    assert torch.allclose(ours, theirs, atol=1e-11, rtol=1e-10)
    assert our_logits.keys() == logits.keys()
    assert logits
    assert all(torch.allclose(our_logits[n], logits[n], rtol=1e-10, atol=1e-12) for n in logits)
    assert our_grads.keys() == grads.keys()
    assert all(torch.allclose(our_grads[n], grads[n], atol=1e-10, rtol=1e-8) for n in grads)


@pytest.mark.parametrize("ours", [False, True])
def test_attention_over_own_rows_has_the_gradients_of_attention(monkeypatch, ours):
    """The definition in the place of the kernels, whose backward is autograd's of it; float64."""
    layout, kept = Layout(LENGTHS), {}

    def forward(q, k, v, *_, scale):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            kept["out"], kept["leaves"] = flash.reference(*leaves, layout, layout, scale), leaves
        return (kept["out"].detach(), *(q.new_zeros(1) for _ in range(4)))

    monkeypatch.setattr(flash, "forward_op", forward)
    monkeypatch.setattr(
        flash, "backward_op", lambda grad, *_, scale: torch.autograd.grad(kept["out"], kept["leaves"], grad)
    )
    for name in ("spread", "collect", "resized"):
        monkeypatch.setattr(heads, name, getattr(heads, f"{name}_reference"))
    torch.manual_seed(0)
    n, nope, rope, value = sum(LENGTHS), 8, 4, 6
    given = [torch.randn(n, *shape, dtype=torch.float64) for shape in ((3, nope + rope), (3, nope + value), (rope,))]
    up, found = torch.randn(n, 3 * value, dtype=torch.float64), []
    for own in (True, False):
        q, kv, k_r = leaves = [x.clone().requires_grad_() for x in given]
        if own:
            out, largest = flash.over_own_rows(q, kv, k_r, nope, layout, 0.3, watch=True)
            assert not largest.requires_grad
        else:
            k, v = heads.spread_reference(kv, k_r, nope)
            largest = flash.largest_logits(q, k, layout, 0.3)
            out = flash.reference(q, k, v[..., :value], layout, layout, 0.3).reshape(n, -1)
        found.append((out.detach(), largest.detach(), *torch.autograd.grad(out, leaves, up)))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(*found, strict=True))


class _Seen:
    def __init__(self) -> None:
        self.largest = {}

    def router(self, layer, scores, cutoff) -> None:
        pass

    def attention_logits(self, layer, maximum) -> None:
        self.largest[layer] = maximum


@pytest.mark.parametrize("few", [0, 32])
def test_chunked_prefill_with_latents_of_earlier_tokens_equals_one_pass(nano, forced, monkeypatch, few):
    """Rows of different lengths; the second piece in latent space (few) or expanded."""
    monkeypatch.setattr("k3rl.model.mla.FEW_QUERIES", few)
    model = nano()
    ids = torch.randint(0, 500, (1, 40), generator=torch.Generator().manual_seed(1))
    forced(False)
    whole = [model.hidden(ids[:, :n]).hidden[0] for n in (25, 40)]
    forced(True)
    cache = model.new_cache(2)
    first = model.hidden(
        torch.cat([ids[:, :20], ids[:, :9]], 1), cu_seqlens=torch.tensor([0, 20, 29]), cache=cache
    ).hidden[0]
    second = model.hidden(
        torch.cat([ids[:, 20:25], ids[:, 9:40]], 1), cu_seqlens=torch.tensor([0, 5, 36]), cache=cache
    ).hidden[0]
    assert torch.allclose(torch.cat([first[:20], second[:5]]), whole[0], atol=1e-10)
    assert torch.allclose(torch.cat([first[20:], second[5:]]), whole[1], atol=1e-10)


def test_the_definition_sees_nothing_later_and_no_other_segment():
    torch.manual_seed(0)
    queries, keys = Layout([3, 2]), Layout([5, 2])  # the first segment has two rows before its queries
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (5, 7, 7))
    out = flash.attention(q, k, v, queries, keys, 0.3)
    one = (k[:4, 0] @ q[1, 0] * 0.3).softmax(0) @ v[:4, 0]  # second query: row 3 of its segment
    assert torch.allclose(out[1, 0], one)
    last = (k[5:7, 1] @ q[4, 1] * 0.3).softmax(0) @ v[5:7, 1]
    assert torch.allclose(out[4, 1], last)


@pytest.mark.parametrize("longest", [40, 1200, 3000])
def test_the_largest_logits_are_those_of_every_visible_pair_whatever_the_bound(longest):
    """float64, one product each; the bound on lengths changes which rows are looked at, not what is found."""
    generator = torch.Generator().manual_seed(0)
    lengths = [17, 1, 40, 30] if longest == 40 else [1100, 17, 83]
    ends = torch.tensor([0, *lengths, *[0] * 3]).cumsum(0).to(torch.int32)
    ends[len(lengths) + 1 :] = sum(lengths) + 12
    n = int(ends[-1])
    q, k = (torch.randn(n, 3, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    q[-12:] *= 100  # padding
    layout = FixedLayout(ends, n, longest, torch.arange(n) >= n - 12)
    found = flash.largest_logits(q, k, layout, 0.5)
    best = [
        max(
            float((q[i, h] @ k[start : i + 1, h].T).max())
            for start, stop in pairwise(ends.tolist()[: len(lengths) + 1])
            for i in range(start, stop)
        )
        for h in range(3)
    ]
    assert torch.allclose(found, torch.tensor(best, dtype=torch.float64) * 0.5, rtol=1e-14)
