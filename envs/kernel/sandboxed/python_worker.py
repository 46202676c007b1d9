"""Runs a submission in Python: Triton in the interpreter, or numba. In a sandbox; expected values never come here.

request.json: kind, and calls with dim and tensors [name, dtype, shape]. N.NAME holds the inputs of call N; outputs are
left as N.NAME, inputs as they are afterwards as N.NAME.after, and for Triton outputs when no kernel is run as
N.NAME.ghost.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from launches import argument_of, grid_of, module_of

STORAGE = {"f32": np.float32, "bf16": np.uint16, "u8": np.uint8, "i32": np.int32}
SCRATCH_BYTES = 4 * 2**20


def arrays_of(number: int, call: dict[str, Any]) -> dict[str, np.ndarray]:
    """Inputs from their files, outputs full of NaN."""
    made = {}
    for name, dtype, shape in call["inputs"]:
        with open(f"{number}.{name}", "rb") as file:
            made[name] = np.frombuffer(file.read(), STORAGE[dtype]).reshape(shape).copy()
    for name, dtype, shape in call["outputs"]:
        made[name] = poisoned(dtype, shape)
    return made


def poisoned(dtype: str, shape: list[int]) -> np.ndarray:
    """All bits set, which is NaN in every float type."""
    size = int(np.prod(shape)) * np.dtype(STORAGE[dtype]).itemsize
    return np.frombuffer(b"\xff" * size, STORAGE[dtype]).reshape(shape).copy()


def run_triton(module: Any, call: dict[str, Any], arrays: dict[str, np.ndarray], *, ghost: bool = False) -> None:
    """Every launch in the interpreter, on tensors that share memory with the arrays; ghost: all but the kernels."""
    import torch

    kinds = {name: dtype for name, dtype, _ in (*call["inputs"], *call["outputs"])}
    tensors = {
        name: torch.from_numpy(array).view(torch.bfloat16) if kinds[name] == "bf16" else torch.from_numpy(array)
        for name, array in arrays.items()
    }
    tensors["scratch"] = torch.zeros(SCRATCH_BYTES // 4)
    for launch in module.launches(dict(call["dim"])):
        arguments = [argument_of(one, call["dim"], list(tensors)) for one in launch["args"]]
        values = [tensors[value] if kind == "tensor" else value for kind, value in arguments]
        kernel, grid = launch["kernel"], grid_of(launch)
        if not ghost:
            kernel[grid](*values, **launch.get("constants", {}))


def run_numba(module: Any, call: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """One call of `kernel`."""
    inputs = {name: arrays[name] for name, _, _ in call["inputs"]}
    module.kernel(dict(call["dim"]), inputs, {name: arrays[name] for name, _, _ in call["outputs"]})


def main() -> None:
    """All calls in order."""
    with open("request.json", encoding="utf-8") as file:
        request = json.load(file)
    module = module_of("kernel.py")
    for number, call in enumerate(request["calls"]):
        arrays = arrays_of(number, call)
        (run_triton if request["kind"] == "triton" else run_numba)(module, call, arrays)
        save(number, call["inputs"], arrays, ".after")
        save(number, call["outputs"], arrays, "")
        if request["kind"] == "triton":
            arrays = arrays_of(number, call)
            run_triton(module, call, arrays, ghost=True)
            save(number, call["outputs"], arrays, ".ghost")


def save(number: int, tensors: list[Any], arrays: dict[str, np.ndarray], ending: str) -> None:
    """Write tensors of a call."""
    for name, _, _ in tensors:
        with open(f"{number}.{name}{ending}", "wb") as file:
            file.write(arrays[name].tobytes())


if __name__ == "__main__":
    main()
