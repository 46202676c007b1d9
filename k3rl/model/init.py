"""How a fresh model starts.

Initialisation follows what trains at the named small sizes; A_log = 0 and the dt_bias law are those of k3.md 2.1.
Every value is one that a checkpoint can hold, so an untrained model equals its own export.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from k3rl.numerics import Stored, project

_OUTPUT = re.compile(r"(\.o_proj|\.down_proj|\.w2|\.routed_expert_up_proj|\.wo|\.fc1)\.weight$")
_QUERY = re.compile(r"_res_proj\.weight$")
_NORM = re.compile(r"(norm\d?)\.weight$")

DT_MIN, DT_MAX = 1e-3, 1e-1
RATES = 1.0, 16.0  # exp(A_log) of gates without a bound (kimi_linear.md 4)
CURRENT_TAP = 0.7  # of the short convolution


@torch.no_grad()
def initialise(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    parameters: Mapping[str, Tensor],
    seed: int,
    stored: Callable[[str], Stored],
    scale_rule: str,
) -> None:
    """Fills parameters, by official name, in place; the same seed gives the same model at any dtype.

    shapes: (official name, shape) of every parameter of the whole model. All are drawn, in this order, so that what a
    parameter gets does not depend on which of them are held here. stored: the format of each.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes:
        fresh = _fresh(name, shape, generator)
        if name in parameters:
            parameters[name].copy_(project(fresh, stored(name), scale_rule))


def _fresh(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One float32 tensor: matrices normal with std 1 / sqrt(in), output matrices half of that."""
    if name.endswith(".A_log") and len(shape) > 1:  # gates without a bound
        return torch.empty(shape).uniform_(*RATES, generator=generator).log_()
    if name.endswith((".A_log", ".e_score_correction_bias")) or _QUERY.search(name):
        return torch.zeros(shape)
    if name.endswith(".dt_bias"):
        u = torch.rand(shape, generator=generator)
        dt = torch.exp(u * (math.log(DT_MAX) - math.log(DT_MIN)) + math.log(DT_MIN)).clamp_min_(1e-4)
        return dt + torch.log(-torch.expm1(-dt))
    if name.endswith("_conv1d.weight"):
        taps = torch.randn(shape, generator=generator).mul_(0.1)
        taps[..., -1] = CURRENT_TAP
        return taps
    if _NORM.search(name):
        return torch.ones(shape)
    values = torch.randn(shape, generator=generator)
    if name.endswith("embed_tokens.weight"):
        return values
    fan_in = math.prod(shape[1:])
    return values.mul_((0.5 if _OUTPUT.search(name) else 1.0) / math.sqrt(fan_in))
