"""The ladder: what operators mean, against their torch task files; experts; splits and prompts."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from k3rl.config import ConfigError
from k3rl.envs import make
from k3rl.envs.kernel import LADDER, KernelLadder, driver, toolchain
from k3rl.envs.kernel.compare import complaint, deviation
from k3rl.envs.kernel.operators import BY_FAMILY, Operator, from_bf16, to_bf16, value_of
from k3rl.envs.sandbox import provider_named
from k3rl.numerics import mx

FOLDER = Path(driver.__file__).with_name("sandboxed")
FAMILIES = [one.family for one in LADDER]


def task_file(operator: Operator):
    spec = importlib.util.spec_from_file_location(operator.family, FOLDER / f"{operator.family}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "bf16":
        return torch.from_numpy(array).view(torch.bfloat16)
    return torch.from_numpy(array).double() if dtype == "f32" else torch.from_numpy(array)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_meaning_is_that_of_the_torch_task_file(family: str) -> None:
    operator = BY_FAMILY[family]
    module = task_file(operator)
    model = module.Model(*module.get_init_inputs())
    dims = operator.draw(random.Random(family), "small")
    inputs = operator.inputs_for(dims, [1, 2])
    got = model(*(as_torch(inputs[one.name], one.dtype) for one in operator.inputs))
    wanted = operator.wanted(dims, inputs)
    for tensor, result in zip(operator.outputs, got if isinstance(got, tuple) else (got,), strict=True):
        # bfloat16 comes out of torch rounded; everything else is float64 on both sides.
        limit = 2**-8 if tensor.dtype == "bf16" else 1e-6 if family == "mxfp4_dequant" else 1e-10
        np.testing.assert_allclose(result.double().numpy(), wanted[tensor.name], rtol=limit, atol=limit)
    shapes = [tuple(one.shape) for one in module.get_inputs()]
    assert len(shapes) == len(operator.inputs)
    results = model(*module.get_inputs())
    assert all(one.isfinite().all() for one in (results if isinstance(results, tuple) else (results,)))


def test_every_expert_is_right_and_writes_nothing_else() -> None:
    async def all_of_them() -> None:
        provider = provider_named("bwrap")
        builder = toolchain.Builder(provider)
        for operator in LADDER:
            rng = random.Random(operator.family)
            shapes = [operator.draw(rng, kind) for kind in ("small", "small", "heldout")]
            calls = [driver.call(operator, dims, [3, number]) for number, dims in enumerate(shapes)]
            program = await builder.build(operator.expert)
            assert isinstance(program, bytes), program
            ran = await toolchain.run(provider, program, calls)
            assert ran.returned is not None, (operator.family, ran.complaint)
            for call, back in zip(calls, ran.returned, strict=True):
                said = complaint(operator, back.outputs, operator.wanted(call.dims, call.inputs))
                assert (back.strayed, said) == (0, None), (operator.family, call.dims)

    asyncio.run(all_of_them())


@pytest.mark.parametrize("family", FAMILIES)
def test_floors_and_shapes_make_sense(family: str) -> None:
    operator = BY_FAMILY[family]
    rng = random.Random(0)
    for kind in ("train", "heldout", "small"):
        dims = operator.draw(rng, kind)
        call = driver.call(operator, dims, [1])
        assert len(call.arena) < driver.MAX_ARENA_BYTES
        assert 0 < operator.floor(dims) <= operator.arithmetic(dims) + operator.traffic(dims)
        assert operator.floor(dims) * 32 >= operator.traffic(dims) / 2
    for axis in operator.axes.values():
        assert axis.train != axis.heldout


def test_contents_depend_on_the_seed_and_on_nothing_else() -> None:
    operator = BY_FAMILY["attn_res"]
    dims = {"S": 2, "T": 3, "D": 17}
    one, same, other = (operator.inputs_for(dims, seed) for seed in ([1, 2], [1, 2], [1, 3]))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["v"], other["v"])


def test_bfloat16_and_mxfp4_are_those_of_the_model() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 100
    mine = from_bf16(to_bf16(values))
    np.testing.assert_array_equal(mine, torch.from_numpy(values).bfloat16().double().numpy())
    operator = BY_FAMILY["mxfp4_dequant"]
    dims = {"R": 3, "C": 96}
    inputs = operator.inputs_for(dims, [5])
    packed, scale = (torch.from_numpy(inputs[name]) for name in ("packed", "scale"))
    theirs = mx.dequantize_mxfp4(packed, scale, torch.float64)
    np.testing.assert_array_equal(operator.wanted(dims, inputs)["out"], theirs.numpy())


def test_rolling_rows_of_the_inputs_rolls_the_outputs() -> None:
    for operator in LADDER:
        if not operator.row_axis:
            continue
        dims = operator.draw(random.Random(1), "small") | {operator.row_axis: 5}
        inputs = operator.inputs_for(dims, [1])
        moved = operator.wanted(dims, operator.rolled(inputs, 2))
        for name, array in operator.rolled(operator.wanted(dims, inputs), 2).items():
            np.testing.assert_allclose(moved[name], array, rtol=1e-12, atol=1e-12)


def test_every_row_counts_and_nan_is_never_right() -> None:
    want = np.array([[100.0, 100.0], [2.0, -2.0]])
    assert deviation(want, want) == (0.0, 0.0)
    ignored = np.array([[100.0, 100.0], [0.0, 0.0]])
    assert deviation(ignored, want)[0] == pytest.approx(1.0)
    assert deviation(np.array([[100.0, np.nan], [2.0, -2.0]]), want) == (np.inf, np.inf)
    assert deviation(np.array([[100.0, np.inf], [2.0, -2.0]]), want) == (np.inf, np.inf)
    coarse = value_of(to_bf16(np.ones((1, 4)) * 1.003), "bf16")
    assert deviation(coarse, np.ones((1, 4)) * 1.003)[0] > BY_FAMILY["softmax"].tolerance.rms


def test_what_is_computed_exactly_and_rounded_is_right_whatever_its_size_and_bfloat16_on_the_way_is_not() -> None:
    operator = BY_FAMILY["attn_res"]
    for dims in ({"S": 3, "T": 2000, "D": 17}, {"S": 2, "T": 64, "D": 7168}):  # short rows, and many elements
        inputs = operator.inputs_for(dims, [1])
        v, w = as_torch(inputs["v"], "bf16").double(), torch.from_numpy(inputs["w"]).double()
        keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5)
        weights = torch.softmax(keys @ w, 0)
        for coarse in (False, True):
            mixed = ((weights.bfloat16().double() if coarse else weights)[..., None] * v).sum(0)
            got = {"out": mixed.bfloat16().view(torch.int16).numpy().view(np.uint16)}
            assert (complaint(operator, got, operator.wanted(dims, inputs)) is None) is not coarse


def test_tasks_are_the_same_each_time_and_splits_do_not_meet() -> None:
    source = KernelLadder()
    assert source.length("train") is None
    assert source.length("heldout") == 8 * len(LADDER)
    for number, operator in enumerate(LADDER):
        task = source.get("heldout", number, 7)
        assert (task.family, task.level) == (operator.family, operator.level)
        assert source.get("heldout", number, 7) == task
        assert source.get("train", number, 7).hidden != task.hidden
        assert task.public().hidden is None
        assert task.hidden is not None
        for dims in task.hidden["counted"]:
            assert all(dims[name] in axis.heldout for name, axis in operator.axes.items())
    assert source.get("train", 0, 1).hidden != source.get("train", 0, 2).hidden
    assert source.get("train", 0, family="attn_res").budgets.wall_s == 24 * 3600
    assert KernelLadder(wall_s=60.0).get("train", 0, family="attn_res").budgets.wall_s == 60.0
    with pytest.raises(IndexError, match="there is no number 88"):
        source.get("heldout", 88)
    with pytest.raises(ValueError, match="no family 'nothing'"):
        source.get("train", 0, family="nothing")


@pytest.mark.parametrize(
    "options",
    [{"language": "fortran"}, {"device": "cuda"}, {"language": "cuda"}, {"language": "triton", "device": "tpu"}],
)
def test_a_language_that_a_device_does_not_take_is_a_configuration_error(options) -> None:
    with pytest.raises(ConfigError, match="kernels"):
        make("kernel", **options)
