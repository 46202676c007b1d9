"""One place that decides between a Triton kernel and its torch reference.

The reference is the definition and always runs; a kernel runs where device, dtype, head dimensions and compute
capability are ones that it was tested on. Falling back is said once per reason (a `UserWarning`), on a CPU it is the
normal case and silent. `strict(True)` turns every fallback on a GPU into an `UnsupportedKernel` error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator

import torch

CAPABILITIES = ((9, 0),)
HEAD_DIMS = ((128, 128),)


class UnsupportedKernel(RuntimeError):
    """Strict mode: a kernel was wanted for a case that only the torch reference covers."""


_strict = False
_said: set[tuple[str, str]] = set()


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Within the block, refuse (UnsupportedKernel) instead of falling back to a reference on a GPU."""
    global _strict
    before, _strict = _strict, on
    try:
        yield
    finally:
        _strict = before


@functools.cache
def have_triton() -> bool:
    """Whether the triton package can be imported (it is an optional extra)."""
    return importlib.util.find_spec("triton") is not None


def use_kernel(
    family: str, *tensors: torch.Tensor, head_dims: tuple[int, int] | None = None, float32_rows: bool = True
) -> bool:
    """Whether the Triton kernels of `family` take a call with these row tensors; says once why they do not.

    head_dims is (K, V) where the family is compiled for fixed ones; float32_rows whether it takes float32 rows besides
    bf16. Raises UnsupportedKernel in strict mode.
    """
    if tensors[0].device.type == "cpu":
        return False
    reason = why_not(tensors, head_dims, float32_rows)
    if reason is None:
        return True
    if _strict:
        raise UnsupportedKernel(f"{family}: {reason}")
    if (family, reason) not in _said:
        _said.add((family, reason))
        warnings.warn(f"{family}: the torch reference runs instead of the kernel: {reason}", stacklevel=3)
    return False


def why_not(tensors: tuple[torch.Tensor, ...], head_dims: tuple[int, int] | None, float32_rows: bool) -> str | None:
    """The reason why no kernel takes this call, with the fix where there is one; None if one does."""
    refused = device_refusal(tensors[0].device)
    if refused is not None:
        return refused
    found = {x.dtype for x in tensors}
    allowed = (torch.bfloat16, torch.float32) if float32_rows else (torch.bfloat16,)
    if len(found) != 1 or not found <= set(allowed):
        return f"row dtypes {sorted(map(str, found))} are not one of {[str(dtype) for dtype in allowed]}"
    if head_dims is not None and head_dims not in HEAD_DIMS:
        return f"head dimensions (K, V) = {head_dims} are not among {HEAD_DIMS}"
    return None


def device_refusal(device: torch.device) -> str | None:
    """Why no kernel at all runs on this device, with the fix where there is one; None if they do."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"kernels are written for NVIDIA GPUs, got device {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        return f"compute capability {capability} is not among the tested {CAPABILITIES}"
    if not have_triton():
        return "triton is not installed (pip install 'k3rl[gpu]')"
    from k3rl.kernels import ptxas

    return ptxas.refusal()


def slow_paths(device: torch.device) -> list[str]:
    """What a person should know of a GPU's slow paths: that no kernel runs at all, else each fallback that was met."""
    if device.type == "cpu":
        return []
    refused = device_refusal(device)
    if refused is not None:
        return [f"no kernel runs on {device}, and the torch code in their place is 20 times as slow: {refused}"]
    return [f"{family}: the torch reference runs instead of the kernel: {reason}" for family, reason in sorted(_said)]
