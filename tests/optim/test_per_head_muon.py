"""Per-Head Muon against golden updates and torch's AdamW, and the contract between masters and stored values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3rl.model.config import K3Config
from k3rl.numerics import mx, project, stored_dtype
from k3rl.optim import (
    MuonConfig,
    NonFiniteGradient,
    OptimizerStateError,
    PerHeadMuon,
    Project,
    fill_buckets,
    newton_schulz,
)
from tests.optim.official import parameters, set_gradients

FOLDER = Path(__file__).parents[1] / "golden" / "muon"
GOLDEN = load_file(FOLDER / "muon.safetensors")
CASES = {case["name"]: case for case in json.loads((FOLDER / "meta.json").read_text())["cases"]}
NANO = K3Config.named("k3-nano")
AT = "language_model.model.layers.3.self_attn."
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.0.w1.weight"
# The official name that makes the rule cut a golden matrix as its case says.
NAMES = {
    "kda_q_3heads_of_8": f"{AT}q_proj.weight",
    "mla_q_b_3heads_of_12": f"{AT}q_b_proj.weight",
    "mla_kv_b_3heads_k8_v6_split_kv": f"{AT}kv_b_proj.weight",
    "expert_w1": EXPERT,
}
THREE_HEADS = SimpleNamespace(
    linear_attn_config=SimpleNamespace(num_heads=3, head_dim=8),
    num_attention_heads=3,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)


def whole_matrix_cases() -> list[str]:
    return [name for name in CASES if name != "mla_kv_b_3heads_k8_v6_one_block_per_head"]


def stored(name: str, master: Tensor) -> Tensor:
    return project(master, stored_dtype(name))


def optimizer(
    params: dict[str, torch.nn.Parameter], project: Project | None = stored, **rates: object
) -> PerHeadMuon:  # fmt: skip
    config = MuonConfig(**({"lr": 0.02, "adamw_lr": 0.005} | rates))
    return PerHeadMuon(params.items(), NANO, config, project=project)


def values(params: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", whole_matrix_cases())
def test_three_steps_equal_the_golden_updates(name: str, nesterov: bool) -> None:
    """float64, relative 1e-10; the rank-one case amplifies rounding in its null directions and gets 1e-6."""
    key = f"{name}.{'nesterov' if nesterov else 'plain'}"
    official = NAMES.get(name, f"{AT}o_proj.weight")
    param = torch.nn.Parameter(GOLDEN[f"{key}.W0"].clone())
    config = MuonConfig(lr=0.02, adamw_lr=0.0, nesterov=nesterov, weight_decay=0.1)
    muon = PerHeadMuon([(official, param)], THREE_HEADS, config)
    assert list(muon.infos[official].row_blocks) == CASES[name]["row_blocks"]
    tolerance = 1e-6 if name == "rank_one_gradient" else 1e-10
    for step in range(3):
        param.grad = GOLDEN[f"{key}.G"][step].clone()
        muon.step()
        torch.testing.assert_close(param.detach(), GOLDEN[f"{key}.W"][step], rtol=tolerance, atol=tolerance)
        momentum = muon.state_tensors()[f"{official}/momentum"]
        torch.testing.assert_close(momentum, GOLDEN[f"{key}.M"][step], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["square", "kda_q_3heads_of_8", "expert_w1", "plain_tall"])
def test_float32_steps_are_within_1e_4_of_the_golden_updates(name: str) -> None:
    key = f"{name}.nesterov"
    param = torch.nn.Parameter(GOLDEN[f"{key}.W0"].float())
    config = MuonConfig(lr=0.02, adamw_lr=0.0, nesterov=True)
    muon = PerHeadMuon([(NAMES.get(name, f"{AT}o_proj.weight"), param)], THREE_HEADS, config)
    for step in range(3):
        param.grad = GOLDEN[f"{key}.G"][step].float()
        muon.step()
        torch.testing.assert_close(param.detach().double(), GOLDEN[f"{key}.W"][step], rtol=1e-4, atol=1e-4)


def test_whole_matrix_variant_makes_one_block_of_all_heads() -> None:
    """The update then has all singular values near 0.2 * sqrt(max side), instead of those of each head."""
    for variant, blocks in (("per_head_muon", 3), ("muon_whole", 1)):
        param = torch.nn.Parameter(torch.zeros(24, 32, dtype=torch.float64))
        config = MuonConfig(lr=1.0, adamw_lr=0.0, weight_decay=0.0, variant=variant)
        muon = PerHeadMuon([(f"{AT}q_proj.weight", param)], THREE_HEADS, config)
        param.grad = torch.randn(24, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        muon.step()
        for block in param.detach().chunk(blocks):
            singular = torch.linalg.svdvals(block) / (0.2 * max(block.shape) ** 0.5)
            assert 0.65 < float(singular.min()) < float(singular.max()) < 1.25  # the band of five steps


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 8, 20), (3, 20, 8), (1, 1, 5), (4, 5, 1)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_newton_schulz_does_not_depend_on_the_norm(shape: tuple[int, int, int], scale: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = newton_schulz(x * scale)
    assert y.shape == x.shape
    torch.testing.assert_close(y, newton_schulz(x), rtol=1e-3, atol=1e-3)
    singular = torch.linalg.svdvals(y)
    assert float(singular.max()) < 1.25


def test_newton_schulz_of_zero_is_zero_and_leaves_other_blocks_alone() -> None:
    x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    alone = newton_schulz(x)
    x[1] = 0
    y = newton_schulz(x)
    assert torch.equal(y[1], torch.zeros(8, 16))
    torch.testing.assert_close(y[[0, 2]], alone[[0, 2]], rtol=1e-5, atol=1e-6)
    assert newton_schulz(torch.zeros(0, 4, 4)).shape == (0, 4, 4)


def test_newton_schulz_of_rank_one_keeps_its_direction() -> None:
    u, v = torch.randn(8, 1, dtype=torch.float64), torch.randn(1, 16, dtype=torch.float64)
    y = newton_schulz((u @ v)[None])[0]
    direction = u @ v / torch.linalg.norm(u @ v)
    assert float((y * direction).sum() / torch.linalg.norm(y)) > 1 - 1e-9


def test_bfloat16_newton_schulz_keeps_the_direction() -> None:
    """The products lose a few percent in bfloat16, the direction does not (cosine above 0.99)."""
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))
    exact, rough = newton_schulz(x.double()), newton_schulz(x, dtype=torch.bfloat16).double()
    cosine = (exact * rough).sum((-2, -1)) / (exact.norm(dim=(-2, -1)) * rough.norm(dim=(-2, -1)))
    assert float(cosine.min()) > 0.99
    assert newton_schulz(x, dtype=torch.bfloat16).dtype == torch.float32


def test_experts_and_heads_are_updated_as_if_each_were_alone() -> None:
    """Blocks are stacked across heads, layers and experts; a matrix must not see its neighbours in the stack."""
    params = parameters(NANO, dtype=torch.float64)
    set_gradients(params, seed=1)
    before, gradients = (
        values(params),
        {name: param.grad.clone() for name, param in params.items() if param.grad is not None},
    )
    optimizer(params, project=None, weight_decay=0.1).step()
    names = [f"{AT}kv_b_proj.weight", f"{AT}o_proj.weight", EXPERT, EXPERT.replace("0.w1", "7.w2")]
    for name in [*names, "language_model.model.layers.1.self_attn.k_proj.weight"]:
        alone = torch.nn.Parameter(before[name].clone())
        single = PerHeadMuon([(name, alone)], NANO, MuonConfig(0.02, 0.005))
        alone.grad = gradients[name]
        single.step()
        torch.testing.assert_close(params[name], alone, rtol=1e-12, atol=1e-12)


def test_adamw_tensors_follow_torch_adamw() -> None:
    params = parameters(NANO, dtype=torch.float64)
    chosen = {n: p for n, p in params.items() if ".experts." not in n}
    ours = PerHeadMuon(chosen.items(), NANO, MuonConfig(lr=0.0, adamw_lr=0.005, weight_decay=0.1))
    adamw = [name for name, info in ours.infos.items() if info.group == "adamw"]
    theirs = {name: torch.nn.Parameter(chosen[name].detach().clone()) for name in adamw}
    reference = torch.optim.AdamW(
        [{"params": [theirs[n]], "weight_decay": 0.1 if ours.infos[n].decay else 0.0} for n in adamw],
        lr=0.005,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(4):
        set_gradients(chosen, seed=step)
        for name in adamw:
            theirs[name].grad = None if chosen[name].grad is None else chosen[name].grad.clone()
        ours.step()
        reference.step()
    for name in adamw:
        torch.testing.assert_close(chosen[name], theirs[name], rtol=1e-12, atol=1e-12)


def test_the_adamw_variant_trains_matrices_with_adamw_too() -> None:
    params = {EXPERT: torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double())}
    reference = torch.nn.Parameter(params[EXPERT].detach().clone())
    ours = optimizer(params, variant="adamw", project=None)
    theirs = torch.optim.AdamW([reference], lr=0.005, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        set_gradients(params, seed=step)
        reference.grad = params[EXPERT].grad
        ours.step()
        theirs.step()
    torch.testing.assert_close(params[EXPERT], reference, rtol=1e-12, atol=1e-12)


def test_parameters_hold_exactly_what_a_checkpoint_would_store() -> None:
    params = parameters(NANO)
    muon = optimizer(params)
    for step in range(2):
        set_gradients(params, seed=step)
        muon.step()
        masters = muon.masters(muon.params)
        for name, param in muon.params.items():
            assert torch.equal(param.detach(), stored(name, masters[name]))
    packed = mx.dequantize_mxfp4(*mx.quantize_mxfp4(masters[EXPERT]))
    assert torch.equal(params[EXPERT].detach(), packed)
    assert not torch.equal(masters[EXPERT], packed)


def test_building_stores_the_masters_in_the_parameters_at_once() -> None:
    params = parameters(NANO)
    raw = params[EXPERT].detach().clone()
    muon = optimizer(params)
    assert torch.equal(params[EXPERT].detach(), mx.fake_quantize_mxfp4(raw))
    assert torch.equal(muon.masters([EXPERT])[EXPERT], raw)


def test_small_steps_add_up_in_the_master_though_each_is_below_the_grid() -> None:
    params = {EXPERT: torch.nn.Parameter(torch.full((64, 64), 1.0))}
    muon = optimizer(params, lr=0.001, weight_decay=0.0)
    start = params[EXPERT].detach().clone()
    changed = []
    for _ in range(400):
        params[EXPERT].grad = torch.eye(64)
        muon.step()
        changed.append(not torch.equal(params[EXPERT].detach(), start))
    assert not changed[0]
    assert changed[-1]


def test_bfloat16_parameters_have_float32_masters() -> None:
    params = parameters(NANO, dtype=torch.bfloat16)
    muon = optimizer(params)
    set_gradients(params, seed=0)
    muon.step()
    state = muon.state_tensors()
    assert {value.dtype for key, value in state.items() if not key.endswith("/steps")} == {torch.float32}
    assert params[EXPERT].dtype == torch.bfloat16


def test_float64_parameters_have_float64_masters() -> None:
    muon = optimizer(parameters(NANO, dtype=torch.float64))
    assert {m.dtype for m in muon.masters(muon.params).values()} == {torch.float64}


def test_a_parameter_without_gradient_is_left_exactly_as_it_is() -> None:
    params = parameters(NANO)
    muon = optimizer(params)
    set_gradients(params, seed=0)
    muon.step()
    idle = [EXPERT, EXPERT.replace("0.w1", "5.w3"), f"{AT}q_b_proj.weight", f"{AT}kv_b_proj.weight"]
    idle += ["language_model.model.norm.weight", f"{AT}q_a_layernorm.weight"]
    before, written = muon.state_tensors(), values(params)
    set_gradients(params, seed=1)
    for name in idle:
        params[name].grad = None
    muon.step()
    after = muon.state_tensors()
    for key, value in before.items():
        name = key.rsplit("/", 1)[0]
        assert torch.equal(value, after[key]) == (name in idle)
    for name in idle:
        assert torch.equal(params[name].detach(), written[name])


def test_step_counts_of_adamw_tensors_are_their_own() -> None:
    """A tensor that sat out a step is corrected for the steps it took, not for the optimizer's."""
    name, other = "language_model.model.norm.weight", "language_model.model.output_attn_res_norm.weight"
    params = {n: torch.nn.Parameter(torch.ones(64, dtype=torch.float64)) for n in (name, other)}
    muon = optimizer(params, project=None)
    params[other].grad = torch.ones(64, dtype=torch.float64)
    muon.step()
    params[name].grad = torch.ones(64, dtype=torch.float64)
    muon.step()
    fresh = {name: torch.nn.Parameter(torch.ones(64, dtype=torch.float64))}
    reference = optimizer(fresh, project=None)
    fresh[name].grad = torch.ones(64, dtype=torch.float64)
    reference.step()
    assert torch.equal(params[name], fresh[name])


