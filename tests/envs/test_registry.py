"""Finding environments, and what importing them costs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from k3rl.config import ConfigError
from k3rl.envs import Environment, UnknownEnvironment, make, names, register, registry
from k3rl.envs.registry import BrokenEnvironment
from k3rl.envs.sandbox import SandboxUnavailable


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "their_envs.py").write_text(
        "import dataclasses\nfrom k3rl.envs import make\n"
        "def cube(sides=6):\n    return dataclasses.replace(make('coding-lists'), name=f'cube{sides}')\n"
        "READY = cube(1)\nNOTHING = 3\ndef wrong():\n    return 3\n"
    )
    (tmp_path / "broken_envs.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "their_envs"


def test_the_shipped_environment_is_whole() -> None:
    environment = make("coding-lists")
    assert "coding-lists" in names()
    assert environment.make_env() is not environment.make_env()
    assert environment.demonstrations is not None
    assert len(list(environment.tasks("heldout", limit=5))) == 5
    assert len(list(environment.tasks("heldout_family"))) == 256
    with pytest.raises(ValueError, match="no end"):
        list(environment.tasks("train"))


def test_options_reach_the_factory() -> None:
    declared = make("coding-lists", declare_tools=True).source
    assert declared.get("train", 0, family="probe").tools[0]["function"]["name"] == "run"
    assert declared.get("train", 0, family="list").tools == ()
    assert make("coding-lists").source.get("train", 0, family="probe").tools == ()


@pytest.mark.usefixtures("clean_registry")
def test_a_registered_factory_is_found_and_its_name_is_taken() -> None:
    def factory() -> Environment:
        return make("coding-lists")

    register("mine", factory)
    register("mine", factory)
    assert make("mine").name == "coding-lists"
    assert "mine" in names()
    for taken in ("mine", "coding-lists"):
        with pytest.raises(ValueError, match="exists already"):
            register(taken, lambda: make("coding-lists"))


def test_module_and_object_are_found(package: str) -> None:
    assert make(f"{package}:cube", sides=8).name == "cube8"
    assert make(f"{package}:READY").name == "cube1"


def test_an_entry_point_is_found(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", f"{package}:cube", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "k3rl.envs" else [])
    assert make("theirs", sides=4).name == "cube4"
    assert "theirs" in names()


def test_what_cannot_be_found_or_is_no_environment_is_said(package: str) -> None:
    with pytest.raises(UnknownEnvironment, match="did you mean 'coding-lists'"):
        make("coding-list")
    with pytest.raises(UnknownEnvironment, match="no module is named 'nowhere'"):
        make("nowhere.at:all")
    with pytest.raises(UnknownEnvironment, match="has no 'absent'"):
        make(f"{package}:absent")
    with pytest.raises(BrokenEnvironment, match=r"a_module_that_is_not_there.*broken_envs\.py:1\)"):
        make("broken_envs:x")
    with pytest.raises(BrokenEnvironment, match="is an int; it must be"):
        make(f"{package}:NOTHING")
    with pytest.raises(BrokenEnvironment, match="gave an int; an environment factory must return"):
        make(f"{package}:wrong")
    with pytest.raises(BrokenEnvironment, match="unexpected keyword argument 'side'"):
        make(f"{package}:cube", side=3)
    with pytest.raises(BrokenEnvironment, match="unexpected keyword argument 'languag'"):
        make("kernel", languag="c")


def test_importing_environments_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, k3rl.envs, k3rl.envs.rollout\n"
        "environment = k3rl.envs.make('coding-lists')\nenvironment.source.get('train', 0)\n"
        "print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SQUARE = (
    "import dataclasses\nfrom k3rl.envs import make\n"
    "def environment(sides=4):\n    return dataclasses.replace(make('coding-lists'), name=f'square{sides}')\n"
    "OTHER = environment(9)\n"
)


def test_a_file_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "square.py").write_text(SQUARE)
    assert make(f"{tmp_path}/square.py", sides=5).name == "square5"
    assert make(f"{tmp_path}/square.py:OTHER").name == "square9"
    monkeypatch.chdir(tmp_path)
    assert make("square.py").name == "square4"
    with pytest.raises(UnknownEnvironment, match="no such file or folder"):
        make("circle.py")
    with pytest.raises(UnknownEnvironment, match="has no 'absent'"):
        make("square.py:absent")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def environment(:", r"SyntaxError.*own\.py:1\)"),
        ("\nimport nowhere_at_all", r"No module named 'nowhere_at_all'.*own\.py:2\)"),
        ("def environment():\n    return [][3]", r"IndexError.*own\.py:2\)"),
        ("def environment(path):\n    return path", "missing 1 required positional argument: 'path'"),
    ],
)
def test_code_of_a_user_that_raises_is_named_with_its_place(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(BrokenEnvironment, match=said):
        make(f"{tmp_path}/own.py")


def test_a_package_folder_is_found_by_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "squared_package"
    folder.mkdir()
    with pytest.raises(UnknownEnvironment, match=r"neither a pyproject\.toml nor an __init__\.py"):
        make(str(folder))
    (folder / "__init__.py").write_text("from squared_package.inner import environment\n")
    (folder / "inner.py").write_text(SQUARE)
    assert make(str(folder), sides=6).name == "square6"
    elsewhere = tmp_path / "elsewhere" / "squared_package"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text(SQUARE)
    with pytest.raises(ConfigError, match="loaded already, from elsewhere"):
        make(str(elsewhere))


def test_a_project_folder_is_found_by_its_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "their_squares.py").write_text(SQUARE)
    project = tmp_path / "pyproject.toml"
    for text in (
        '[project]\nname = "x"\n',
        '[project.entry-points]\n"k3rl.envs" = "x"\n',
        '[project.entry-points."k3rl.envs"]\na = "m:x"\nb = "m:y"\n',
    ):
        project.write_text(text)
        with pytest.raises(ConfigError, match="wants"):
            make(str(tmp_path))
    project.write_text(
        '[project.entry-points."k3rl.envs"]\na = "their_squares:OTHER"\nb = "their_squares:environment"\n'
    )
    assert make(f"{tmp_path}:a").name == "square9"
    assert make(f"{tmp_path}:b", sides=3).name == "square3"
    project.write_text("[broken")
    with pytest.raises(ConfigError, match="is not TOML"):
        make(str(tmp_path))


def test_shipped_environments_are_imported_only_when_asked_for() -> None:
    code = (
        "import sys, k3rl.envs\nprint(k3rl.envs.names())\n"
        "print([name for name in sys.modules if name.startswith(('k3rl.envs.chip', 'k3rl.envs.compiler'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names_line, loaded = done.stdout.splitlines()
    assert "'chip', " in names_line
    assert "'compiler'" in names_line
    assert loaded == "[]"


@pytest.mark.parametrize("name", ["chip", "compiler", "coding-lists", "coding-repair"])
def test_every_shipped_environment_offers_what_a_check_tries(name: str) -> None:
    environment = make(name)
    task = environment.source.get("heldout", 0)
    assert environment.null is not None
    assert environment.hacks is not None
    assert len(environment.hacks(task)) > 10
    assert environment.null(task) != environment.oracle(task)


@pytest.mark.parametrize(("name", "package"), [("chip", "yosys"), ("compiler", "valgrind")])
def test_a_missing_debian_package_is_named_with_the_one_command(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda tool, **where: None if tool == package else real(tool, **where))
    with pytest.raises(SandboxUnavailable, match=rf"apt-get install -y .*{package}"):
        make(name).grader()
