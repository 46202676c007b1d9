"""Short causal convolution with SiLU; weight [C, 4], the last tap for the current row."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        padded = nn.functional.pad(x.T[None], (3, 0))
        return nn.functional.silu(nn.functional.conv1d(padded, weight[:, None], groups=weight.shape[0])[0].T)


def get_inputs():
    return [torch.randn(48, 256), torch.randn(256, 4)]


def get_init_inputs():
    return []
