"""The element-wise halves of a Muon step on blocks of float32, and the projection of masters to MXFP4 values.

    start:  M <- m M + f G;  U = f G + m M (Nesterov) or M;  X = U / |U|_F in bf16, what Newton-Schulz starts from
    finish: W <- (1 - lr decay) W - lr scale O
    mxfp4:  the values that a checkpoint stores of a master, in bf16, which holds each of them

Each of them reads and writes every number once, where plain operations take a dozen passes. `start_reference`,
`finish_reference` and `k3rl.numerics.project` are the definitions.
"""

from __future__ import annotations

import warnings

import torch

from k3rl.kernels import limits
from k3rl.numerics import project


def start(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    factor: torch.Tensor,
    rate: float,
    nesterov: bool,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """gradient, momentum float32 [n, r, c] that `limits.MUON` takes -> X bf16 [n, r, c]; the momentum is moved.

    factor: a float32 scalar on the device that the gradient, which stays as it is, is multiplied with (clipping).
    live int32 [n] on the device: the momentum of a block with 0 stays, and its X means nothing; None: all of them move.
    A block is scaled by its largest magnitude first, as in `newton_schulz`; one of zeros gives zeros.
    """
    from k3rl.kernels.optim import muon_kernels

    return muon_kernels.start(gradient, momentum, factor, rate, nesterov, live)


def start_reference(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    factor: torch.Tensor,
    rate: float,
    nesterov: bool,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """`start` in plain torch."""
    gradient = gradient * factor
    moved = (momentum * rate).add_(gradient)
    momentum.copy_(moved if live is None else torch.where(_by_block(live), moved, momentum))
    x = torch.add(gradient, momentum, alpha=rate) if nesterov else momentum
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
    return x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min_(1.0)).to(torch.bfloat16)


def finish(
    master: torch.Tensor,
    update: torch.Tensor,
    lr: torch.Tensor,
    decay: float,
    scale: float,
    live: torch.Tensor | None = None,
) -> None:
    """master float32 [n, r, c] <- (1 - lr decay) master - lr scale update, in place; update bf16 [n, r, c].

    lr: a float32 scalar on the device, so that a captured step can have another one at each replay. live: as in
    `start`.
    """
    from k3rl.kernels.optim import muon_kernels

    muon_kernels.finish(master, update, lr, decay, scale, live)


def finish_reference(
    master: torch.Tensor,
    update: torch.Tensor,
    lr: torch.Tensor,
    decay: float,
    scale: float,
    live: torch.Tensor | None = None,
) -> None:
    """`finish` in plain torch."""
    moved = (master * (1 - lr * decay)).sub_(update.to(master.dtype) * (lr * scale))
    master.copy_(moved if live is None else torch.where(_by_block(live), moved, master))


def _by_block(live: torch.Tensor) -> torch.Tensor:
    return (live > 0).view(-1, 1, 1)


def mxfp4(master: torch.Tensor) -> torch.Tensor | None:
    """master float32 [..., n], n a multiple of 32 -> its MXFP4 values under the rule "ceil", bf16 [..., n].

    Bit for bit those of `k3rl.numerics.project`, which is tried once for each device. None where no kernel takes it.
    """
    if not limits.MUON.takes_mxfp4(master):
        return None
    from k3rl.kernels.optim import muon_kernels

    if master.device not in _exact:
        given = trial(master.device)
        wrong = unequal(muon_kernels.mxfp4(given), project(given, "mxfp4", "ceil"))
        _exact[master.device] = not bool(wrong.any())
        if wrong.any():
            warnings.warn(
                f"mxfp4: the torch reference runs instead of the kernel: {int(wrong.sum())} trial values of "
                f"{wrong.numel()} differ, the first from {float(given[wrong][0])!r}",
                stacklevel=2,
            )
    return muon_kernels.mxfp4(master) if _exact[master.device] else None


_exact: dict[torch.device, bool] = {}


def trial(device: torch.device) -> torch.Tensor:
    """float32 [n, 96]: numbers of every exponent beside others of their size, ties, both zeros, subnormals, inf."""
    drawn = torch.randn(282, 96, generator=torch.Generator().manual_seed(0))
    x = drawn.clamp(-1.9, 1.9) * torch.exp2(torch.arange(-154.0, 128.0))[:, None]
    ties = torch.stack([torch.arange(-48, 48) / 8, torch.arange(96) / 16, torch.arange(96) / -32, torch.zeros(96)])
    ties[3, 5], ties[3, 40], ties[3, 70] = -0.0, float("inf"), 1e-45
    return torch.cat([x, ties, 0.2 * drawn]).to(device)


def unequal(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ in a bit, signs of zeros included; one NaN is as good as another."""
    found, wanted = found.float(), wanted.float()
    return (found.view(torch.int32) != wanted.view(torch.int32)) & ~(found.isnan() & wanted.isnan())
