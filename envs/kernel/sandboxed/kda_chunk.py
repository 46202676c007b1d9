"""A chunk of Kimi Delta Attention from a state [H, K, V]; q and k are normalized, g is the log of the decay."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, q, k, v, g, beta, state):
        outputs = []
        for t in range(q.shape[0]):
            state = state * torch.exp(g[t])[..., None]
            rest = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + (beta[t][:, None] * k[t])[..., None] * rest[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        return torch.stack(outputs), state


def get_inputs():
    q, k = (nn.functional.normalize(torch.randn(32, 2, 64), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(32, 2, 64), -5 * torch.rand(32, 2, 64), torch.rand(32, 2)
    return [q / 8, k, v, g, beta, torch.randn(2, 64, 64) / 4]


def get_init_inputs():
    return []
