"""How much memory an engine may take for states when nobody says so: what the device or the machine has free."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from k3rl.model import K3ForCausalLM

SHARE = 0.5  # of what is free, when nobody says how much memory states may take
TRANSPOSED_BYTES = 256 << 20  # of weights on a CPU that are held a second time, experts and the rest apart, at most
CPU_RUN = 2048  # prompt tokens that a CPU computes at a time: temporaries of more are fetched page by page, each time
_STEP, _GPU_STEP = 1 << 13, 1 << 15  # prompt tokens of a step of an engine: at least, and at most on a GPU
_STEP_ELEMENTS = 1 << 25  # of the hidden rows of so many tokens: what a layer makes of them stays below some GiB
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def states_budget(model: K3ForCausalLM, share: float = SHARE) -> int:
    """Bytes that states may take beside `model` and the second one that a weight update builds: a share of the rest."""
    second = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    second += sum(bank.nbytes for bank in model.packed_banks.values())
    return max(0, int(share * (free_bytes(model.device) - second)))


def keep_experts_transposed(model: K3ForCausalLM) -> None:
    """Lets a model on a CPU hold its experts a second time, as decode reads them fastest, where they are small."""
    parts = list(model.moe_parts())
    small = sum(part.bank.leaf_bytes for part in parts) <= TRANSPOSED_BYTES
    for part in parts:
        part.bank.keeps_transposed = small and model.device.type == "cpu"


def prefill_step(model: K3ForCausalLM) -> int:
    """Prompt tokens that an engine computes in a step, at most. A GPU is kept busy by many tokens of a small model."""
    if model.device.type == "cpu":
        return _STEP
    return max(_STEP, min(_GPU_STEP, _STEP_ELEMENTS // model.config.hidden_size))


def prefill_run(model: K3ForCausalLM) -> int | None:
    """Prompt tokens to compute together, at most, where whole prompts allow it; None: no matter how many."""
    return CPU_RUN if model.device.type == "cpu" else None


def keeps_copies(model: K3ForCausalLM) -> bool:
    """Whether what is not an expert is small enough to be held a second time, as decode reads it fastest."""
    experts = sum(part.bank.leaf_bytes for part in model.moe_parts())
    return sum(parameter.nbytes for parameter in model.parameters()) - experts <= TRANSPOSED_BYTES


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on the device; on the CPU, what the machine and this process's control group leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available()
    for limit, usage, cache in _CGROUPS:
        left = _group_left(Path(limit), Path(usage), cache)
        if left is not None:
            free = min(free, left)
    return free


def device_bytes(device: torch.device | str) -> int:
    """Memory that the device has; on the CPU, what the machine or this process's control group allows."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, _, _ in _CGROUPS:
        text = Path(limit).read_text(encoding="ascii").strip() if Path(limit).is_file() else ""
        whole = min(whole, int(text)) if text.isdecimal() else whole
    return whole


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _group_left(limit: Path, usage: Path, cache: str) -> int | None:
    """What a control group leaves, file pages that can be dropped counted as free; None without a limit."""
    if not limit.is_file() or not usage.is_file():
        return None
    text = limit.read_text(encoding="ascii").strip()
    if not text.isdecimal():
        return None
    used = int(usage.read_text(encoding="ascii"))
    stat = limit.with_name("memory.stat")
    if stat.is_file():
        rows = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
        used -= next((int(row[1]) for row in rows if row[0] == cache), 0)
    return max(0, int(text) - used)