def test_a_zero_gradient_gives_no_update_and_no_nan() -> None:
    params = parameters(NANO)
    muon = optimizer(params, weight_decay=0.0)
    before = values(params)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    muon.step()
    for name in muon.params:
        assert torch.equal(params[name].detach(), before[name])


def test_weight_decay_shrinks_matrices_and_leaves_vectors() -> None:
    params = parameters(NANO, dtype=torch.float64)
    muon = optimizer(params, project=None, weight_decay=0.1)
    before = values(params)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    muon.step()
    for name, info in muon.infos.items():
        rate = (0.02 if info.group == "muon" else 0.005) * 0.1 * info.decay
        torch.testing.assert_close(params[name].detach(), before[name] * (1 - rate), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_named_and_changes_nothing(bad: float) -> None:
    params = parameters(NANO)
    muon = optimizer(params)
    set_gradients(params, seed=0)
    gradient = params[f"{AT}q_b_proj.weight"].grad
    assert gradient is not None
    gradient[3, 4] = bad
    before, state = values(params), muon.state_tensors()
    with pytest.raises(NonFiniteGradient, match=r"q_b_proj.* 1 non-finite values of 6144"):
        muon.step()
    with pytest.raises(NonFiniteGradient, match="q_b_proj"):
        muon.clip_grad_norm_(1.0)
    assert all(torch.equal(before[name], params[name].detach()) for name in params)
    unchanged = muon.state_tensors()
    assert all(torch.equal(value, unchanged[key]) for key, value in state.items())


def test_gradient_norms_beyond_float32_squares_are_still_finite() -> None:
    params = parameters(NANO)
    muon = optimizer(params)
    set_gradients(params, seed=0, scale=1e25)
    assert math.isfinite(muon.grad_norm())
    muon.step()
    assert all(bool(param.isfinite().all()) for param in params.values())


def test_clipping_scales_all_gradients_to_the_limit_and_returns_the_norm() -> None:
    params = parameters(NANO, dtype=torch.float64)
    muon = optimizer(params)
    set_gradients(params, seed=0)
    trained = [params[name] for name in muon.params]
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in trained if p.grad is not None))
    assert muon.grad_norm() == pytest.approx(expected, rel=1e-12)
    assert muon.clip_grad_norm_(2 * expected) == pytest.approx(expected, rel=1e-12)
    assert muon.grad_norm() == pytest.approx(expected, rel=1e-12)
    assert muon.clip_grad_norm_(0.5) == pytest.approx(expected, rel=1e-12)
    assert muon.grad_norm() == pytest.approx(0.5, rel=1e-12)
    muon.zero_grad()
    assert muon.grad_norm() == 0.0


