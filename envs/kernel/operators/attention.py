"""The rungs of K3's own mixing: Attention Residuals, and a chunk of Kimi Delta Attention."""

from __future__ import annotations

import numpy as np

from k3rl.envs.kernel.operators.base import BFLOAT16, Arrays, Axis, Dims, Operator, Tensor, rows, to_bf16


def _attn_res(d: Dims, x: Arrays) -> Arrays:
    values = x["v"]
    keys = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5)
    scores = keys @ x["w"]
    weights = np.exp(scores - scores.max(0))
    return {"out": ((weights / weights.sum(0))[..., None] * values).sum(0)}


ATTN_RES = Operator(
    family="attn_res",
    level=9,
    title="Attention Residuals: a softmax mix over the residual rows of earlier blocks",
    text=(
        "for each token t: k[s] = v[s, t] / sqrt(mean(v[s, t]^2) + 1e-5), score[s] = sum over d of k[s][d] * w[d], "
        "p = softmax of score over the sources s, out[t] = sum over s of p[s] * v[s, t] (v itself, not k). v and out "
        "are bfloat16 (the upper half of a float32, as uint16_t); compute in float32 and round to nearest even"
    ),
    axes={
        "S": Axis((5, 7, 9), (6, 8), (1, 2, 3)),
        "T": Axis((24, 32, 48), (28, 40), (1, 3, 5)),
        "D": Axis((512, 768, 1024), (640, 896), (17, 40, 64)),
    },
    inputs=(Tensor("v", "bf16", ("S", "T", "D")), Tensor("w", "f32", ("D",))),
    outputs=(Tensor("out", "bf16", ("T", "D")),),
    contents=lambda rng, d: {
        "v": to_bf16(rows(rng, d["S"], d["T"], d["D"])),
        "w": 2 * rng.standard_normal(d["D"]) / np.sqrt(d["D"]),
    },
    meaning=_attn_res,
    arithmetic=lambda d: d["T"] * d["D"] * (4.0 * d["S"] + 2),
    tolerance=BFLOAT16,
    row_axis="T",
    gpu={
        "S": Axis((5, 9), (7, 8), (1, 2, 3)),
        "T": Axis((512, 1024), (768,), (1, 3, 5)),
        "D": Axis((7168,), (7168, 6144), (17, 40, 64)),
    },
)


def _kda(d: Dims, x: Arrays) -> Arrays:
    """The recurrence, all heads together: state [H, K, V]."""
    state, out = x["state"].copy(), np.empty((d["T"], d["H"], d["V"]))
    for t in range(d["T"]):
        state *= np.exp(x["g"][t])[..., None]
        rest = x["v"][t] - np.einsum("hkv,hk->hv", state, x["k"][t])
        state += (x["beta"][t][:, None] * x["k"][t])[..., None] * rest[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, x["q"][t])
    return {"out": out, "final": state}


def _kda_contents(rng: np.random.Generator, d: Dims) -> Arrays:
    shape = d["T"], d["H"], d["K"]
    q, k = rng.standard_normal(shape), rng.standard_normal(shape)
    slow = rng.random((1, *shape[1:])) < 0.5  # half of the channels decay slowly, half quickly
    return {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True) / np.sqrt(d["K"]),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((d["T"], d["H"], d["V"])),
        "g": -np.where(slow, 0.02, 5.0) * rng.random(shape),
        "beta": rng.random((d["T"], d["H"])),
        "state": rng.standard_normal((d["H"], d["K"], d["V"])) / 4,
    }


KDA_CHUNK = Operator(
    family="kda_chunk",
    level=10,
    title="a chunk of Kimi Delta Attention",
    text=(
        "for each head h and t = 0, 1, ...: S = diag(exp(g[t, h])) S; u = v[t, h] - S^T k[t, h]; "
        "S = S + beta[t, h] k[t, h] u^T; out[t, h] = S^T q[t, h]. S begins as state[h], [K, V], and ends as final[h]. "
        "q and k are normalized already, g is in (-5, 0]"
    ),
    axes={
        "T": Axis((16, 32), (24,), (1, 3, 5)),
        "H": Axis((2, 3), (2, 4), (1, 2)),
        "K": Axis((32, 64), (48,), (8, 12)),
        "V": Axis((32, 64), (48,), (8, 20)),
    },
    inputs=(
        Tensor("q", "f32", ("T", "H", "K")),
        Tensor("k", "f32", ("T", "H", "K")),
        Tensor("v", "f32", ("T", "H", "V")),
        Tensor("g", "f32", ("T", "H", "K")),
        Tensor("beta", "f32", ("T", "H")),
        Tensor("state", "f32", ("H", "K", "V")),
    ),
    outputs=(Tensor("out", "f32", ("T", "H", "V")), Tensor("final", "f32", ("H", "K", "V"))),
    contents=_kda_contents,
    meaning=_kda,
    arithmetic=lambda d: 2.0 * d["T"] * d["H"] * d["K"] * d["V"],
)
