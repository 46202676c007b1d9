"""The examples with the true packages, each in a virtual environment made for it. Only when asked for:

    K3RL_TRUE_PACKAGES=gymnasium,reasoning-gym pytest tests/envs/adapters/test_true_packages.py

`all` names every one of them. A folder in K3RL_TRUE_PACKAGES_DIR keeps the environments from one time to the next.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "adapters"
PACKAGES = {
    "gymnasium": ("gymnasium",),
    "reasoning-gym": ("reasoning-gym",),
    "textarena": ("textarena",),
    "skyrl-gym": ("skyrl-gym",),
    "verifiers": ("verifiers", "uv"),
    "openenv": ("openenv",),
}
ASKED = os.environ.get("K3RL_TRUE_PACKAGES", "")
SYSTEMS = sorted(PACKAGES) if ASKED == "all" else [name for name in ASKED.split(",") if name]


def test_every_system_has_an_example_and_packages_to_try_it_with() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "play.py", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    from k3rl.envs.registry import adapters

    assert adapters() == sorted(PACKAGES)
    assert "{" + ",".join(adapters()) + "}" in done.stdout.replace("\n", "").replace(" ", "")
    assert set(SYSTEMS) <= set(PACKAGES), "K3RL_TRUE_PACKAGES names something else"


def python_with(system: str, folder: Path) -> str:
    python = folder / system / "bin" / "python"
    if not python.exists():
        venv.create(folder / system, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", *PACKAGES[system]]
        subprocess.run(install, check=True, timeout=600)
    return str(python)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if SYSTEMS:

    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("system", SYSTEMS)
    def test_an_example_runs_with_the_true_package(system: str, tmp_path: Path) -> None:
        python = python_with(system, Path(os.environ.get("K3RL_TRUE_PACKAGES_DIR", tmp_path)))
        words, server = ["--python", python], None
        if system == "openenv":
            port = free_port()
            server = subprocess.Popen([python, EXAMPLES / "openenv_server.py", str(port)])
            words = ["--url", f"http://127.0.0.1:{port}"]
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                with socket.socket() as one:
                    if one.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
        try:
            done = subprocess.run(
                [sys.executable, EXAMPLES / "play.py", system, *words, "--json"],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        finally:
            if server is not None:
                server.terminate()
                server.wait(30)
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        digits = 1.0 - 0.05 * 9  # the digit may be the last one that is tried
        assert shown["score"]["reward"] >= (digits if system == "openenv" else 1.0), shown
