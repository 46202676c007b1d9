"""The project's files and imports, as the structure tests see them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "actors", "pipelines", "envs")
FOLDERS = ("k3rl", *LINKED, "tests", "benchmarks", "examples", ".ci")


@dataclass(frozen=True)
class Import:
    """One import statement: the file it stands in, its line, and the dotted name it loads."""

    file: Path
    line: int
    name: str
    for_types_only: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.name}"


@cache
def python_files() -> tuple[Path, ...]:
    """Every Python file of the project, each once: linked folders under their top-level names."""
    return tuple(
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not (folder == "k3rl" and path.relative_to(ROOT / "k3rl").parts[0] in LINKED)
    )


@cache
def package_files() -> tuple[Path, ...]:
    """The files that are part of the package k3rl."""
    return tuple(path for path in python_files() if path.relative_to(ROOT).parts[0] in ("k3rl", *LINKED))


@cache
def tree_of(path: Path) -> ast.Module:
    gc.disable()  # a tree is kept: looking for garbage among all of them took longer than parsing
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.freeze()
        gc.enable()


def module_name(path: Path) -> str:
    """The dotted name that a file of the package is imported by: kernels/kda/decode.py -> k3rl.kernels.kda.decode."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "k3rl" else ["k3rl", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def module_names() -> frozenset[str]:
    names = {module_name(path) for path in package_files()}
    return frozenset(names | {name.rpartition(".")[0] for name in names if "." in name})


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node; expressions, which hold none, are not looked into."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, field, ())
        for inner in below if isinstance(below, list) else ():
            yield inner
            yield from statements(inner)


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file, relative ones resolved, `from a import b` as a.b where that is a module."""
    every = list(statements(tree_of(path)))
    type_only = {
        inner for node in every if isinstance(node, ast.If) and _is_type_checking(node) for inner in statements(node)
    }
    found = []
    for node in every:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Import(path, node.lineno, alias.name, node in type_only))
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(path, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                name = inner if inner in module_names() else base
                found.append(Import(path, node.lineno, name, node in type_only))
    return tuple(found)


def _base_of(path: Path, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def _is_type_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.dump(node.test)


def is_sandboxed(path: Path) -> bool:
    """Files that run only inside a sandbox."""
    return "sandboxed" in path.relative_to(ROOT).parts
