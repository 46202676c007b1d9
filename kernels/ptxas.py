"""Which assembler Triton uses, and whether it can be trusted with Hopper matrix instructions.

ptxas before 13.1 may reuse the input registers of an asynchronous WGMMA before it has read them: wrong numbers without
an error (triton-lang/triton#11781, NVIDIA's CUDA 13.3 release notes). Triton 3.6 bundles 12.8. The scan kernels feed
WGMMA from registers, so they are refused there. The remedy is a newer ptxas, which `pip install 'k3rl[gpu]'` brings as
the package nvidia-cuda-nvcc. It is taken by itself where TRITON_PTXAS_PATH names no other.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from pathlib import Path

FIRST_GOOD = (13, 1)
FIX = (
    "pip install 'k3rl[gpu]', which brings a newer one (nvidia-cuda-nvcc), or set TRITON_PTXAS_PATH to a ptxas of 13.1 "
    "or later"
)


def path() -> str | None:
    """The ptxas that Triton would run for Hopper: TRITON_PTXAS_PATH, else the bundled one; None without Triton."""
    return os.environ.get("TRITON_PTXAS_PATH") or bundled()


@functools.cache
def bundled() -> str | None:
    """The ptxas that came with Triton; None without Triton."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas")


def choose() -> None:
    """Has Triton take the packaged ptxas in this process, where none is named and the bundled one is refused."""
    own, other = bundled(), packaged()
    if os.environ.get("TRITON_PTXAS_PATH") or own is None or other is None:
        return
    if (version(own) or (0,)) < FIRST_GOOD <= (version(other) or (0,)):
        os.environ["TRITON_PTXAS_PATH"] = other


@functools.cache
def packaged() -> str | None:
    """The ptxas of the pip package nvidia-cuda-nvcc, if that is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for candidate in sorted(Path(folder).glob("cu*/bin/ptxas")):
            return str(candidate)
    return None


@functools.cache
def version(ptxas: str) -> tuple[int, ...] | None:
    """Version of a ptxas binary, such as (12, 8, 93); None if it cannot be run."""
    try:
        text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else None


def refusal() -> str | None:
    """Why the kernels must not run with the ptxas in use, with the fix; None if they may."""
    choose()
    ptxas = path()
    if ptxas is None:
        return None
    found = version(ptxas)
    if found is None:
        return f"ptxas at {ptxas} does not run; {FIX}"
    if found < FIRST_GOOD:
        return f"ptxas {_dotted(found)} mis-assembles Hopper matrix products fed from registers; {FIX}"
    return None


def doctor_checks() -> list[dict[str, object]]:
    """What `k3rl doctor` shows for the kernels: dicts with name, ok, found, fix."""
    checks: list[dict[str, object]] = []
    have = importlib.util.find_spec("triton") is not None
    triton = importlib.metadata.version("triton") if have else "not installed"
    checks.append({"name": "triton", "ok": have, "found": triton, "fix": "" if have else "pip install 'k3rl[gpu]'"})
    if have:
        why = refusal()  # which chooses one first
        found = version(str(path()))
        shown = f"{_dotted(found)} at {path()}" if found else f"none at {path()}"
        checks.append(
            {"name": "ptxas for Hopper kernels", "ok": why is None, "found": shown, "fix": FIX if why else ""}
        )
    return checks


def _dotted(found: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in found)
