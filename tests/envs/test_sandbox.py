"""One contract for every local provider, and what bubblewrap adds."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3rl.envs.sandbox import Sandbox, SandboxLimits, SandboxProvider, SandboxUnavailable, provider_named
from k3rl.envs.sandbox.bwrap import BwrapProvider, refusal
from k3rl.envs.sandbox.slots import Slot

PYTHON = "/usr/bin/python3"


@pytest.fixture(params=["bwrap", "subprocess"])
def provider(request: pytest.FixtureRequest) -> SandboxProvider:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return provider_named(request.param)


def in_sandbox(provider: SandboxProvider, body: Callable[[Sandbox], Any], limits: SandboxLimits | None = None) -> Any:
    async def run() -> Any:
        async with await provider.create(limits) as box:
            return await body(box)

    return asyncio.run(run())


def run(provider: SandboxProvider, *argv: str, limits: SandboxLimits | None = None, **options: Any) -> Any:
    return in_sandbox(provider, lambda box: box.exec(list(argv), **options), limits)


def test_a_command_gives_its_streams_and_status(provider: SandboxProvider) -> None:
    result = run(provider, "/bin/sh", "-c", "cat; echo wrong >&2; exit 3", stdin=b"hello")
    assert (result.returncode, result.stdout, result.stderr) == (3, b"hello", b"wrong\n")
    assert (result.truncated, result.timed_out, result.workspace_exceeded) == (False, False, False)


def test_files_go_in_and_out_and_commands_see_them(provider: SandboxProvider) -> None:
    async def body(box: Sandbox) -> None:
        await box.write("deep/er/a.txt", b"one", 0o640)
        result = await box.exec(["/bin/sh", "-c", "cat a.txt; echo two > b.txt; stat -c %a a.txt"], cwd="deep/er")
        assert result.stdout == b"one640\n"
        assert await box.read("deep/er/b.txt") == b"two\n"
        assert await box.read("deep/er/b.txt", max_bytes=2) == b"tw"
        with pytest.raises(FileNotFoundError):
            await box.read("nothing")

    in_sandbox(provider, body)


@pytest.mark.parametrize("path", ["../up", "a/../../up", "", "/"])
def test_paths_stay_inside_the_workspace(path: str, provider: SandboxProvider) -> None:
    async def body(box: Sandbox) -> None:
        with pytest.raises(ValueError, match="inside the workspace"):
            await box.read(path)
        with pytest.raises(ValueError, match="inside the workspace"):
            await box.write(path, b"")

    in_sandbox(provider, body)


def test_links_and_pipes_are_not_followed(provider: SandboxProvider) -> None:
    async def body(box: Sandbox) -> None:
        await box.exec(["/bin/sh", "-c", "ln -s /etc/passwd link; ln -s /etc folder; mkfifo pipe"])
        for path in ("link", "folder/passwd", "pipe"):
            with pytest.raises(OSError, match=r"."):
                await box.read(path)
        with pytest.raises(OSError, match=r"."):
            await box.write("link", b"x")
        with pytest.raises(OSError, match=r"."):
            await box.write("folder/new", b"x")

    in_sandbox(provider, body)


def test_time_is_limited(provider: SandboxProvider) -> None:
    started = time.monotonic()
    result = run(provider, "/bin/sh", "-c", "echo begun; sleep 60", timeout_s=0.5)
    assert result.timed_out
    assert result.returncode is None
    assert result.stdout == b"begun\n"
    assert time.monotonic() - started < 10


def test_output_is_kept_up_to_its_limit_and_a_flood_is_ended(provider: SandboxProvider) -> None:
    limits = SandboxLimits(output_bytes=1000)
    some = run(provider, "/bin/sh", "-c", "head -c 5000 /dev/zero", limits=limits)
    assert (some.returncode, len(some.stdout), some.truncated) == (0, 1000, True)
    flood = run(provider, "/usr/bin/yes", limits=limits, timeout_s=60)
    assert (flood.returncode, len(flood.stdout), flood.truncated, flood.timed_out) == (None, 1000, True, False)


def test_memory_and_file_size_are_limited(provider: SandboxProvider) -> None:
    limits = SandboxLimits(memory_bytes=256 * 2**20, file_bytes=2**20)
    hog = run(provider, PYTHON, "-c", "b'x' * 10**9", limits=limits)
    assert b"MemoryError" in hog.stderr
    large = run(provider, PYTHON, "-c", "open('large', 'wb').write(b'x' * 2**21)", limits=limits)
    assert b"File too large" in large.stderr


def test_a_full_workspace_is_reported(provider: SandboxProvider) -> None:
    limits = SandboxLimits(workspace_bytes=2**20)
    fill = "for i in 1 2 3; do head -c 500000 /dev/zero > $i; done"
    assert run(provider, "/bin/sh", "-c", fill, limits=limits).workspace_exceeded


def test_the_environment_is_not_inherited(provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3RL_SECRET", "leak")
    result = run(provider, "/usr/bin/env", env={"GIVEN": "yes"})
    assert b"leak" not in result.stdout
    assert b"GIVEN=yes" in result.stdout


def test_stop_removes_the_workspace_whatever_is_in_it(provider: SandboxProvider) -> None:
    async def body(box: Any) -> Path:
        await box.exec(["/bin/sh", "-c", "mkdir -p a/b; touch a/b/c; chmod 000 a/b; chmod 500 a"])
        path: Path = box._workspace.path
        assert path.is_dir()
        await box.stop()
        return path

    assert not in_sandbox(provider, body).exists()


BWRAP = BwrapProvider()


def test_bwrap_checks_that_it_works() -> None:
    assert BWRAP.check() is None  # it raises where sandboxes cannot be made


def test_bwrap_gives_each_sandbox_a_user_of_its_own_when_it_may() -> None:
    slots = [Slot() for _ in range(3)]
    expected = 3 if os.geteuid() == 0 else 0
    assert len({slot.uid for slot in slots if slot.uid is not None}) == expected
    uids = [slot.uid for slot in slots]
    for slot in slots:
        slot.release()
        slot.release()
    again = Slot()
    assert again.uid == uids[0]
    again.release()


def test_bwrap_has_no_network_no_home_and_a_read_only_system() -> None:
    script = """
