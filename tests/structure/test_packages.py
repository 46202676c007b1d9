"""What is shipped: the sdist and the wheel hold real files under k3rl/, and the wheel works without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import structure_source as source

ROOT = source.ROOT
SOURCES = ("k3rl", *source.LINKED, "pyproject.toml", "README.md", "LICENSE")


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel built from it, both from a copy of the sources, without a network."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, folder / name)
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder, cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel_names(built) -> set[str]:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The wheel, installed into an empty folder."""
    target = tmp_path_factory.mktemp("installed")
    wheel = next(built.glob("*.whl"))
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def expected_modules() -> set[str]:
    return {source.module_name(path) for path in source.package_files()}


def as_modules(names: set[str]) -> set[str]:
    paths = [Path(name).with_suffix("") for name in names if name.startswith("k3rl/") and name.endswith(".py")]
    return {".".join(path.parts[:-1] if path.name == "__init__" else path.parts) for path in paths}


def test_the_wheel_holds_every_module_of_the_checkout(wheel_names):
    assert as_modules(wheel_names) == expected_modules()


def test_the_wheel_has_one_top_level_package(wheel_names):
    roots = {name.split("/")[0] for name in wheel_names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"k3rl"}


def test_the_wheel_holds_real_files_where_the_checkout_has_links(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        for name in source.LINKED:
            text = wheel.read(f"k3rl/{name}/__init__.py").decode()
            assert text == (ROOT / name / "__init__.py").read_text(encoding="utf-8")


def test_the_wheel_holds_the_data_files(wheel_names):
    data = {
        str(Path("k3rl") / path.relative_to(ROOT / "k3rl" if folder == "k3rl" else ROOT))
        for folder in ("k3rl", *source.LINKED)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert "k3rl/py.typed" in data
    assert data <= wheel_names


def test_the_sdist_holds_the_same_modules(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        members = {member.name.split("/", 1)[1]: member for member in sdist.getmembers() if "/" in member.name}
    assert as_modules(set(members)) == expected_modules()
    assert all(members[f"k3rl/{name}/__init__.py"].isfile() for name in source.LINKED)


def test_an_installed_wheel_imports_from_its_own_files(installed, tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import importlib;"
        "rooms = ['types', 'config', 'run', 'tokens', 'envs', 'kernels', 'actors', 'pipelines'];"
        "print('\\n'.join(importlib.import_module('k3rl.' + room).__file__ for room in rooms))"
    )
    places = run(sys.executable, "-P", "-c", program, installed, cwd=tmp_path).split()
    assert len(places) == 8
    assert all(Path(place).is_relative_to(installed) for place in places), places


def test_an_installed_wheel_brings_no_bare_packages(installed):
    assert not {name for name in source.LINKED if (installed / name).exists()}


def test_the_installed_command_prints_its_help(installed, tmp_path):
    program = "import sys; sys.path.insert(0, sys.argv[1]); from k3rl.cli import main; sys.exit(main(['--help']))"
    assert "k3rl COMMAND" in run(sys.executable, "-P", "-c", program, installed, cwd=tmp_path)


def test_the_editable_install_does_not_put_the_checkout_on_the_path(tmp_path):
    program = (
        "import importlib.util as u, sys, k3rl;"
        "print([name for name in ('kernels', 'actors', 'pipelines', 'envs') if u.find_spec(name)], k3rl.__file__)"
    )
    assert run(sys.executable, "-P", "-c", program, cwd=tmp_path).startswith("[] ")
