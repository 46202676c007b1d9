"""The model on the Triton kernels, under the interpreter and in processes of their own (`interpreted.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreting import interpret

from k3rl.kernels import dispatch
from k3rl.model import K3Config, K3ForCausalLM

HERE = Path(__file__).parent


@pytest.mark.parametrize("case", ["layer", "whole", "states", "engine"])
def test_the_model_on_kernels_agrees_with_the_torch_path(case):
    interpret(HERE / "interpreted.py", case)


@pytest.mark.parametrize(("family", "cases"), [("k3", 10), ("kimi-linear", 6)])
def test_the_way_of_a_gpu_mixes_no_devices_and_makes_no_host_wait(family, cases):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    run = subprocess.run(
        [sys.executable, HERE / "on_a_fake_gpu.py", family],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stdout.splitlines()) == cases


def test_a_cpu_never_takes_kernels_even_in_strict_mode():
    model = K3ForCausalLM(K3Config.named("k3-nano"), dtype=torch.bfloat16)
    model.init_weights(0)
    with dispatch.strict():
        assert not model.language_model.model.layers[0].self_attn.takes_kernels(torch.zeros(1, dtype=torch.bfloat16))
        model(torch.tensor([[1, 2, 3]]))
