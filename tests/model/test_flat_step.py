"""The flat step of a CPU against the forward that learners and prompts take."""

from __future__ import annotations

import pytest
import torch

from k3rl.engine.paged import PagedCache
from k3rl.model import K3Config, K3ForCausalLM, flat_step
from k3rl.model.flat_step import FlatStep

ROWS, TOKENS = 5, 9


def nano(dtype=torch.float64, name="k3-nano", **changes):
    model = K3ForCausalLM(K3Config.named(name).replace(**changes), dtype=dtype)
    model.init_weights(0)
    return model


def prompted(model, cache, rows, seed=1):
    """Rows of the cache after prompts of different lengths."""
    given = torch.Generator().manual_seed(seed)
    view = cache.select(torch.tensor(rows))
    lengths = [TOKENS - place for place in range(len(rows))]
    if isinstance(cache, PagedCache):
        cache.claim(rows, [length + 8 for length in lengths])
    ids = torch.randint(0, model.config.vocab_size, (1, sum(lengths)), generator=given)
    model.hidden(ids, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), cache=view)
    return view


def new_cache(model, kind):
    return model.new_cache(ROWS) if kind == "dense" else PagedCache(model.config, ROWS, 16, 4, model.dtype)


@pytest.mark.parametrize(("name", "kind"), [("k3-nano", "dense"), ("k3-nano", "paged"), ("kimi-linear-nano", "paged")])
@pytest.mark.parametrize("rows", [[1, 2, 3], [4, 0, 2]], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("state_bytes", [1, 1 << 20])
def test_gives_what_the_forward_gives_and_leaves_the_same_states(monkeypatch, name, kind, rows, state_bytes):
    """float64: sums in another order, 1e-12 relative to numbers of the order of 1. Routes are equal."""
    monkeypatch.setattr(flat_step, "STATE_BYTES", state_bytes)
    model = nano(name=name)
    assert FlatStep.takes(model)
    step, given = FlatStep(model, copies=True), torch.Generator().manual_seed(2)
    with torch.inference_mode():
        wanted, found = (prompted(model, new_cache(model, kind), rows) for _ in range(2))
        for _ in range(3):
            ids = torch.randint(0, model.config.vocab_size, (len(rows),), generator=given)
            want = model.hidden(ids[:, None], cache=wanted)
            hidden, routes = step.hidden(ids, found)
            torch.testing.assert_close(hidden, want.hidden[:, 0], rtol=1e-12, atol=1e-12)
            assert torch.equal(routes, want.routes[:, 0])
    assert torch.equal(found.lengths, wanted.lengths)
    for read, layers in (("recurrent", "kda"), ("conv", "kda"), ("latent", "mla")):
        for layer in getattr(model.config, f"{layers}_layers"):
            states = (getattr(cache, read)(layer) for cache in (found, wanted))
            torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("copies", [True, False])
def test_reads_a_parameter_that_was_written_to(copies):
    """float64, 1e-12 as above."""
    model = nano()
    step, ids = FlatStep(model, copies), torch.tensor([3, 5])
    with torch.inference_mode():
        step.hidden(ids, model.new_cache(2))
    for name, parameter in model.named_parameters():
        if "layers.1." in name and parameter.requires_grad:
            with torch.no_grad():
                parameter.mul_(1.25)
    with torch.inference_mode():
        hidden, _ = step.hidden(ids, model.new_cache(2))
        want = model.hidden(ids[:, None], cache=model.new_cache(2)).hidden[:, 0]
    torch.testing.assert_close(hidden, want, rtol=1e-12, atol=1e-12)


def test_agrees_with_the_forward_in_float32():
    """1e-5: roundings of float32 sums in another order; where a product's bits do not depend on its layout, none."""
    model = nano(torch.float32)
    step, ids = FlatStep(model, copies=True), torch.arange(32)
    caches = [model.new_cache(32), model.new_cache(32)]
    with torch.inference_mode():
        for _ in range(2):
            want = model.hidden(ids[:, None], cache=caches[0])
            hidden, routes = step.hidden(ids, caches[1])
            torch.testing.assert_close(hidden, want.hidden[:, 0], rtol=1e-5, atol=1e-5)
            assert torch.equal(routes, want.routes[:, 0])


def test_leaves_other_models_to_the_forward():
    assert FlatStep.takes(nano(torch.float32))
    plain = K3Config.named("k3-nano")
    for ablation in ({"residual": "sum"}, {"activation": "swiglu"}, {"experts": "latent"}):
        changed = plain.replace(ablation=type(plain.ablation)(**ablation))
        assert not FlatStep.takes(K3ForCausalLM(changed))
    assert not FlatStep.takes(K3ForCausalLM(plain, dtype=torch.bfloat16))
    assert not FlatStep.takes(K3ForCausalLM(plain, experts=range(2)))
    assert not FlatStep.takes(K3ForCausalLM(plain, device="meta"))
