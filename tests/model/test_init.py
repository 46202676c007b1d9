"""Fresh weights: reproducible, storable, and starting where the recipe says."""

from __future__ import annotations

import torch

from k3rl.numerics import project, stored_dtype


def test_a_seed_gives_the_same_model_at_any_dtype_and_another_seed_another(nano) -> None:
    narrow, exact, other = nano(4, torch.float32), nano(4, torch.float64), nano(5, torch.float32)
    for (name, a), (_, b) in zip(narrow.official_parameters(), exact.official_parameters(), strict=True):
        assert torch.equal(a.double(), b), name
    assert not torch.equal(narrow.language_model.lm_head.weight, other.language_model.lm_head.weight)


def test_every_fresh_value_is_one_a_checkpoint_can_store(nano) -> None:
    for name, parameter in nano(dtype=torch.float32).official_parameters():
        assert torch.equal(project(parameter.detach(), stored_dtype(name)), parameter), name


def test_gates_queries_and_taps_start_where_the_recipe_says(nano) -> None:
    parameters = {n: p.detach() for n, p in nano(dtype=torch.float32).official_parameters()}
    for name, parameter in parameters.items():
        if name.endswith(("A_log", "e_score_correction_bias", "_res_proj.weight")):
            assert not parameter.any(), name
        if name.endswith("dt_bias"):
            step = torch.nn.functional.softplus(parameter)
            assert float(step.min()) > 0.9e-3, name
            assert float(step.max()) < 1.1e-1, name
        if name.endswith("conv1d.weight"):
            assert torch.equal(parameter[..., -1], torch.full_like(parameter[..., -1], 0.7)), name
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
    q_proj = parameters["language_model.model.layers.0.self_attn.q_proj.weight"]
    o_proj = parameters["language_model.model.layers.0.self_attn.o_proj.weight"]
    assert abs(float(q_proj.std()) * 8 - 1) < 0.05  # 4096 draws: standard error 0.011
    assert abs(float(o_proj.std()) * 16 - 1) < 0.05
    assert abs(float(parameters["language_model.model.embed_tokens.weight"].std()) - 1) < 0.02
