"""KDA with gates that have no lower bound: every form against the recurrence, and layers of Kimi-Linear checkpoints
against what `transformers` computes with them in float64 (golden/kimi_linear/README.md)."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from k3rl.kernels.kda.operator import kda_recurrent, kda_reference
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.model.exact import exact_logprobs
from k3rl.model.flat_step import FlatStep
from k3rl.model.kda_chunks import chunked_kda
from k3rl.model.layout import Layout

GOLDEN = Path(__file__).parents[1] / "golden" / "kimi_linear"
REGIMES = ("common", "slow", "saturated", "gone", "mixed")


def inputs(regime: str, lengths: list[int], h: int = 2, width: int = 4, seed: int = 0) -> list[Tensor]:
    """qkv [n, 3hD], z [n, hD], b [n, h], A_log [h], dt_bias [hD], state [S, h, D, D]; rates of 1 to 16."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    qkv, z, b = (torch.randn(n, w, generator=g, dtype=torch.float64) for w in (3 * h * width, h * width, h))
    rate = torch.linspace(1, 16, h, dtype=torch.float64).repeat_interleave(width)
    strong = (60 + 5 * z) / rate  # about -60 a token, in every head
    z = {
        "common": z,
        "slow": z - 14,
        "saturated": strong,
        "gone": strong * 40,  # exp(-2400) is 0
        "mixed": torch.where(torch.arange(h * width) % 3 == 0, z - 8, torch.where(z > 1, strong, z)),
    }[regime]
    state = torch.randn(len(lengths), h, width, width, generator=g, dtype=torch.float64)
    bias = 0.1 * torch.randn(h * width, generator=g, dtype=torch.float64)
    return [x.requires_grad_() for x in (qkv, z, b, rate[::width].log().clone(), bias, state)]


