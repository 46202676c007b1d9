"""GPU mode, all but the GPU: compilation for one, the device process, what it is asked and what its answers are worth.

The device process runs for real, on a CUDA driver of ours that does on the CPU what the interface says (fake_cuda.c).
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest

from k3rl.config import MissingResource
from k3rl.envs import make
from k3rl.envs.compiler.toolchain import Refused
from k3rl.envs.kernel import KernelRubric, driver, gpu
from k3rl.envs.kernel.gpu import Compiled, Timing, WrongOutput
from k3rl.envs.kernel.operators import BY_FAMILY
from k3rl.envs.sandbox import SandboxDied, provider_named
from k3rl.types import Scored

OPERATOR = BY_FAMILY["softmax"]
DIMS = {"T": 24, "D": 300}
HEAD = (
    "#include <math.h>\n#include <pthread.h>\n#include <unistd.h>\nvoid softmax(const unsigned *grid, void **args) {\n"
)
ROWS = """
    const float *x = *(const float **)args[0];
    float *out = *(float **)args[1];
    int D = *(int *)args[2];
    for (unsigned t = 0; t < grid[0]; t++) {
        float top = x[t * D], sum = 0;
        for (int i = 0; i < D; i++) top = fmaxf(top, x[t * D + i]);
        for (int i = 0; i < D; i++) sum += expf(x[t * D + i] - top);
        for (int i = 0; i < D; i++) out[t * D + i] = expf(x[t * D + i] - top) / sum;
    }
"""
HONEST = HEAD + ROWS + "}\n"
KERNELS = {
    "honest": HONEST,
    "nothing": HEAD + "}\n",
    "first result again": "static int ran;\n" + HEAD + "if (ran++) return;\n" + ROWS + "}\n",
    "writes elsewhere": HEAD + ROWS + "out[grid[0] * D] = ((float *)x)[0] = 0;}\n",
    "writes later": HEAD.replace(
        "void softmax",
        "static pthread_t thread;\n"
        "static void *late(void *out) { for (;;) ((volatile float *)out)[1] = 0; }\nvoid softmax",
    )
    + ROWS
    + "if (!thread) pthread_create(&thread, 0, late, out);}\n",
    "slow": HEAD + ROWS + "usleep(3000);}\n",
}
FOUND: dict[str, Any] = {
    "nothing": WrongOutput,
    "first result again": WrongOutput,
    "writes elsewhere": Refused,
    "writes later": (Refused, WrongOutput),  # whichever launch its thread meets first
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our libcuda.so.1 and one shared object a kernel."""
    folder = tmp_path_factory.mktemp("cuda")
    line = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o"]
    subprocess.run([*line, folder / "libcuda.so.1", Path(__file__).with_name("fake_cuda.c"), "-ldl"], check=True)
    for name, text in KERNELS.items():
        subprocess.run([*line, folder / name, "-x", "c", "-"], input=text.encode(), check=True)
    return folder


