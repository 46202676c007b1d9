"""Who may import whom."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys

import pytest
import structure_source as source

FLOORS = {
    "packed": 1,
    "types": 1,
    "config": 1,
    "numerics": 1,
    "tokens": 1,
    "kernels": 2,
    "envs": 2,
    "data": 2,
    "run": 2,
    "model": 3,
    "optim": 3,
    "losses": 3,
    "dashboard": 3,
    "parallel": 4,
    "checkpoint": 5,
    "planner": 5,
    "engine": 6,
    "serve": 7,
    "actors": 8,
    "pipelines": 9,
    "cli": 10,
}


def room_of(module: str) -> str:
    """The room of a dotted name; `python -m k3rl` is the command line."""
    parts = module.split(".")
    if len(parts) == 1:
        return "k3rl"
    return "cli" if parts[1] == "__main__" else parts[1]


def breach(importer: str, imported: str) -> str | None:
    """Why this import is not allowed, or None."""
    room, other = room_of(importer), room_of(imported)
    if room == other or other == "k3rl":
        return None
    if room == "k3rl":
        return "k3rl/__init__.py imports no room"
    floor, below = FLOORS[room], FLOORS[other]
    if below < floor or (below == floor == 1):
        return None
    return f"{room} is on floor {floor}, {other} on floor {below}"


def own_imports(path):
    return [found for found in source.imports_of(path) if found.name.split(".")[0] == "k3rl"]


def test_every_room_has_a_floor():
    rooms = {room_of(name) for name in source.module_names()} - {"k3rl"}
    assert rooms <= FLOORS.keys(), f"rooms without a floor: {rooms - FLOORS.keys()}"


def test_modules_import_only_from_their_room_or_floors_below():
    found = [
        f"{one}: {why}"
        for path in source.package_files()
        for one in own_imports(path)
        if (why := breach(source.module_name(path), one.name))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("k3rl.model.kda", "k3rl.parallel.mesh"),
        ("k3rl.run.metrics", "k3rl.data.batch"),
        ("k3rl.types", "k3rl.run"),
        ("k3rl.pipelines.rl", "k3rl.cli.parser"),
        ("k3rl", "k3rl.model"),
    ],
)
def test_a_breach_of_the_floors_is_noticed(importer, imported):
    assert breach(importer, imported)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A project of its own; what was read of this one is read again afterwards."""
    caches = (source.python_files, source.package_files, source.module_names)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_relative_imports_are_resolved(elsewhere):
    package = elsewhere / "k3rl" / "model"
    package.mkdir(parents=True)
    (elsewhere / "k3rl" / "parallel").mkdir()
    (elsewhere / "k3rl" / "parallel" / "mesh.py").touch()
    (elsewhere / "k3rl" / "engine").mkdir()
    (elsewhere / "k3rl" / "engine" / "cache.py").touch()
    (package / "__init__.py").write_text("from . import kda\nfrom ..parallel import mesh\n")
    (package / "kda.py").write_text("from ..engine.cache import Slot\n")
    names = {found.name for path in sorted(package.iterdir()) for found in source.imports_of(path)}
    assert {"k3rl.parallel.mesh", "k3rl.engine.cache"} <= names


def test_the_ground_floor_has_no_circle():
    ground = [room for room, floor in FLOORS.items() if floor == 1]
    edges = {room: set() for room in ground}
    for path in source.package_files():
        room = room_of(source.module_name(path))
        if room in edges:
            edges[room] |= {room_of(found.name) for found in own_imports(path)} & set(ground) - {room}
    while ready := [room for room, needs in edges.items() if not needs & edges.keys()]:
        for room in ready:
            del edges[room]
    assert not edges, f"these import each other: {edges}"


def test_linked_folders_are_never_imported_bare():
    found = [
        str(one)
        for path in source.python_files()
        for one in source.imports_of(path)
        if one.name.split(".")[0] in source.LINKED
    ]
    assert not found, "\n".join(found)


def test_ray_is_imported_only_by_actors_and_pipelines():
    found = [
        str(one)
        for path in source.package_files()
        for one in source.imports_of(path)
        if one.name.split(".")[0] == "ray" and room_of(source.module_name(path)) not in ("actors", "pipelines")
    ]
    assert not found, "\n".join(found)


def test_torch_is_not_imported_by_types_config_tokens_run_and_envs():
    found = [
        str(one)
        for path in source.package_files()
        for one in source.imports_of(path)
        if one.name.split(".")[0] == "torch"
        and not one.for_types_only
        and not source.is_sandboxed(path)
        and room_of(source.module_name(path)) in ("k3rl", "types", "config", "tokens", "envs", "run", "cli")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "module",
    [
        *("k3rl", "k3rl.types", "k3rl.config", "k3rl.tokens", "k3rl.data", "k3rl.envs", "k3rl.run", "k3rl.cli"),
        "k3rl.dashboard",
        *("k3rl.actors.environment", "k3rl.actors.reward", "k3rl.actors.rollout"),  # of processes without torch
    ],
)
def test_a_fresh_interpreter_that_imports_it_has_neither_torch_nor_ray(module):
    program = f"import sys, {module}; print(sorted({{'torch', 'ray'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_what_examples_and_benchmarks_import_of_the_package_is_there():
    wanted = {
        (module, alias.name, str(path.relative_to(source.ROOT)))
        for path in source.python_files()
        if path.relative_to(source.ROOT).parts[0] in ("examples", "benchmarks")
        for node in source.statements(source.tree_of(path))
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("k3rl")
        for alias in node.names
    }
    missing = []
    for module, name, where in sorted(wanted):
        try:
            there = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        except ModuleNotFoundError:
            there = None
        if not there:
            missing.append(f"{where} takes {name} of {module}")
    assert not missing, "\n".join(missing)
