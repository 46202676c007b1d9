"""Source text -> tokens."""

from __future__ import annotations

import re

KEYWORDS = ("kernel", "let", "for", "in", "step", "if", "else", "store", "true", "false")
PUNCTUATION = ("..", "<=", ">=", "==", "!=", "&&", "||", *"+-*/%<>=!(){}[],;:")
_TOKEN = re.compile(
    r"(?P<skip>[ \t\r\n]+|#[^\n]*)"
    r"|(?P<float>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)"
    r"|(?P<int>\d+)"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<punct>" + "|".join(re.escape(one) for one in PUNCTUATION) + ")"
)


class SourceError(Exception):
    """The program is wrong: `code` as in the specification, line and column from 1."""

    def __init__(self, code: str, line: int, col: int) -> None:
        super().__init__(f"{code} at {line}:{col}")
        self.code, self.line, self.col = code, line, col


class Token:
    """kind: keyword, name, int, float, punct or end; text as written; line and column from 1."""

    __slots__ = ("col", "kind", "line", "text")

    def __init__(self, kind: str, text: str, line: int, col: int) -> None:
        self.kind, self.text, self.line, self.col = kind, text, line, col


def lex(source: str) -> list[Token]:
    """All tokens, an `end` token last. Raises SourceError("lex") at the first character that starts no token."""
    tokens: list[Token] = []
    position, line, line_start = 0, 1, 0
    while position < len(source):
        found = _TOKEN.match(source, position)
        if found is None:
            raise SourceError("lex", line, position - line_start + 1)
        text, kind = found.group(), found.lastgroup or ""
        if kind == "name" and text in KEYWORDS:
            kind = "keyword"
        if kind != "skip":
            tokens.append(Token(kind, text, line, position - line_start + 1))
        newlines = text.count("\n")
        if newlines:
            line += newlines
            line_start = position + text.rindex("\n") + 1
        position = found.end()
    tokens.append(Token("end", "", line, position - line_start + 1))
    return tokens
