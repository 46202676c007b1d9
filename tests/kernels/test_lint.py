"""What the interpreter gets silently wrong must go through `triton_ops`: raw bf16 dots and casts are found here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
FILES = sorted(path for path in KERNELS.glob("*.py") if "import triton.language" in path.read_text())


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


def test_the_lint_finds_what_it_is_for():
    assert len(raw_uses("tl.dot(a, b)\nx.to(tl.bfloat16)\ntl.dot_scaled(a)")) == 3
    assert not raw_uses("dot(a, b)\nx.to(tl.float16)\nx.to(tl.bfloat16, bitcast=True)")


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "triton_ops.py"], ids=lambda p: p.name)
def test_kernels_use_the_helpers_for_dots_and_bf16_rounding(path):
    assert not raw_uses(path.read_text())


def test_there_are_kernels_to_check():
    assert len(FILES) >= 6
