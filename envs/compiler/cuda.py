"""Runs PTX with the CUDA driver in a process of its own, for the milestone that needs a GPU.

The process holds inputs only. PTX cannot call the operating system; a fault or an endless kernel ends with the
process, which is killed when its time is over.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 128  # of a block, as the specification says
RUN_S = 60.0
_LIBRARY = "libcuda.so.1"


def available() -> bool:
    """Whether this machine has a CUDA driver and at least one GPU."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    count = ctypes.c_int(0)
    return library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


async def run(text: str, case: Mapping[str, Any], contents: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Buffers after the launches, or None when the module does not load, faults, or runs over its time."""
    with tempfile.TemporaryDirectory(prefix="k3rl-ptx-") as folder:
        place = Path(folder)
        (place / "module.ptx").write_text(text)
        (place / "launches.json").write_text(json.dumps(case["launches"]))
        for number, array in enumerate(contents):
            (place / f"{number}.in").write_bytes(array.tobytes())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "k3rl.envs.compiler.cuda", folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "CUDA_CACHE_DISABLE": "1"},
        )
        try:
            code = await asyncio.wait_for(process.wait(), RUN_S)
        except TimeoutError:
            code = None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code != 0:
            return None
        return [
            np.frombuffer((place / f"{number}.out").read_bytes(), array.dtype) for number, array in enumerate(contents)
        ]


class Device:
    """The first GPU, one module loaded. Raises RuntimeError with the driver's error number."""

    def __init__(self, ptx: bytes) -> None:
        self._cuda = ctypes.CDLL(_LIBRARY)
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(ptx))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def upload(self, data: bytes) -> ctypes.c_uint64:
        """A device buffer with this content."""
        place = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(max(len(data), 4)))
        self._call("cuMemcpyHtoD_v2", place, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))
        return place

    def download(self, place: ctypes.c_uint64, size: int) -> bytes:
        """`size` bytes of a device buffer."""
        data = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", data, place, ctypes.c_size_t(size))
        return data.raw

    def launch(self, name: str, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run a kernel and wait for it."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        pointers = (ctypes.c_void_p * max(len(arguments), 1))(
            *(ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in arguments)
        )
        self._call("cuLaunchKernel", function, grid[0], grid[1], 1, THREADS, 1, 1, 0, None, pointers, None)
        self._call("cuCtxSynchronize")


def main(folder: str) -> None:
    """The worker: module.ptx, launches.json and N.in in, N.out out."""
    place = Path(folder)
    device = Device((place / "module.ptx").read_bytes())
    inputs = {one.stem: one.read_bytes() for one in place.glob("*.in")}
    buffers = {name: device.upload(data) for name, data in inputs.items()}
    scalars = {"i32": ctypes.c_int32, "f32": ctypes.c_float}
    for launch in json.loads((place / "launches.json").read_text()):
        arguments = [
            buffers[str(value)] if kind == "buffer" else scalars[kind](value) for kind, value in launch["args"]
        ]
        device.launch(f"mt_{launch['instance']}", launch["grid"], arguments)
    for name, data in inputs.items():
        (place / f"{name}.out").write_bytes(device.download(buffers[name], len(data)))


if __name__ == "__main__":
    main(sys.argv[1])
