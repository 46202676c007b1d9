"""Known faults of other kernels that show without running one; docs/kernels.md says which test stands for which."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from k3rl.kernels import dispatch, ptxas
from k3rl.kernels.kda.decode import kda_decode
from k3rl.kernels.kda.operator import kda
from k3rl.kernels.kda.short_conv import short_conv
from k3rl.kernels.norm.gated_norm import gated_norm

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "kernels").rglob("*.py"))
# Integers that a model fixes. Every other one varies from call to call and must not be specialised.
FIXED = re.compile(r".*(_t|_h|_stride)|H|C|row|channels|width|heads|experts|outputs|r|k|p_[nrk]")


def inputs(T: int, H: int = 2, D: int = 4):
    rows = [torch.randn(1, T, H, D, dtype=torch.float64) for _ in range(4)]
    return [*rows, torch.randn(1, T, H, dtype=torch.float64), torch.zeros(H), torch.zeros(H * D)]


def jit_functions():
    """(file name, function) of every compiled function, as syntax."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield path.name, node


@pytest.mark.parametrize("bound", [0.0, -5.1, 1.0, float("nan")])
def test_a_bound_out_of_range_is_refused(bound):
    with pytest.raises(ValueError, match="gate_lower_bound"):
        kda(*inputs(3), gate_lower_bound=bound)
    q, k, v, gate, beta = (x[:, 0] for x in inputs(1)[:5])
    pools = (torch.zeros(1, 3, 24), torch.zeros(1, 2, 4, 4), torch.tensor([0]), torch.tensor([0]))
    shared = ([torch.zeros(8, 4)] * 3, torch.zeros(2), torch.zeros(8), torch.ones(4))
    with pytest.raises(ValueError, match="gate_lower_bound"):
        kda_decode(q, k, v, gate, beta, v, *shared, *pools, gate_lower_bound=bound)


def test_value_heads_that_are_not_query_heads_are_refused():
    args = inputs(3)
    args[2] = torch.zeros(1, 3, 4, 4)
    with pytest.raises(ValueError, match="v must have shape"):
        kda(*args)


def test_sequences_longer_than_the_rows_and_batches_beside_packing_are_refused():
    with pytest.raises(ValueError, match="rise from 0 to at most"):
        kda(*inputs(3), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="B must be 1"):
        short_conv([torch.zeros(2, 3, 4)], [torch.zeros(4, 4)], cu_seqlens=torch.tensor([0, 3]))


@pytest.mark.parametrize("A", [-20.0, 0.0, 20.0, 100.0])
@pytest.mark.parametrize("bias", [-200.0, 200.0])
def test_rates_that_overflow_float32_leave_finite_gradients(A, bias):
    args = [x.float() for x in inputs(20)]
    args[5].fill_(A)
    args[6].fill_(bias)
    args = [x.requires_grad_() for x in args]
    o, S = kda(*args)
    for value in (o, S, *torch.autograd.grad(o.sum() + S.sum(), args)):
        assert torch.isfinite(value).all()


def test_the_weight_gradient_of_the_gated_norm_carries_the_gate_once():
    x, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64).requires_grad_()
    gate = torch.zeros(5, 8, dtype=torch.float64)
    (grad,) = torch.autograd.grad(gated_norm(x, gate, weight).sum(), weight)
    torch.testing.assert_close(grad, 0.5 * torch.nn.functional.rms_norm(x, (8,), None, 1e-5).sum(0))


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_a_gpu_that_no_kernel_was_tested_on_takes_the_reference(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tensor = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert str(capability) in dispatch.why_not((tensor,), None, True)


def test_head_dimensions_that_no_kernel_was_tested_on_take_the_reference(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ptxas, "refusal", lambda: None)  # that of this machine may be too old
    tensor = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    for dims in ((64, 64), (128, 64), (60, 100)):
        assert "head dimensions" in dispatch.why_not((tensor,), dims, False)


def test_counts_that_vary_from_call_to_call_compile_no_variant():
    spec = importlib.util.spec_from_file_location("compiling", Path(__file__).with_name("compile_for_hopper.py"))
    compiling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiling)
    seen = set()
    for kernel, _, _ in compiling.CONFIGURATIONS.values():
        seen.add(kernel.__name__ + kernel.__module__)
        for parameter in kernel.params:
            if not parameter.is_constexpr and compiling.type_of(parameter.name, kernel.__name__) == "i32":
                assert FIXED.fullmatch(parameter.name) or parameter.do_not_specialize, (kernel, parameter.name)
    assert len(seen) >= 15


def test_no_kernel_tunes_itself_uses_bulk_copies_or_calls_host_functions():
    for file, function in jit_functions():
        text = ast.unparse(function)
        for word in ("autotune", "next_power_of_2", "tensor_descriptor", "triton.cdiv", "atomic_"):
            if word == "atomic_" and function.name in ("split_kernel", "load_counts_kernel"):
                continue  # they count, in whole numbers; no sum depends on an order
            assert word not in text, f"{file}: {function.name} uses {word}"


def test_the_table_of_faults_names_tests_that_exist():
    names = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.M))
    cases = set(re.findall(r'^    "([a-z-]+)":', (ROOT / "tests/kernels/interpreted.py").read_text(), re.M))
    checks = set(re.findall(r'yield "\w+", f?"([^",]+)', (ROOT / "benchmarks/kda_checks.py").read_text()))
    table = re.findall(r"^\| (\d+) \| (.+?) \| (.*?) \|$", (ROOT / "docs/kernels.md").read_text(), re.M)
    assert sorted(int(number) for number, _, _ in table) == list(range(1, 53))
    for number, applies, tests in table:
        named = re.findall(r"`([^`]+)`", tests)
        assert named or applies.startswith("no"), f"fault {number} applies and names no test"
        for name in named:
            assert name in names | cases | checks, f"fault {number}: {name}"
