"""Experts of small inference batches: one batched product, from matrices that are held as it reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3rl.model import K3Config, K3ForCausalLM
from k3rl.model.config import QuantizationConfig
from k3rl.model.moe import ExpertBank


def bank_of(activations: str = "none") -> tuple[K3ForCausalLM, ExpertBank]:
    quantization = QuantizationConfig(weights="mxfp4", activations=activations)
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(quantization=quantization), dtype=torch.float64)
    model.init_weights(0)
    return model, next(model.moe_parts()).bank


MODEL, BANK = bank_of()


def one_by_one(bank: ExpertBank, z: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each row through each of its experts, by the definition."""
    gate_up, down = bank.matrices()
    rows = []
    for row, chosen, shares in zip(z, ids.tolist(), weights, strict=True):
        active = [bank.read(bank.unit(gate_up[e] @ bank.read(row))) for e in chosen]
        rows.append(sum(s * (down[e] @ a) for s, e, a in zip(shares, chosen, active, strict=True)))
    return torch.stack(rows)


@given(st.integers(1, 40), st.integers(1, 16), st.booleans())
def test_any_batch_is_its_rows_one_by_one(rows, spread, kept):
    draw = np.random.default_rng([rows, spread])
    chosen = [draw.choice(np.arange(max(spread, 2)), 2, replace=False) for _ in range(rows)]
    ids = torch.from_numpy(np.array(chosen))
    z = torch.from_numpy(draw.standard_normal((rows, BANK.matrices()[0].shape[2])))
    weights = torch.from_numpy(draw.random((rows, 2)))
    BANK.keeps_transposed = kept
    with torch.no_grad():
        found = BANK(z, weights, ids)
        torch.testing.assert_close(found, one_by_one(BANK, z, weights, ids), rtol=1e-11, atol=1e-11)  # order of sums


@pytest.mark.parametrize("how", ["in place", "by a list", "while inferring", "as another dtype"])
def test_a_matrix_that_was_written_to_is_read_anew(how):
    model, bank = bank_of("mxfp8")
    bank.keeps_transposed = True
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (20, 2), generator=draw)
    z = torch.randn(20, bank.matrices()[0].shape[2], generator=draw, dtype=torch.float64)
    weights = torch.rand(20, 2, generator=draw, dtype=torch.float64)
    with torch.inference_mode():
        before = bank(z, weights, ids)
    leaf = next(model.moe_parts()).experts[3].w2.weight
    if how == "while inferring":
        with torch.inference_mode():
            leaf.mul_(2)
    else:
        with torch.no_grad():
            if how == "as another dtype":
                model.to(torch.float32).to(torch.float64)
            leaf.mul_(2) if how != "by a list" else torch._foreach_mul_([leaf], 2)
    with torch.no_grad():
        after = bank(z, weights, ids)
        assert not torch.equal(after, before)
        torch.testing.assert_close(after, one_by_one(bank, z, weights, ids), rtol=1e-11, atol=1e-11)
