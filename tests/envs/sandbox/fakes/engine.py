"""A container engine and its command line: `docker` and `podman` on a PATH of their own.

Run as a program it is the command line; DOCKER_HOST names the folder in which the engine keeps its containers.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

WITH_VALUE = {
    *("--name", "--label", "--network", "--cap-drop", "--security-opt", "--user", "--memory", "--memory-swap"),
    *("--pids-limit", "--cpus", "--tmpfs", "--workdir", "--entrypoint"),
}
PLAIN = {"--detach", "--rm", "--init", "--read-only"}


def fail(text: str, code: int = 125) -> None:
    sys.stderr.write(text + "\n")
    raise SystemExit(code)


def flags(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(flags with their values, the rest), as the engine reads them: it knows no others."""
    found: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        flag = words.pop(0)
        if flag not in WITH_VALUE | PLAIN:
            fail(f"unknown flag: {flag}")
        found.setdefault(flag, []).append(words.pop(0) if flag in WITH_VALUE else "")
    return found, words


def run(state: Path, words: list[str]) -> None:
    from machine import begin

    given, rest = flags(words)
    safe = given["--network"] == ["none"] and given["--cap-drop"] == ["ALL"] and "--read-only" in given
    if not safe or given["--user"] != ["65532:65534"] or given["--entrypoint"] != ["sleep"]:
        fail("a test engine takes no such container")
    image, seconds = rest
    if image == "none":
        fail("docker: Error response from daemon: pull access denied for none")
    folders = tuple(word.partition(":")[0] for word in given["--tmpfs"])
    (state / given["--name"][0]).write_text(str(begin(folders, int(seconds))))
    print("0" * 64)


def outer_of(state: Path, name: str) -> int:
    try:
        return int((state / name).read_text())
    except FileNotFoundError:
        fail(f"Error response from daemon: No such container: {name}", 1)
        return 0


def execute(state: Path, words: list[str]) -> None:
    from machine import PATH, entering

    assert words[:3] == ["--interactive", "--user", "65534:65534"]
    name, *argv = words[3:]
    outer = outer_of(state, name)
    if (state / "delay").exists():
        time.sleep(float((state / "delay").read_text()))
    line = entering(outer, argv)
    os.execvpe(line[0], line, {"PATH": PATH})


def remove(state: Path, words: list[str]) -> None:
    from machine import end

    assert words[:2] == ["--force", "--volumes"]
    outer = outer_of(state, words[2])
    end(outer)
    (state / words[2]).unlink()


def main(words: list[str]) -> None:
    state = Path(os.environ.get("DOCKER_HOST", "").removeprefix("unix://"))
    if not state.is_dir():
        fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?", 1)
    {"run": run, "exec": execute, "rm": remove, "version": lambda *_: None}[words[0]](state, words[1:])


def service(name: str, folder: Path, monkeypatch: Any) -> Any:
    """The engine for the tests."""
    from sandbox_fakes.machine import end
    from sandbox_fakes.service import Service

    class Engine(Service):
        provider_name = name

        def options(self) -> dict[str, Any]:
            return {}

        def living(self) -> int:
            return len(list(state.glob("k3rl-*")))

        @property
        def delay_s(self) -> float:
            return 0.0

        @delay_s.setter
        def delay_s(self, seconds: float) -> None:
            if seconds:
                (state / "delay").write_text(str(seconds))
            else:
                (state / "delay").unlink(missing_ok=True)

        def lose(self) -> None:
            for path in state.glob("k3rl-*"):
                end(int(path.read_text()))
                path.unlink()

    state, programs = folder / "engine", folder / "bin"
    state.mkdir()
    programs.mkdir()
    line = f'#!/bin/sh\nexec {sys.executable} -S -B {Path(__file__).resolve()} "$@"\n'
    (programs / name).write_text(line)
    (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{state}")
    return Engine()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1:])
