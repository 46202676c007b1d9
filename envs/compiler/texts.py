"""Source texts for the front-end milestones: token soup, random syntax trees, and programs with one planted mistake."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from k3rl.envs.compiler.reference.lexer import KEYWORDS, PUNCTUATION

_NAMES = ("a", "x1", "_", "_tmp", "row", "BLOCK", "fortune", "iffy", "stores", "e5", "letter", "in_", "Kernel")
_FLOATS = ("0.5", "1.0", "10.25", "1e3", "2E-4", "3.5e+2", "0.0", "7e0")
_INTS = ("0", "1", "42", "007", "65536")
_COMMENTS = ("# plain\n", "# a + b .. 1.5 @ $\n", "#\n", "## twice # again\n")

# (lines to insert, code expected at the last of them); the checker must name the code and the line.
TYPE_ERRORS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("let bad = nope + 1;",), "undefined"),
    (("let bad = frobnicate(1.0);",), "undefined"),
    (("nope = 3;",), "undefined"),
    (("let zz = 1;", "let zz = 2;"), "redefined"),
    (("let bad = exp(1.0, 2.0);",), "arity"),
    (("let bad = where(true, 1.0);",), "arity"),
    (("let bad = arange(4);",), "arity"),
    (("let bad = 1 + 1.0;",), "type"),
    (("let bad = 1.0 % 2.0;",), "type"),
    (("let bad = !1;",), "type"),
    (("let bad = true && 1;",), "type"),
    (("let bad = exp(1);",), "type"),
    (("let bad = -true;",), "type"),
    (("let bad = where(1, 2, 3);",), "type"),
    (("let zz = 1;", "zz = 1.0;"), "type"),
    (("let zz = zeros(2);", "zz = zeros(3);"), "shape"),
    (("let bad = arange(0, 4) + arange(0, 5);",), "shape"),
    (("let bad = zeros(4) + zeros(4, 4);",), "shape"),
    (("let bad = dot(zeros(2, 3), zeros(2, 3));",), "shape"),
    (("let bad = trans(zeros(3));",), "shape"),
    (("let bad = sum(1.0, 0);",), "shape"),
    (("let bad = zeros(0);",), "const"),
    (("let bad = arange(3, 3);",), "const"),
    (("let bad = sum(zeros(4), 1);",), "const"),
    (("let bad = program_id(2);",), "const"),
    (("let zz = 4;", "let bad = zeros(zz);"), "const"),
    (("for qq in 0..3 {", "qq = 1;"), "assign"),
)
_GOOD_LINES = (
    "let fine = expand(arange(0, 4), 0) + expand(arange(0, 3), 1);",
    "let fine = dot(zeros(2, 3), zeros(3, 5)) * 2.0;",
    "let fine = max(trans(zeros(2, 7)), 0) < 0.5 || true;",
    "let fine = i32(full(2.5, 2 * 3 - 1)) % 4;",
    "let fine = where(arange(0, 6) >= 3, 1, full(2, 6));",
    "let fine = sum(sum(full(1, 3, 4), 1), 0) / 2;",
)


def tokens(rng: random.Random) -> dict[str, Any]:
    """Tokens in any order, blanks and comments between."""
    parts = []
    for _ in range(rng.randint(15, 40)):
        parts.append(rng.choice([*_NAMES, *_FLOATS, *_INTS, *KEYWORDS, *PUNCTUATION, *PUNCTUATION]))
        parts.append(rng.choice((" ", " ", "\n", "  ", " " + rng.choice(_COMMENTS))))
    return {"family": "tokens", "source": "".join(parts)}


def spacing(rng: random.Random) -> dict[str, Any]:
    """Held out: tokens that touch, tabs, carriage returns, a comment at the very end."""
    runs = (
        "a<=b",
        "0..n",
        "1.5..2",
        "x==-y",
        "!!(z)",
        "p&&q||r",
        "3e4e5",
        "1.2.3",
        "f32[8,16]",
        "*f32",
        "a<-1",
        "i>=0..9",
    )
    parts = []
    for _ in range(rng.randint(10, 20)):
        parts += [rng.choice(runs), rng.choice(("\t", "\r\n", " \t ", ";", "\n\n", rng.choice(_COMMENTS)))]
    return {"family": "spacing", "source": "".join(parts) + rng.choice(("# the end", "\n", "x"))}


class Trees:
    """Random programs that parse, whatever they mean."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        self.rng, self.depth = rng, depth

    def expression(self, depth: int) -> str:
        """Any expression; parentheses where the grammar needs none, too."""
        r = self.rng.random()
        if depth == 0 or r < 0.15:
            return self.rng.choice([*_NAMES, *_FLOATS, *_INTS, "true", "false"])
        if r < 0.55:
            left, right = self.expression(depth - 1), self.expression(depth - 1)
            operator = self.rng.choice(("+", "-", "*", "/", "%", "&&", "||", "<", "=="))
            if operator in ("<", "=="):  # comparisons do not chain
                return (
                    f"({left}) {operator} ({right})" if self.rng.random() < 0.5 else f"(({left}) {operator} ({right}))"
                )
            return f"{self.shield(left)} {operator} {self.shield(right)}"
        if r < 0.7:
            return f"{self.rng.choice('-!')}{self.shield(self.expression(depth - 1))}"
        if r < 0.85:
            return f"({self.expression(depth - 1)})"
        arguments = ", ".join(self.expression(depth - 1) for _ in range(self.rng.randint(0, 3)))
        return f"{self.rng.choice(_NAMES)}({arguments})"

    def shield(self, text: str) -> str:
        """Parentheses around anything that compares."""
        return f"({text})" if "<" in text or "==" in text else text

    def statement(self, depth: int) -> str:
        """Any statement."""
        kind = self.rng.choice(("let", "let", "set", "store", "for", "if") if depth else ("let", "set", "store"))
        name, e = self.rng.choice(_NAMES), self.expression(self.depth)
        if kind == "let":
            return f"let {name} = {e};"
        if kind == "set":
            return f"{name} = {e};"
        if kind == "store":
            return f"store({name}, {e});"
        body = "\n".join(self.statement(depth - 1) for _ in range(self.rng.randint(0, 3)))
        if kind == "for":
            step = f" step {self.expression(1)}" if self.rng.random() < 0.5 else ""
            return f"for {name} in {self.expression(1)}..{self.expression(1)}{step} {{\n{body}\n}}"
        other = self.rng.choice(
            ("", f" else {{ {self.statement(0)} }}", f" else if {name} {{ {self.statement(0)} }} else {{ }}")
        )
        return f"if {self.expression(1)} {{\n{body}\n}}{other}"

    def program(self) -> str:
        """One to three kernels."""
        kernels = []
        for number in range(self.rng.randint(1, 3)):
            kinds = [self.rng.choice(("f32", "i32", "*f32", "*i32", "const")) for _ in range(self.rng.randint(0, 3))]
            params = ", ".join(f"p{place}: {kind}" for place, kind in enumerate(kinds))
            body = "\n    ".join(self.statement(2) for _ in range(self.rng.randint(1, 4)))
            kernels.append(f"kernel k{number}({params}) {{\n    {body}\n}}")
        return "\n\n".join(kernels)


