from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.tokens.train_merges import learn_merges, make_table


def test_the_first_merges_of_a_small_text_are_its_most_frequent_pairs():
    # "ab" occurs 4 times, then "abc" 3 times; "xy" 2 times.
    assert learn_merges("abc\nabc\nabc\nab\nxy\nxy", 3, taken=()) == ["ab", "abc", "xy"]


def test_ties_go_to_the_smaller_text_and_digits_and_newlines_never_merge():
    assert learn_merges("zz1yy\nzz1yy", 2, taken=()) == ["yy", "zz"]


def test_a_markup_name_takes_no_place_among_the_merges():
    assert "ab" not in learn_merges("abcd\nabcd\nabce\nabce", 2, taken=("ab",))


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match="gives only 1 merges"):
        learn_merges("ab\nab", 5, taken=())


@given(st.lists(st.text(alphabet="ab c", max_size=12), min_size=4, max_size=12))
def test_the_first_merge_is_the_most_frequent_pair_of_characters(lines):
    pairs = Counter(pair for line in lines if len(line) > 1 for pair in map("".join, pairwise(line)))
    best = max(pairs.values(), default=0)
    if best < 2:
        return
    (merge,) = learn_merges("\n".join(lines), 1, taken=())
    assert merge == min(pair for pair, count in pairs.items() if count == best)


def test_the_same_text_gives_the_same_table_byte_for_byte():
    text = "\n".join(
        f"{a}{b}{c} then {c}{b} or {b}{a}" for a in "abcdefghi" for b in "ijklmnopqr" for c in "qrstuvwxyz"
    )
    assert make_table(text, "a test") == make_table(text, "a test")
    assert json.loads(make_table(text, "a test"))["made_by"]["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_the_shipped_table_says_how_it_was_made():
    path = importlib.resources.files("k3rl.tokens") / "small_vocab.json"
    made = json.loads(path.read_text(encoding="utf-8"))["made_by"]
    assert set(made) == {"command", "text", "text_characters", "text_sha256"}
    assert "seed" in made["text"]
