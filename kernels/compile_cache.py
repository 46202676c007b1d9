"""Compiled kernels are kept between runs, shared by the processes of a machine, and made ahead by several at once.

    <user's cache>/k3rl/kernels/specializations.jsonl     what runs have launched, of every version
                                triton-3.6.0-ptxas-13.5.37/...   what was compiled, as Triton keeps it
                                inductor-torch-2.11.0/...        what torch.compile made, as it keeps it

`use` has this process keep what it compiles, and write down what that was. `python -m k3rl.kernels.compile_cache`
compiles what is written down and missing, on as many cores as there are, without a GPU; it prints `done total` as it
goes. A specialization stays right when a kernel's source changes, so the first run of a new version need not compile
its kernels one after the other.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from k3rl.kernels import dispatch, ptxas

TABLE = "specializations.jsonl"
SHIPPED = Path(__file__).with_name(TABLE)
"""What runs of the named sizes launch, if it was recorded for this version."""
_OPTIONS = {  # that a launch chooses; a backend fills the others in for its target, with paths of its own
    "num_warps",
    "num_ctas",
    "num_stages",
    "maxnreg",
    "enable_fp_fusion",
    "launch_cooperative_grid",
    "launch_pdl",
    "debug",
    "sanitize_overflow",
    "default_dot_input_precision",
}
_NEWEST = 512  # of the user's specializations that are compiled ahead
_MANAGER = "k3rl.kernels.triton_cache:SharedCache"


@dataclass(frozen=True)
class Specialization:
    """One kernel with its constants and argument types. target: (backend, arch, threads of a warp); data: Triton's JSON
    of it; seconds: what compiling it took, 0 where it was found compiled."""

    module: str
    name: str
    target: tuple[str, int, int]
    data: str
    seconds: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        return self.module, self.name, self.target, self.data


def home() -> Path:
    """The folder of k3rl's kernels in K3RL_CACHE_DIR, or in the user's cache."""
    own = os.environ.get("K3RL_CACHE_DIR")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3rl") / "kernels"


def directory() -> Path:
    """Where Triton keeps what it compiles: TRITON_CACHE_DIR, else a folder for these versions in `home`."""
    if named := os.environ.get("TRITON_CACHE_DIR"):
        return Path(named)
    ptxas.choose()
    used = ptxas.path()
    assembler = ".".join(map(str, (ptxas.version(used) if used else None) or ("none",)))
    triton = metadata.version("triton") if dispatch.have_triton() else "none"
    return home() / f"triton-{triton}-ptxas-{assembler}"


def compiled() -> int:
    """Kernels that are in the cache."""
    try:
        return sum(1 for _ in directory().glob("*/__grp__*.json"))
    except OSError:  # entries come and go
        return 0


def _portable(data: str) -> str:
    """Triton's JSON of a specialization as any machine may compile it."""
    values = {name: value for name, value in json.loads(data).items() if name not in ("name", "key")}
    options = values["options"].items()
    values["options"] = {name: value for name, value in options if name in _OPTIONS and value is not None}
    return json.dumps(values, separators=(",", ":"))


