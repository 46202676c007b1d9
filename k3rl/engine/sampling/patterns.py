"""Patterns of JSON schemas in the part that a grammar keeps exactly, and formats as such patterns.

A compiler passes over anchors inside a pattern, lookarounds and back references. So a pattern is parsed here and
written anew: anchored at both ends, with literals, classes, groups, alternatives and repetitions, and everything else
is refused by name. What is written matches no text that the given pattern does not match. It may match fewer, where
dialects differ: `\\W`, `\\D` and `\\S`, and a class that leaves out one of `\\w`, `\\d`, `\\s`, give printable ASCII.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

MAX_REPEAT = 100_000

_SHORTHAND = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \\t\\n\\r"}
_PRINTABLE = range(0x20, 0x7F)
_INSIDE = {"d": re.compile("[0-9]"), "w": re.compile("[A-Za-z0-9_]"), "s": re.compile(" ")}
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_HEX = {"x": 2, "u": 4}
_QUOTED = set("\\^$.|?*+()[]{}/-")


class PatternError(ValueError):
    """A pattern that cannot be enforced in full; the message names the construct."""


@dataclass(frozen=True, slots=True)
class _Atom:
    """A piece that matches one character, as it is written."""

    text: str


@dataclass(frozen=True, slots=True)
class _Anchor:
    sign: str


@dataclass(frozen=True, slots=True)
class _Repeat:
    what: _Node
    text: str


@dataclass(frozen=True, slots=True)
class _Group:
    options: tuple[tuple[_Node, ...], ...]


_Node: TypeAlias = "_Atom | _Anchor | _Repeat | _Group"


def enforced(pattern: str) -> str:
    """The pattern, written anew and anchored. Raises PatternError."""
    parser = _Parser(pattern)
    group = parser.options()
    if parser.place < len(pattern):
        parser.refuse("a closing bracket without an opening one")
    written = _written(group, True, True)
    whole = f"^({written})$" if len(group.options) > 1 else f"^{written}$"
    try:
        re.compile(whole)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"it is no pattern ({error})") from error
    return whole


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.place = 0

    def refuse(self, what: str) -> NoReturn:
        raise PatternError(f"it has {what} at character {self.place}, which cannot be enforced while sampling")

    def options(self) -> _Group:
        options = [self._sequence()]
        while self._peek() == "|":
            self.place += 1
            options.append(self._sequence())
        return _Group(tuple(options))

    def _peek(self) -> str:
        return self._pattern[self.place] if self.place < len(self._pattern) else ""

    def _sequence(self) -> tuple[_Node, ...]:
        found: list[_Node] = []
        while (sign := self._peek()) and sign not in "|)":
            node = self._one(sign)
            if (times := self._times()) is not None:
                if isinstance(node, _Anchor):
                    self.refuse("a repeated anchor")
                node = _Repeat(node, times)
            found.append(node)
        return tuple(found)

    def _one(self, sign: str) -> _Node:
        if sign == "(":
            return self._group()
        if sign == "[":
            return self._class()
        if sign == "\\":
            return self._escape()
        if sign in "*+?{":
            self.refuse(f"{sign!r} behind nothing")
        self.place += 1
        if sign in "^$":
            return _Anchor(sign)
        return _Atom(".") if sign == "." else _Atom(_literal(sign))

    def _group(self) -> _Node:
        rest = self._pattern[self.place :]
        if rest.startswith("(?"):
            named = re.match(r"\(\?(?::|P?<[A-Za-z_]\w*>)", rest)
            if named is None:
                look = rest.startswith(("(?=", "(?!", "(?<=", "(?<!"))
                self.refuse("a lookaround" if look else f"the group {rest[:4]!r}")
            self.place += named.end()
        else:
            self.place += 1
        inner = self.options()
        if self._peek() != ")":
            self.refuse("a group that does not end")
        self.place += 1
        return inner

    def _escape(self) -> _Node:
        character, shorthand = self._escaped()
        if shorthand is None:
            return _Atom(_literal(character))
        if shorthand in _SHORTHAND:
            return _Atom(f"[{_SHORTHAND[shorthand]}]")
        return _Atom(_printable_without(_INSIDE[shorthand.lower()]))

    def _escaped(self) -> tuple[str, str | None]:
        """(the character, None), or ("", letter) for a shorthand class."""
        letter = self._pattern[self.place + 1 : self.place + 2]
        if letter in tuple("dwsDWS"):
            self.place += 2
            return "", letter
        if letter in _CONTROL:
            self.place += 2
            return _CONTROL[letter], None
        if letter in _HEX:
            digits = self._pattern[self.place + 2 : self.place + 2 + _HEX[letter]]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX[letter]}}}", digits) or 0xD800 <= int(digits, 16) < 0xE000:
                self.refuse(f"the escape \\{letter}{digits}")
            self.place += 2 + _HEX[letter]
            return chr(int(digits, 16)), None
        if not letter or letter.isalnum():
            what = {"b": "a word boundary", "B": "a word boundary"}.get(letter, f"the escape \\{letter}")
            self.refuse("a back reference" if letter.isdigit() and letter != "0" else what)
        self.place += 2
        return letter, None

    def _class(self) -> _Node:
        begin = self.place
        self.place += 1
        negated = self._peek() == "^"
        self.place += negated
        pieces: list[str] = []
        shorthand = False
        first = True
        while (sign := self._peek()) != "]" or first:
            if not sign:
                self.place = begin
                self.refuse("a class that does not end")
            if sign == "]" and first:
                self.refuse("an empty class, or one that begins with ]")
            first = False
            low, named = self._member()
            if named is not None:
                if named not in _SHORTHAND:
                    self.refuse(f"\\{named} inside a class")
                shorthand = True
                pieces.append(_SHORTHAND[named])
                continue
            if self._peek() == "-" and self._pattern[self.place + 1 : self.place + 2] not in ("]", ""):
                self.place += 1
                high, named = self._member()
                if named is not None or high < low:
                    self.refuse("a range that is none")
                pieces.append(f"{_in_class(low)}-{_in_class(high)}")
            else:
                pieces.append(_in_class(low))
        self.place += 1
        inside = "".join(pieces)
        if negated and shorthand:
            return _Atom(_printable_without(re.compile(f"[{inside}]")))
        return _Atom(f"[{'^' if negated else ''}{inside}]")

    def _member(self) -> tuple[str, str | None]:
        if self._peek() == "\\":
            return self._escaped()
        sign = self._peek()
        if sign == "[":
            self.refuse("'[' inside a class; write \\[")
        self.place += 1
        return sign, None

    def _times(self) -> str | None:
        """The repetition behind a piece, without its laziness, which changes no whole match."""
        found = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}").match(self._pattern, self.place)
        if found is None:
            if self._peek() == "{":
                self.refuse("'{' that begins no repetition; write \\{")
            return None
        counts = [int(count) for count in re.findall(r"\d+", found[0])]
        if counts and (max(counts) > MAX_REPEAT or counts[-1] < counts[0]):
            self.refuse(f"the repetition {found[0]}")
        self.place = found.end()
        if self._peek() == "?":
            self.place += 1
        elif self._peek() == "+":
            self.refuse("a possessive repetition")
        return found[0]


def _written(node: _Node, start: bool, end: bool) -> str:
    """start, end: whether nothing can come before or behind, so that an anchor there says nothing more."""
    if isinstance(node, _Atom):
        return node.text
    if isinstance(node, _Anchor):
        if not (start if node.sign == "^" else end):
            raise PatternError(f"it has the anchor {node.sign} inside, which cannot be enforced while sampling")
        return ""
    if isinstance(node, _Repeat):
        inner = _written(node.what, False, False)
        return (f"({inner})" if isinstance(node.what, _Group) else inner) + node.text
    return "|".join(_sequence_written(sequence, start, end) for sequence in node.options)


def _sequence_written(sequence: tuple[_Node, ...], start: bool, end: bool) -> str:
    parts = []
    for number, node in enumerate(sequence):
        first = start and all(isinstance(before, _Anchor) for before in sequence[:number])
        last = end and all(isinstance(behind, _Anchor) for behind in sequence[number + 1 :])
        text = _written(node, first, last)
        parts.append(f"({text})" if isinstance(node, _Group) else text)
    return "".join(parts)


def _literal(character: str) -> str:
    return _named(character) if character not in _QUOTED else f"\\{character}"


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[" else _named(character)


def _named(character: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f", "\v": "\\v"}.get(character, character)


def _printable_without(excluded: re.Pattern[str]) -> str:
    kept = [code for code in _PRINTABLE if not excluded.fullmatch(chr(code))]
    pieces, begin = [], 0
    for place in range(1, len(kept) + 1):
        if place == len(kept) or kept[place] != kept[place - 1] + 1:
            low, high = _in_class(chr(kept[begin])), _in_class(chr(kept[place - 1]))
            pieces.append(low if begin == place - 1 else f"{low}-{high}")
            begin = place
    return f"[{''.join(pieces)}]"


def _formats() -> dict[str, str]:
    """Each format as a pattern; some give fewer texts than the format has, none gives another."""
    leap = "((1[0-9]|2[0-9])(0[48]|[2468][048]|[13579][26])|(12|16|20|24|28)00)-02-29"
    year = "[12][0-9]{3}"
    days = (
        "(01|03|05|07|08|10|12)-(0[1-9]|[12][0-9]|3[01])|(04|06|09|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
    )
    date = f"({year}-({days})|{leap})"
    clock = "([01][0-9]|2[0-3]):[0-5][0-9]"
    time = rf"{clock}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+\-]{clock})"
    count = "[0-9]{1,6}"
    seconds = f"{count}S"
    of_day = f"T({count}H({count}M({seconds})?)?|{count}M({seconds})?|{seconds})"
    of_date = f"({count}D|{count}M({count}D)?|{count}Y({count}M({count}D)?)?)({of_day})?"
    octet = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    label = r"[A-Za-z0-9]{1,20}(\-[A-Za-z0-9]{1,20}){0,2}"
    host = rf"({label}\.){{1,3}}[A-Za-z]{{2,12}}"
    name = r"[A-Za-z0-9]{1,16}([._+\-][A-Za-z0-9]{1,16}){0,2}"
    segment = r"[A-Za-z0-9._~\-]{1,64}"
    digit = "[0-9a-fA-F]"
    uri = rf"https?:\/\/{host}(\/{segment}){{0,16}}(\?{segment}={segment})?"
    return {
        "date": date,
        "time": time,
        "date-time": f"{date}T{time}",
        "duration": f"P({of_date}|{of_day}|{count}W)",
        "email": f"{name}@{host}",
        "hostname": host,
        "ipv4": rf"({octet}\.){{3}}{octet}",
        "ipv6": f"({digit}{{1,4}}:){{7}}{digit}{{1,4}}",
        "uuid": rf"{digit}{{8}}(\-{digit}{{4}}){{3}}\-{digit}{{12}}",
        "uri": uri,
        "uri-reference": uri,
        "iri": uri,
        "iri-reference": uri,
        "json-pointer": r"(\/([A-Za-z0-9_.\-]|~[01]){0,64}){0,16}",
    }


FORMATS = {name: f"^{pattern}$" for name, pattern in _formats().items()}
