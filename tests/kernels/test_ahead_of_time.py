"""Every launch configuration of the tables compiles for sm_90a on this CPU, within its resource limits.

K3RL_PTXAS names further assemblers that must agree (the one that the kernels want is not a dependency of the tests).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("compiling", Path(__file__).with_name("compile_for_hopper.py"))
compiling = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compiling)

SHARED_MEMORY = 227 * 1024
# Bytes of spill stores, where they are not 0: `mix-gradient` of K3's width works on 28 elements a thread of each row;
# gates without a bound hold queries, keys and decays through five splits (without a cap of 168 registers no spills, but
# two programs on a multiprocessor instead of three, and slower).
SPILLS = {"mix-gradient-7168": 16}
SPILLS |= {"prepare-unbounded": 256, "prepare-save-unbounded": 256, "input-gradients-unbounded": 128}
SPILLS |= {"decode-deferred-unbounded": 32}
# Matrix instructions that must be there. The inverse in `prepare` must not use WGMMA: from registers it came out NaN.
INSTRUCTIONS = {"prepare": "mma.sync", "prepare-save": "mma.sync"}
INSTRUCTIONS |= dict.fromkeys(("w4-grouped-skinny-16", "w4-grouped-skinny-96"), "wgmma")
INSTRUCTIONS |= dict.fromkeys(
    (
        "largest-logits",
        "chunked-prefill",
        "scan",
        "scan-save",
        "scan-transition",
        "merge",
        "reverse-scan",
        "state-gradients",
    ),
    "wgmma",
)
INSTRUCTIONS |= dict.fromkeys(("own-attention", "symmetric", "symmetric-grown"), "wgmma")
INSTRUCTIONS["input-gradients"] = "mma.sync"


@pytest.mark.parametrize("name", compiling.CONFIGURATIONS)
def test_configuration_compiles_within_its_limits(name):
    found = compiling.resources(name)
    for assembler, used in found["assemblers"].items():
        assert used["spill_bytes"] <= SPILLS.get(name, 0), (assembler, found)
    assert found["shared_bytes"] <= SHARED_MEMORY, found
    assert name not in INSTRUCTIONS or found[INSTRUCTIONS[name]] > 0, found
    assert not name.startswith("prepare") or not found["wgmma"], found


def test_the_convolution_backward_carries_every_row_that_it_reaches_back_to():
    """Three inputs, three gradients and four sums. Triton 3.6 drops values that a loop hands on from one to the next
    when they start as one constant; the interpreter, which does not compile, is right either way."""
    kernel = compiling.compiled(*compiling.CONFIGURATIONS["conv-backward"])
    (loop,) = (line for line in kernel.asm["ttgir"].splitlines() if "scf.for" in line)
    carried = loop.partition(") -> (")[2]
    assert carried.count("xf32") == 10, loop


def test_packed_experts_are_decoded_into_registers_that_no_matrix_instruction_still_reads():
    """Triton 3.6 lets the last ones of a pass run on while the next pass writes those registers, unless the sum is
    asked for; the order in a pass is its own, each product with registers of its own."""
    kernel = compiling.compiled(*compiling.CONFIGURATIONS["w4-grouped-skinny-16"])
    lines = [line for line in kernel.asm["ttgir"].splitlines() if "warp_group_dot" in line or "inline_asm" in line]
    last = max(number for number, line in enumerate(lines) if "warp_group_dot " in line)
    assert "warp_group_dot_wait" in lines[last + 1], lines
    assert "pendings = 0" in lines[last + 1], lines
    assert any("mov.b32" in line for line in lines[last + 2 :]), lines


def test_the_number_of_compiled_variants_is_bounded():
    """Per model: each configuration, times with and without states given and saved where that is a constant."""
    flags = ("HAS_S0", "SAVE", "HAS_DS", "HAS_HISTORY", "PACKED", "EARLY", "TRANSITION", "WHERE")
    kernels = {kernel: constants for kernel, constants, _ in compiling.CONFIGURATIONS.values()}
    assert sum(2 ** sum(flag in constants for flag in flags) for constants in kernels.values()) <= 88
