"""The optimizer's kernels under the interpreter, in a process of its own, and the steps on blocks that they start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreting import interpret

from k3rl.numerics import project
from k3rl.optim import stored_values
from k3rl.optim.newton_schulz import iterated, newton_schulz

HERE = Path(__file__).parent


def test_kernels_agree_with_their_references() -> None:
    interpret(HERE / "interpreted.py")


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (2, 8, 8)])
def test_steps_on_normalized_blocks_need_no_transposed_copy(shape: tuple[int, int, int]) -> None:
    """In float64, so that only the order of sums is left."""
    blocks = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unit = blocks / torch.linalg.vector_norm(blocks, dim=(-2, -1), keepdim=True)
    torch.testing.assert_close(iterated(unit), newton_schulz(blocks), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stored", ["mxfp4", "bf16", "fp32"])
def test_stored_values_are_the_projection(stored) -> None:
    master = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for value in (master, master.double()):
        found = stored_values(stored, value, "ceil")
        assert torch.equal(found.to(value.dtype), project(value, stored, "ceil"))
