"""The Makefile and the script that installs Debian packages, on machines that lack something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import structure_source as source

ROOT = source.ROOT
SCRIPT = ROOT / ".ci" / "debian-packages"


@pytest.fixture
def machine(tmp_path):
    """A folder of programs that is the whole PATH of a pretended machine, and a way to add programs to it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "basename", "env"):
        (folder / name).symlink_to(shutil.which(name))

    def program(name: str, body: str = "exit 0") -> None:
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)

    program("id", "echo 1000")
    (folder / "python3").symlink_to(sys.executable)
    program.folder = folder
    return program


def install(machine, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT], env={"PATH": str(machine.folder), **environment}, capture_output=True, text=True, timeout=30
    )


def test_with_everything_there_nothing_happens(machine):
    machine("bwrap")
    done = install(machine)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_user_who_may_not_install_is_given_the_one_command(machine):
    machine("apt-get", "echo must not run; exit 9")
    done = install(machine)
    assert done.returncode == 1
    wanted = "sudo sh -c 'apt-get update && apt-get install --yes --no-install-recommends bubblewrap'"
    assert wanted in done.stderr
    assert "must not run" not in done.stdout


def test_root_installs_what_is_missing(machine):
    machine("id", "echo 0")
    machine("apt-get", 'echo "apt-get $*"')
    done = install(machine)
    assert done.returncode == 0
    assert done.stdout == "apt-get update\napt-get install --yes --no-install-recommends bubblewrap\n"


def test_sudo_without_a_password_installs_what_is_missing(machine):
    machine("sudo", 'shift; exec "$@"')
    machine("true")
    machine("apt-get", 'echo "apt-get $* $DEBIAN_FRONTEND"')
    done = install(machine)
    assert done.returncode == 0
    assert "bubblewrap noninteractive" in done.stdout


def test_sudo_that_asks_for_a_password_is_not_used(machine):
    machine("sudo", "exit 1")
    machine("apt-get", "exit 9")
    assert install(machine).returncode == 1


def test_a_python_without_venv_names_the_package(machine):
    machine("bwrap")
    machine("apt-get")
    machine("python3.12", "exit 1")
    done = install(machine, PYTHON="python3.12")
    assert done.returncode == 1
    assert "python3.12-venv" in done.stderr


def test_a_system_without_apt_is_told_the_names(machine):
    done = install(machine)
    assert done.returncode == 1
    assert "bubblewrap" in done.stderr
    assert "package manager" in done.stderr


def test_an_old_python_is_refused_with_the_way_out(tmp_path):
    old = tmp_path / "python3"
    answers = "*version_info*) exit 1;; *-V*) echo Python 3.9.2;;"
    old.write_text(f'#!/bin/sh\ncase "$*" in {answers} *) exec {sys.executable} "$@";; esac\n')
    old.chmod(0o755)
    line = ["make", "--no-print-directory", "-C", ROOT, f"PYTHON={old}", f"VENV={tmp_path / 'venv'}", "install"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_torch_index_is_used_for_torch_alone(tmp_path):
    line = [
        "make",
        "--dry-run",
        "-C",
        ROOT,
        f"VENV={tmp_path / 'venv'}",
        "TORCH_INDEX=https://index.example",
        "install",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    asked = [text for text in done.stdout.splitlines() if "--index-url" in text and "pip install" in text]
    assert len(asked) == 1
    assert "https://index.example" in asked[0]
    assert "requirement torch" in asked[0]
    command = [sys.executable, ROOT / ".ci" / "requirement", "torch"]
    requirement = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    assert requirement in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert requirement.startswith("torch>=")


def test_the_scripts_can_be_run():
    assert all(os.access(path, os.X_OK) for path in (ROOT / ".ci").iterdir() if path.is_file())
    for path in (SCRIPT, ROOT / ".ci" / "run"):
        shell = Path(path).read_text(encoding="utf-8").splitlines()[0].split("/")[-1].split()[-1]
        assert subprocess.run([shell, "-n", path], timeout=30).returncode == 0
