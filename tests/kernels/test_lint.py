"""What no run on a CPU would show: raw bf16 dots and casts, which the interpreter gets silently wrong, and kernels that
are launched early and touch memory before they have waited."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
FILES = sorted(path for path in KERNELS.rglob("*.py") if "import triton.language" in path.read_text())


def raw_uses(source: str) -> list[str]:
    """`tl.dot`, `tl.dot_scaled` and `.to(tl.bfloat16)` calls in a source, as text with line numbers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            text = ast.unparse(node)
            cast = node.func.attr == "to" and any(ast.unparse(a) == "tl.bfloat16" for a in node.args)
            if ast.unparse(node.func) in ("tl.dot", "tl.dot_scaled") or (cast and "bitcast=True" not in text):
                found.append(f"line {node.lineno}: {text}")
    return found


def launched_early(source: str) -> dict[str, bool]:
    """Kernel that is launched with `early` -> whether it waits before it touches memory."""
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = {}
    launches = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript))
    for node in launches:
        if not any(word.arg is None and ast.unparse(word.value) == "early()" for word in node.keywords):
            continue
        name = ast.unparse(node.func.value)
        body = [ast.unparse(statement) for statement in functions[name].body]
        before = body[: body.index("begin()")] if "begin()" in body else ["tl.load"]
        found[name] = not any(word in line for line in before for word in ("load", "store", "atomic", "return"))
    return found


def test_the_lint_finds_kernels_that_do_not_wait():
    launch = "\ndef run():\n    k[(1,)](x, B=1, **early())\n"
    assert launched_early(f"def k(x):\n    prefetch(x, 16)\n    begin()\n    y = tl.load(x){launch}") == {"k": True}
    assert launched_early(f"def k(x):\n    y = tl.load(x)\n    begin(){launch}") == {"k": False}
    assert launched_early(f"def k(x):\n    if x:\n        begin(){launch}") == {"k": False}
    assert launched_early("def k(x):\n    pass\ndef run():\n    k[(1,)](x)") == {}


def test_kernels_that_are_launched_early_wait_before_they_touch_memory():
    found = {name: waits for path in FILES for name, waits in launched_early(path.read_text()).items()}
    assert len(found) >= 15
    assert all(found.values()), found


def test_the_lint_finds_what_it_is_for():
    assert len(raw_uses("tl.dot(a, b)\nx.to(tl.bfloat16)\ntl.dot_scaled(a)")) == 3
    assert not raw_uses("dot(a, b)\nx.to(tl.float16)\nx.to(tl.bfloat16, bitcast=True)")


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "triton_ops.py"], ids=lambda p: p.name)
def test_kernels_use_the_helpers_for_dots_and_bf16_rounding(path):
    assert not raw_uses(path.read_text())


def test_there_are_kernels_to_check():
    assert len(FILES) >= 6
