"""Three ways to run a program agree: NumPy over the tree, the IR machine, and the reference's own interpreter.

Tolerance 1e-4 of the largest value: float32 rounding of some dozens of operations is near 1e-6.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.envs.compiler import evaluate, fuzz, gpt, library
from k3rl.envs.compiler.grader import run_ir
from k3rl.envs.compiler.protocol import arguments, parameters
from k3rl.envs.compiler.reference.interpret import interpret
from k3rl.envs.compiler.reference.lower import lower
from k3rl.envs.compiler.reference.parser import parse
from k3rl.envs.compiler.reference.passes import optimize

FAMILIES = {**fuzz.RUNNABLE, **library.KERNELS}


def lowered(case):
    instance = case["instances"][0]
    return lower(parse(case["source"])[0], instance["consts"])[0]


def close(got, want) -> bool:
    return bool(np.all(np.abs(got - want) <= 1e-4 * max(1.0, np.abs(want).max())))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(0, 10**6))
def test_lowered_and_optimized_ir_mean_what_the_tree_means(family, seed):
    case = FAMILIES[family](random.Random(seed))
    start, final, _ = evaluate.run_case(case, 0)
    plain = lowered(case)
    got, cost = run_ir(json.loads(json.dumps(plain)), case, start)
    better, less = run_ir(json.loads(json.dumps(optimize(plain))), case, start)
    assert all(map(close, got, final))
    assert all(map(close, better, final))
    assert less <= cost


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(fuzz.RUNNABLE)), st.integers(0, 10**6))
def test_the_interpreter_means_what_the_tree_means(family, seed):
    case = fuzz.RUNNABLE[family](random.Random(seed))
    _, final, _ = evaluate.run_case(case, 0)
    values = arguments(case, 0)
    interpret(optimize(lowered(case)), case["launches"][0]["grid"], values)
    names = [name for name, kind in parameters(case, case["instances"][0]["kernel"]) if kind.startswith("*")]
    assert all(close(np.asarray(values[name]), want) for name, want in zip(names, final, strict=True))


def test_the_optimizer_removes_repeats_dead_code_and_loop_invariants():
    case = fuzz.redundant(random.Random(1))
    start, _, _ = evaluate.run_case(case, 0)
    plain = lowered(case)
    assert run_ir(optimize(plain), case, start)[1] < 0.6 * run_ir(plain, case, start)[1]


def test_integer_division_truncates_towards_zero():
    source = (
        "kernel k(x: *i32, out: *i32) { let a = load(x, arange(0, 4)); store(out, arange(0, 4), a / 3 * 10 + a % 3); }"
    )
    buffers = [fuzz.buffer("x", "i32", 4, "given", values=[-7, 7, -2, 6]), fuzz.buffer("out", "i32", 4)]
    case = fuzz.single("x", source, "k", {}, buffers, [], [1, 1])
    _, final, _ = evaluate.run_case(case, 0)
    assert final[1].tolist() == [-21, 21, -2, 20]


def test_attention_is_softmax_attention():
    case = library.attention(random.Random(3))
    start, final, work = evaluate.run_case(case, 0)
    t, d = case["launches"][0]["args"][-1][1], case["instances"][0]["consts"]["D"]
    q, k, v = (one.astype(np.float64).reshape(t, d) for one in start[:3])
    scale = float(case["source"].split("trans(key)) * ")[1].split(";")[0])
    scores = np.where(np.tri(t, dtype=bool), q @ k.T * scale, -np.inf)
    shares = np.exp(scores - scores.max(1, keepdims=True))
    want = shares / shares.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(final[3].reshape(t, d), want, rtol=1e-6, atol=1e-6)  # literals are rounded to float32
    assert work.products >= t * d * t  # half of two products of t*t*d at least


def test_attention_residuals_mix_layers_by_a_softmax_over_depth():
    case = library.attnres(random.Random(4))
    start, final, _ = evaluate.run_case(case, 0)
    (_, tokens), (_, depth) = case["launches"][0]["args"][-2:]
    width = case["instances"][0]["consts"]["D"]
    layers = start[0].astype(np.float64).reshape(depth, tokens, width)
    factor = float(case["source"].split("let score = ")[1].split(" *")[0])
    norm = np.sqrt((layers**2).mean(-1) + 1e-5)
    scores = factor * (layers @ start[1].astype(np.float64)) / norm
    shares = np.exp(scores - scores.max(0))
    want = np.einsum("jt,jtd->td", shares / shares.sum(0), layers)
    np.testing.assert_allclose(final[2].reshape(tokens, width), want, rtol=1e-6, atol=1e-6)


def loss_of(weights, tokens, slope, epsilon):
    """The GPT's loss in plain NumPy, for finite differences. Weights: name -> matrix."""

    def norm(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)

    t = len(tokens) - 1
    x = weights["E"][tokens[:-1]] + weights["P"]
    n = norm(x)
    q, k, v = (n @ weights[name] for name in ("Wq", "Wk", "Wv"))
    scores = np.where(np.tri(t, dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -1e30)
    shares = np.exp(scores - scores.max(1, keepdims=True))
    y = x + shares / shares.sum(1, keepdims=True) @ v @ weights["Wo"]
    h = norm(y) @ weights["W1"]
    z = y + h / (1 + np.exp(-slope * h)) @ weights["W2"]
    logits = norm(z) @ weights["Wh"]
    top = logits.max(1)
    return np.mean(np.log(np.exp(logits - top[:, None]).sum(1)) + top - logits[np.arange(t), tokens[1:]])


@pytest.fixture(scope="module")
def trained():
    case = gpt.training(random.Random(5), steps=1)
    start, final, _ = evaluate.run_case(case, 0)
    names = [one["name"] for one in case["buffers"]]
    return case, dict(zip(names, start, strict=True)), dict(zip(names, final, strict=True))


@pytest.mark.parametrize("name", ["E", "P", "Wq", "Wk", "Wv", "Wo", "W1", "W2", "Wh"])
def test_every_gradient_of_the_gpt_is_the_derivative_of_its_loss(trained, name):
    case, start, final = trained
    slope = float(case["source"].split("exp(-")[1].split(" *")[0])
    epsilon = float(case["source"].split("/ f32(D) + ")[1].split(")")[0])
    d = start["Wq"].size ** 0.5
    shapes = {
        "E": int(d),
        "P": int(d),
        "W1": start["W1"].size // int(d),
        "W2": int(d),
        "Wh": start["Wh"].size // int(d),
    }
    weights = {
        one: start[one].astype(np.float64).reshape(-1, shapes.get(one, int(d)))
        for one in ("E", "P", "Wq", "Wk", "Wv", "Wo", "W1", "W2", "Wh")
    }
    assert loss_of(weights, start["tokens"], slope, epsilon) == pytest.approx(final["loss"][0], rel=1e-6)
    direction = np.random.default_rng(0).standard_normal(weights[name].shape)
    losses = []
    for sign in (1, -1):
        moved = {**weights, name: weights[name] + sign * 1e-5 * direction}
        losses.append(loss_of(moved, start["tokens"], slope, epsilon))
    slope_along = float((final[f"d{name}"].reshape(direction.shape) * direction).sum())
    # A central difference of step 1e-5 in float64 is good to about 1e-6; literals are rounded to float32.
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(slope_along, rel=1e-4, abs=1e-6)


def test_the_gpt_learns():
    case = gpt.training(random.Random(6), steps=24)
    _, final, _ = evaluate.run_case(case, 0)
    losses = final[[one["name"] for one in case["buffers"]].index("loss")]
    assert losses[-4:].mean() < 0.7 * losses[:4].mean()
