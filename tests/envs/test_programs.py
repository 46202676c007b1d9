"""Many small programs in one sandbox: values, outcomes, order, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.envs.sandbox import (
    ProgramJob,
    ProgramLimits,
    ProgramRunner,
    ProgramStatus,
    SandboxLimits,
    SandboxProvider,
    SandboxUnavailable,
    provider_named,
    same_value,
)
from k3rl.envs.sandbox.base import ProgramServerProcess
from k3rl.envs.sandbox.bwrap import BwrapProvider
from k3rl.envs.sandbox.sandboxed.program_server import decode, encode

IDENTITY = "def f(a):\n return a"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@settings(deadline=None)
@given(VALUES)
def test_encoding_keeps_values_and_their_types(value: Any) -> None:
    assert same_value(decode(encode(value)), value)
    assert repr(decode(encode(value))) == repr(value)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_equality_is_that_of_type_and_repr(one: Any, other: Any) -> None:
    if repr(one) == repr(other):
        assert same_value(one, other)
    if same_value(one, other):
        assert type(one) is type(other)
        assert one == other


@pytest.mark.parametrize(
    ("one", "other"),
    [(True, 1), (0, False), (1, 1.0), ([1], (1,)), ([True], [1]), ({1: 2}, {True: 2}), (float("nan"), float("nan"))],
)
def test_equality_tells_types_apart(one: Any, other: Any) -> None:
    assert not same_value(one, other)


@settings(max_examples=15, deadline=None)
@given(value=VALUES)
def test_values_come_back_from_the_sandbox_as_they_went_in(value: Any, runner: ProgramRunner) -> None:
    outcome = runner.run_batch([ProgramJob(IDENTITY, "f", ((value,),))])[0]
    assert outcome.status is ProgramStatus.RETURNED
    assert same_value(outcome.calls[0].value, value)


def test_outcomes_come_in_the_order_of_jobs_and_calls_whatever_runs_first(runner: ProgramRunner) -> None:
    slow = "import time\ndef f(a):\n time.sleep(0.1)\n return [a, 'slow']"
    jobs = [
        ProgramJob(slow if number % 5 == 0 else f"def f(a):\n return [a, {number}]", "f", ((number,), (-number,)))
        for number in range(20)
    ]
    for number, outcome in enumerate(runner.run_batch(jobs)):
        name = "slow" if number % 5 == 0 else number
        assert [call.value for call in outcome.calls] == [[number, name], [-number, name]]


@pytest.mark.parametrize(
    ("source", "status", "detail"),
    [
        ("def f(a:", ProgramStatus.ERROR, "SyntaxError"),
        ("import nothing", ProgramStatus.ERROR, "ModuleNotFoundError"),
        ("g = 1", ProgramStatus.ERROR, "KeyError"),
        ("\0", ProgramStatus.ERROR, "null bytes"),
        ("import os\nos.abort()", ProgramStatus.CRASHED, "signal 6"),
        ("import os\nos._exit(3)", ProgramStatus.CRASHED, "no result"),
        ("print('x' * 200000)", ProgramStatus.OUTPUT_LIMIT, "printed"),
        ("def f(a):\n return 'x' * 2000000", ProgramStatus.OUTPUT_LIMIT, "returned"),
        ("import time\ntime.sleep(50)", ProgramStatus.TIMEOUT, "wall time"),
        (
            "import os\nos.write(4, b'x')\nos.write(5, b'x')\nos.write(6, b'x')\ndef f(a):\n return 1",
            ProgramStatus.FORGED,
            "",
        ),
    ],
)
def test_failures_are_typed(source: str, status: ProgramStatus, detail: str, runner: ProgramRunner) -> None:
    outcome = runner.run_batch([ProgramJob(source, "f", ((1,),))])[0]
    assert outcome.status is status
    assert detail in outcome.detail
    assert outcome.calls == ()


def test_an_exception_of_one_call_leaves_the_others(runner: ProgramRunner) -> None:
    outcome = runner.run_batch([ProgramJob("def f(a):\n return 1 // a", "f", ((1,), (0,), (-1,)))])[0]
    assert [call.value for call in outcome.calls] == [1, None, -1]
    assert outcome.calls[1].error == "ZeroDivisionError: integer division or modulo by zero"


def test_equal_jobs_run_once(runner: ProgramRunner) -> None:
    draw = ProgramJob("import os\ndef f(a):\n return os.urandom(8).hex()", "f", ((1,),))
    outcomes = runner.run_batch([draw, ProgramJob(IDENTITY, "f", ((1,),)), draw])
    assert outcomes[0] == outcomes[2]
    assert runner.run_batch([draw]) != outcomes[:1]


def test_a_large_job_is_run(runner: ProgramRunner) -> None:
    values = list(range(100_000))
    outcome = runner.run_batch([ProgramJob("def f(a):\n return sum(a)", "f", ((values,),))])[0]
    assert outcome.calls[0].value == sum(values)


def test_the_event_loop_runs_other_work_meanwhile(runner: ProgramRunner) -> None:
    async def both() -> list[str]:
        order: list[str] = []

        async def program() -> None:
            await runner.run([ProgramJob("import time\ndef f(a):\n time.sleep(0.3)", "f", ((1,),))])
            order.append("program")

        async def other() -> None:
            await asyncio.sleep(0.01)
            order.append("other")

        await asyncio.gather(program(), other())
        return order

    assert asyncio.run(both()) == ["other", "program"]


def _children() -> set[str]:
    """Command lines of all processes below this one."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = (int(fields[1]), (folder / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue

    def below(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid][0]
        return pid == os.getpid()

    return {f"{pid} {text}" for pid, (parent, text) in parents.items() if below(parent) and pid != os.getpid()}


