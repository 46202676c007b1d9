"""`k3rl doctor`: does this machine have what a run needs?"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser

OLDEST_PYTHON = (3, 11)
CPUS = 2
MEMORY_GIB = 6.0
DISK_GIB = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `fix` is empty when all is well."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def doctor(words: Sequence[str]) -> int:
    """The `k3rl doctor` command; exits 3 when something that a run needs is missing."""
    parser = Parser("doctor", "Checks what a run needs, and says how to mend what is missing.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--reap", action="store_true", help="first remove what sandboxes of dead processes left behind")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    removed = _reap() if arguments.reap else []
    checks = [*removed, *run_checks()]
    if arguments.json:
        print_json({"checks": [asdict(check) for check in checks]})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{'ok     ' if check.ok else 'MISSING'}  {check.name:<{width}}  {check.found}")
            if check.fix:
                print(f"         {'':<{width}}  fix: {check.fix}")
    return 0 if all(check.ok for check in checks) else 3


def run_checks() -> Iterator[Check]:
    """Every check, in the order a run would stumble over them."""
    yield _python()
    yield from _packages()
    yield _ray_authentication()
    yield from _ray_ports()
    yield _sandbox()
    yield _sandbox_limits()
    yield _at_least("cpus", float(len(os.sched_getaffinity(0))), CPUS, "", "use a machine with 2 or more CPUs")
    yield _at_least("memory", memory_gib(), MEMORY_GIB, " GiB", "close other programs, or use a larger machine")
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    yield _at_least("disk", disk, DISK_GIB, " GiB free here", "free some space, or write runs elsewhere with --out")
    yield from _kernels()


def _python() -> Check:
    ok = sys.version_info >= OLDEST_PYTHON
    return Check("python", ok, platform.python_version(), "" if ok else "install Python 3.11 or newer")


def _packages() -> Iterator[Check]:
    """The required packages of k3rl's own metadata, each against the range named there."""
    from packaging.requirements import Requirement

    for text in metadata.requires("k3rl") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Check(requirement.name, False, "not installed", f"pip install '{text}'")
            continue
        ok = requirement.specifier.contains(found, prereleases=True)
        yield Check(requirement.name, ok, found, "" if ok else f"pip install '{text}'")


def _ray_authentication() -> Check:
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is None or mode == "token":
        return Check("ray authentication", True, "token" if mode else "token (k3rl sets it when it starts Ray)")
    fix = "unset RAY_AUTH_MODE, or set it to token: whoever reaches an open Ray port can run programs here"
    return Check("ray authentication", False, f"RAY_AUTH_MODE={mode}", fix)


def _ray_ports() -> Iterator[Check]:
    """What of the Ray processes of this machine others could reach. Ray binds most of its ports to every interface."""
    from k3rl.cli.ports import ray_ports

    found = ray_ports()
    if not found:
        yield Check("ray ports", True, "no Ray of this user runs here; while one does, its ports are listed here")
        return
    inside = [one for one in found if one.loopback]
    if inside:
        yield Check("ray ports", True, f"{len(inside)} on loopback: {', '.join(str(one.port) for one in inside)}")
    for one in (one for one in found if not one.loopback):  # Ray itself opens them, and a run does not lack them
        warned = "" if one.token else "; close it to others by a firewall, since it answers whoever reaches it"
        yield Check("ray port", True, one.described() + warned)


def _sandbox() -> Check:
    """Whether the sandbox that a run uses starts, not only whether its program is there: a kernel may forbid it."""
    from k3rl.envs.sandbox import SandboxUnavailable, provider_named

    try:
        provider_named("bwrap").check()
    except SandboxUnavailable as error:
        found, _, fix = str(error).partition("; ")
        return Check("sandbox", False, found, fix or "make bubblewrap work for this user, see the message")
    return Check("sandbox", True, "bubblewrap starts")


def _sandbox_limits() -> Check:
    """What holds a sandbox to its memory, processes and processors. Both ways are good for a run."""
    from k3rl.envs.sandbox import cgroups

    groups = cgroups.available()
    if groups is not None:
        return Check("sandbox limits", True, groups.describe())
    found = f"rlimits and a watch over memory (no writable cgroup; {cgroups.VARIABLE} may name an empty, delegated one)"
    return Check("sandbox limits", True, found)


def _reap() -> list[Check]:
    """Clear up after sandboxes whose owner is dead."""
    from k3rl.envs.sandbox import leases

    removed = leases.reap()
    return [Check("reaped", True, thing) for thing in removed] or [Check("reaped", True, "nothing was left behind")]


def _at_least(name: str, found: float, wanted: float, unit: str, fix: str) -> Check:
    return Check(name, found >= wanted, f"{found:.4g}{unit} (a run wants {wanted:g})", "" if found >= wanted else fix)


def memory_gib() -> float:
    """Memory that this process may use: the machine's, or its control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
            total = min(total, int(text))
    return total / 2**30


def _kernels() -> Iterator[Check]:
    """GPU, triton and compiler, from the room that knows them. A machine without a GPU needs none of it."""
    from k3rl import kernels

    needed = shutil.which("nvidia-smi") is not None
    checks: Callable[[], Sequence[dict[str, object]]] | None = getattr(kernels, "doctor_checks", None)
    for entry in checks() if checks is not None else ():
        name, fine, found = str(entry["name"]), bool(entry["ok"]), str(entry["found"])
        if fine or needed:
            yield Check(name, fine, found, str(entry.get("fix") or ""))
        else:
            yield Check(name, True, f"{found}; there is no GPU, so it is not needed", "")
