"""The reference's lexer, parser and type checker against what the specification says, worked out by hand."""

from __future__ import annotations

import random

import pytest

from k3rl.envs.compiler import fuzz, texts
from k3rl.envs.compiler.reference.lexer import SourceError, lex
from k3rl.envs.compiler.reference.lower import lower
from k3rl.envs.compiler.reference.parser import parse


def kinds(source: str) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in lex(source)][:-1]


def expression(text: str):
    return parse(f"kernel k() {{ let a = {text}; }}")[0][3][0][2]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("0..n", [("int", "0"), ("punct", ".."), ("name", "n")]),
        ("1.5..2", [("float", "1.5"), ("punct", ".."), ("int", "2")]),
        ("3e4e5", [("float", "3e4"), ("name", "e5")]),
        ("a<=-1", [("name", "a"), ("punct", "<="), ("punct", "-"), ("int", "1")]),
        ("iffy if", [("name", "iffy"), ("keyword", "if")]),
        ("x # if $\n+", [("name", "x"), ("punct", "+")]),
    ],
)
def test_the_longest_match_wins(source, want):
    assert kinds(source) == want


def test_places_count_from_one_and_the_end_token_is_after_the_last_character():
    last, end = lex("a\n\t bc")[-2:]
    assert (last.line, last.col) == (2, 3)
    assert (end.kind, end.line, end.col) == ("end", 2, 5)


def test_a_character_that_starts_no_token_is_an_error_at_its_place():
    with pytest.raises(SourceError) as caught:
        lex("let a\n  = @;")
    assert (caught.value.code, caught.value.line, caught.value.col) == ("lex", 2, 5)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1 - 2 - 3", ["bin", "-", ["bin", "-", ["int", 1], ["int", 2]], ["int", 3]]),
        ("1 + 2 * 3", ["bin", "+", ["int", 1], ["bin", "*", ["int", 2], ["int", 3]]]),
        ("-a * b", ["bin", "*", ["un", "-", ["name", "a"]], ["name", "b"]]),
        ("a || b && c", ["bin", "||", ["name", "a"], ["bin", "&&", ["name", "b"], ["name", "c"]]]),
        ("(1 + 2) * 3", ["bin", "*", ["bin", "+", ["int", 1], ["int", 2]], ["int", 3]]),
        ("f(1, x(), 2.5)", ["call", "f", [["int", 1], ["call", "x", []], ["float", 2.5]]]),
        ("a < 1 == b", None),
    ],
)
def test_operators_bind_as_the_grammar_says(text, want):
    if want is None:
        with pytest.raises(SourceError, match="syntax"):
            expression(text)
    else:
        assert expression(text) == want


def test_else_if_is_a_list_with_one_if():
    source = "kernel k(x: *f32, B: const) { if a { } else if b { store(x, 0, 1.0); } for i in 0..B step 2 { i = 1; } }"
    name, params, body = parse(source)[0][1:]
    assert (name, params) == ("k", [["x", "*f32"], ["B", "const"]])
    store = ["store", [["name", "x"], ["int", 0], ["float", 1.0]]]
    assert body[0] == ["if", ["name", "a"], [], [["if", ["name", "b"], [store], []]]]
    assert body[1] == ["for", "i", ["int", 0], ["name", "B"], ["int", 2], [["set", "i", ["int", 1]]]]


def test_shapes_follow_from_constants_and_broadcasting():
    source = """kernel k(x: *f32, n: i32, B: const) {
        let a = expand(arange(0, B), 1) + expand(arange(0, B / 2), 0);
        let b = sum(f32(a), 0);
        let c = b < 0.5;
        let d = dot(zeros(B, 3), trans(zeros(5, 3)));
        let e = load(x, n);
    }"""
    _, lets = lower(parse(source)[0], {"B": 8})
    assert dict(lets) == {"a": "i32[8,4]", "b": "f32[4]", "c": "bool[4]", "d": "f32[8,5]", "e": "f32"}


@pytest.mark.parametrize("number", range(len(texts.TYPE_ERRORS)))
def test_a_planted_mistake_is_named_with_its_line(number):
    lines, code = texts.TYPE_ERRORS[number]
    case = fuzz.loops(random.Random(number))
    source = texts.add_lines(random.Random(number), case["source"], lines)
    instance = case["instances"][0]
    lower(parse(case["source"])[0], instance["consts"])  # without the mistake nothing is wrong
    with pytest.raises(SourceError) as caught:
        lower(parse(source)[0], instance["consts"])
    assert caught.value.code == code
    assert source.split("\n")[caught.value.line - 1].strip() == lines[-1]