class _Recorder:
    """Writes down each specialization that this process is the first to launch."""

    def __init__(self) -> None:
        self._known = {one.key for one in recorded()}
        self._took_s = 0.0

    def timed(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's listener: a kernel was compiled, or found."""
        self._took_s = 0.0 if cache_hit else times.total / 1e6

    def launched(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        """Triton's hook: a kernel is there for the first time in this process."""
        from triton.runtime import driver

        target = driver.active.get_current_target()
        place = target.backend, target.arch, target.warp_size
        data = _portable(compile["specialization_data"])
        one = Specialization(fn.module, fn.name, place, data, round(self._took_s, 2))
        if one.key in self._known or not fn.module.startswith("k3rl."):
            return
        self._known.add(one.key)
        with open(home() / TABLE, "a", encoding="utf-8") as file:  # a line at a time, from several processes
            file.write(json.dumps(asdict(one)) + "\n")


def use() -> None:
    """This process keeps its compiled kernels in the cache, shares them, and writes down what it launches.

    To be called before the first launch. Does nothing without Triton or where the cache cannot be written.
    """
    if not dispatch.have_triton():
        return
    folder = directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        home().mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    # Its own default is a folder for temporary files, which a machine may empty between two runs.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / f"inductor-torch-{metadata.version('torch')}"))
    os.environ.setdefault("TRITON_CACHE_MANAGER", _MANAGER)
    from triton import knobs

    _hash_callees_first()
    recorder = _Recorder()
    knobs.compilation.listener = recorder.timed
    knobs.runtime.jit_post_compile_hook = recorder.launched


def _hash_callees_first() -> None:
    """Makes the name of a compiled kernel the same in every process.

    Triton 3.6 puts the constants that a called function reads into its caller's hash only where that function was
    hashed before, so what one process has compiled another would not find.
    """
    from triton.runtime import jit

    finder: Any = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if update is None or getattr(update, "callees_first", False):
        return

    def update_hash(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 (computed once, and kept)
        update(self, function)

    update_hash.callees_first = True  # type: ignore[attr-defined]
    finder._update_hash = update_hash


def recorded(capabilities: Collection[int] = ()) -> list[Specialization]:
    """What runs have written down and, for GPUs of these capabilities, what the package ships: each once, the slowest
    to compile first."""
    found: dict[tuple[Any, ...], Specialization] = {}
    own = _lines(home() / TABLE)
    shipped = [one for one in _lines(SHIPPED) if one.target[1] in capabilities]
    for one in (*shipped, *own[-_NEWEST:]):
        found.setdefault(one.key, one)
    return sorted(found.values(), key=lambda one: -one.seconds)


def _lines(path: Path) -> list[Specialization]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            values = json.loads(line)
            found.append(Specialization(**values | {"target": tuple(values["target"])}))
        except (ValueError, TypeError, KeyError):  # another version's, or torn by a kill
            continue
    return found


# ------------------------------------------------------------------------------------------------- made ahead


def compile_one(one: Specialization) -> bool:
    """Compiles one for its target, unless it is in the cache. False for a kernel that is no longer as it was."""
    import triton.language as tl
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        kernel = getattr(importlib.import_module(one.module), one.name)
        about = json.loads(one.data)
    except (ImportError, AttributeError, ValueError):
        return False

    def constant(value: Any) -> Any:
        if tl.dtype.is_dtype(value):
            return tl.dtype(value)
        return tl.constexpr(value["constexpr"]) if isinstance(value, dict) else value

    keys = [tuple(key) for key in about["constant_keys"]]
    constants = dict(zip(keys, map(constant, about["constant_vals"]), strict=True))
    attributes = dict(zip(map(tuple, about["attrs_keys"]), about["attrs_vals"], strict=True))
    options = {key: _tuples(value) for key, value in about["options"].items()}
    signature = {key: _tuples(value) for key, value in about["signature"].items()}
    if set(signature) != set(kernel.arg_names):
        return False
    source = ASTSource(kernel, signature, constants, attributes)
    try:
        compiled = compile_kernel(source, target=GPUTarget(*one.target), options=options)
    except Exception:  # it will be compiled where it is launched, if it still is, and that says what is wrong
        return False
    if one.target[0] == "cuda":
        from triton.backends.nvidia import driver

        with suppress(Exception):  # where there is no driver to link to, nothing is launched either
            driver.CudaLauncher(source, compiled.metadata)  # the host's side, which a C compiler makes for a signature
    return True


def _tuples(value: Any) -> Any:
    """JSON has no tuples, and arguments of kernels are no lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def compile_all(wanted: Sequence[Specialization], processes: int) -> Iterator[int]:
    """Compiles all of these on so many processes; gives how many are done, as they are. Forks: no GPU may be in use."""
    for module in sorted({one.module for one in wanted}):  # once, before the processes are copies of this one
        try:
            importlib.import_module(module)
        except ImportError:
            continue
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for number, _ in enumerate(pool.imap_unordered(compile_one, wanted), start=1):
            yield number


def _capabilities() -> set[int]:
    """Those of this machine's GPUs, such as 90, as the driver's tool says: nothing here may use one."""
    line = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(line, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    return {int(text.replace(".", "")) for text in said.split() if text.replace(".", "").isdecimal()}


def main(say: Callable[[str], None] = lambda text: print(text, flush=True)) -> None:
    """Compiles what is written down and missing."""
    if not dispatch.have_triton():
        return
    use()
    wanted = recorded(_capabilities())
    if wanted:
        say(f"0 {len(wanted)}")
        begun = time.monotonic()
        for done in compile_all(wanted, min(len(wanted), len(os.sched_getaffinity(0)))):
            say(f"{done} {len(wanted)}")
        say(f"{len(wanted)} {len(wanted)} {time.monotonic() - begun:.1f}")


if __name__ == "__main__":
    main()
