"""The sandbox that a reward function asks for by the argument `sandbox`: fresh, with the answer's files in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from k3rl.envs.sandbox import (
    ExecResult,
    ProgramJob,
    ProgramLimits,
    ProgramRunner,
    ProgramStatus,
    Sandbox,
    SandboxDied,
    SandboxError,
    provider_named,
)

T = TypeVar("T")


class SubmissionError(Exception):
    """A function of a submission gave no value: it raised, hung, or is not there. The submission's own fault."""


class GraderSandbox:
    """A workspace in which plain functions run commands. Raises SandboxError when the machine failed."""

    def __init__(self, provider: str, files: Mapping[str, str]) -> None:
        self._provider = provider
        self._files = files
        self._runner = asyncio.Runner()
        self._sandbox: Sandbox | None = None
        self._programs: ProgramRunner | None = None

    def __enter__(self) -> GraderSandbox:
        self._sandbox = self._do(provider_named(self._provider).create())
        for path, text in self._files.items():
            with contextlib.suppress(OSError, ValueError):  # a name that no file can have was not handed in
                self.write(path, text)
        return self

    def __exit__(self, *_: object) -> None:
        if self._programs is not None:
            self._programs.close()
        if self._sandbox is not None:
            self._do(self._sandbox.stop())
        self._runner.close()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> ExecResult:
        """One command; nothing that it starts survives it."""
        return self._do(self._open().exec(argv, stdin=stdin, timeout_s=timeout_s))

    def function(self, source: str, entry: str, timeout_s: float = 3.0) -> Callable[..., Any]:
        """The function `entry` of a program, each call of it in a fresh process inside a sandbox.

        Arguments and values are plain data and cross by value, so the program never meets what it is compared with.
        A call raises SubmissionError where the program gives no value.
        """
        limits = ProgramLimits(wall_s=timeout_s, cpu_s=max(1, round(timeout_s)))
        programs = self._programs = self._programs or ProgramRunner(provider_named(self._provider), limits=limits)

        def call(*arguments: Any) -> Any:
            outcome = programs.run_batch([ProgramJob(source, entry, (arguments,))])[0]
            if outcome.status is ProgramStatus.SANDBOX_DIED:
                raise SandboxDied(outcome.detail)
            if outcome.status is not ProgramStatus.RETURNED:
                raise SubmissionError(f"{outcome.status}: {outcome.detail}")
            if outcome.calls[0].error is not None:
                raise SubmissionError(outcome.calls[0].error)
            return outcome.calls[0].value

        return call

    def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """At most `max_bytes` of a plain file."""
        return self._do(self._open().read(path, max_bytes))

    def write(self, path: str, text: str) -> None:
        """Make or replace a file."""
        self._do(self._open().write(path, text.encode("utf-8", "surrogateescape")))

    def _open(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError("the sandbox of a reward function is open only while the function runs")
        return self._sandbox

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)
