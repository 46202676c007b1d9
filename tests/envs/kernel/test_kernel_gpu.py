"""GPU mode, all but the GPU: compilation for one, the device process, what it is asked and what its answers are worth.

The device process runs for real, on a CUDA driver of ours that does on the CPU what the interface says (fake_cuda.c).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3rl.config import MissingResource
from k3rl.envs import make
from k3rl.envs.compiler.toolchain import Refused
from k3rl.envs.kernel import KernelRubric, driver, gpu
from k3rl.envs.kernel.env import Validator
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
# Knows a row that comes again by low bits of its first number, and copies what it found then.
REMEMBERS = (
    "static float known[1 << 12][512];\n"
    + HEAD
    + ROWS.replace(
        "float top",
        "unsigned bits; __builtin_memcpy(&bits, x + t * D, 4); float *row = known[bits & 4095];\n"
        "if (*row) { __builtin_memcpy(out + t * D, row, 4 * D); continue; }\nfloat top",
    ).replace("/ sum;\n    }", "/ sum;\n __builtin_memcpy(row, out + t * D, 4 * D); }")
    + "}\n"
)
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
    "31 remembers rows": REMEMBERS,
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

    def measure(name: str, *, timed: bool = False, entry: str = "softmax") -> Timing | None:
        calls = [driver.call(OPERATOR, DIMS, [0])]
        row = {"name": "softmax", "grid": [DIMS["T"]], "threads": 32, "shared": 0, "scratch": 2, "cubin": 0}
        own = {"name": entry}
        row["args"] = [["tensor", "x"], ["tensor", "out"], ["int", DIMS["D"]]]
        sides = {
            side: (Compiled(gpu.plans_of([[row | more]], calls), {"0.cubin": (library / image).read_bytes()}), 0)
            for side, image, more in (("candidate", name, own), ("expert", "honest", {}))
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


def test_31_a_kernel_that_remembers_rows_finds_none_that_comes_again(run, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "REPEATS", 12)
    with pytest.raises(WrongOutput):
        run("31 remembers rows", timed=True)


def test_stirred_contents_keep_their_size_and_need_other_outputs_and_any_row_may_be_looked_at() -> None:
    shape = {"T": 24, "D": 300}
    inputs = OPERATOR.inputs_for(shape, [1])
    stirred = OPERATOR.stirred(inputs, 5)
    assert not np.array_equal(stirred["x"], inputs["x"])
    assert np.array_equal(stirred["x"], OPERATOR.stirred(inputs, 5)["x"])
    assert np.abs(stirred["x"] / inputs["x"] - 1).max() < 1 / 8
    assert (stirred["x"].view(np.uint32) & 4095 == inputs["x"].view(np.uint32) & 4095).all()
    assert not gpu.output_right(OPERATOR, shape, inputs, OPERATOR.wanted(shape, stirred), None)
    wanted = OPERATOR.wanted(shape, inputs)
    assert gpu.output_right(OPERATOR, shape, inputs, wanted, 4)
    wanted["out"][::2] = np.nan
    assert not gpu.output_right(OPERATOR, shape, inputs, wanted, 23)


def test_an_error_of_the_gpu_is_the_submissions_only_when_the_expert_runs(run, monkeypatch) -> None:
    with pytest.raises(WrongOutput, match="cuModuleGetFunction"):
        run("honest", entry="not_there")
    real = gpu._device

    async def broken(folder: Path, request: Any) -> dict[str, Any]:
        return await real(folder, request) if request is None else {"error": "cuMemAlloc_v2 failed with CUDA error 46"}

    monkeypatch.setattr(gpu, "_device", broken)
    with pytest.raises(SandboxDied, match="the expert too: cuMemAlloc_v2"):
        run("honest")


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


def test_an_agent_is_told_why_its_kernel_does_not_compile(library, monkeypatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setattr(gpu, "LIBRARY", str(library / "libcuda.so.1"))
    task = make("kernel", language="triton", device="cuda").source.get("train", 0, family="softmax")
    text = OPERATOR.gpu_expert.replace("tl.load(", "tl.loads(", 1)
    found = asyncio.run(Validator()(task, json.dumps({"files": {"kernel.py": text}})))
    assert not found.valid
    assert "does not compile or run" in found.message
    assert "loads" in found.message


ATTN_RES = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static float wide(uint16_t x) { uint32_t i = (uint32_t)x << 16; float f; memcpy(&f, &i, 4); return f; }
static uint16_t narrow(float f) { uint32_t i; memcpy(&i, &f, 4); return (i + 0x7fff + (i >> 16 & 1)) >> 16; }
static uint16_t kept[1 << 16];
void attn_res(const unsigned *grid, void **args) {
    uint16_t *v = *(uint16_t **)args[0], *out = *(uint16_t **)args[2];
    const float *w = *(const float **)args[1];
    long S = *(int *)args[3], T = *(int *)args[4], D = *(int *)args[5];
    float *mix = malloc(4 * D);
    for (long t = 0; t < T; t++) {
        float total = 0;
        memset(mix, 0, 4 * D);
        for (long s = 0; s < S; s++) {
            const uint16_t *row = v + (s * T + t) * D;
            float dot = 0, squares = 0;
            for (long i = 0; i < D; i++) dot += wide(row[i]) * w[i], squares += wide(row[i]) * wide(row[i]);
            float weight = expf(dot / sqrtf(squares / D + 1e-5f));
            for (long i = 0; i < D; i++) mix[i] += weight * wide(row[i]);
            total += weight;
        }
        for (long i = 0; i < D; i++) {
            uint16_t *own = kept + (t * D + i) % (1 << 16);
            out[t * D + i] = REPLAYS && *own ? *own : (*own = narrow(mix[i] / total));
            if (SPOILS) v[t * D + i] ^= 1;
        }
    }
    free(mix);
}
"""
HONEST_FLAGS = {"REPLAYS": 0, "SPOILS": 0}
STAND_INS = {
    "34": {"SPOILS": 1},
    "31": {"REPLAYS": 1},
}