@pytest.fixture
def run(library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures a kernel of KERNELS beside the honest one."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setattr(gpu, "SPREAD", float("inf"))  # of times on a shared CPU
    monkeypatch.setattr(gpu, "FLUSH_BYTES", 4096)

    def measure(name: str, *, timed: bool = False) -> Timing | None:
        calls = [driver.call(OPERATOR, DIMS, [0])]
        row = {"name": "softmax", "grid": [DIMS["T"]], "threads": 32, "shared": 0, "scratch": 2, "cubin": 0}
        row["args"] = [["tensor", "x"], ["tensor", "out"], ["int", DIMS["D"]]]
        plans = gpu.plans_of([[row]], calls)
        sides = {
            side: (Compiled(plans, {"0.cubin": (library / image).read_bytes()}), 0)
            for side, image in (("candidate", name), ("expert", "honest"))
        }
        return asyncio.run(gpu.measured(OPERATOR, DIMS, [[1], [2], [3]], sides, timed=timed))

    return measure


def test_an_honest_kernel_is_measured_beside_the_expert(run, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "REPEATS", 8)
    slow = run("slow", timed=True)
    assert slow is not None
    assert slow.candidate > 0.003
    assert slow.candidate > slow.expert > 0
    # 16 GB/s, as our driver says of itself.
    assert slow.floor == pytest.approx(2 * 24 * 300 * 4 / 16e9)
    assert slow.reading == pytest.approx(slow.floor / 2)
    score = gpu.worth([slow])
    assert isinstance(score, Scored)
    assert score.reward == pytest.approx(0.5 * slow.expert / slow.candidate)


@pytest.mark.parametrize("name", FOUND)
def test_a_kernel_that_is_wrong_or_writes_elsewhere_is_found(run, name) -> None:
    with pytest.raises(FOUND[name]):
        run(name)


def test_the_device_describes_itself(library, monkeypatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    assert asyncio.run(gpu.describe()) == {"name": "a CPU", "capability": 90, "bytes_per_s": 1.6e10}


def test_without_a_driver_the_refusal_is_typed_and_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", "libcuda.so.none")
    task = make("kernel", language="triton", device="cuda").source.get("train", 0)
    judge = KernelRubric("bwrap")
    with pytest.raises(MissingResource, match="NVIDIA driver"):
        judge.score_batch([(task, "x")])
    judge.close()


GOOD = {"cubin": 0, "name": "k", "grid": [1], "threads": 32, "shared": 0, "scratch": 0, "args": [["tensor", "x"]]}


@pytest.mark.parametrize(
    "change",
    [
        {"cubin": -1},
        {"cubin": "../../x"},
        {"name": 3},
        {"grid": [0]},
        {"grid": [1, 2**20]},
        {"grid": 5},
        {"threads": 2048},
        {"threads": True},
        {"shared": 10**9},
        {"scratch": 3},
        {"args": [["tensor", "expected"]]},
        {"args": [["int", 1.5]]},
        {"args": [["int", 2**70]]},
        {"args": [["float", "1"]]},
        {"args": [["pointer", 12345]]},
        {"args": [["int", 1]] * 65},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    calls = [driver.call(OPERATOR, DIMS, [0])]
    assert gpu.plans_of([[GOOD]], calls)[0][0]["grid"] == [1, 1, 1]
    with pytest.raises((ValueError, TypeError)):
        gpu.plans_of([[{**GOOD, **change}]], calls)
    with pytest.raises(ValueError, match="plans for"):
        gpu.plans_of([], calls)
    with pytest.raises(ValueError, match="1 to 64"):
        gpu.plans_of([[]], calls)


def result(**changes: Any) -> dict[str, Any]:
    sample = {"device_s": 1.0, "host_s": 1.1, "set": 0, "shift": 0, "checked": True}
    return {
        "samples": {side: [dict(sample) for _ in range(10)] for side in ("candidate", "expert")},
        "strayed": {"candidate": 0, "expert": 0},
        "ghost": {"candidate": 0, "expert": 0},
        "device": {"bytes_per_s": 1e9},
        **changes,
    }


def test_clocks_that_contradict_each_other_and_an_expert_that_fails_are_the_machines_fault() -> None:
    fine = result()
    gpu.check_run(fine, {"candidate": True, "expert": True})
    with pytest.raises(SandboxDied, match="the expert's outputs"):
        gpu.check_run(fine, {"candidate": True, "expert": False})
    timing, spread = gpu.timing_of(OPERATOR, DIMS, fine)
    assert (timing.candidate, timing.expert, spread) == (1.0, 1.0, 0.0)
    hurried = result()
    for sample in hurried["samples"]["candidate"]:
        sample["host_s"] = 0.5
    with pytest.raises(SandboxDied, match="the host waited"):
        gpu.timing_of(OPERATOR, DIMS, hurried)
    ragged = result()
    for number, sample in enumerate(ragged["samples"]["candidate"]):
        sample["device_s"] = 1.0 + number
        sample["host_s"] = 20.0
    assert gpu.timing_of(OPERATOR, DIMS, ragged)[1] == pytest.approx(6.0 / 5.5)


def test_times_that_no_honest_kernel_has_are_not_paid() -> None:
    timing = Timing(candidate=0.5, expert=1.0, floor=0.25, reading=0.2)
    assert gpu.worth([timing]).reward == pytest.approx(0.5 + 0.5 * 0.5 / 0.75)
    with pytest.raises(Refused, match="below_floor"):
        gpu.worth([timing, dataclasses.replace(timing, candidate=0.19)])
    with pytest.raises(Refused, match="quarantined"):
        gpu.worth([dataclasses.replace(timing, expert=10.0)])
    # Outputs may still be in the cache when the clock stops: at the floor, and not above 1.
    assert gpu.worth([dataclasses.replace(timing, candidate=0.21)]).reward == 1.0
    with pytest.raises(SandboxDied, match="least possible"):
        gpu.worth([dataclasses.replace(timing, expert=0.2)])


def test_the_expert_is_compiled_for_hopper_without_a_gpu() -> None:
    operator = BY_FAMILY["attn_res"]
    calls = [driver.call(operator, {"S": 2, "T": 3, "D": 40}, [0])]
    files = {"kernel.py": operator.gpu_expert}
    made = asyncio.run(gpu.compiled(provider_named("bwrap"), "triton", files, calls))
    assert isinstance(made, Compiled), made
    (launch,) = made.plans[0]
    assert (launch["name"], launch["grid"], launch["threads"], launch["scratch"]) == ("attn_res", [3, 1, 1], 256, 2)
    assert launch["args"][-3:] == [("int", 2), ("int", 3), ("int", 40)]
    assert made.cubins["0.cubin"].startswith(b"\x7fELF")
