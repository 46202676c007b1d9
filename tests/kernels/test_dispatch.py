"""Who runs: kernel or reference, and which assembler is trusted."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from k3rl.kernels import dispatch, doctor_checks, limits, ptxas


def fake_ptxas(folder, version: str):
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}'\n")
    path.chmod(0o755)
    return str(path)


def test_a_cpu_tensor_takes_the_reference_silently_even_in_strict_mode():
    with warnings.catch_warnings(), dispatch.strict():
        warnings.simplefilter("error")
        assert not dispatch.use_kernel("kda", torch.zeros(1))


def test_an_unsupported_device_is_said_once_and_refused_in_strict_mode():
    x = torch.zeros(1, device="meta")
    with pytest.warns(UserWarning, match="reference runs instead"):
        assert not dispatch.use_kernel("some family", x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not dispatch.use_kernel("some family", x)
    with dispatch.strict(), pytest.raises(dispatch.UnsupportedKernel, match=r"some family.*meta"):
        dispatch.use_kernel("some family", x)


@pytest.mark.parametrize(
    ("version", "good"), [("12.8.93", False), ("13.0.88", False), ("13.1.80", True), ("13.5.37", True)]
)
def test_ptxas_that_corrupts_register_operands_is_refused_with_the_fix(tmp_path, monkeypatch, version, good):
    monkeypatch.setenv("TRITON_PTXAS_PATH", fake_ptxas(tmp_path, version))
    reason = ptxas.refusal()
    assert (reason is None) == good
    assert good or (version in reason and "nvidia-cuda-nvcc" in reason)


def test_ptxas_that_does_not_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "missing"))
    assert "does not run" in ptxas.refusal()


def test_doctor_reports_name_ok_found_and_fix():
    checks = doctor_checks()
    assert checks
    for check in checks:
        assert set(check) == {"name", "ok", "found", "fix"}
        assert check["ok"] or check["fix"]


def test_the_package_imports_and_runs_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, k3rl.kernels\n"
        "from k3rl.kernels import gemm, mla, moe, norm, optim, sampling\n"
        "from k3rl.kernels.kda import kda\n"
        "x = torch.ones(1, 3, 1, 2)\n"
        "o, state = kda(x, x, x, x, x[..., 0], torch.zeros(1), torch.zeros(2))\n"
        "print(tuple(o.shape), tuple(state.shape))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 3, 1, 2) (1, 1, 2, 2)"


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "kind", "taken"),
    [
        (1, 37_000, 7168, torch.bfloat16, True),  # few rows: whatever the matrix
        (16, 64, 64, torch.bfloat16, True),
        (17, 12_288, 128, torch.bfloat16, False),  # many outputs, which every tile of rows would read again
        (64, 8192, 1024, torch.bfloat16, True),
        (64, 8192, 1088, torch.bfloat16, False),  # more than 16 MiB
        (65, 3208, 1024, torch.bfloat16, False),
        (256, 2048, 1024, torch.bfloat16, True),
        (257, 64, 64, torch.bfloat16, False),
        (0, 64, 64, torch.bfloat16, False),
        (8, 63, 64, torch.bfloat16, False),
        (8, 64, 96, torch.bfloat16, False),
        (8, 64, 64, torch.float32, False),  # quietly: no kernel is meant to take it
    ],
)
def test_skinny_products_are_the_kernels_where_they_were_faster(
    monkeypatch, rows: int, outputs: int, width: int, kind: torch.dtype, taken: bool
) -> None:
    monkeypatch.setattr(dispatch, "use_kernel", lambda *tensors, **options: True)
    x, matrix = (torch.empty(n, width, dtype=kind, device="meta") for n in (rows, outputs))
    assert limits.SKINNY.takes(x, matrix) is taken
    assert not limits.SKINNY.takes(x.unsqueeze(0), matrix)
    assert not limits.SKINNY.takes(torch.empty(rows, width, dtype=kind), torch.empty(1, 1, dtype=kind))
