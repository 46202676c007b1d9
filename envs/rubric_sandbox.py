"""The sandbox that a reward function asks for by the argument `sandbox`: fresh, with the answer's files in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from k3rl.envs.sandbox import ExecResult, Sandbox, SandboxError, provider_named

T = TypeVar("T")


class GraderSandbox:
    """A workspace in which plain functions run commands. Raises SandboxError when the machine failed."""

    def __init__(self, provider: str, files: Mapping[str, str]) -> None:
        self._provider = provider
        self._files = files
        self._runner = asyncio.Runner()
        self._sandbox: Sandbox | None = None

    def __enter__(self) -> GraderSandbox:
        self._sandbox = self._do(provider_named(self._provider).create())
        for path, text in self._files.items():
            self.write(path, text)
        return self

    def __exit__(self, *_: object) -> None:
        if self._sandbox is not None:
            self._do(self._sandbox.stop())
        self._runner.close()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> ExecResult:
        """One command; nothing that it starts survives it."""
        return self._do(self._open().exec(argv, stdin=stdin, timeout_s=timeout_s))

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