def test_lr_scale_multiplies_both_rates() -> None:
    half, scaled = parameters(NANO, dtype=torch.float64), parameters(NANO, dtype=torch.float64)
    a = optimizer(half, lr=0.01, adamw_lr=0.0025, project=None)
    b = optimizer(scaled, project=None)
    for muon, params, scale in ((a, half, 1.0), (b, scaled, 0.5)):
        set_gradients(params, seed=0)
        muon.step(scale)
    for name in a.params:
        torch.testing.assert_close(half[name], scaled[name], rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("variant", ["per_head_muon", "muon_whole", "adamw"])
def test_saved_state_continues_bit_for_bit(variant: str) -> None:
    params = parameters(NANO)
    muon = optimizer(params, variant=variant)
    for step in range(2):
        set_gradients(params, seed=step)
        muon.step()
    saved = muon.state_tensors()
    resumed_params = parameters(NANO, seed=99)
    resumed = optimizer(resumed_params, variant=variant)
    resumed.load_state_tensors(saved)
    assert all(torch.equal(params[n].detach(), resumed_params[n].detach()) for n in muon.params)
    for step in range(2, 4):
        for optim, ps in ((muon, params), (resumed, resumed_params)):
            set_gradients(ps, seed=step)
            optim.step()
    assert all(torch.equal(params[n].detach(), resumed_params[n].detach()) for n in muon.params)
    ended = resumed.state_tensors()
    assert all(torch.equal(value, ended[key]) for key, value in muon.state_tensors().items())


def test_saved_state_is_a_copy_in_parameter_shapes() -> None:
    params = parameters(NANO)
    muon = optimizer(params)
    state = muon.state_tensors()
    frozen = {key: value.clone() for key, value in state.items()}
    assert state[f"{AT}kv_b_proj.weight/momentum"].shape == params[f"{AT}kv_b_proj.weight"].shape
    set_gradients(params, seed=0)
    muon.step()
    assert all(torch.equal(frozen[key], value) for key, value in state.items())


def test_state_that_does_not_fit_is_refused_by_name_before_anything_changes() -> None:
    params = parameters(NANO)
    muon = optimizer(params)
    good, before = muon.state_tensors(), values(params)
    key = f"{EXPERT}/momentum"
    missing = {k: v for k, v in good.items() if k != key}
    with pytest.raises(OptimizerStateError, match=r"experts.0.w1.weight/momentum is missing"):
        muon.load_state_tensors(missing)
    with pytest.raises(OptimizerStateError, match=r"other/master belongs to no parameter"):
        muon.load_state_tensors(good | {"other/master": torch.zeros(1)})
    with pytest.raises(OptimizerStateError, match=r"w1.weight/momentum has shape \(2,\), wanted \(64, 64\)"):
        muon.load_state_tensors(good | {key: torch.zeros(2)})
    assert all(torch.equal(before[name], params[name].detach()) for name in params)


def test_set_masters_writes_only_the_named_parameters() -> None:
    params = parameters(NANO)
    muon = optimizer(params)
    before = values(params)
    name = f"{AT}kv_b_proj.weight"
    master = muon.masters([name])[name] * 0.5
    muon.set_masters({name: master})
    assert torch.equal(muon.masters([name])[name], master)
    assert torch.equal(params[name].detach(), master.bfloat16().float())
    assert all(torch.equal(before[n], params[n].detach()) for n in params if n != name)
    with pytest.raises(OptimizerStateError, match="shape"):
        muon.set_masters({name: torch.zeros(3)})


def test_frozen_parameters_and_the_balancing_bias_are_not_trained() -> None:
    params = parameters(NANO)
    params[EXPERT].requires_grad_(False)
    muon = optimizer(params)
    assert EXPERT not in muon.params
    assert not any("e_score_correction_bias" in name for name in muon.params)
    with pytest.raises(ValueError, match="no parameter to train"):
        optimizer({EXPERT: params[EXPERT]})
    with pytest.raises(ValueError, match="given twice"):
        PerHeadMuon([(f"{AT}o_proj.weight", params[f"{AT}o_proj.weight"])] * 2, NANO, MuonConfig(0.1, 0.1))


def test_projection_is_called_with_stacks_of_one_storage_kind() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def watch(name: str, master: Tensor) -> Tensor:
        seen.append((name, tuple(master.shape)))
        return stored(name, master)

    optimizer(parameters(NANO), project=watch)
    experts = [shape for name, shape in seen if ".experts." in name]
    # 4 layers of 16 experts: w2, and w1 with w3, which lie side by side in a bank and are stored alike, one call each
    assert sorted(experts) == [(64, 64, 64), (128, 64, 64)]


def test_buckets_stay_within_their_limit_and_keep_the_order() -> None:
    assert list(fill_buckets([3, 3, 3, 9, 1, 1], limit=6)) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert list(fill_buckets([], limit=6)) == []
    assert list(fill_buckets([7], limit=6)) == [(0, 1)]


def test_splitting_a_stack_into_buckets_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (1 << 25, 3 * 64 * 64):
        monkeypatch.setattr("k3rl.optim.state.fill_buckets", lambda sizes, limit=limit: fill_buckets(sizes, limit))
        params = parameters(NANO)
        muon = optimizer(params)
        set_gradients(params, seed=0)
        muon.step()
        results.append((values(params), muon.state_tensors()))
    for one, two in zip(*results, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, two[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"adamw_lr": math.nan}, "adamw_lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"variant": "sgd"}, "variant is 'sgd'"),
    ],
)
def test_rates_that_no_step_can_take_are_refused(rates: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MuonConfig(**({"lr": 0.02, "adamw_lr": 0.005} | rates))
