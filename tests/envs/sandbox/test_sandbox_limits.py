"""Quotas on memory, processes, disk, output and time bite on both ways: with control groups and with rlimits."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from pathlib import Path

import pytest

from k3rl.envs.sandbox import ExecOutcome, ExecResult, SandboxDied, SandboxLimits, launch, provider_named
from k3rl.envs.sandbox.base import SandboxError
from k3rl.envs.sandbox.bwrap import BwrapProvider
from k3rl.envs.sandbox.cgroups import Cgroup, Cgroups, available, find
from k3rl.envs.sandbox.unsafe import SubprocessProvider

PYTHON = "/usr/bin/python3"
WAYS = [
    pytest.param(BwrapProvider(cgroups=cgroups), id=f"bwrap-{'cgroups' if cgroups else 'rlimits'}")
    for cgroups in ((True, False) if available() is not None else (False,))
]
bothways = pytest.mark.parametrize("provider", WAYS)


def run(
    provider: BwrapProvider | SubprocessProvider, *argv: str, limits: SandboxLimits, timeout_s: float = 30
) -> ExecResult:
    async def body() -> ExecResult:
        async with await provider.create(limits) as box:
            return await box.exec(argv, timeout_s=timeout_s)

    return asyncio.run(body())


@bothways
def test_a_memory_hog_is_ended_and_said_to_be_one_also_when_many_processes_share_the_hunger(
    provider: BwrapProvider,
) -> None:
    hog = (
        "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(40 * 2**20)\nx[:] = b'x' * len(x)\ntime.sleep(20)"
    )
    limits = SandboxLimits(memory_bytes=128 * 2**20)
    started = time.monotonic()
    done = run(provider, PYTHON, "-I", "-c", hog, limits=limits)
    assert done.outcome is ExecOutcome.MEMORY_LIMIT
    assert time.monotonic() - started < 15


@bothways
def test_a_fork_bomb_meets_its_limit_and_the_machine_does_not_notice(provider: BwrapProvider) -> None:
    bomb = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        n += 1
except OSError:
    print(n)
"""
    count = run(provider, PYTHON, "-I", "-c", bomb, limits=SandboxLimits(processes=10))
    assert 1 <= int(count.stdout or 0) < 10
    assert count.outcome is ExecOutcome.EXITED


@bothways
def test_a_hundred_megabytes_of_output_are_cut(provider: BwrapProvider) -> None:
    done = run(provider, "/usr/bin/head", "-c", "100000000", "/dev/zero", limits=SandboxLimits(output_bytes=1000))
    assert (done.outcome, len(done.stdout), done.truncated) == (ExecOutcome.OUTPUT_LIMIT, 1000, True)


@bothways
def test_files_tmp_and_workspace_have_quotas(provider: BwrapProvider) -> None:
    limits = SandboxLimits(file_bytes=2**19, tmp_bytes=2**20, workspace_bytes=2**20)

    async def body() -> None:
        async with await provider.create(limits) as box:
            script = "head -c 2000000 /dev/zero > /box/x; stat -c %s /box/x; rm -f /box/x"
            assert int((await box.exec(["sh", "-c", script])).stdout) <= 2**19
            for folder in ("/tmp", "/dev/shm"):
                script = f"for i in 1 2 3 4; do head -c 400000 /dev/zero > {folder}/$i; done; cat {folder}/* | wc -c"
                assert int((await box.exec(["sh", "-c", script])).stdout) <= 2**20
            fill = "i=0; while true; do i=$((i+1)); head -c 200000 /dev/zero > $i; done"
            assert (await box.exec(["sh", "-c", fill])).outcome is ExecOutcome.DISK_LIMIT
            empty = "i=0; while true; do i=$((i+1)); : > empty$i; done"
            again = await box.exec(["sh", "-c", f"rm -f *; {empty}"])
            assert again.outcome is ExecOutcome.DISK_LIMIT, "a million empty files are no free lunch"
            # On a busy machine there are more names by then than a command line holds.
            assert (await box.exec(["sh", "-c", "find . -mindepth 1 -delete && echo clean"])).stdout == b"clean\n"
            assert (await box.exec(["true"])).outcome is ExecOutcome.EXITED

    asyncio.run(body())


@bothways
def test_wall_time_and_processor_time_are_limited(provider: BwrapProvider) -> None:
    assert run(provider, "sleep", "60", limits=SandboxLimits(), timeout_s=0.3).outcome is ExecOutcome.TIME_LIMIT
    spin = run(provider, "sh", "-c", "while :; do :; done", limits=SandboxLimits(cpu_s=1))
    assert spin.outcome is ExecOutcome.TIME_LIMIT
    assert not spin.timed_out


