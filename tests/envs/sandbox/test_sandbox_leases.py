"""What a sandbox holds is on disk, and a reaper removes it when its owner is dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from k3rl.cli import main
from k3rl.envs.leaks import Census, watched
from k3rl.envs.sandbox import (
    ProgramJob,
    ProgramRunner,
    ProgramStatus,
    SandboxDied,
    SandboxError,
    SandboxLimits,
    launch,
    leases,
    provider_named,
)
from k3rl.envs.sandbox.leases import Lease, is_over, owner_now, reap, start_time

# Makes two sandboxes with something running in each and a program server, tells where, and hangs.
OWNER = """
import asyncio, sys, warnings
warnings.simplefilter("ignore")
from k3rl.envs.sandbox import ProgramRunner, ProgramJob, provider_named
async def body():
    boxes = [await provider_named(name, cgroups=name == "bwrap").create() for name in ("bwrap", "subprocess")]
    runner = ProgramRunner(provider_named("bwrap"))
    await runner.run([ProgramJob("def f(a):\\n return a", "f", ((1,),))])
    script = f"(setsid setsid sleep {sys.argv[1]} &) ; sleep {sys.argv[1]}"
    work = [asyncio.create_task(box.exec(["sh", "-c", script])) for box in boxes]
    await asyncio.sleep(0.7)
    print(*(box.holding.workspace.path for box in boxes), flush=True)
    await asyncio.gather(*work)
asyncio.run(body())
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    folder = tmp_path / "runtime"
    monkeypatch.setenv(leases.VARIABLE, str(folder))
    return folder


def commands_with(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if word in text and int(entry.name) != os.getpid():
                found.append(text)
    return found


def test_what_an_owner_killed_in_the_middle_left_behind_is_gone_after_the_reaper_ran(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word = f"41{os.getpid()}.25"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, word], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        boxes = [Path(text) for text in owner.stdout.readline().split()]
        assert reap() == [], "a living owner's things are its own"
        assert len(list(runtime.glob("*.json"))) == 3
        assert len(commands_with(f"sleep {word}")) >= 4
        held = [json.loads(path.read_text()) for path in runtime.glob("*.json")]
        groups = [Path(path) for lease in held for path in (lease["group"] or {}).values()]
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert all(box.is_dir() for box in boxes)
    assert main(["doctor", "--reap", "--json"]) in (0, 3)
    said = capsys.readouterr().out
    assert all(str(box) in said for box in boxes)
    assert not any(box.exists() for box in boxes)
    assert not any(group.exists() for group in groups)
    assert list(runtime.glob("*.json")) == []
    deadline = time.monotonic() + 5
    while commands_with(word) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert commands_with(word) == []
    assert reap() == []


def test_a_lease_ends_with_its_owner_its_boot_or_its_deadline(runtime: Path) -> None:
    lease = Lease(seconds=100)
    (path,) = runtime.glob("*.json")
    text: dict[str, Any] = json.loads(path.read_text())
    now = time.time()
    assert not is_over(text, now)
    assert is_over(text, now + 101)
    assert is_over({**text, "owner": {**text["owner"], "boot": "another"}}, now)
    assert is_over({**text, "owner": {**text["owner"], "start": 1}}, now), "a new process with the old number"
    other = {**text, "owner": {**text["owner"], "namespace": "pid:[1]", "start": 1}}
    assert not is_over(other, now), "another container's processes cannot be judged from here"
    assert is_over(other, now + 101)
    lease.release()
    lease.release()
    assert list(runtime.glob("*.json")) == []
    assert start_time(os.getpid()) == owner_now()["start"]
    assert start_time(2**22 + 1) is None


def test_use_renews_a_lease_when_half_of_it_is_over(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, now = Lease(seconds=100), time.time()
    (path,) = runtime.glob("*.json")
    for later, kept in ((40.0, True), (60.0, False)):
        before = json.loads(path.read_text())["deadline"]
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        lease.renew()
        assert (json.loads(path.read_text())["deadline"] == before) is kept
    lease.release()


def test_a_runtime_folder_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv(leases.VARIABLE, str(folder))
    with pytest.raises(SandboxError, match="this user alone"):
        leases.runtime_folder()


def test_nothing_is_left_after_many_calls_crashes_included() -> None:
    async def body(folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            boxes = [await provider_named(name).create(SandboxLimits(processes=16)) for name in ("bwrap", "subprocess")]
        for number in range(12):
            for box in boxes:
                script = ("exit 3", "kill -9 $$", "(setsid sleep 30 &) ; echo x", "head -c 9000000 /dev/zero")[
                    number % 4
                ]
                await box.exec(["sh", "-c", script], timeout_s=10)
        dropped = asyncio.create_task(boxes[0].exec(["sleep", "30"]))
        await asyncio.sleep(0.05)
        dropped.cancel()
        await asyncio.wait({dropped})
        launch.launcher().process.kill()  # the worst that can happen to the starting of commands
        with contextlib.suppress(SandboxDied):
            await boxes[0].exec(["true"])
        for box in boxes:
            await box.stop()
        assert list(folder.iterdir()) == []

    with watched() as watch:
        before = Census.take(watch.folder)
        asyncio.run(body(watch.folder))
        with ProgramRunner(provider_named("bwrap")) as runner:
            jobs = [ProgramJob(source, "f", ((1,),)) for source in ("import os\nos._exit(3)", "def f(a):\n return a")]
            statuses = [outcome.status for outcome in runner.run_batch(jobs)]
            assert statuses == [ProgramStatus.CRASHED, ProgramStatus.RETURNED]
        assert watch.leaks() == []
        assert before.kinds["cgroup"] == Census.take(watch.folder).kinds["cgroup"]
