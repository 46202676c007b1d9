"""Rooms are entered by their facades, and no class is a room of its own."""

from __future__ import annotations

import ast
import importlib

import pytest
import structure_source as source

MOST_PAST_A_FACADE = 40
MOST_METHODS = 30
# A compiler's pass has a method for each kind of node.
VISITORS = "envs/compiler/reference"


def facades() -> dict[str, set[str]]:
    """Dotted name of every folder of the package that names its exports -> those names."""
    found = {}
    for path in source.package_files():
        if path.name != "__init__.py":
            continue
        for node in source.tree_of(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[source.module_name(path)] = set(ast.literal_eval(node.value))
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def past_a_facade(module: str, node: ast.ImportFrom, known: dict[str, set[str]]) -> list[str]:
    """Names that an import takes from inside another room. A room that is one file is its own facade."""
    taken = node.module or ""
    if not taken.startswith("k3rl.") or room(taken) == room(module):
        return []
    if taken.count(".") == 1 and taken not in known:
        return []
    return [f"{taken}.{alias.name}" for alias in node.names if alias.name not in known.get(taken, set())]


def test_few_imports_go_past_a_facade():
    known = facades()
    past = [
        f"{path.relative_to(source.ROOT)}:{node.lineno} takes {name}"
        for path in source.package_files()
        if not source.is_sandboxed(path)
        for node in ast.walk(source.tree_of(path))
        if isinstance(node, ast.ImportFrom)
        for name in past_a_facade(source.module_name(path), node, known)
    ]
    assert len(past) <= MOST_PAST_A_FACADE, "\n".join(past)


@pytest.mark.parametrize(
    ("line", "past"),
    [
        ("from k3rl.model import K3Config", 0),
        ("from k3rl.model.config import K3Config", 1),
        ("from k3rl.model import config", 1),
        ("from k3rl.types import Task, Turn", 0),
        ("from k3rl.numerics import mx", 0),
        ("from k3rl.engine.rows import RowTable, Request", 2),
    ],
)
def test_an_import_past_a_facade_is_noticed(line, past):
    assert len(past_a_facade("k3rl.pipelines.rl", ast.parse(line).body[0], facades())) == past


@pytest.mark.parametrize("folder", sorted(facades()))
def test_a_facade_has_what_it_names(folder):
    module = importlib.import_module(folder)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing


def test_every_room_has_a_facade():
    rooms = {name for name in source.module_names() if name.count(".") == 1}
    folders = {name for name in rooms if any(other.startswith(f"{name}.") for other in source.module_names())}
    assert folders <= facades().keys(), folders - facades().keys()


def test_classes_have_fewer_than_30_methods():
    large = [
        f"{path.relative_to(source.ROOT)}: {node.name} has {methods} methods"
        for path in source.package_files()
        if VISITORS not in str(path)
        for node in ast.walk(source.tree_of(path))
        if isinstance(node, ast.ClassDef)
        and (methods := sum(isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) for inner in node.body))
        >= MOST_METHODS
    ]
    assert not large, "\n".join(large)
