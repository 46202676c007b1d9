"""The step of fixed shapes by the pieces that have kernels, each as its definition, against the step without them."""

from __future__ import annotations

import torch

from k3rl.engine.paged import PagedCache
from k3rl.kernels import limits
from k3rl.kernels.gemm import PartialSums, skinny
from k3rl.kernels.mla import decode_step
from k3rl.kernels.norm.rms_norm import rms_norm_reference
from k3rl.model import K3Config, K3ForCausalLM, attn_res
from k3rl.model.attn_res import ResidualStream

ROWS, PAGE = 3, 16


def stepped(model: K3ForCausalLM, tokens: int) -> list[torch.Tensor]:
    """Hidden rows of steps from empty states, and the states behind them."""
    cache = PagedCache(model.config, ROWS, ROWS, PAGE, torch.float64)
    given = torch.Generator().manual_seed(1)
    index = torch.arange(ROWS)
    found = []
    for past in range(tokens):
        ids = torch.randint(0, model.config.vocab_size, (ROWS,), generator=given)
        at = torch.full((ROWS,), past)
        states = cache.step_cache(index, at, (index + 1) * PAGE + past, (index + 1).view(ROWS, 1))
        found.append(model.step(ids, states)[0])
    return [*found, *cache.latent.values(), *cache.recurrent.values()]


def mix(last, bank, norm, proj, eps, *then):
    out = attn_res.kernel.mix_reference(last, bank, norm, proj, eps)
    return (rms_norm_reference(out, *then)[0] if then else out), None


def mix_sum(last, added, *given):
    total = skinny.as_tensor(added) if last is None else last + skinny.as_tensor(added)
    return mix(total, *given)[0], total


def test_pieces_of_a_step_that_have_kernels_change_nothing(monkeypatch):
    """float64: sums in another order, 1e-12 relative to numbers of the order of 1."""
    model = K3ForCausalLM(K3Config.named("k3-nano"), dtype=torch.float64)
    model.init_weights(0)
    wanted = stepped(model, 2)
    for module, name in ((decode_step, "queries"), (decode_step, "attend"), (skinny, "split_k")):
        monkeypatch.setattr(module, name, getattr(module, f"{name}_reference"))
    for entry, name in ((limits.MLADecodeStepLimits, "takes_queries"), (limits.SplitKLimits, "takes"),
                        (limits.AttnResLimits, "takes")):  # fmt: skip
        monkeypatch.setattr(entry, name, lambda *_: True)
    monkeypatch.setattr(limits, "SPLIT_K", limits.SplitKLimits(depth=16))
    monkeypatch.setattr(attn_res, "reads_by_kernel", lambda x: True)  # outputs wait for reads, as on a GPU
    for name, call in (("mix", mix), ("mix_sum", mix_sum)):
        monkeypatch.setattr(attn_res.kernel, name, call)
    added = []
    monkeypatch.setattr(ResidualStream, "add", lambda self, x, add=ResidualStream.add: (added.append(x), add(self, x)))
    for found, want in zip(stepped(model, 2), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    assert sum(isinstance(x, PartialSums) for x in added) == 2 * (5 + 4)  # of all layers but the dense one's MLP