def _left() -> tuple[set[str], str, int]:
    return _children(), Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))


def test_a_thousand_programs_leave_no_process_mount_or_descriptor() -> None:
    sources = [
        "def f(a):\n return a + {number}",
        "import os\nos.fork()\ndef f(a):\n return {number}",
        "import os\nos._exit({number} % 256)",
        "raise ValueError({number})",
        "import subprocess\ndef f(a):\n subprocess.Popen(['/bin/sleep', '{number}'])\n return a",
    ]
    before = _left()
    with ProgramRunner(provider_named("bwrap"), workers=2, limits=ProgramLimits(wall_s=5.0)) as programs:
        jobs = [ProgramJob(sources[number % 5].format(number=number), "f", ((1,),)) for number in range(1000)]
        outcomes = programs.run_batch(jobs)
        assert [outcome.calls[0].value for outcome in outcomes[::5]] == [1 + number for number in range(0, 1000, 5)]
        assert ProgramStatus.SANDBOX_DIED not in {outcome.status for outcome in outcomes}
        running = _children() - before[0]
        assert len(running) == 4  # two bwraps, each with its server
    assert _left() == before
    inside = [line.split()[0] for line in running if "bwrap" not in line]
    assert len(inside) == 2
    deadline = time.monotonic() + 5.0  # the kernel reaps what it has killed
    while any(Path("/proc", pid, "exe").exists() for pid in inside) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path("/proc", pid, "exe").exists() for pid in inside)


