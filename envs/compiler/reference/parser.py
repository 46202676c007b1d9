"""Tokens -> syntax tree, by recursive descent.

Nodes are lists as in the specification, with a source line appended where the type checker needs one: an expression
is a `Node(shape, line)`, and `plain` gives the lists of the specification.
"""

from __future__ import annotations

from typing import Any

from .lexer import SourceError, Token, lex

PRECEDENCE = (("||",), ("&&",), ("<", "<=", ">", ">=", "==", "!="), ("+", "-"), ("*", "/", "%"))
COMPARISON = 2


class Node(list):
    """A syntax tree node: the list of the specification, and the line where it starts."""

    line: int = 0

    def __init__(self, items: list[Any], line: int) -> None:
        super().__init__(items)
        self.line = line


class Parser:
    """One pass over the tokens; `here` is the next token."""

    def __init__(self, source: str) -> None:
        self._tokens = lex(source)
        self._at = 0

    @property
    def here(self) -> Token:
        return self._tokens[self._at]

    def _fail(self) -> SourceError:
        return SourceError("syntax", self.here.line, self.here.col)

    def _take(self) -> Token:
        token = self.here
        self._at += 1
        return token

    def _is(self, text: str) -> bool:
        return self.here.text == text and self.here.kind in ("punct", "keyword")

    def _accept(self, text: str) -> bool:
        if self._is(text):
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> Token:
        if not self._is(text):
            raise self._fail()
        return self._take()

    def _name(self) -> str:
        if self.here.kind != "name":
            raise self._fail()
        return self._take().text

    def program(self) -> list[Node]:
        """One kernel or more."""
        kernels = [self._kernel()]
        while self.here.kind != "end":
            kernels.append(self._kernel())
        return kernels

    def _kernel(self) -> Node:
        line = self._expect("kernel").line
        name = self._name()
        self._expect("(")
        params: list[Node] = []
        while not self._is(")"):
            if params:
                self._expect(",")
            params.append(self._param())
        self._expect(")")
        return Node(["kernel", name, params, self._block()], line)

    def _param(self) -> Node:
        line = self.here.line
        name = self._name()
        self._expect(":")
        star = "*" if self._accept("*") else ""
        kind = self.here
        if kind.text not in ("f32", "i32") and not (kind.text == "const" and not star):
            raise self._fail()
        self._take()
        return Node([name, star + kind.text], line)

    def _block(self) -> list[Node]:
        self._expect("{")
        statements: list[Node] = []
        while not self._accept("}"):
            statements.append(self._statement())
        return statements

    def _statement(self) -> Node:
        line = self.here.line
        if self._accept("for"):
            return self._for(line)
        if self._accept("if"):
            return self._if(line)
        if self._accept("store"):
            node = Node(["store", self._arguments()], line)
        elif self._accept("let"):
            name = self._name()
            self._expect("=")
            node = Node(["let", name, self._expression()], line)
        else:
            name = self._name()
            self._expect("=")
            node = Node(["set", name, self._expression()], line)
        self._expect(";")
        return node

    def _for(self, line: int) -> Node:
        name = self._name()
        self._expect("in")
        low = self._expression()
        self._expect("..")
        high = self._expression()
        step = self._expression() if self._accept("step") else None
        return Node(["for", name, low, high, step, self._block()], line)

    def _if(self, line: int) -> Node:
        condition = self._expression()
        then = self._block()
        other: list[Node] = []
        if self._accept("else"):
            inner = self.here.line
            other = [self._if(inner)] if self._accept("if") else self._block()
        return Node(["if", condition, then, other], line)

    def _arguments(self) -> list[Node]:
        self._expect("(")
        arguments: list[Node] = []
        while not self._is(")"):
            if arguments:
                self._expect(",")
            arguments.append(self._expression())
        self._expect(")")
        return arguments

    def _expression(self, level: int = 0) -> Node:
        if level == len(PRECEDENCE):
            return self._unary()
        left = self._expression(level + 1)
        while self.here.kind == "punct" and self.here.text in PRECEDENCE[level]:
            operator = self._take().text
            left = Node(["bin", operator, left, self._expression(level + 1)], left.line)
            if level == COMPARISON:
                break  # comparisons do not chain
        return left

    def _unary(self) -> Node:
        line = self.here.line
        for operator in "-!":
            if self._accept(operator):
                return Node(["un", operator, self._unary()], line)
        return self._primary(line)

    def _primary(self, line: int) -> Node:
        token = self.here
        if token.kind == "int":
            return Node(["int", int(self._take().text)], line)
        if token.kind == "float":
            return Node(["float", float(self._take().text)], line)
        if token.kind == "keyword" and token.text in ("true", "false"):
            return Node(["bool", self._take().text == "true"], line)
        if self._accept("("):
            inner = self._expression()
            self._expect(")")
            return inner
        name = self._name()
        if self._is("("):
            return Node(["call", name, self._arguments()], line)
        return Node(["name", name], line)


def parse(source: str) -> list[Node]:
    """The kernels of a program. Raises SourceError("lex") or SourceError("syntax") at the offending token."""
    return Parser(source).program()