@pytest.fixture(scope="session")
def call_on_gpu() -> Any:
    """The program that is meant for a machine with a GPU."""
    spec = importlib.util.spec_from_file_location("attn_res_on_gpu", Path(__file__).with_name("attn_res_on_gpu.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_for_a_gpu_runs_whole_on_a_stand_in(library, call_on_gpu, monkeypatch, tmp_path) -> None:
    """All of it but the GPU and the compiler for one: C in the place of machine code, our driver in that of CUDA's."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setattr(gpu, "LIBRARY", str(library / "libcuda.so.1"))
    monkeypatch.setattr(gpu, "SPREAD", float("inf"))  # of times on a shared CPU
    monkeypatch.setattr(gpu, "FLUSH_BYTES", 4096)
    monkeypatch.setattr(gpu, "REPEATS", 6)
    monkeypatch.setattr("k3rl.envs.kernel.tasks.SMALL", 1)
    monkeypatch.setattr(call_on_gpu, "WIDTH", 640)
    monkeypatch.setattr(call_on_gpu, "SOURCES", (5,))
    monkeypatch.setattr(call_on_gpu, "OTHERS", ("softmax",))
    some = {name: text for name, text in call_on_gpu.HACKS.items() if name[:2] == "34"}
    monkeypatch.setattr(call_on_gpu, "HACKS", some)
    offered = {name: files for name, (_, files) in call_on_gpu.submissions(nvcc=True).items()}

    async def compiled(provider, language, files, calls, capability) -> Compiled | str:
        name = next((name for name, own in offered.items() if own == files), "")
        if calls[0].operator.family != "attn_res":
            return "no stand-in"
        flags = {**HONEST_FLAGS, **STAND_INS.get(name[:2], {})}
        built = library / f"attn_res-{'-'.join(map(str, flags.values()))}"
        if not built.exists():
            line = ["gcc", "-shared", "-fPIC", "-O2", "-w", *(f"-D{key}={value}" for key, value in flags.items())]
            subprocess.run([*line, "-o", built, "-x", "c", "-"], input=ATTN_RES.encode(), check=True)
        row = {"name": "attn_res", "threads": 32, "shared": 0, "scratch": 2, "cubin": 0, "grid": [1]}
        tensors = [["tensor", name] for name in ("v", "w", "out")]
        plans = [[{**row, "args": [*tensors, *(["int", size] for size in call.dims.values())]}] for call in calls]
        return Compiled(gpu.plans_of(plans, calls), {"0.cubin": built.read_bytes()})

    monkeypatch.setattr(gpu, "compiled", compiled)
    monkeypatch.setattr(gpu, "check", lambda *_: None)
    report = call_on_gpu.main(["--out", str(tmp_path), "--provider", "bwrap", "--tokens", "6"], "cpu", nvcc=True)
    assert json.loads((tmp_path / "attn_res_on_gpu.json").read_text()) == json.loads(json.dumps(report))
    rows = report["rows"]
    honest = {"honest: one pass", "the expert: two passes", "honest: CUDA"}
    assert rows.keys() == offered.keys() | {"eager torch", "expert of softmax"}
    for name in honest:
        assert rows[name]["status"] == "scored", rows[name]
        assert rows[name]["right"] == 1.0
        assert rows[name]["reward"] == pytest.approx(0.5, abs=0.3)  # all three are the same code here
    for name in offered.keys() - honest:
        spoils = name.startswith("34")
        assert (rows[name]["status"], rows[name]["reward"]) == (("invalid", None) if spoils else ("scored", 0.0)), name
    assert (rows["eager torch"]["status"], rows["eager torch"]["right"]) == ("timed", 1.0)
    assert 0 < rows["eager torch"]["reward"] <= 1.0
    assert (rows["expert of softmax"]["status"], rows["expert of softmax"]["right"]) == ("scored", 0.0)