class Fragile(BwrapProvider):
    """Kills each server it starts `deaths` times, as soon as it is used."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self.deaths = deaths
        self.started = 0

    def start_program_server(self) -> ProgramServerProcess:
        server = super().start_program_server()
        self.started += 1
        if self.started <= self.deaths:
            ready = server.receive
            calls: list[int] = []

            def receive() -> bytes:
                calls.append(1)
                if len(calls) == 1:
                    message = ready()
                    server.process.kill()
                    watched = select.poll()
                    watched.register(server.control, select.POLLHUP)
                    assert watched.poll(10_000)
                    return message
                return ready()

            server.receive = receive  # type: ignore[method-assign]
        return server


def test_a_sandbox_that_dies_once_is_replaced() -> None:
    provider = Fragile(deaths=1)
    with ProgramRunner(provider) as programs:
        outcome = programs.run_batch([ProgramJob(IDENTITY, "f", ((7,),))])[0]
    assert outcome.status is ProgramStatus.RETURNED
    assert outcome.calls[0].value == 7
    assert provider.started == 2


def test_a_sandbox_that_dies_again_is_an_outcome_of_its_own() -> None:
    provider = Fragile(deaths=2)
    with ProgramRunner(provider) as programs:
        died, fine = (programs.run_batch([ProgramJob(IDENTITY, "f", ((7,),))])[0] for _ in range(2))
    assert died.status is ProgramStatus.SANDBOX_DIED
    assert died.detail
    assert fine.status is ProgramStatus.RETURNED


def test_a_hung_server_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from k3rl.envs.sandbox import programs as module

    monkeypatch.setattr(module._Server, "GRACE_S", 0.3)
    with ProgramRunner(provider_named("bwrap"), limits=ProgramLimits(wall_s=0.3)) as programs:
        programs.run_batch([ProgramJob(IDENTITY, "f", ((1,),))])
        server = next(iter(programs._servers))
        inner = subprocess.run(
            ["pgrep", "-P", str(server._server.process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        os.kill(int(inner[0]), signal.SIGSTOP)
        started = time.monotonic()
        outcome = programs.run_batch([ProgramJob(IDENTITY, "f", ((2,),))])[0]
    assert outcome.status is ProgramStatus.RETURNED
    assert time.monotonic() - started >= 0.6


class Missing(SandboxProvider):
    name, safe = "missing", True

    def check(self) -> None: ...

    async def create(self, limits: SandboxLimits | None = None) -> Any: ...

    def start_program_server(self) -> ProgramServerProcess:
        raise SandboxUnavailable("no such thing here")


def test_a_machine_without_sandboxes_is_an_error_not_an_outcome() -> None:
    with ProgramRunner(Missing()) as programs, pytest.raises(SandboxUnavailable, match="no such thing"):
        programs.run_batch([ProgramJob(IDENTITY, "f", ((1,),))])


def test_an_interpreter_that_does_not_start_is_unavailable_with_its_complaint() -> None:
    with (
        ProgramRunner(BwrapProvider(interpreter="/usr/bin/false")) as programs,
        pytest.raises(SandboxUnavailable) as info,
    ):
        programs.run_batch([ProgramJob(IDENTITY, "f", ((1,),))])
    assert "exit status 1" in str(info.value)


@pytest.fixture
def python_outside_usr() -> Iterator[Path]:
    """An installation whose folder holds the system's Python and its library."""
    system = Path(os.path.realpath("/usr/bin/python3"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        prefix = Path(folder, "python")
        (prefix / "bin").mkdir(parents=True)
        (prefix / "lib").mkdir()
        shutil.copy(system, prefix / "bin")
        (prefix / "lib" / system.name).symlink_to(f"/usr/lib/{system.name}")
        Path(folder).chmod(0o755)
        yield prefix / "bin" / system.name


def test_a_python_outside_usr_works_as_well(python_outside_usr: Path) -> None:
    source = "import sys\ndef f(a):\n return [sys.executable, sys.base_prefix]"
    with ProgramRunner(BwrapProvider(interpreter=str(python_outside_usr))) as programs:
        value = programs.run_batch([ProgramJob(source, "f", ((1,),))])[0].calls[0].value
    assert value == [str(python_outside_usr), str(python_outside_usr.parent.parent)]


def test_a_python_that_the_sandbox_user_cannot_reach_is_refused_with_the_remedy(python_outside_usr: Path) -> None:
    folder = python_outside_usr.parents[2]
    folder.chmod(0o700)
    job = ProgramJob(IDENTITY, "f", ((1,),))
    with ProgramRunner(BwrapProvider(interpreter=str(python_outside_usr))) as programs:
        if os.geteuid() != 0:  # the sandbox's user is this one, which may enter its own folder
            assert programs.run_batch([job])[0].calls[0].value == 1
            return
        with pytest.raises(SandboxUnavailable, match=f"{folder}.*apt-get install -y python3"):
            programs.run_batch([job])


def test_it_works_for_a_user_without_privileges() -> None:
    """In a fork that gives root away; as an ordinary user the fork changes nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65533)
                os.setuid(65533)
            with ProgramRunner(provider_named("bwrap")) as programs:
                good, bomb = programs.run_batch(
                    [ProgramJob(source, "f", ((3,),)) for source in (IDENTITY, "import os\nwhile True:\n os.fork()")]
                )
            os.write(writing, f"{good.calls[0].value} {bomb.status}".encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        assert file.read() in ("3 error", "3 crashed", "3 timeout")


def test_closing_twice_is_fine_and_a_closed_runner_says_so() -> None:
    programs = ProgramRunner(provider_named("bwrap"))
    programs.run_batch([ProgramJob(IDENTITY, "f", ((1,),))])
    programs.close()
    programs.close()
    with pytest.raises(RuntimeError, match="closed"):
        programs.run_batch([ProgramJob(IDENTITY, "f", ((1,),))])


@pytest.mark.parametrize("wrong", [{"wall_s": 0}, {"cpu_s": -1}, {"memory_bytes": 0}])
def test_limits_must_be_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProgramLimits(**wrong)


def test_the_unsafe_provider_runs_programs_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3rl.envs.sandbox import unsafe

    monkeypatch.setattr(unsafe, "_warned", False)
    with pytest.warns(UserWarning, match="unsafe"):
        provider = provider_named("subprocess")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        provider_named("subprocess")
    assert not provider.safe
    with ProgramRunner(provider, limits=ProgramLimits(wall_s=1.0)) as programs:
        good, loop, fork = programs.run_batch(
            [
                ProgramJob(IDENTITY, "f", ((5,),)),
                ProgramJob("while True: pass", "f", ((5,),)),
                ProgramJob("import os, time\nif os.fork() == 0: time.sleep(60)\ndef f(a):\n return a", "f", ((5,),)),
            ]
        )
    assert good.calls[0].value == 5
    assert loop.status is ProgramStatus.TIMEOUT
    assert fork.calls[0].value == 5


def test_an_unknown_provider_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="bwrap, subprocess"):
        provider_named("jail")
