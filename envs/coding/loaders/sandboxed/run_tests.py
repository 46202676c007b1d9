"""Runs in a grading sandbox: named tests, each in a process of its own. Plain standard library, pytest where it is.

Standard input: {"nonce", "tests": [id, ...], "timeout_s"}. Standard output, last line: the nonce and a JSON list with
one of "passed", "failed", "missing" per test. The process of a test says its result behind a token of this process, so
a test that ends early, or prints, has not passed. Nor has one after which the machinery of tests is not what it was, or
in which a value passed for equal that is equal to anything.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import select
import signal
import sys
import unittest

try:  # before the submission's folder is on the path
    import pytest
except ImportError:
    pytest = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


# What runs tests and says how they ended; plugins of pytest change other parts of it by right.
WATCHED = ("builtins", "unittest", "_pytest.runner", "_pytest.reports", "_pytest.outcomes", "_pytest.main", "pluggy")

BOUND = (classmethod, staticmethod, property)


def machinery() -> dict[tuple[str, str, str], int]:
    """(module, class, name) -> identity of everything callable that decides whether a test has passed."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(tuple(f"{one}." for one in WATCHED)):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, "", key] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                own = list(vars(value).items())
                found |= {(name, key, one): id(part) for one, part in own if callable(part) or isinstance(part, BOUND)}
    return found


def other_than(value: Any) -> list[Any]:
    """Values of the same plain type that are not equal to it."""
    if isinstance(value, bool) or value is None:
        return [object()]
    if isinstance(value, (int, float)):
        return [value + 1, value - 2.5]
    if isinstance(value, str):
        return [value + "?"]
    if isinstance(value, bytes):
        return [value + b"?"]
    if isinstance(value, (list, tuple)):
        return [type(value)([*value, object()])]
    if isinstance(value, dict):
        return [{**value, object(): 0}]
    return [{*value, object()}] if isinstance(value, (set, frozenset)) else []


def equals_anything(value: Any, wanted: Any) -> bool:
    """Whether a value is equal to `wanted` and to what `wanted` is not. `unittest.mock.ANY` is a test's own."""
    if type(value) is type(wanted) or type(value).__module__.startswith("unittest"):
        return False
    return any(bool(value == other) for other in [*other_than(wanted), object()])


def watch_equality() -> list[str]:
    """From now on `assertEqual` notes values that are equal to anything."""
    seen: list[str] = []
    plain = unittest.TestCase.assertEqual

    def watched(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        if equals_anything(first, second) or equals_anything(second, first):
            seen.append(type(first).__name__)
        plain(self, first, second, msg)

    unittest.TestCase.assertEqual = unittest.TestCase.assertEquals = watched  # type: ignore[method-assign]
    return seen


def run_one(test: str) -> str:
    """The result of a test, by pytest's name (path::Class::name) or by a dotted one."""
    path, *names = test.split("::")
    if not names:
        return run_dotted(test)
    if pytest is not None:
        return run_pytest(test)
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            return "missing"
        found = getattr(found, name)
    if isinstance(getattr(module, names[0]), type) and issubclass(getattr(module, names[0]), unittest.TestCase):
        return run_dotted(".".join([module.__name__, *names]))
    if len(names) == 2:  # a plain class in pytest's manner
        found = getattr(getattr(module, names[0])(), names[1])
    found()
    return "passed"


def run_dotted(name: str) -> str:
    if name.endswith(")") and " (" in name:  # `test_a (package.module.Class)`, as unittest prints it
        own, _, place = name[:-1].partition(" (")
        name = place if place.endswith(f".{own}") else f"{place}.{own}"
    suite = unittest.defaultTestLoader.loadTestsFromName(name)
    if suite.countTestCases() == 0 or unittest.defaultTestLoader.errors:
        return "missing"
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    return "passed" if result.wasSuccessful() and not result.skipped and result.testsRun else "failed"


def run_pytest(test: str) -> str:
    outcomes: list[str] = []

    class Plugin:
        def pytest_runtest_logreport(self, report: object) -> None:
            outcomes.append(f"{report.when}:{report.outcome}")  # type: ignore[attr-defined]

    code = pytest.main([test, "-q", "-p", "no:cacheprovider"], plugins=[Plugin()])
    if int(code) in (4, 5):
        return "missing"
    return "passed" if int(code) == 0 and "call:passed" in outcomes else "failed"


def apart(test: str, timeout_s: float) -> str:
    """`run_one` in a fork that must report before its time is over."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(read)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            seen = watch_equality()
            before = machinery()
            result = run_one(test)
            after = machinery()
            if seen or any(after.get(key) != one for key, one in before.items()):
                result = "failed"
        except BaseException:
            result = "failed"
        os.write(write, f"{token}{result}".encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], timeout_s)
    said = os.read(read, 200).decode("utf-8", "replace") if ready else ""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    return said.removeprefix(token) if said.startswith(token) else "failed"


if __name__ == "__main__":
    job = json.load(sys.stdin)
    token = os.urandom(16).hex()
    sys.path[:0] = [folder for folder in (os.getcwd(), os.path.join(os.getcwd(), "src")) if os.path.isdir(folder)]
    sys.dont_write_bytecode = True
    results = [apart(test, job["timeout_s"]) for test in job["tests"]]
    print(job["nonce"] + json.dumps(results))
