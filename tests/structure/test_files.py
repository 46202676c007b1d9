"""What files may look like: sizes, links, forbidden calls, no traces of the machine they were written on."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
import structure_source as source

ROOT = source.ROOT
LONGEST_FILE = 600
LONGEST_FUNCTION = 90
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_ARGUMENTS = {"weights_only": "False", "allow_pickle": "True", "trust_remote_code": "True"}
SKIPPED = {".git", ".venv", "__pycache__", "build", "dist", "outputs", "golden", "k3rl.egg-info"}
# Written in halves, so that this file does not contain what it forbids.
FORBIDDEN_TEXT = [
    re.compile("(?<![\\w.])/" + "work/"),
    re.compile("/" + "home/\\w"),
    re.compile("/" + "opt/(wheels|pypi)"),
    re.compile("py" + "pi\\.org|python" + "hosted\\.org|download\\.py" + "torch\\.org"),
]


def text_files():
    """Every text file that people wrote, once each."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            name for name in names if name not in SKIPPED and not name.endswith("_cache") and name != ".hypothesis"
        ]
        for name in set(files) - {".git"}:  # a file in a linked worktree
            path = Path(folder) / name
            if path.suffix in ("", ".py", ".md", ".toml", ".yaml", ".txt", ".ipynb", ".js", ".html", ".css"):
                yield path


def test_the_four_links_are_relative_and_lead_to_the_top_level_folders():
    for name in source.LINKED:
        link = ROOT / "k3rl" / name
        assert link.is_symlink(), f"{link} is no link"
        assert os.readlink(link) == f"../{name}"
        assert (ROOT / name / "__init__.py").is_file()


def test_files_are_at_most_600_lines():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source.python_files()}
    too_long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > LONGEST_FILE}
    assert not too_long


def test_functions_are_at_most_90_lines():
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in source.python_files()
        for node in source.statements(source.tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert not too_long, "\n".join(too_long)


def test_every_module_of_the_package_says_what_it_is():
    silent = [
        str(path.relative_to(ROOT)) for path in source.package_files() if not ast.get_docstring(source.tree_of(path))
    ]
    assert not silent, silent


def unsafe_calls(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, what) of everything in a syntax tree that could run code hidden in data."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, f"import {name}") for name in modules if name.split(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
        arguments = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
        if ast.unparse(node.func) == "torch.load" and arguments.get("weights_only") != "True":
            found.append((node.lineno, "torch.load without weights_only=True"))
        found += [
            (node.lineno, f"{name}={bad}") for name, bad in UNSAFE_ARGUMENTS.items() if arguments.get(name) == bad
        ]
    return found


def test_nothing_is_unpickled():
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path in source.package_files()
        for line, what in unsafe_calls(source.tree_of(path))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_an_unsafe_line_is_noticed(line):
    assert unsafe_calls(ast.parse(line))


@pytest.mark.parametrize("line", ["torch.load(path, weights_only=True)", "np.load(path)", "json.loads(text)"])
def test_a_safe_line_is_let_through(line):
    assert not unsafe_calls(ast.parse(line))


def test_no_file_names_a_machine_or_a_registry():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in text_files()
        for pattern in FORBIDDEN_TEXT
        if (match := pattern.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert not found, "\n".join(found)


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def commands_in(page: str) -> list[list[str]]:
    """The command lines of a page's code blocks, split at blanks, prompts taken off."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|bash|console|shell)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line for line in text.splitlines() if line.startswith("    ")]
    return [words for line in lines if (words := line.strip().removeprefix("$ ").split())]


PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_lines_of_at_most_120_characters_and_links_to_what_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    # A row of a table and an address cannot be broken.
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|") and "://" not in line]
    assert not long
    links = [link.partition("#")[0] for link in re.findall(r"\[[^\]]*\]\(([^)]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    named = re.findall(r"`((?:docs|benchmarks)/[\w/]+\.(?:md|py))`", text)
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_of_a_page_exist(page):
    named = {word for words in commands_in(page) if words[0] == "make" for word in words[1:2] if "=" not in word}
    assert named <= make_targets()


def test_k3rl_commands_of_the_readme_exist():
    from k3rl.cli import COMMANDS

    named = {words[1] for words in commands_in("README.md") if words[0].endswith("k3rl") and len(words) > 1}
    assert {name for name in named if not name.startswith("-")} <= COMMANDS.keys()


def test_the_readme_shows_the_two_commands_of_a_newcomer():
    commands = [" ".join(words[:2]) for words in commands_in("README.md")]
    assert "make quickstart" in commands
    assert "make test" in commands


def test_the_continuous_integration_uses_the_targets_that_people_use():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    parts = set(re.findall(r"^part \d+ ([a-z-]+)", text, re.MULTILINE))
    assert {"test", "quickstart", "lint"} <= parts <= make_targets()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_map_names_files_that_exist_and_takes_at_most_ten_stops_a_way():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+/[\w/]+\.py)`", text))
    rooms = [ROOT, ROOT / "kernels"]
    assert not [name for name in named if not any((room / name).is_file() for room in rooms)]
    for way in text.split("## The way of ")[1:]:
        stops = re.findall(r"^\d+\. ", way, re.MULTILINE)
        assert 5 <= len(stops) <= 10
