"""QK-clip against its golden case, and what it leaves alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from k3rl.model.config import K3Config
from k3rl.numerics import project, stored_dtype
from k3rl.optim import MuonConfig, PerHeadMuon, QKClipError, clip_heads_, qk_clip_
from tests.optim.official import parameters

FOLDER = Path(__file__).parents[1] / "golden" / "muon"
GOLDEN = load_file(FOLDER / "muon.safetensors")
META = json.loads((FOLDER / "meta.json").read_text())["qkclip"]
NANO = K3Config.named("k3-nano")
RATES = MuonConfig(0.02, 0.005)
HEADS = SimpleNamespace(
    linear_attn_config=SimpleNamespace(num_heads=1, head_dim=1),
    num_attention_heads=META["heads"],
    qk_nope_head_dim=META["qk_nope"],
    qk_rope_head_dim=META["qk_rope"],
    v_head_dim=META["v"],
)


def test_clipped_heads_equal_the_golden_weights() -> None:
    q_b, kv_b, largest = GOLDEN["qkclip.q_b"].clone(), GOLDEN["qkclip.kv_b"].clone(), GOLDEN["qkclip.s_max"]
    clipped = clip_heads_(q_b, kv_b, largest, HEADS, META["tau"])
    assert clipped == int((largest > META["tau"]).sum())
    torch.testing.assert_close(q_b, GOLDEN["qkclip.q_b_after"], rtol=1e-14, atol=0)
    torch.testing.assert_close(kv_b, GOLDEN["qkclip.kv_b_after"], rtol=1e-14, atol=0)


def test_a_clipped_head_ends_at_tau() -> None:
    """The logit is q_n k_n + q_r k_r with a shared k_r; both terms scale by gamma."""
    generator = torch.Generator().manual_seed(0)
    nope, rope, v, rank = META["qk_nope"], META["qk_rope"], META["v"], 16
    q_b = torch.randn(3 * (nope + rope), rank, generator=generator, dtype=torch.float64) * 10
    kv_b = torch.randn(3 * (nope + v), rank, generator=generator, dtype=torch.float64) * 10
    c_q, c_kv, k_r = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (rank, rank, rope))

    def logits() -> torch.Tensor:
        query, keys = (q_b @ c_q).view(3, nope + rope), (kv_b @ c_kv).view(3, nope + v)
        return (query[:, :nope] * keys[:, :nope]).sum(1) + (query[:, nope:] * k_r).sum(1)

    before = logits().abs()
    clip_heads_(q_b, kv_b, before, HEADS, tau=100.0)
    torch.testing.assert_close(logits().abs(), before.clamp_max(100.0), rtol=1e-12, atol=1e-12)


def test_masters_are_clipped_and_stored_once_a_layer_exceeds_tau() -> None:
    params = parameters(NANO)
    muon = PerHeadMuon(params.items(), NANO, RATES, project=lambda n, m: project(m, stored_dtype(n)))
    before = muon.masters(muon.params)
    maxima = {3: torch.tensor([50.0, 400.0]), 4: torch.tensor([99.0, 100.0])}
    assert qk_clip_(muon, maxima, NANO, 100.0) == 1
    after = muon.masters(muon.params)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    at = "language_model.model.layers.3.self_attn"
    assert sorted(changed) == [f"{at}.kv_b_proj.weight", f"{at}.q_b_proj.weight"]
    q_before, q_after = (m[f"{at}.q_b_proj.weight"].view(2, 48, 64) for m in (before, after))
    kv_before, kv_after = (m[f"{at}.kv_b_proj.weight"].view(2, 64, 64) for m in (before, after))
    assert torch.equal(q_before[0], q_after[0])
    assert torch.equal(q_after[1, :32], q_before[1, :32] * 0.5)
    assert torch.equal(q_after[1, 32:], q_before[1, 32:] * 0.25)
    assert torch.equal(kv_after[1, :32], kv_before[1, :32] * 0.5)
    assert torch.equal(kv_after[1, 32:], kv_before[1, 32:])
    for name in changed:
        assert torch.equal(params[name].detach(), after[name].bfloat16().float())


def test_wrong_layers_head_counts_and_non_finite_logits_are_refused() -> None:
    params = parameters(NANO)
    muon = PerHeadMuon(params.items(), NANO, RATES)
    with pytest.raises(QKClipError, match=r"layer 0 has no trained q_b_proj; MLA layers are \[3, 4\]"):
        qk_clip_(muon, {0: torch.zeros(2)}, NANO)
    with pytest.raises(QKClipError, match=r"shape \(3,\); the model has 2 heads"):
        qk_clip_(muon, {3: torch.full((3,), 1e3)}, NANO)
    for bad in (math.nan, math.inf):
        with pytest.raises(QKClipError, match="non-finite"):
            qk_clip_(muon, {3: torch.tensor([1.0, bad])}, NANO)
    assert qk_clip_(muon, {}, NANO) == 0
