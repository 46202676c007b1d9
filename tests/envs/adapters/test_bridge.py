"""The process behind an adapter: what it costs when it goes wrong, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.config import MissingResource
from k3rl.envs import make
from k3rl.envs.adapters.bridge import BlockingBridge, Bridge, BridgeSpec, ForeignDied, ForeignHung, ForeignRaised

FAKES = Path(__file__).with_name("fakes")
OPTIONS = {"observe": "", "act": "", "instructions": "", "reset_options": None}


def spec(how: str = "", **more) -> BridgeSpec:
    kind = {"id": "Misbehaving-v0", "kwargs": {"how": how}} if how else {"id": "Corridor-v0", "kwargs": {}}
    options = {**OPTIONS, **kind}
    return BridgeSpec("gymnasium", "gymnasium", options, paths=(str(FAKES),), **more)


def of_group(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def gone(group: int) -> bool:
    """Whether a group has ended, within ten seconds."""
    deadline = time.monotonic() + 10
    while of_group(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not of_group(group)


async def started(chosen: BridgeSpec) -> tuple[Bridge, int]:
    bridge = Bridge(chosen)
    await bridge.start()
    assert bridge.pid is not None
    return bridge, bridge.pid


def test_a_hanging_call_is_killed_with_the_processes_that_it_started():
    async def work():
        bridge, group = await started(spec("hang", call_s=0.5))
        await bridge.call("open", row={}, seed=1)
        with pytest.raises(ForeignHung, match=r"act took more than 0\.5 s"):
            await bridge.call("act", text="1")
        with pytest.raises(ForeignDied, match="not running"):
            await bridge.call("act", text="1")
        await bridge.close()
        return group

    assert gone(asyncio.run(work()))


def test_a_cancelled_call_ends_its_process():
    async def work():
        bridge, group = await started(spec("hang"))
        await bridge.call("open", row={}, seed=1)
        task = asyncio.create_task(bridge.call("act", text="1"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not bridge.alive
        return group

    assert gone(asyncio.run(work()))


def test_an_exception_leaves_the_process_and_its_state_as_they_are():
    async def work():
        bridge, group = await started(spec())
        with pytest.raises(ForeignRaised, match="AttributeError"):
            await bridge.call("act", text="1")  # nothing is open yet
        with pytest.raises(ForeignRaised, match="no attribute 'nonsense'"):
            await bridge.call("nonsense")
        assert (await bridge.call("open", row={}, seed=1))["messages"]
        await bridge.close()
        await bridge.close()
        return group

    assert gone(asyncio.run(work()))


def test_two_bridges_share_nothing():
    async def work():
        (one, _), (other, _) = await started(spec()), await started(spec())
        for bridge in (one, other):
            await bridge.call("open", row={}, seed=5)
        alone = [(await one.call("act", text="0"))["messages"][0]["content"] for _ in range(3)]
        beside = [(await other.call("act", text="0"))["messages"][0]["content"] for _ in range(3)]
        await asyncio.gather(one.close(), other.close())
        assert alone == beside

    asyncio.run(work())


def test_the_process_ends_when_its_owner_is_killed():
    program = (
        "import asyncio, sys\n"
        "from k3rl.envs.adapters.bridge import Bridge, BridgeSpec\n"
        "async def work():\n"
        f"    options, paths = {spec('hang').options!r}, ({str(FAKES)!r},)\n"
        "    bridge = Bridge(BridgeSpec('gymnasium', 'gymnasium', options, paths=paths))\n"
        "    await bridge.start()\n"
        "    await bridge.call('open', row={}, seed=1)\n"
        "    print(bridge.pid, flush=True)\n"
        "    await bridge.call('act', text='1')\n"
        "asyncio.run(work())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    time.sleep(0.3)  # into the call that hangs
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while child in of_group(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = of_group(child)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert child not in left


def test_a_missing_package_is_named_with_the_way_to_install_it(tmp_path):
    async def work():
        await Bridge(BridgeSpec("textarena", "textarena", {"opponent": "", "players": 1})).start()

    with pytest.raises(MissingResource, match="pip install textarena"):
        asyncio.run(work())
    with pytest.raises(MissingResource, match="pip install textarena"):  # before a run has begun
        make("textarena:Guess-v0").source.get("train", 0)
    with pytest.raises(MissingResource, match="is no program"):
        spec(python=str(tmp_path / "bin" / "python")).interpreter()


def test_foreign_processes_see_only_the_environment_that_they_are_given(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("WANTED", "y")
    found = spec(variables=("WANTED",)).environment()
    assert found["WANTED"] == "y"
    assert "SECRET_TOKEN" not in found
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(FAKES)
    other = spec(python=sys.executable).environment()
    assert other["PYTHONPATH"] == str(FAKES)  # not the modules of this Python
    assert other["PATH"].startswith(os.path.dirname(sys.executable))


def test_a_blocking_bridge_starts_again_after_its_process_died_and_ends_when_nobody_holds_it():
    bridge = BlockingBridge(spec("die"))
    for _ in range(2):
        bridge.call("open", row={}, seed=1)
        with pytest.raises(ForeignDied):
            bridge.call("act", text="1")
    bridge.call("open", row={}, seed=1)
    group = bridge.pid
    assert group is not None
    del bridge
    assert gone(group)
