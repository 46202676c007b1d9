"""Submissions in Python, run in sandboxes by an interpreter that has their packages: Triton interpreted, numba, torch.

A sandbox sees /usr and nothing else of this machine, so the folder of the running environment's packages is shown to
it read-only, and a Python in /usr of the same version imports from there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from k3rl.envs.compiler.toolchain import Refused
from k3rl.envs.kernel.driver import Call
from k3rl.envs.kernel.operators import STORAGE, Arrays, Operator, Tensor
from k3rl.envs.kernel.operators.base import BFLOAT16
from k3rl.envs.kernel.toolchain import MEBIBYTE, KernelToolsMissing
from k3rl.envs.sandbox import Sandbox, SandboxLimits, SandboxProvider
from k3rl.envs.sandbox.bwrap import BwrapProvider

PACKAGES = {
    "triton": ("torch", "triton"),
    "cuda": (),
    "numba": ("numpy", "numba"),
    "model": ("torch",),
    "compile": ("torch", "triton"),
}
ADVICE = {"triton": "pip install 'k3rl[kernels]'", "torch": "pip install torch", "numba": "pip install numba"}
RUN_S = 120.0
# The interpreter rounds float32 to bfloat16 by cutting it off, which costs up to a whole unit in the last place.
INTERPRETED = dataclasses.replace(BFLOAT16, rounding=1.0)
_ROOM = Path(__file__).with_name("sandboxed")
_LIMITS = SandboxLimits(
    memory_bytes=32768 * MEBIBYTE, processes=64, cpu_s=300, file_bytes=256 * MEBIBYTE, workspace_bytes=512 * MEBIBYTE
)


def check(provider: SandboxProvider, language: str) -> None:
    """Raises KernelToolsMissing when a package of this language is not installed or cannot be shown to a sandbox."""
    for name in PACKAGES[language]:
        if importlib.util.find_spec(name) is None:
            advice = ADVICE.get(name, f"pip install {name}")
            raise KernelToolsMissing(f"kernels in {language} need the package {name}, which is not here; `{advice}`")
    interpreter(provider)
    closed = [path for path in _packages() if not _open_to_all(Path(path))]
    if isinstance(provider, BwrapProvider) and os.geteuid() == 0 and closed:
        raise KernelToolsMissing(
            f"a sandbox's user may not enter {closed[0]}, where the packages for {language} are; "
            "put the environment into a folder that every user may enter"
        )


def interpreter(provider: SandboxProvider) -> str:
    """A Python inside /usr of the running version; outside bubblewrap the running one. Raises KernelToolsMissing."""
    if not isinstance(provider, BwrapProvider):
        return sys.executable
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = shutil.which(name, path="/usr/local/bin:/usr/bin")
    if found is None or not os.path.realpath(found).startswith("/usr/"):
        raise KernelToolsMissing(
            f"kernels in Python run on a {name} inside /usr, where sandboxes see it; `sudo apt-get install -y {name}`"
        )
    return found


def _packages() -> list[str]:
    """The folders that hold the packages."""
    folders = []
    for name in ("numpy", "torch", "triton", "numba"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(folders))


def _open_to_all(folder: Path) -> bool:
    return all(one.stat().st_mode & stat.S_IXOTH for one in (folder, *folder.parents))


def with_packages(provider: SandboxProvider, devices: Sequence[str] = ()) -> SandboxProvider:
    """The provider, showing the packages; one that is not bubblewrap must have them by itself."""
    if isinstance(provider, BwrapProvider):
        return provider.showing(_packages(), devices)
    return provider


async def script(
    provider: SandboxProvider, sandbox: Sandbox, name: str, environment: Mapping[str, str], timeout_s: float = RUN_S
) -> str | None:
    """Run a file of `sandboxed/` in a workspace; what is wrong, or None when it ended well."""
    for file in dict.fromkeys(("launches.py", name)):
        await sandbox.write(file, (_ROOM / file).read_bytes())
    variables = {"PYTHONPATH": ":".join([*_packages(), "."]), "OMP_NUM_THREADS": "1", **environment}
    line = [interpreter(provider), "-s", "-P", "-B", name]
    done = await sandbox.exec(line, env=variables, timeout_s=timeout_s)
    if done.returncode == 0:
        return None
    state = "time over" if done.timed_out else f"exit status {done.returncode}"
    return f"{state}: {done.stderr.decode('utf-8', 'replace').strip()[-600:]}"


async def run(
    provider: SandboxProvider, language: str, files: Mapping[str, str], calls: Sequence[Call]
) -> tuple[list[Arrays], list[Arrays]] | str:
    """(outputs of every call as stored, for Triton those without its kernels too), or why the submission failed.

    Raises Refused for changed inputs.
    """
    async with await with_packages(provider).create(_LIMITS) as sandbox:
        await sandbox.write("kernel.py", files["kernel.py"].encode())
        await sandbox.write("request.json", json.dumps(request(language, calls)).encode())
        for number, call in enumerate(calls):
            for name, array in call.inputs.items():
                await sandbox.write(f"{number}.{name}", array.tobytes())
        environment = {"TRITON_INTERPRET": "1", "HOME": "/tmp"}
        failed = await script(provider, sandbox, "python_worker.py", environment)
        if failed is not None:
            return failed
        found: tuple[list[Arrays], list[Arrays]] = ([], [])
        for number, call in enumerate(calls):
            after = await _tensors(sandbox, number, call.operator.inputs, call, ".after")
            if after is None:
                return f"the inputs of call {number} are gone"
            for name, array in after.items():
                if array.tobytes() != call.inputs[name].tobytes():
                    raise Refused("writes_outside", f"the input {name} was changed")
            for kept, ending in zip(found, ("", ".ghost") if language == "triton" else ("",), strict=False):
                outputs = await _tensors(sandbox, number, call.operator.outputs, call, ending)
                if outputs is None:
                    return f"outputs of call {number} are not complete"
                kept.append(outputs)
        return found


async def _tensors(sandbox: Sandbox, number: int, tensors: Sequence[Tensor], call: Call, ending: str) -> Arrays | None:
    """Tensors that a worker has written, None when one of them is not complete."""
    found = {}
    for tensor in tensors:
        size = tensor.bytes(call.dims)
        try:
            data = await sandbox.read(f"{number}.{tensor.name}{ending}", size + 1)
        except OSError:
            return None
        if len(data) != size:
            return None
        found[tensor.name] = np.frombuffer(data, STORAGE[tensor.dtype]).reshape(tensor.sizes(call.dims))
    return found


def request(kind: str, calls: Sequence[Call]) -> dict[str, object]:
    """What a worker is told of the calls: sizes and tensors, no contents."""
    rows = [
        {
            "dim": dict(call.dims),
            "inputs": [[one.name, one.dtype, one.sizes(call.dims)] for one in call.operator.inputs],
            "outputs": [[one.name, one.dtype, one.sizes(call.dims)] for one in call.operator.outputs],
        }
        for call in calls
    ]
    return {"kind": kind, "calls": rows}


def interpreted(operator: Operator, language: str) -> Operator:
    """The operator with what the Triton interpreter can keep of bfloat16."""
    lossy = language == "triton" and any(one.dtype == "bf16" for one in operator.outputs)
    return dataclasses.replace(operator, tolerance=INTERPRETED) if lossy else operator
