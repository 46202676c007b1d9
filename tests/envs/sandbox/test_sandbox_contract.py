"""One contract for every sandbox provider: the local ones for real, each remote one against a fake of its service."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_fakes import daytona, e2b, engine, kubernetes, modal, swerex
from sandbox_fakes.service import Service

from k3rl.config import MissingResource
from k3rl.envs.sandbox import (
    ExecOutcome,
    Sandbox,
    SandboxDied,
    SandboxLimits,
    SandboxProvider,
    SandboxSlow,
    SandboxUnavailable,
    provider_named,
)

LOCAL = ("bwrap", "subprocess")
FAKES: dict[str, Callable[[], Service]] = {
    "kubernetes": kubernetes.Kubernetes,
    "kubernetes-v4": kubernetes.KubernetesV4,
    "e2b": e2b.E2B,
    "daytona": daytona.Daytona,
    "swe-rex": swerex.SweRex,
    "modal": modal.Modal,
}
REMOTE = ("docker", *(name for name in FAKES if name != "kubernetes-v4"))
TWINS = ("podman", "kubernetes-v4")  # another spelling of a protocol that has the whole contract


def fake_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    if name in FAKES:
        return FAKES[name]()
    engine_of: Service = engine.service(name, folder, monkeypatch)
    return engine_of


@pytest.fixture
def service(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    fake = fake_of(request.param, tmp_path, monkeypatch)
    yield fake
    fake.close()


@pytest.fixture
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SandboxProvider]:
    if request.param in LOCAL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield provider_named(request.param)
        return
    fake = fake_of(request.param, tmp_path, monkeypatch)
    yield fake.provider()
    assert fake.living() == 0, "a machine was left"
    fake.close()


remote = pytest.mark.parametrize("service", REMOTE, indirect=True)
LIMITS = SandboxLimits(output_bytes=1000, workspace_bytes=8 * 2**20, memory_bytes=96 * 2**20)


@pytest.mark.parametrize("provider", [*LOCAL, *REMOTE], indirect=True)
def test_the_contract_of_every_provider(provider: SandboxProvider) -> None:
    async def all_of_it() -> None:
        provider.check() if provider.name in LOCAL else None
        box = await provider.create(LIMITS)
        try:
            for part in (commands, files, escapes, limits_bite, nothing_survives, many_at_once):
                await part(box)
            async with await provider.create(LIMITS) as other:
                await shares_nothing(box, other)
        finally:
            await box.stop()
        await box.stop()
        with pytest.raises(SandboxDied, match="stopped"):
            await box.exec(["true"])

    asyncio.run(all_of_it())


@pytest.mark.parametrize("provider", TWINS, indirect=True)
def test_files_and_commands_of_the_other_spellings(provider: SandboxProvider) -> None:
    async def some_of_it() -> None:
        async with await provider.create(LIMITS) as box:
            await files(box)

    asyncio.run(some_of_it())


async def commands(box: Sandbox) -> None:
    done = await box.exec(
        ["sh", "-c", 'cat; echo wrong >&2; echo "$NAME $HOME"; exit 3'], stdin=b"in\0\xff\n", env={"NAME": "n"}
    )
    assert done.returncode == 3
    assert done.stdout.startswith(b"in\0\xff\nn /")
    assert done.stderr == b"wrong\n"
    assert (done.truncated, done.timed_out, done.outcome) == (False, False, ExecOutcome.EXITED)
    long = b"0123456789abcdef" * 60_000
    assert (await box.exec(["sh", "-c", "wc -c"], stdin=long)).stdout.split() == [b"960000"]
    assert (await box.exec(["no-such-command"])).returncode == 127
    assert (await box.exec(["/usr"])).returncode == 126
    assert (await box.exec(["sh", "-c", "kill -9 $$"])).returncode in (-9, 137)
    words = ["one two", "$(id)", "'", '"', "*", "a\nb", "-n", ""]
    shown = await box.exec(["printf", "%s|", *words])
    assert shown.stdout.decode().split("|")[:-1] == words


async def files(box: Sandbox) -> None:
    every_byte = bytes(range(256)) * 500
    await box.write("deep/er/data", every_byte)
    await box.write("deep/tool", b"#!/bin/sh\necho ran from $(basename $(pwd))\n", 0o755)
    assert await box.read("deep/er/data") == every_byte
    assert await box.read("deep/er/data", max_bytes=7) == every_byte[:7]
    assert (await box.exec(["./tool"], cwd="deep")).stdout == b"ran from deep\n"
    await box.exec(["sh", "-c", "printf made > deep/er/new"])
    assert await box.read("deep/er/new") == b"made"
    with pytest.raises(FileNotFoundError):
        await box.read("nothing")


async def escapes(box: Sandbox) -> None:
    for path in ("../up", "a/../../up", "", "/", ".", "/etc/../../up", "a\0b"):
        with pytest.raises(ValueError, match="inside the workspace"):
            await box.read(path)
        with pytest.raises(ValueError, match="inside the workspace"):
            await box.write(path, b"")
    for cwd in ("..", "/tmp/..", "deep/../.."):
        with pytest.raises(ValueError, match="inside the workspace"):
            await box.exec(["true"], cwd=cwd)
    for absolute in ("/etc/passwd", "/usr/bin/env"):
        with pytest.raises(FileNotFoundError):
            await box.read(absolute)
    with pytest.raises(FileNotFoundError):
        await box.exec(["true"], cwd="/tmp")
    await box.exec(["sh", "-c", "ln -s /usr link; ln -s /usr/bin/env file; mkfifo pipe"])
    for path in ("file", "link/bin/env", "pipe"):
        with pytest.raises(OSError, match=r"."):
            await box.read(path)
    for path in ("link/new",):
        with pytest.raises(OSError, match=r"."):
            await box.write(path, b"x")


async def limits_bite(box: Sandbox) -> None:
    started = time.monotonic()
    slow = await box.exec(["sh", "-c", "echo begun; sleep 60"], timeout_s=0.6)
    assert (slow.outcome, slow.returncode, slow.stdout) == (ExecOutcome.TIME_LIMIT, None, b"begun\n")
    flood = await box.exec(["head", "-c", "100000000", "/dev/zero"])
    assert (flood.outcome, len(flood.stdout), flood.truncated) == (ExecOutcome.OUTPUT_LIMIT, 1000, True)
    some = await box.exec(["sh", "-c", "rm -rf deep; head -c 5000 /dev/zero"])
    assert (some.outcome, len(some.stdout), some.truncated) == (ExecOutcome.EXITED, 1000, True)
    fill = "i=0; while true; do i=$((i+1)); head -c 1000000 /dev/zero > fill$i || exit 4; done"
    assert (await box.exec(["sh", "-c", fill])).outcome is ExecOutcome.DISK_LIMIT
    hog = "import os; os.system('rm -f fill*'); x = [bytearray(10**7) for _ in range(20)]; import time; time.sleep(20)"
    assert (await box.exec(["python3", "-c", hog])).outcome is ExecOutcome.MEMORY_LIMIT
    assert time.monotonic() - started < 25


async def nothing_survives(box: Sandbox) -> None:
    leave = "(setsid sh -c 'sleep 0.4; echo late > late' &) ; sleep 0.1; echo done"
    assert (await box.exec(["sh", "-c", leave])).stdout == b"done\n"
    await asyncio.sleep(0.5)
    with pytest.raises(FileNotFoundError):
        await box.read("late")
    started = time.monotonic()
    dropped = asyncio.create_task(box.exec(["sh", "-c", "sleep 2; echo late > late"]))
    await asyncio.sleep(0.25)
    dropped.cancel()
    await asyncio.wait({dropped})
    assert dropped.cancelled()
    assert time.monotonic() - started < 2, "the order to end it took longer than the command"
    await asyncio.sleep(2.2 - (time.monotonic() - started))
    with pytest.raises(FileNotFoundError):
        await box.read("late")


async def many_at_once(box: Sandbox) -> None:
    async def one(number: int) -> bytes:
        return (await box.exec(["sh", "-c", f"cat; echo {number}"], stdin=b"%d " % number)).stdout

    assert await asyncio.gather(*map(one, range(2))) == [b"%d %d\n" % (number, number) for number in range(2)]


async def shares_nothing(box: Sandbox, other: Sandbox) -> None:
    await box.write("secret", b"s")
    assert (await other.exec(["ls", "-A"])).stdout == b""


@remote
def test_a_machine_that_is_lost_is_a_dead_sandbox(service: Service) -> None:
    async def body() -> None:
        box = await service.provider().create(LIMITS)
        running = asyncio.create_task(box.exec(["sleep", "30"]))
        await asyncio.sleep(0.5)
        service.lose()
        with pytest.raises(SandboxDied):
            await asyncio.wait_for(running, 20)
        with pytest.raises(SandboxDied):
            await box.exec(["true"])
        with pytest.raises(SandboxDied):
            await box.read("x")
        await box.stop()

    asyncio.run(body())
    assert service.living() == 0


@pytest.mark.parametrize("service", ["docker", "kubernetes", "modal"], indirect=True)
def test_a_service_that_does_not_answer_meets_a_deadline(service: Service) -> None:
    async def body() -> None:
        box = await service.provider(grace_s=0.2).create(LIMITS)
        service.delay_s = 1.5
        started = time.monotonic()
        with pytest.raises(SandboxSlow, match="longer than"):
            await box.exec(["true"], timeout_s=0.2)
        assert time.monotonic() - started < 15
        service.delay_s = 0.0
        await box.stop()

    asyncio.run(body())


@pytest.mark.parametrize("service", ["kubernetes", "e2b", "daytona", "swe-rex"], indirect=True)
def test_a_refused_credential_is_unavailable_and_leaves_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: dict[str, Any] = {"token": "bad"} if service.provider_name == "kubernetes" else {"api_key": "bad"}
    if service.provider_name == "swe-rex":
        bad = {"servers": [{**one, "token": "bad"} for one in service.options()["servers"]]}
    with pytest.raises(SandboxUnavailable, match="401"):
        asyncio.run(service.provider(**bad).create())
    assert service.living() == 0


@pytest.mark.parametrize(
    ("name", "variable"), [("kubernetes", "KUBERNETES_TOKEN"), ("e2b", "E2B_API_KEY"), ("daytona", "DAYTONA_API_KEY")]
)
def test_a_missing_credential_is_named(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SandboxUnavailable, match=variable):
        provider_named(name).check()


@pytest.mark.parametrize(("name", "package"), [("docker", "docker.io"), ("podman", "podman")])
def test_a_missing_engine_command_is_named_with_its_package(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=f"apt-get install -y {package}"):
        provider_named(name).check()


def test_modal_without_its_package_names_the_extra() -> None:
    with pytest.raises(MissingResource, match=r"k3rl\[modal\]"):
        provider_named("modal").check()


@pytest.mark.parametrize("service", ["docker"], indirect=True)
def test_an_image_that_cannot_be_had_is_an_error_and_no_container(service: Service) -> None:
    with pytest.raises(Exception, match="pull access denied"):
        asyncio.run(service.provider(image="none").create())
    assert service.living() == 0


@pytest.mark.parametrize("service", ["docker"], indirect=True)
def test_a_command_that_kills_everything_it_can_reach_is_its_own_end_not_the_machines(service: Service) -> None:
    async def body() -> None:
        async with await service.provider().create(LIMITS) as box:
            done = await box.exec(["sh", "-c", "kill -9 -1; sleep 5"])
            assert done.returncode in (-9, 137)
            assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    asyncio.run(body())
