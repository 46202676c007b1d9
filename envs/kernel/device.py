"""Launches compiled kernels on the GPU and times them, in a process of its own that no code of a submission is part of.

A submission's kernels arrive as machine code with a list of launches. This process fills the inputs, with other low
bits at each repeat so that nothing that a kernel remembers is right again, poisons outputs, flushes the L2 cache,
records CUDA events around the launches and reads the outputs back; it holds no expected values.
Device code cannot reach this process's clock, events or files. Uses the CUDA driver alone, without torch.

folder: request.json as `gpu` writes it, N.cubin of each side; leaves result.json and outputs as SIDE.REPEAT.NAME.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from k3rl.envs.kernel.operators import BY_FAMILY, Arrays, Dims, Operator

LIBRARY = "libcuda.so.1"
GUARD = 256
GUARD_BYTE, POISON_BYTE = 0xA5, 0xFF
LATE_S = 0.05  # for work of earlier launches to show itself
SCRATCH_BYTES = 4 * 2**20
# Of the L2 cache before each launch: milliseconds, in which clocks rise and the host queues all launches, so that no
# gap between them is timed.
FLUSHES = 40
# Bytes a second of memory by the vendor's data sheets, where a driver does not tell the clock (virtual machines).
PEAKS = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "L40S": 0.864e12, "B200": 8.0e12}
_CLOCK_RATE, _BUS_WIDTH, _MAJOR, _MINOR = 36, 37, 75, 76  # CUdevice_attribute
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute


class CudaError(RuntimeError):
    """A call of the CUDA driver failed; the message has its name and number."""


class Driver:
    """The CUDA driver on the first GPU. Raises CudaError; OSError where there is no driver."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        self.call("cuInit", 0)
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(self._device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver."""
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise CudaError(f"{name} failed with CUDA error {code}")

    def attribute(self, number: int) -> int:
        """A number that the driver knows of the GPU."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def describe(self) -> dict[str, Any]:
        """name, capability (90 for Hopper), bytes_per_s (what its memory can move at most)."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self._device)
        peak = 2.0 * self.attribute(_CLOCK_RATE) * 1e3 * self.attribute(_BUS_WIDTH) / 8
        if peak <= 0:
            peak = next((rate for model, rate in PEAKS.items() if model in name.value.decode()), 0.0)
        capability = 10 * self.attribute(_MAJOR) + self.attribute(_MINOR)
        return {"name": name.value.decode(), "capability": capability, "bytes_per_s": peak}

    def allocate(self, size: int) -> ctypes.c_uint64:
        """Device memory."""
        place = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        return place

    def fill(self, place: int, byte: int, size: int) -> None:
        """Set bytes."""
        self.call("cuMemsetD8_v2", ctypes.c_uint64(place), ctypes.c_ubyte(byte), ctypes.c_size_t(size))

    def upload(self, place: int, data: np.ndarray) -> None:
        """Copy an array to the device."""
        data = np.ascontiguousarray(data)
        pointer = data.ctypes.data_as(ctypes.c_void_p)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(place), pointer, ctypes.c_size_t(data.nbytes))

    def download(self, place: int, size: int) -> np.ndarray:
        """Bytes from the device."""
        data = np.empty(size, np.uint8)
        pointer = data.ctypes.data_as(ctypes.c_void_p)
        self.call("cuMemcpyDtoH_v2", pointer, ctypes.c_uint64(place), ctypes.c_size_t(size))
        return data

    def event(self) -> ctypes.c_void_p:
        """A CUDA event with timing."""
        made = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(made), 0)
        return made

    def function(self, image: bytes, name: str, shared: int) -> ctypes.c_void_p:
        """An entry of a cubin, allowed to use so much shared memory."""
        module, entry = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        self.call("cuModuleGetFunction", ctypes.byref(entry), module, name.encode())
        if shared > 48 * 1024:
            self.call("cuFuncSetAttribute", entry, _MAX_DYNAMIC_SHARED, shared)
        return entry


class Memory:
    """The tensors of one side on the device, each between guard bytes, and its scratch."""

    def __init__(self, driver: Driver, operator: Operator, dims: Dims) -> None:
        self._driver = driver
        self._operator, self._dims = operator, dims
        self.places: dict[str, int] = {}
        for tensor in (*operator.inputs, *operator.outputs):
            size = tensor.bytes(dims)
            start = driver.allocate(size + 2 * GUARD).value
            driver.fill(start, GUARD_BYTE, size + 2 * GUARD)
            self.places[tensor.name] = start + GUARD
        self.places["scratch"] = driver.allocate(SCRATCH_BYTES).value

    def prepare(self, inputs: Arrays) -> None:
        """Fresh inputs at the same addresses, outputs full of NaN, scratch full of zeros."""
        for name, array in inputs.items():
            self._driver.upload(self.places[name], array)
        for tensor in self._operator.outputs:
            self._driver.fill(self.places[tensor.name], POISON_BYTE, tensor.bytes(self._dims))
        self._driver.fill(self.places["scratch"], 0, SCRATCH_BYTES)

    def outputs(self) -> dict[str, np.ndarray]:
        """Bytes of every output."""
        return {
            one.name: self._driver.download(self.places[one.name], one.bytes(self._dims))
            for one in self._operator.outputs
        }

    def strayed(self, inputs: Arrays) -> int:
        """Bytes that are no output and are not as they were: inputs and guards."""
        count = 0
        for tensor in (*self._operator.inputs, *self._operator.outputs):
            place, size = self.places[tensor.name], tensor.bytes(self._dims)
            for guard in (place - GUARD, place + size):
                count += int((self._driver.download(guard, GUARD) != GUARD_BYTE).sum())
            if tensor.name in inputs:
                before = inputs[tensor.name].reshape(-1).view(np.uint8)
                count += int((self._driver.download(place, size) != before).sum())
        return count


class Side:
    """The launches of one kernel, submission or expert, ready to run."""

    def __init__(self, driver: Driver, memory: Memory, launches: Sequence[Mapping[str, Any]], folder: Path) -> None:
        self._driver, self.memory = driver, memory
        self._launches = [self._ready(one, folder) for one in launches]

    def _ready(self, launch: Mapping[str, Any], folder: Path) -> tuple[Any, ...]:
        entry = self._driver.function((folder / launch["cubin"]).read_bytes(), launch["name"], launch["shared"])
        values: list[Any] = []
        for kind, value in launch["args"]:
            if kind == "tensor":
                values.append(ctypes.c_uint64(self.memory.places[value]))
            elif kind == "float":
                values.append(ctypes.c_float(value))
            else:
                values.append(ctypes.c_int32(value) if -(2**31) <= value < 2**31 else ctypes.c_int64(value))
        values += [ctypes.c_uint64(0)] * launch["scratch"]
        pointers = (ctypes.c_void_p * max(len(values), 1))(
            *(ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in values)
        )
        grid = [ctypes.c_uint(one) for one in launch["grid"]]
        return entry, grid, ctypes.c_uint(launch["threads"]), ctypes.c_uint(launch["shared"]), pointers, values

    def run(self) -> None:
        """Launch everything, in order, on one stream."""
        one = ctypes.c_uint(1)
        for entry, grid, threads, shared, pointers, _ in self._launches:
            self._driver.call("cuLaunchKernel", entry, *grid, threads, one, one, shared, None, pointers, None)

    def timed(self, flush: tuple[int, int], begin: ctypes.c_void_p, end: ctypes.c_void_p) -> tuple[float, float]:
        """(seconds between the events, seconds that the host saw, flush included) of one run, the L2 cache cold."""
        driver = self._driver
        driver.call("cuCtxSynchronize")
        driver.call("cuCtxResetPersistingL2Cache")  # a kernel may have asked the cache to keep its lines
        started = time.perf_counter()
        for _ in range(FLUSHES):
            driver.fill(flush[0], 0, flush[1])
        driver.call("cuEventRecord", begin, None)
        self.run()
        driver.call("cuEventRecord", end, None)
        driver.call("cuEventSynchronize", end)
        driver.call("cuCtxSynchronize")
        host = time.perf_counter() - started
        spent = ctypes.c_float()
        driver.call("cuEventElapsedTime", ctypes.byref(spent), begin, end)
        return spent.value / 1e3, host


def measure(folder: Path) -> dict[str, Any]:
    """Run a request; see `gpu`."""
    request = json.loads((folder / "request.json").read_text())
    operator, dims = BY_FAMILY[request["family"]], request["dims"]
    driver = Driver()
    sides = {
        name: Side(driver, Memory(driver, operator, dims), request["launches"][name], folder)
        for name in request["launches"]
    }
    flush = driver.allocate(request["flush_bytes"]).value, request["flush_bytes"]
    begin, end = driver.event(), driver.event()
    with ThreadPoolExecutor(len(request["seeds"])) as pool:
        sets = list(pool.map(lambda seed: operator.inputs_for(dims, seed), request["seeds"]))
    rows = dims.get(operator.row_axis, 1)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    chooser = secrets.SystemRandom()
    kept = {request["repeats"] - 1, *chooser.sample(range(request["repeats"]), request["checked"])}
    for repeat in range(-request["warmups"], request["repeats"]):
        which, shift, stir = chooser.randrange(len(sets)), chooser.randrange(rows), chooser.getrandbits(63)
        inputs = operator.stirred(operator.rolled(sets[which], shift), stir)
        for name, side in sides.items():  # the submission first, then the expert, on the same contents
            side.memory.prepare(inputs)
            device, host = side.timed(flush, begin, end)
            if repeat < 0:
                continue
            row = {"device_s": device, "host_s": host, "set": which, "shift": shift, "stir": stir}
            samples[name].append(row | {"checked": repeat in kept})
            if repeat in kept:
                for output, data in side.memory.outputs().items():
                    data.tofile(folder / f"{name}.{repeat}.{output}")
    strayed = {name: side.memory.strayed(inputs) for name, side in sides.items()}
    return {"samples": samples, "strayed": strayed, "ghost": _ghost(driver, sides, inputs), "device": driver.describe()}


def _ghost(driver: Driver, sides: Mapping[str, Side], inputs: Arrays) -> dict[str, int]:
    """Bytes that change in poisoned outputs when nothing is launched: work that goes on from earlier launches."""
    found = {}
    for name, side in sides.items():
        side.memory.prepare(inputs)
        driver.call("cuCtxSynchronize")
        time.sleep(LATE_S)
        found[name] = sum(int((data != POISON_BYTE).sum()) for data in side.memory.outputs().values())
    return found


def main(folder: str) -> None:
    """Write result.json: what was measured, or the error that ended it."""
    place = Path(folder)
    try:
        with open(Path(tempfile.gettempdir(), "k3rl-gpu.lock"), "a") as lock:  # one job on a GPU at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            result = measure(place) if (place / "request.json").exists() else Driver().describe()
    except (CudaError, OSError) as error:
        result = {"error": str(error), "no_driver": isinstance(error, OSError)}
    (place / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