def trees(rng: random.Random) -> dict[str, Any]:
    """Random programs of moderate depth."""
    return {"family": "trees", "source": Trees(rng, 3).program()}


def deep(rng: random.Random) -> dict[str, Any]:
    """Held out: deep expressions and long chains of operators of equal weight."""
    chain = " ".join(f"{rng.choice(_NAMES)} {rng.choice('+-')}" for _ in range(12)) + " 1"
    mixed = (
        " ".join(f"{rng.choice(_NAMES)} {rng.choice(('*', '+', '%', '-', '&&', '||', '/'))}" for _ in range(12))
        + " 2.5"
    )
    unary = "".join(rng.choice("-!") for _ in range(9)) + "x1"
    source = Trees(rng, 5).program()
    return {
        "family": "deep",
        "source": f"{source}\nkernel last() {{ let a = {chain}; let b = {mixed}; let c = {unary}; }}",
    }


def break_lexing(rng: random.Random, source: str) -> str:
    """Put in a character that starts no token."""
    place = rng.randrange(len(source))
    return source[:place] + rng.choice("@$`~?^'\"\\&|") + source[place:]


def break_syntax(rng: random.Random, source: str) -> str:
    """Drop, double or swap one word or punctuation mark."""
    words = source.split(" ")
    places = [number for number, word in enumerate(words) if word.strip()]
    place = rng.choice(places)
    how = rng.random()
    if how < 0.4:
        del words[place]
    elif how < 0.7:
        words.insert(place, words[place])
    else:
        words[place] = rng.choice((";", ")", "{", "let", "1.5", "..", "name", "else", "=", "%"))
    return " ".join(words)


def add_lines(rng: random.Random, source: str, lines: tuple[str, ...]) -> str:
    """Put statements after a random statement of the only kernel."""
    old = source.split("\n")
    places = [number for number, line in enumerate(old[:-1]) if line.endswith((";", "{")) and number]
    place = rng.choice(places) + 1
    new = [*old[:place], *(f"    {line}" for line in lines), *old[place:]]
    if lines[-1] == "qq = 1;":
        new.insert(place + len(lines), "    }")
    return "\n".join(new)


def break_types(rng: random.Random, source: str) -> str:
    """Plant one mistake of `TYPE_ERRORS`."""
    return add_lines(rng, source, rng.choice(TYPE_ERRORS)[0])


def enrich(rng: random.Random, source: str) -> str:
    """Add one more correct `let`."""
    return add_lines(rng, source, (rng.choice(_GOOD_LINES),))


TEXTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "tokens": tokens,
    "spacing": spacing,
    "trees": trees,
    "deep": deep,
}