def by_chunks(given: list[Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    layout = Layout(lengths)
    extended = (x.new_zeros(layout.n_extended, x.shape[1]).index_copy(0, layout.extended, x) for x in given[:3])
    return chunked_kda(*extended, *given[3:5], layout, state=given[5], bound=None)


def by_operator(run, given: list[Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    qkv, z, b, a_log, dt_bias, state = given
    h = a_log.shape[0]
    q, k, v = (x.view(1, -1, h, x.shape[-1] // h) for x in qkv.chunk(3, -1))
    o, final = run(q, k, v, z.view(q.shape), b.unsqueeze(0), a_log, dt_bias, None, state,
                   torch.tensor([0, *lengths]).cumsum(0))  # fmt: skip
    return o.flatten(2)[0], final


def errors(run, wanted, given: list[Tensor]) -> list[float]:
    """Relative errors of outputs, states and all gradients."""
    found = []
    for o, state in (run, wanted):
        up = [torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape) for x in (o, state)]
        found.append([o, state, *torch.autograd.grad([o, state], given, up)])
    return [((a - b).norm() / b.norm().clamp(min=1e-290)).item() for a, b in zip(*found, strict=True)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(REGIMES), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(0, 1000))
def test_every_form_gives_outputs_states_and_gradients_of_the_recurrence(regime, lengths, seed) -> None:
    args = inputs(regime, lengths, seed=seed)
    for run in (by_chunks(args, lengths), by_operator(kda_reference, args, lengths)):
        found = errors(run, by_operator(kda_recurrent, args, lengths), args)
        # Gradients of z, A_log and dt_bias that are all but 0 keep fewer digits; without a decay they are 0.
        assert max(found) < 1e-9, (regime, found)


def test_backward_equals_finite_differences() -> None:
    args = inputs("common", [3, 18])
    assert torch.autograd.gradcheck(lambda *x: by_chunks(list(x), [3, 18]), args, fast_mode=True)


@pytest.mark.parametrize("rate", [-20.0, 0.0, 20.0])
@pytest.mark.parametrize("bias", [-200.0, 200.0])
def test_extreme_gates_stay_finite_in_float32(rate, bias) -> None:
    args = [x.detach().float().requires_grad_() for x in inputs("common", [40])]
    with torch.no_grad():
        args[3].fill_(rate)
        args[4].fill_(bias)
    for o, state in (by_chunks(args, [40]), by_operator(kda_reference, args, [40])):
        for value in (o, state, *torch.autograd.grad(o.sum() + state.sum(), args)):
            assert value.isfinite().all()


# ---------------------------------------------------------------------------------------------- golden layers


class Case:
    """The KDA layers of one tiny checkpoint, in float64, written out from the formulas beside the recurrence."""

    def __init__(self, name: str) -> None:
        weights = load_file(GOLDEN / name / "model.safetensors")
        self.weights = {key: value.double() for key, value in weights.items()}
        self.expected = load_file(GOLDEN / name / "golden.safetensors")
        self.meta = json.loads((GOLDEN / name / "golden.json").read_text())
        config = json.loads((GOLDEN / name / "config.json").read_text())
        linear = config["linear_attn_config"]
        self.eps, self.heads, self.width = config["rms_norm_eps"], linear["num_heads"], linear["head_dim"]
        self.layers = [layer - 1 for layer in linear["kda_layers"]]

    def hidden(self, layer: int, ids: Tensor) -> Tensor:
        """Normed rows that the layer reads."""
        x = nn.functional.embedding(ids[0], self.weights["model.embed_tokens.weight"])
        if layer:
            x = self.expected[f"layer.{layer - 1}.out"][0].double()
        return nn.functional.rms_norm(
            x, x.shape[-1:], self.weights[f"model.layers.{layer}.input_layernorm.weight"], self.eps
        )

    def run(self, layer: int, x: Tensor, chunks: bool) -> tuple[Tensor, Tensor]:
        """Normed rows [T, H] -> the mixer's output [T, H] and the state [1, h, D, D]."""
        part = {key.split("self_attn.")[1].removesuffix(".weight"): value for key, value in self.weights.items()
                if key.startswith(f"model.layers.{layer}.self_attn.")}  # fmt: skip
        rows, streams = len(x), []
        for letter in "qkv":
            raw = nn.functional.pad((x @ part[f"{letter}_proj"].T).T, (3, 0))
            taps = part[f"{letter}_conv1d"].view(-1, 1, 4)
            streams.append(nn.functional.silu(nn.functional.conv1d(raw[None], taps, groups=len(taps)))[0].T)
        z = x @ part["f_a_proj"].T @ part["f_b_proj"].T
        given = [torch.cat(streams, -1), z, x @ part["b_proj"].T, part["A_log"].flatten(), part["dt_bias"]]
        given.append(x.new_zeros(1, self.heads, self.width, self.width))
        o, state = by_chunks(given, [rows]) if chunks else by_operator(kda_recurrent, given, [rows])
        o = o.view(rows, self.heads, self.width)
        normed = nn.functional.rms_norm(o, (self.width,), part["o_norm"], self.eps)
        gate = (x @ part["g_a_proj"].T @ part["g_b_proj"].T).sigmoid()
        return (normed.flatten(1) * gate) @ part["o_proj"].T, state


@pytest.mark.parametrize("chunks", [True, False], ids=["chunks", "recurrence"])
@pytest.mark.parametrize("name", ["case_a", "case_a128", "case_c"])
def test_layers_of_kimi_linear_checkpoints_match_the_reference(name, chunks) -> None:
    case = Case(name)
    checked = 0
    for layer in case.layers:
        ids = case.expected[case.meta["hidden_input"]]
        out, _ = case.run(layer, case.hidden(layer, ids), chunks)
        want = case.expected[f"layer.{layer}.attn_out"][0].double()
        # Outputs and the rows that a later layer reads are stored in float32.
        assert float((out - want).abs().max()) < 4e-6 * max(1.0, float(want.abs().max())), layer
        checked += 1
    for tokens, where in case.meta["state_input"].items():
        ids = case.expected[where.split("[")[0]][:, : int(tokens)]
        _, state = case.run(0, case.hidden(0, ids), chunks)
        want = case.expected[f"state.{tokens}.layer.0.S"].double()
        assert float((state - want).abs().max()) < 4e-6 * max(1.0, float(want.abs().max())), tokens
        checked += 1
    assert checked >= 3


# ---------------------------------------------------------------------------------------------- the model's layer


@pytest.fixture
def unbounded(nano) -> K3ForCausalLM:
    """A k3-nano without a bound, rates of 1 to 16 and strong gates: log decays reach tens per token."""
    linear = dataclasses.replace(K3Config.named("k3-nano").linear_attn_config, gate_lower_bound=None)
    model = nano(linear_attn_config=linear)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(0, math.log(16), parameter.numel()))
            elif name.endswith("f_b_proj.weight"):
                parameter.mul_(30)
    return model


def test_a_model_without_a_bound_decodes_what_its_forward_gives(unbounded) -> None:
    """float64: sums in another order, 1e-11 relative to numbers of the order of 1."""
    ids = torch.randint(0, unbounded.config.vocab_size, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = unbounded.hidden(ids).hidden
        plain, flat = unbounded.new_cache(1), unbounded.new_cache(1)
        step = FlatStep(unbounded, copies=True)
        for cache in (plain, flat):
            unbounded.hidden(ids[:, :19], cache=cache)
        for t in range(19, 30):
            rows = unbounded.hidden(ids[:, t : t + 1], cache=plain).hidden, step.hidden(ids[:, t], flat)[0][:, None]
            for row in rows:
                torch.testing.assert_close(row, whole[:, t : t + 1], rtol=1e-11, atol=1e-11)


def test_exact_mode_without_a_bound_gives_the_logprobs_of_the_forward(unbounded) -> None:
    ids = torch.randint(0, unbounded.config.vocab_size, (30,), generator=torch.Generator().manual_seed(1))
    places = torch.arange(10, 29)
    with torch.inference_mode():
        wanted = unbounded(ids[None]).logits[0, places].log_softmax(-1).gather(1, ids[places + 1, None])[:, 0]
    found = exact_logprobs(unbounded, ids, places, ids[places + 1].tolist(), temperature=1.0, sampling_mask=None)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
