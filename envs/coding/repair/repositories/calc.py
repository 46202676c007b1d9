"""The repository `calc`: arithmetic over whole numbers."""

from __future__ import annotations

import random
from typing import Any

from k3rl.envs.coding.repair.repositories.base import Mistake, Repository


def _expression(rng: random.Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randint(0, 30))
    left, right = _expression(rng, depth - 1), _expression(rng, depth - 1)
    text = f"{left}{rng.choice(['+', '-', '*', ' - ', ' + ', '/', '^'])}{right}"
    return f"({text})" if rng.random() < 0.4 else text


def _small(rng: random.Random) -> list[Any]:
    """An expression whose powers stay small."""
    return [_expression(rng).replace("^", rng.choice(["-", "+", "*"])) + rng.choice(["", "", "^2", "-2^2", "+3^2^1"])]


CALC = Repository(
    "calc",
    "evaluates arithmetic over whole numbers",
    {
        "calc/__init__.py": '"""Arithmetic over whole numbers."""\n',
        "calc/lexer.py": '''"""Text to tokens: numbers, operators, parentheses."""


def tokens(text):
    """["12", "+", "(", ...]; blanks separate and mean nothing."""
    found, place = [], 0
    while place < len(text):
        character = text[place]
        if character.isdigit():
            end = place
            while end < len(text) and text[end].isdigit():
                end += 1
            found.append(text[place:end])
            place = end
        else:
            if not character.isspace():
                found.append(character)
            place += 1
    return found
''',
        "calc/parser.py": '''"""Tokens to a tree: a number, or [operator, left, right]."""

from calc.lexer import tokens

LEVELS = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 3}
RIGHT = {"^"}  # a^b^c is a^(b^c)


def tree(text):
    """The tree of an expression."""
    found, rest = _climb(tokens(text), 1)
    return found


def _climb(rest, level):
    left, rest = _atom(rest)
    while rest and LEVELS.get(rest[0], 0) >= level:
        operator, rest = rest[0], rest[1:]
        step = 0 if operator in RIGHT else 1
        right, rest = _climb(rest, LEVELS[operator] + step)
        left = [operator, left, right]
    return left, rest


def _atom(rest):
    if rest[0] == "(":
        inner, rest = _climb(rest[1:], 1)
        return inner, rest[1:]
    return int(rest[0]), rest[1:]
''',
        "calc/machine.py": '''"""Values of trees, and trees written back."""

from calc.parser import LEVELS, tree


def value(text):
    """The value; a division by zero gives None, and so does everything made from it."""
    return _value(tree(text))


def _value(node):
    if isinstance(node, int):
        return node
    operator, left, right = node[0], _value(node[1]), _value(node[2])
    if left is None or right is None:
        return None
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if operator == "/":
        return None if right == 0 else int(left / right)
    return left ** right


def depth(text):
    """How many operators lie on the longest way from the root to a number."""
    return _depth(tree(text))


def _depth(node):
    return 0 if isinstance(node, int) else 1 + max(_depth(node[1]), _depth(node[2]))


def operators(text):
    """The operators of an expression, those that bind most strongly first, each once."""
    found = set()
    _collect(tree(text), found)
    return sorted(found, key=lambda operator: (-LEVELS[operator], operator))


def _collect(node, found):
    if not isinstance(node, int):
        found.add(node[0])
        _collect(node[1], found)
        _collect(node[2], found)
''',
    },
    (
        Mistake(
            "calc/parser.py",
            "0 if operator in RIGHT else 1",
            "0",
            "differences of three numbers are wrong",
            ("parser.tree", "machine.value"),
        ),
        Mistake(
            "calc/parser.py",
            '"*": 2, "/": 2',
            '"*": 1, "/": 2',
            "products are added before they are multiplied",
            ("parser.tree", "machine.value", "machine.operators"),
        ),
        Mistake(
            "calc/machine.py",
            "int(left / right)",
            "left // right",
            "quotients of negative numbers are rounded the wrong way; they go towards zero",
            ("machine.value",),
        ),
        Mistake(
            "calc/machine.py",
            "1 + max(",
            "1 + min(",
            "the depth of lopsided expressions is too small",
            ("machine.depth",),
        ),
        Mistake(
            "calc/lexer.py",
            "end < len(text) and text[end].isdigit()",
            "end < len(text) and end < place + 1 and text[end].isdigit()",
            "numbers with several digits fall apart",
            ("lexer.tokens", "parser.tree", "machine.value"),
        ),
        Mistake(
            "calc/machine.py",
            "(-LEVELS[operator], operator)",
            "(LEVELS[operator], operator)",
            "operators are listed in the wrong order",
            ("machine.operators",),
        ),
    ),
    {
        "lexer.tokens": lambda rng: [_expression(rng)],
        "parser.tree": _small,
        "machine.value": _small,
        "machine.depth": _small,
        "machine.operators": _small,
    },
)