def test_without_control_groups_even_the_unsafe_provider_ends_a_crowd() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        provider = SubprocessProvider(cgroups=False)
    crowd = "i=0; while [ $i -lt 60 ]; do sleep 20 & i=$((i+1)); done; wait"
    done = run(provider, "sh", "-c", crowd, limits=SandboxLimits(processes=10))
    assert done.outcome is ExecOutcome.PROCESS_LIMIT


def test_a_command_sees_its_control_group_and_no_group_stays() -> None:
    groups = available()

    async def body() -> tuple[list[str], list[Path]]:
        async with await provider_named("bwrap").create() as box:
            group = box.holding.group  # type: ignore[attr-defined]
            running = asyncio.create_task(box.exec(["sleep", "5"], timeout_s=0.4))
            await asyncio.sleep(0.25)
            inside = [] if group is None else [Path(f"/proc/{pid}/comm").read_text().strip() for pid in group.members()]
            await running
            return inside, [] if group is None else group.all_folders()

    inside, folders = asyncio.run(body())
    assert ("sleep" in inside) is (groups is not None)
    assert not any(folder.exists() for folder in folders)


def fake_v2(folder: Path, handed: str = "") -> Path:
    """A version 2 hierarchy as the kernel shows it; files of a new group appear when they are written."""
    own = folder / "own"
    own.mkdir()
    (folder / "cgroup.controllers").write_text("cpu memory pids io\n")
    (own / "cgroup.controllers").write_text("cpu memory pids io\n")
    (own / "cgroup.subtree_control").write_text(handed)
    return own


def test_version_2_is_preferred_and_its_files_get_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fake_v2(tmp_path)
    # A plain folder keeps the files that the kernel's would take with it.
    monkeypatch.setattr(Path, "rmdir", lambda self: [[one.unlink() for one in self.iterdir()], os.rmdir(self)])
    groups = find(tmp_path, "0::/own\n")
    assert groups == Cgroups(2, {"memory": own, "pids": own, "cpu": own})
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    group = groups.named()
    (group.all_folders()[0]).mkdir()
    for name in ("memory.swap.max", "memory.oom.group"):
        (group.all_folders()[0] / name).write_text("")
    group.set_limits(SandboxLimits(memory_bytes=2**20, processes=5, cpus=1.5))
    read = {path.name: path.read_text() for path in group.all_folders()[0].iterdir()}
    assert read == {
        "memory.max": "1048576",
        "pids.max": "7",
        "cpu.max": "150000 100000",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
    }
    (group.all_folders()[0] / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.oom_kills() == 2
    group.remove()
    assert not list(own.glob("k3rl-*"))


def test_version_2_without_the_memory_controller_is_none(tmp_path: Path) -> None:
    own = fake_v2(tmp_path)
    (own / "cgroup.controllers").write_text("hugetlb\n")
    assert find(tmp_path, "0::/own\n") is None


def test_cgroup_kill_ends_every_member() -> None:
    """Where a version 2 hierarchy can be written, even without controllers, the kernel's own kill is used."""
    mounted = [
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[2] == "cgroup2"
    ]
    group = Cgroup(2, {"unified": Path(mounted[0] if mounted else "/sys/fs/cgroup", f"k3rl-test-{os.getpid()}")})
    try:
        group.all_folders()[0].mkdir()
    except OSError:
        assert available() is None or available().version == 1  # type: ignore[union-attr]
        return

    async def body() -> int:
        launch.enter()
        order = launch.Order(
            ["/bin/sh", "-c", "sleep 60 & sleep 60"], {}, groups=[str(group.all_folders()[0] / "cgroup.procs")]
        )
        null = os.open("/dev/null", os.O_RDWR)
        started = launch.launch(order, [null, null, null])
        await started.started
        while len(group.members()) < 2:
            await asyncio.sleep(0.01)
        group.kill()
        os.close(null)
        code = await started.ended
        launch.leave()
        return code

    try:
        assert asyncio.run(body()) == -9
        assert group.members() == []
    finally:
        group.remove()
    assert not group.all_folders()[0].exists()


def test_a_launcher_that_is_killed_is_a_dead_sandbox_and_the_next_command_has_a_new_one() -> None:
    async def body() -> None:
        async with await provider_named("bwrap").create() as box:
            running = asyncio.create_task(box.exec(["sleep", "30"]))
            await asyncio.sleep(0.3)
            launch.launcher().process.kill()
            with pytest.raises(SandboxDied, match="starts sandboxes has ended"):
                await running
            assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    asyncio.run(body())


def test_a_group_that_the_kernel_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no control group"):
        Cgroups(2, {"memory": tmp_path / "absent", "pids": tmp_path / "absent"}).named().make(SandboxLimits())
