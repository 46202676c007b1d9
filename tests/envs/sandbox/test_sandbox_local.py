"""What bubblewrap adds to the contract of all providers, and how local sandboxes begin and end."""

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


def test_the_environment_is_not_inherited(provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3RL_SECRET", "leak")
    result = run(provider, "/usr/bin/env", env={"GIVEN": "yes"})
    assert b"leak" not in result.stdout
    assert b"GIVEN=yes" in result.stdout


def test_stop_removes_the_workspace_whatever_is_in_it(provider: SandboxProvider) -> None:
    async def body(box: Any) -> Path:
        await box.exec(["/bin/sh", "-c", "mkdir -p a/b; touch a/b/c; chmod 000 a/b; chmod 500 a"])
        path: Path = box.holding.workspace.path
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
