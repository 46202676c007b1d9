"""Kernels in numba, one function a rung: what an honest submission in this language looks like."""

import math

import numba
import numpy as np


@numba.njit(fastmath=True)
def situ_glu(gate, up, out):
    for t in range(gate.shape[0]):
        for i in range(gate.shape[1]):
            g, u = gate[t, i], up[t, i]
            out[t, i] = 100.0 * math.tanh(g / 4) / (1.0 + math.exp(-g)) * math.tanh(u / 25)


@numba.njit(fastmath=True)
def rms_norm_gated(x, gate, weight, out):
    for t in range(x.shape[0]):
        total = 0.0
        for i in range(x.shape[1]):
            total += x[t, i] * x[t, i]
        scale = 1.0 / math.sqrt(total / x.shape[1] + 1e-5)
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] * scale * weight[i] / (1.0 + math.exp(-gate[t, i]))


@numba.njit
def softmax(x, out):
    for t in range(x.shape[0]):
        top, total = x[t].max(), 0.0
        for i in range(x.shape[1]):
            out[t, i] = math.exp(x[t, i] - top)
            total += out[t, i]
        for i in range(x.shape[1]):
            out[t, i] /= total


@numba.njit
def mixed(v, w, out):
    for t in range(v.shape[1]):
        scores = np.empty(v.shape[0])
        for s in range(v.shape[0]):
            square = dot = 0.0
            for i in range(v.shape[2]):
                square += v[s, t, i] * v[s, t, i]
                dot += v[s, t, i] * w[i]
            scores[s] = dot / math.sqrt(square / v.shape[2] + 1e-5)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        for i in range(v.shape[2]):
            out[t, i] = 0.0
            for s in range(v.shape[0]):
                out[t, i] += weights[s] * v[s, t, i]


def attn_res(v, w, out):
    result = np.empty(out.shape, np.float32)
    mixed((v.astype(np.uint32) << 16).view(np.float32), w, result)
    bits = result.view(np.uint32)
    out[...] = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16


KERNELS = {"gate": situ_glu, "x": softmax, "x weight": rms_norm_gated, "v": attn_res}


def kernel(dim, inputs, outputs):
    name = "x weight" if "weight" in inputs else next(iter(inputs))
    KERNELS[name](*inputs.values(), outputs["out"])
