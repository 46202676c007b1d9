"""Experts that rows travel to, and adapters beside them: grouped products give what one product an expert gives."""

from __future__ import annotations

import pytest
import torch

from k3rl.model import K3Config, K3ForCausalLM, LoraConfig, moe_grouped
from k3rl.model.lora import prepare_adapter

CONFIG = K3Config.named("k3-nano").replace(num_experts=8)


@pytest.mark.parametrize("adapted", [False, True])
def test_grouped_products_give_what_expert_by_expert_gives(adapted, monkeypatch) -> None:
    model = K3ForCausalLM(CONFIG)
    model.init_weights(0)
    if adapted:
        prepare_adapter(model, LoraConfig(rank=8, alpha=16.0))
        generator = torch.Generator().manual_seed(1)
        for _, parameter in model.adapter.parameters():
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    bank = next(iter(model.moe_parts())).bank
    if not adapted:
        bank.keep_sums(torch.zeros(CONFIG.num_experts, dtype=torch.int32))
    generator = torch.Generator().manual_seed(2)
    given = torch.randn(40, CONFIG.expert_hidden_size, generator=generator)
    scores = torch.rand(40, CONFIG.num_experts - 1, generator=generator)  # the last expert has no rows
    weights, ids = scores.topk(CONFIG.num_experts_per_token)
    found = []
    for grouped in (False, True):
        monkeypatch.setattr(moe_grouped, "pays", lambda rows, grouped=grouped: grouped)
        z, own = given.clone().requires_grad_(), weights.clone().requires_grad_()
        leaves = bank.adapter.leaves if adapted else []
        out = bank(z, own, ids)
        out.square().sum().backward()
        kept = [] if bank.sums is None else [bank.sums.gate_up.clone(), bank.sums.down.clone()]
        found.append([out.detach(), z.grad, own.grad, *kept, *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
        if bank.sums is not None:
            bank.sums.clear()
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)  # experts without rows have no gradient
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # float32 in another order
