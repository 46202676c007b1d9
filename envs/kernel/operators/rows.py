"""Rungs that work on rows: element-wise, norm, reduction, softmax, short convolution."""

from __future__ import annotations

import numpy as np

from k3rl.envs.kernel.operators.base import EXP_OPS, Arrays, Axis, Dims, Operator, Tensor, near_one, rows, sigmoid

_T = Axis((48, 64, 96), (56, 80), (1, 3, 7))
_D = Axis((512, 768, 1024), (640, 896), (33, 65, 100))


def _situ(dims: Dims, x: Arrays) -> Arrays:
    gate, up = x["gate"], x["up"]
    return {"out": 4 * np.tanh(gate / 4) * sigmoid(gate) * 25 * np.tanh(up / 25)}


SITU_GLU = Operator(
    family="situ_glu",
    level=1,
    title="SiTU-GLU, element by element",
    text="out = [4 tanh(gate / 4) sigmoid(gate)] * [25 tanh(up / 25)]",
    axes={"T": _T, "D": _D},
    inputs=(Tensor("gate", "f32", ("T", "D")), Tensor("up", "f32", ("T", "D"))),
    outputs=(Tensor("out", "f32", ("T", "D")),),
    contents=lambda rng, d: {name: 2 * rows(rng, d["T"], d["D"]) for name in ("gate", "up")},
    meaning=_situ,
    gpu={"T": Axis((2048, 4096), (3072,), (1, 3, 7)), "D": Axis((3072, 6144), (4096,), (33, 65, 100))},
    arithmetic=lambda d: d["T"] * d["D"] * (3 * EXP_OPS + 4),
    row_axis="T",
)


def _gated_norm(dims: Dims, x: Arrays) -> Arrays:
    scale = 1 / np.sqrt((x["x"] ** 2).mean(-1, keepdims=True) + 1e-5)
    return {"out": x["x"] * scale * x["weight"] * sigmoid(x["gate"])}


RMS_NORM_GATED = Operator(
    family="rms_norm_gated",
    level=2,
    title="RMSNorm with a sigmoid gate",
    text="out = x / sqrt(mean(x^2) + 1e-5) * weight * sigmoid(gate), the mean over D",
    axes={"T": _T, "D": _D},
    inputs=(
        Tensor("x", "f32", ("T", "D")),
        Tensor("gate", "f32", ("T", "D")),
        Tensor("weight", "f32", ("D",)),
    ),
    outputs=(Tensor("out", "f32", ("T", "D")),),
    contents=lambda rng, d: {
        "x": rows(rng, d["T"], d["D"]),
        "gate": 2 * rng.standard_normal((d["T"], d["D"])),
        "weight": near_one(rng, d["D"]),
    },
    meaning=_gated_norm,
    gpu={"T": Axis((2048, 4096), (3072,), (1, 3, 7)), "D": Axis((4096, 7168), (6144,), (33, 65, 100))},
    arithmetic=lambda d: d["T"] * d["D"] * (EXP_OPS + 4),
    row_axis="T",
)


def _logsumexp(dims: Dims, x: Arrays) -> Arrays:
    top = x["x"].max(-1, keepdims=True)
    return {"out": top[:, 0] + np.log(np.exp(x["x"] - top).sum(-1))}


LOGSUMEXP = Operator(
    family="logsumexp",
    level=3,
    title="log-sum-exp of rows",
    text="out[t] = log(sum over d of exp(x[t, d])); x may be as large as 1000, so subtract the row's maximum",
    axes={"T": _T, "D": _D},
    inputs=(Tensor("x", "f32", ("T", "D")),),
    outputs=(Tensor("out", "f32", ("T",)),),
    contents=lambda rng, d: {"x": 3 * rows(rng, d["T"], d["D"]) + rng.choice([0.0, 900.0], (d["T"], 1))},
    meaning=_logsumexp,
    arithmetic=lambda d: d["T"] * d["D"] * (EXP_OPS + 1),
    row_axis="T",
)


def _softmax(dims: Dims, x: Arrays) -> Arrays:
    weights = np.exp(x["x"] - x["x"].max(-1, keepdims=True))
    return {"out": weights / weights.sum(-1, keepdims=True)}


SOFTMAX = Operator(
    family="softmax",
    level=4,
    title="softmax of rows",
    text="out[t] = exp(x[t] - max) / sum(exp(x[t] - max)); x may be as large as 1000",
    axes={"T": _T, "D": _D},
    inputs=(Tensor("x", "f32", ("T", "D")),),
    outputs=(Tensor("out", "f32", ("T", "D")),),
    contents=lambda rng, d: {"x": 2 * rows(rng, d["T"], d["D"]) + rng.choice([0.0, 900.0], (d["T"], 1))},
    meaning=_softmax,
    arithmetic=lambda d: d["T"] * d["D"] * (EXP_OPS + 2),
    row_axis="T",
    gpu={"T": Axis((2048, 4096), (3072,), (1, 3, 7)), "D": Axis((4096, 8192), (5120,), (33, 65, 100))},
)


def _short_conv(dims: Dims, x: Arrays) -> Arrays:
    padded = np.concatenate([np.zeros((3, dims["C"])), x["x"]])
    total = sum(padded[tap : tap + dims["T"]] * x["weight"][:, tap] for tap in range(4))
    return {"out": total * sigmoid(total)}


SHORT_CONV = Operator(
    family="short_conv",
    level=5,
    title="short causal convolution with SiLU",
    text=(
        "y[t, c] = sum over j = 0..3 of weight[c, j] * x[t - 3 + j, c], zeros before the start; out = y * sigmoid(y)"
    ),
    axes={"T": Axis((48, 64, 96), (56, 80), (1, 2, 5, 9)), "C": Axis((256, 384, 512), (320, 448), (9, 33, 40))},
    inputs=(Tensor("x", "f32", ("T", "C")), Tensor("weight", "f32", ("C", "4"))),
    outputs=(Tensor("out", "f32", ("T", "C")),),
    contents=lambda rng, d: {"x": rows(rng, d["T"], d["C"]), "weight": rng.standard_normal((d["C"], 4))},
    meaning=_short_conv,
    arithmetic=lambda d: d["T"] * d["C"] * (EXP_OPS + 6),
)
