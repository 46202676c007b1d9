"""Compiles a submission for the GPU and says what to launch. In a sandbox without a GPU or contents.

request.json: kind ("triton" or "cuda"), capability (90 for Hopper), calls as for python_worker. Leaves N.cubin and
plan.json: per call a list of launches {cubin, name, grid, threads, shared, args: [[kind, value]], scratch}. The host
checks all of it: whatever this process says is the submission's word.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from launches import argument_of, grid_of, module_of

POINTERS = {"f32": "*fp32", "bf16": "*bf16", "u8": "*u8", "i32": "*i32"}
_DIVISIBLE = [["tt.divisibility", 16]]


class Cubins:
    """Compiled kernels, each different one once."""

    def __init__(self, kind: str, capability: int) -> None:
        self._kind, self._capability = kind, capability
        self._known: dict[str, dict[str, Any]] = {}
        if kind == "cuda":
            compiler = shutil.which("nvcc", path="/usr/local/cuda/bin:/usr/local/bin:/usr/bin") or "nvcc"
            own = "a" if capability >= 90 else ""  # the instructions of this architecture alone
            line = [compiler, "-cubin", f"-arch=sm_{capability}{own}", "-O3", "-o", "0.cubin", "kernel.cu"]
            subprocess.run(line, check=True)

    def of(self, launch: dict[str, Any], arguments: list[tuple[str, Any]], kinds: dict[str, str]) -> dict[str, Any]:
        """Which cubin a launch needs, its entry, threads, shared memory, and whether scratch pointers follow."""
        if self._kind == "cuda":
            return {
                "cubin": 0,
                "name": str(launch["kernel"]),
                "threads": int(launch.get("threads", 256)),
                "shared": int(launch.get("shared", 0)),
                "scratch": 0,
            }
        return self._triton(launch, arguments, kinds)

    def _triton(
        self, launch: dict[str, Any], arguments: list[tuple[str, Any]], kinds: dict[str, str]
    ) -> dict[str, Any]:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        function, constants = launch["kernel"], dict(launch.get("constants", {}))
        names = [name for name in function.arg_names if name not in constants]
        signature, hints = {}, {}
        for name in function.arg_names:
            if name in constants:
                signature[name] = "constexpr"
                continue
            kind, value = arguments[names.index(name)]
            signature[name] = type_of(kind, value, kinds)
            if kind == "tensor" or (kind == "int" and value % 16 == 0):
                hints[(function.arg_names.index(name),)] = _DIVISIBLE
        options = {"num_warps": int(launch.get("num_warps", 4)), "num_stages": int(launch.get("num_stages", 3))}
        key = json.dumps([function.__name__, signature, sorted(map(str, hints)), repr(constants), options])
        if key not in self._known:
            places = {(function.arg_names.index(name),): value for name, value in constants.items()}
            source = ASTSource(function, signature, places, hints)
            made = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=options)
            number = len(self._known)
            with open(f"{number}.cubin", "wb") as file:
                file.write(made.asm["cubin"])
            self._known[key] = {
                "cubin": number,
                "name": made.metadata.name,
                "threads": 32 * made.metadata.num_warps,
                "shared": made.metadata.shared,
                "scratch": 2,
            }
        return self._known[key]


def type_of(kind: str, value: Any, kinds: dict[str, str]) -> str:
    """A parameter's type as Triton writes it."""
    if kind == "tensor":
        return POINTERS[kinds[value]]
    if kind == "float":
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def main() -> None:
    """All calls in order."""
    with open("request.json", encoding="utf-8") as file:
        request = json.load(file)
    module = module_of("kernel.py")
    cubins = Cubins(request["kind"], request["capability"])
    plan = []
    for call in request["calls"]:
        kinds = {name: dtype for name, dtype, _ in (*call["inputs"], *call["outputs"])} | {"scratch": "f32"}
        rows = []
        for launch in module.launches(dict(call["dim"])):
            arguments = [argument_of(one, call["dim"], list(kinds)) for one in launch["args"]]
            row = cubins.of(launch, arguments, kinds)
            rows.append({**row, "grid": grid_of(launch), "args": arguments})
        plan.append(rows)
    with open("plan.json", "w", encoding="utf-8") as file:
        json.dump(plan, file)


if __name__ == "__main__":
    main()
