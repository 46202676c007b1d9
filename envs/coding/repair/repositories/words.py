"""The repository `words`: words of texts."""

from __future__ import annotations

import random

from k3rl.envs.coding.repair.repositories.base import Mistake, Repository


def _text(rng: random.Random) -> str:
    words = ["a", "tea", "Tea", "pot", "kettle", "it's", "re-use", "x1", "the", "THE"]
    return "".join(
        rng.choice(words) + rng.choice([" ", "  ", ", ", ". ", "\n", "! "]) for _ in range(rng.randint(3, 12))
    )


WORDS = Repository(
    "words",
    "counts and lays out words",
    {
        "words/__init__.py": '"""Words of texts."""\n',
        "words/scan.py": '''"""Text to words."""


def words(text):
    """Words in small letters; letters, digits, and ' and - inside a word belong to it."""
    found, word = [], ""
    for place, character in enumerate(text + " "):
        inside = character in "'-" and word and text[place + 1 : place + 2].isalnum()
        if character.isalnum() or inside:
            word += character.lower()
        elif word:
            found.append(word)
            word = ""
    return found
''',
        "words/count.py": '''"""How often words occur."""

from words.scan import words


def counts(text):
    """[word, how often], the most frequent first, equal ones in alphabetical order."""
    found = {}
    for word in words(text):
        found[word] = found.get(word, 0) + 1
    return [[word, number] for word, number in sorted(found.items(), key=lambda item: (-item[1], item[0]))]


def pairs(text):
    """Words that follow one another, in order, each pair once."""
    all_words = words(text)
    found = []
    for pair in zip(all_words, all_words[1:]):
        if list(pair) not in found:
            found.append(list(pair))
    return found
''',
        "words/layout.py": '''"""Words in lines."""

from words.count import counts
from words.scan import words


def wrapped(text, width):
    """Lines of at most `width` characters; a longer word has a line of its own."""
    lines, line = [], ""
    for word in words(text):
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line] if line else lines


def chart(text):
    """A bar for each word that occurs more than once."""
    return [f"{word} {'#' * number}" for word, number in counts(text) if number > 1]
''',
    },
    (
        Mistake(
            "words/scan.py",
            "character.lower()",
            "character",
            "the same word in capital letters counts as another",
            ("scan.words", "count.counts", "layout.chart"),
        ),
        Mistake(
            "words/scan.py",
            'enumerate(text + " ")',
            "enumerate(text)",
            "a word at the very end of a text is lost",
            ("scan.words", "count.counts"),
        ),
        Mistake(
            "words/count.py",
            "(-item[1], item[0])",
            "-item[1]",
            "words that occur equally often are not in order",
            ("count.counts", "layout.chart"),
        ),
        Mistake(
            "words/layout.py",
            "len(line) + 1 + len(word) > width",
            "len(line) + len(word) > width",
            "some lines are too long",
            ("layout.wrapped",),
        ),
        Mistake(
            "words/layout.py",
            "[*lines, line] if line else lines",
            "lines",
            "the last line is missing",
            ("layout.wrapped",),
        ),
        Mistake(
            "words/count.py",
            "if list(pair) not in found",
            "if pair not in found",
            "some pairs are listed several times",
            ("count.pairs",),
        ),
    ),
    {
        "scan.words": lambda rng: [_text(rng).rstrip() if rng.random() < 0.5 else _text(rng)],
        "count.counts": lambda rng: [_text(rng).rstrip()],
        "count.pairs": lambda rng: [_text(rng) * 2],
        "layout.wrapped": lambda rng: [_text(rng), rng.randint(4, 20)],
        "layout.chart": lambda rng: [_text(rng)],
    },
    held_out=True,
)
