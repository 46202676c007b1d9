"""RMSNorm with a sigmoid gate."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, gate, weight):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * scale * weight * torch.sigmoid(gate)


def get_inputs():
    return [torch.randn(64, 512), 2 * torch.randn(64, 512), 1 + 0.2 * torch.randn(512)]


def get_init_inputs():
    return []
