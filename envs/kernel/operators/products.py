"""Rungs that multiply matrices: two layouts, MXFP4 decoding, and the grouped product of experts."""

from __future__ import annotations

import numpy as np

from k3rl.envs.kernel.operators.base import Arrays, Axis, Dims, Operator, Tensor, rows

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_M = Axis((32, 48, 64), (40, 56), (1, 5, 7))
_K = Axis((64, 96, 128), (80, 112), (3, 17, 33))


def decoded(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """MXFP4 as float64: packed [..., n/2] with element 2b in the low nibble of byte b, E8M0 scale [..., n/32]."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return E2M1[nibbles] * np.repeat(np.exp2(scale - 127.0), 32, -1)


def _scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(120, 130, shape)


MATMUL = Operator(
    family="matmul",
    level=6,
    title="matrix product",
    text="out[m, n] = sum over k of a[m, k] * b[k, n]",
    axes={"M": _M, "K": _K, "N": Axis((64, 96, 128), (80, 112), (3, 9, 33))},
    inputs=(Tensor("a", "f32", ("M", "K")), Tensor("b", "f32", ("K", "N"))),
    outputs=(Tensor("out", "f32", ("M", "N")),),
    contents=lambda rng, d: {"a": rows(rng, d["M"], d["K"]), "b": rng.standard_normal((d["K"], d["N"]))},
    meaning=lambda d, x: {"out": x["a"] @ x["b"]},
    arithmetic=lambda d: d["M"] * d["N"] * d["K"],
    row_axis="M",
)

LINEAR = Operator(
    family="linear",
    level=7,
    title="matrix product with the second matrix stored by output (a linear layer with a bias)",
    text="out[m, n] = bias[n] + sum over k of a[m, k] * b[n, k]",
    axes={"M": _M, "K": _K, "N": Axis((64, 96, 128), (80, 112), (3, 9, 33))},
    inputs=(Tensor("a", "f32", ("M", "K")), Tensor("b", "f32", ("N", "K")), Tensor("bias", "f32", ("N",))),
    outputs=(Tensor("out", "f32", ("M", "N")),),
    contents=lambda rng, d: {
        "a": rows(rng, d["M"], d["K"]),
        "b": rng.standard_normal((d["N"], d["K"])),
        "bias": rng.standard_normal(d["N"]),
    },
    meaning=lambda d, x: {"out": x["a"] @ x["b"].T + x["bias"]},
    arithmetic=lambda d: d["M"] * d["N"] * d["K"],
    row_axis="M",
)

MXFP4_DEQUANT = Operator(
    family="mxfp4_dequant",
    level=8,
    title="MXFP4 decoding",
    text=(
        "out[r, i] = E2M1[nibble i] * 2^(scale[r, i / 32] - 127): element 2b of a row is the low nibble of byte b, "
        "2b + 1 the high one; bit 3 of a nibble is the sign, bits 0-2 index {0, 0.5, 1, 1.5, 2, 3, 4, 6}"
    ),
    axes={"R": Axis((32, 48, 64), (40, 56), (1, 3, 7)), "C": Axis((512, 768, 1024), (640, 896), (32, 96))},
    inputs=(Tensor("packed", "u8", ("R", "C/2")), Tensor("scale", "u8", ("R", "C/32"))),
    outputs=(Tensor("out", "f32", ("R", "C")),),
    contents=lambda rng, d: {
        "packed": rng.integers(0, 256, (d["R"], d["C"] // 2)),
        "scale": _scales(rng, d["R"], d["C"] // 32),
    },
    meaning=lambda d, x: {"out": decoded(x["packed"], x["scale"])},
    arithmetic=lambda d: 2.0 * d["R"] * d["C"],
    row_axis="R",
)


def _grouped_contents(rng: np.random.Generator, d: Dims) -> Arrays:
    cuts = np.sort(rng.integers(0, d["N"] + 1, d["E"] - 1))
    return {
        "x": rows(rng, d["N"], d["K"]),
        "packed": rng.integers(0, 256, (d["E"], d["O"], d["K"] // 2)),
        "scale": _scales(rng, d["E"], d["O"], d["K"] // 32),
        "offsets": np.concatenate([[0], cuts, [d["N"]]]),
    }


def _grouped(d: Dims, x: Arrays) -> Arrays:
    weights = decoded(x["packed"], x["scale"])
    out = np.empty((d["N"], d["O"]))
    for expert in range(d["E"]):
        first, last = x["offsets"][expert], x["offsets"][expert + 1]
        out[first:last] = x["x"][first:last] @ weights[expert].T
    return {"out": out}


MXFP4_GROUPED_GEMM = Operator(
    family="mxfp4_grouped_gemm",
    level=11,
    title="grouped matrix product of experts with MXFP4 weights",
    text=(
        "rows offsets[e] .. offsets[e + 1] of x belong to expert e (an expert may have none): "
        "out[n, o] = sum over k of x[n, k] * W[e, o, k], W decoded from packed and scale along K: element 2b of a row "
        "is the low nibble of byte b, 2b + 1 the high one; bit 3 of a nibble is the sign, bits 0-2 index "
        "{0, 0.5, 1, 1.5, 2, 3, 4, 6}; times 2^(scale - 127), one scale for 32 elements"
    ),
    axes={
        "E": Axis((3, 4), (5,), (1, 2)),
        "N": Axis((48, 64), (56,), (1, 5, 9)),
        "K": Axis((64, 96), (128,), (32,)),
        "O": Axis((32, 48), (40,), (3, 8, 17)),
    },
    inputs=(
        Tensor("x", "f32", ("N", "K")),
        Tensor("packed", "u8", ("E", "O", "K/2")),
        Tensor("scale", "u8", ("E", "O", "K/32")),
        Tensor("offsets", "i32", ("E+1",)),
    ),
    outputs=(Tensor("out", "f32", ("N", "O")),),
    contents=_grouped_contents,
    meaning=_grouped,
    arithmetic=lambda d: d["N"] * d["O"] * d["K"],
)
