"""A run on GPUs says what is compiled while it starts, and has earlier runs' kernels compiled ahead."""

from __future__ import annotations

import time

from k3rl.kernels import compile_cache
from k3rl.pipelines import kernel_watch
from k3rl.pipelines.kernel_watch import KernelWatch


def add_kernels(first: int, count: int) -> None:
    for number in range(first, first + count):
        folder = compile_cache.directory() / f"entry{number}"
        folder.mkdir(parents=True)
        (folder / "__grp__some_kernel.json").write_text("{}")


def test_what_is_compiled_is_said_until_the_first_step_is_done(tmp_path, monkeypatch):
    monkeypatch.setenv("K3RL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile_cache, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(kernel_watch, "_LOOK_S", 0.02)
    monkeypatch.setattr(kernel_watch, "_SAY_S", 0.05)
    add_kernels(0, 3)
    said: list[str] = []
    with KernelWatch(said.append) as watch:
        add_kernels(3, 5)
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
        assert said[0].startswith("compiling kernels: 5 so far")
        time.sleep(0.3)
        assert len(said) == 1, "nothing more was compiled, so nothing more is said"
        watch.end()
        time.sleep(0.1)
        add_kernels(8, 2)
        time.sleep(0.2)
        assert len(said) == 1
        assert watch.compiled == 7
    assert watch._ahead is not None
    assert watch._ahead.poll() is not None, "its processes end with the run"