import os, socket
print(sorted(os.listdir('/')))
for path in ('/usr/x', '/x', '/dev/x', '/proc/x', '/sys/x', '/usr/lib/python3/dist-packages/sitecustomize.py'):
    try:
        open(path, 'w')
        print('wrote', path)
    except OSError:
        pass
try:
    socket.create_connection(('127.0.0.1', 22), timeout=1)
except OSError as error:
    print(type(error).__name__)
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('10.0.0.1', 53))
except OSError as error:
    print(error.strerror)
"""
    lines = run(BWRAP, PYTHON, "-I", "-c", script).stdout.decode().splitlines()
    roots = {"bin", "box", "dev", "lib", "proc", "sbin", "tmp", "usr", "lib32", "lib64"}
    assert set(eval(lines[0])) <= roots
    assert lines[1:] == ["ConnectionRefusedError", "Network is unreachable"]


def test_bwrap_limits_tmp_and_processes() -> None:
    limits = SandboxLimits(tmp_bytes=2**20, processes=10)
    for folder in ("/tmp", "/dev/shm"):
        fill = f"head -c 2000000 /dev/zero > {folder}/x; stat -c %s {folder}/x"
        assert int(run(BWRAP, "/bin/sh", "-c", fill, limits=limits).stdout) <= 2**20
    bomb = """
import os
n = 0
try:
    while True:
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        n += 1
except OSError:
    print(n)
"""
    count = run(BWRAP, PYTHON, "-I", "-c", bomb, limits=limits, timeout_s=20)
    assert 1 <= int(count.stdout or 0) < 10


def test_bwrap_kills_what_a_command_leaves_behind() -> None:
    mark = f"31{os.getpid()}.5"
    run(BWRAP, "/bin/sh", "-c", f"setsid sleep {mark} & setsid setsid sleep {mark} & echo left")
    run(BWRAP, "/bin/sh", "-c", f"setsid sleep {mark} & sleep 60", timeout_s=0.3)
    for _ in range(100):
        alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(path)]
        if not alive:
            return
        time.sleep(0.02)
    assert alive == []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_two_sandboxes_share_nothing() -> None:
    async def both() -> None:
        async with await BWRAP.create() as one, await BWRAP.create() as two:
            await one.exec(["/bin/sh", "-c", "echo secret > /tmp/x; echo secret > x"])
            result = await two.exec(["/bin/sh", "-c", "ls /tmp; ls; ls /box"])
            assert result.stdout == b""
            assert (await one.exec(["/bin/sh", "-c", "ls /tmp; ls"])).stdout == b"x\n"

    asyncio.run(both())


def test_without_bubblewrap_the_error_names_package_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxUnavailable, match=r"package `bubblewrap`.*apt-get install -y bubblewrap"):
        BWRAP.check()
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        BWRAP.start_program_server()


def test_refused_namespaces_name_the_setting() -> None:
    text = refusal("bwrap: setting up uid map: Permission denied")
    assert "setting up uid map" in text
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in text


def test_a_command_that_is_cancelled_at_any_moment_of_its_start_leaves_nothing(provider: SandboxProvider) -> None:
    word = f"word-{os.getpid()}-{provider.name}"

    async def body(box: Sandbox) -> None:
        for number in range(40):
            running = asyncio.create_task(box.exec(["/bin/sh", "-c", f": {word}; sleep 30"]))
            await asyncio.sleep(number / 4000)
            running.cancel()
            done, _ = await asyncio.wait({running}, timeout=20)
            assert done, f"cancelled after {number / 4} ms, it never came back"
            assert running.cancelled()

    in_sandbox(provider, body)
    assert word not in "".join(_text(entry / "cmdline") for entry in Path("/proc").iterdir() if entry.name.isdigit())
