"""The repository `ledger`: accounts of a household."""

from __future__ import annotations

import random
from typing import Any

from k3rl.envs.coding.repair.repositories.base import Mistake, Repository


def _cents(rng: random.Random) -> int:
    return rng.choice([0, 5, 40, 99, 100, 250, 1205, 99999]) * rng.choice([1, 1, 1, -1])


def _entries(rng: random.Random) -> list[Any]:
    people = ["ann", "bob", "cyd"]
    return [[rng.choice(people), rng.choice(["food", "rent", "fun"]), _cents(rng)] for _ in range(rng.randint(2, 7))]


LEDGER = Repository(
    "ledger",
    "keeps the accounts of a household",
    {
        "ledger/__init__.py": '"""Accounts of a household."""\n',
        "ledger/money.py": '''"""Amounts in cents, as text and back."""


def show(cents):
    """12345 -> "123.45"; the sign stands in front."""
    sign = "-" if cents < 0 else ""
    whole, rest = divmod(abs(cents), 100)
    return f"{sign}{whole}.{rest:02d}"


def read(text):
    """The inverse of `show`."""
    negative = text.startswith("-")
    whole, _, rest = text.lstrip("-").partition(".")
    cents = int(whole) * 100 + int(rest)
    return -cents if negative else cents


def split(cents, parts):
    """`parts` shares that add up to `cents`; the first ones get the odd cents."""
    share, odd = divmod(cents, parts)
    return [share + 1 if number < odd else share for number in range(parts)]
''',
        "ledger/book.py": '''"""Entries are [person, category, cents]."""

from ledger.money import split


def balances(entries):
    """Sum of cents by person, in alphabetical order, people without a balance left out."""
    sums = {}
    for person, _, cents in entries:
        sums[person] = sums.get(person, 0) + cents
    return [[person, sums[person]] for person in sorted(sums) if sums[person] != 0]


def by_category(entries):
    """Sum of cents by category, the largest first, equal ones in alphabetical order."""
    sums = {}
    for _, category, cents in entries:
        sums[category] = sums.get(category, 0) + cents
    return sorted(([name, cents] for name, cents in sums.items()), key=lambda item: (-item[1], item[0]))


def shared(entries, people):
    """What each of `people` has to pay of the whole, in their order."""
    total = sum(cents for _, _, cents in entries)
    return list(zip(people, split(total, len(people))))
''',
        "ledger/report.py": '''"""Texts for people."""

from ledger import book
from ledger.money import show


def table(entries):
    """One line for each person with a balance, amounts under one another."""
    rows = [(person, show(cents)) for person, cents in book.balances(entries)]
    width = max((len(amount) for _, amount in rows), default=0)
    return "\\n".join(f"{person} {amount:>{width}}" for person, amount in rows)


def headline(entries):
    """The largest category and its amount."""
    name, cents = book.by_category(entries)[0]
    return f"most went to {name}: {show(cents)}"
''',
    },
    (
        Mistake(
            "ledger/money.py",
            "divmod(abs(cents), 100)",
            "divmod(cents, 100)",
            "negative amounts are shown wrongly",
            ("money.show", "report.table", "report.headline"),
        ),
        Mistake(
            "ledger/money.py",
            "{rest:02d}",
            "{rest}",
            "amounts with a single digit of cents are shown wrongly",
            ("money.show", "report.table", "report.headline"),
        ),
        Mistake(
            "ledger/money.py",
            "if number < odd",
            "if number <= odd",
            "shares of a bill do not add up",
            ("money.split", "book.shared"),
        ),
        Mistake(
            "ledger/book.py",
            "if sums[person] != 0",
            "if sums[person] > 0",
            "people who owe something are missing",
            ("book.balances", "report.table"),
        ),
        Mistake(
            "ledger/book.py",
            "(-item[1], item[0])",
            "(item[1], item[0])",
            "categories come in the wrong order",
            ("book.by_category", "report.headline"),
        ),
        Mistake(
            "ledger/report.py",
            ":>{width}",
            ":<{width}",
            "amounts in the table are not aligned",
            ("report.table",),
        ),
    ),
    {
        "money.show": lambda rng: [_cents(rng)],
        "money.split": lambda rng: [rng.randint(0, 999), rng.randint(1, 6)],
        "book.balances": lambda rng: [_entries(rng)],
        "book.by_category": lambda rng: [_entries(rng)],
        "book.shared": lambda rng: [_entries(rng), rng.sample(["ann", "bob", "cyd", "dan"], rng.randint(1, 4))],
        "report.table": lambda rng: [_entries(rng)],
        "report.headline": lambda rng: [_entries(rng)],
    },
)
