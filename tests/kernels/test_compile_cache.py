"""The cache of compiled kernels: kept, shared by processes, and filled ahead from what runs wrote down. No GPU."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.kernels import compile_cache

_spec = importlib.util.spec_from_file_location("compiling", Path(__file__).with_name("compile_for_hopper.py"))
compiling = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compiling)
NAMES = ("norm", "rounding", "add-groups")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A user's cache that holds nothing, which this process and those it starts use."""
    from triton import knobs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_cache, "SHIPPED", tmp_path / "none")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    monkeypatch.setattr(knobs.compilation, "listener", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    compile_cache.use()
    for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER"):
        monkeypatch.setenv(name, os.environ[name])
    return compile_cache.directory()


def specialization(name: str) -> compile_cache.Specialization:
    """A configuration of the table as a launch on a Hopper GPU would be written down."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import serialize_specialization_data

    kernel, constants, options = compiling.CONFIGURATIONS[name]
    signature, values, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        if parameter.name in constants:
            signature[parameter.name], values[place,] = "constexpr", constants[parameter.name]
            continue
        signature[parameter.name] = compiling.type_of(parameter.name, kernel.__name__)
        if signature[parameter.name] != "fp32" and not parameter.do_not_specialize:
            attributes[place,] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", 90, 32)
    parsed = make_backend(target).parse_options({"num_warps": 4} | options)
    data = serialize_specialization_data(name, signature, values, attributes, parsed, "")
    return compile_cache.Specialization(kernel.fn.__module__, kernel.__name__, ("cuda", 90, 32), data)


def write_down(names) -> None:
    lines = [json.dumps(vars(specialization(name))) for name in names]
    (compile_cache.home() / compile_cache.TABLE).write_text("\n".join([*lines, "{torn"]) + "\n")


def test_what_is_written_down_is_compiled_by_a_process_of_its_own(cache) -> None:
    write_down(NAMES)
    done = subprocess.run(
        [sys.executable, "-m", "k3rl.kernels.compile_cache"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[:2] for line in done[:-1]] == [[str(n), "3"] for n in range(4)]
    assert compile_cache.compiled() == len(NAMES)


def test_what_is_compiled_ahead_is_found_by_who_launches_it(cache) -> None:
    for number, name in enumerate(NAMES, start=1):
        assert compile_cache.compile_one(specialization(name))
        assert compile_cache.compiled() == number
        compiling.compiled(*compiling.CONFIGURATIONS[name])
        assert compile_cache.compiled() == number, "it is the same entry of the cache"


def test_every_configuration_of_the_table_can_be_written_down() -> None:
    """Triton makes JSON of a launch for whoever listens, and would fail the launch where it cannot."""
    for name in compiling.CONFIGURATIONS:
        assert json.loads(specialization(name).data)["signature"]


def test_a_kernel_that_is_no_longer_as_it_was_is_passed_over(cache) -> None:
    one = specialization("norm")
    for changed in ({"name": "gone_kernel"}, {"module": "k3rl.kernels.gone"}, {"data": "{"}):
        assert not compile_cache.compile_one(compile_cache.Specialization(**vars(one) | changed))
    about = json.loads(one.data)
    about["signature"] = {"other": "*bf16"}
    assert not compile_cache.compile_one(compile_cache.Specialization(**vars(one) | {"data": json.dumps(about)}))
    assert compile_cache.compiled() == 0


def compile_counted(name: str, begun) -> None:
    from triton import knobs

    begun.wait()
    misses = []
    knobs.compilation.listener = lambda *, cache_hit, **_: misses.append(not cache_hit)
    compiling.compiled(*compiling.CONFIGURATIONS[name])
    os._exit(sum(misses))


def test_of_two_processes_that_want_a_kernel_one_compiles_it(cache) -> None:
    context = multiprocessing.get_context("fork")
    begun = context.Barrier(2)
    both = [context.Process(target=compile_counted, args=("norm", begun)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert sorted(process.exitcode for process in both) == [0, 1]


def test_a_process_that_dies_while_it_compiles_leaves_no_lock(cache) -> None:
    from k3rl.kernels.triton_cache import SharedCache

    context = multiprocessing.get_context("fork")

    def die() -> None:
        assert SharedCache("ab").get_group("kernel.json") is None
        os._exit(0)

    process = context.Process(target=die)
    process.start()
    process.join(30)
    begun = time.monotonic()
    assert SharedCache("ab").get_group("kernel.json") is None
    assert time.monotonic() - begun < 5


def test_the_recorder_writes_each_launch_down_once(cache, monkeypatch) -> None:
    from types import SimpleNamespace

    from triton.runtime import driver

    recorder, one = compile_cache._Recorder(), specialization("norm")
    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="cuda", arch=90, warp_size=32))
    monkeypatch.setattr(driver, "_active", target, raising=False)
    recorder.timed(times=SimpleNamespace(total=2_500_000), cache_hit=False)
    for _ in range(2):
        recorder.launched(
            fn=SimpleNamespace(module=one.module, name=one.name), compile={"specialization_data": one.data}
        )
    recorder.launched(fn=SimpleNamespace(module="elsewhere", name="x"), compile={"specialization_data": one.data})
    (found,) = compile_cache.recorded()
    assert (found.module, found.name, found.target, found.seconds) == (one.module, one.name, one.target, 2.5)
    given, kept = json.loads(one.data), json.loads(found.data)
    assert all(kept[name] == given[name] for name in ("signature", "constant_keys", "constant_vals", "attrs_vals"))
    assert compile_cache.compile_one(one)
    entries = compile_cache.compiled()
    assert compile_cache.compile_one(found)
    assert compile_cache.compiled() == entries, "what is written down is the same kernel"
    compile_cache._Recorder().launched(
        fn=SimpleNamespace(module=one.module, name=one.name), compile={"specialization_data": one.data}
    )
    assert len(compile_cache.recorded()) == 1


def test_a_kernel_has_the_same_name_whatever_was_hashed_before_it(cache):
    """By order of hashing: callers before what they call, and after."""
    import ast

    module = importlib.import_module("k3rl.kernels.gemm.w4_grouped_skinny_kernels")
    kernel = module.w4_grouped_skinny_kernel
    names = {node.id for node in ast.walk(kernel.parse()) if isinstance(node, ast.Name)}
    called = [found for name in sorted(names) if hasattr(found := kernel.__globals__.get(name), "cache_key")]
    assert called, "the kernel calls another function"

    def key_of(order) -> str:
        for function in (*called, kernel):
            function.hash = None
            function.used_global_vals = {}
        for function in order:
            function.cache_key  # noqa: B018
        return kernel.cache_key

    assert key_of([kernel]) == key_of(called) == key_of([*called, kernel])


def test_what_ships_can_be_compiled_by_this_version():
    """Each line names a kernel that is there, with the arguments that it has."""
    shipped = compile_cache._lines(compile_cache.SHIPPED)
    assert len(shipped) > 100
    for one in shipped:
        kernel = getattr(importlib.import_module(one.module), one.name)
        assert set(json.loads(one.data)["signature"]) == set(kernel.arg_names), one.name
        assert "/" not in one.data
