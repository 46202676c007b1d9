"""A pattern that is written anew matches nothing that the given one does not; formats are what the standards say."""

from __future__ import annotations

import ipaddress
import re
import uuid
from datetime import date, datetime, time
from urllib.parse import urlsplit

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from k3rl.engine.sampling.patterns import FORMATS, PatternError, enforced

atoms = st.sampled_from(
    ["a", "\\.", ".", "[a-c]", "[^a]", r"\d", r"\W", r"[^\w-]", r"[\s_]", "\u00e9", r"\u0041", "-", '"', r"\/", "[-a]"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+?", "{0,2}", "{2}", "?"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        inner.map(lambda pattern: f"({pattern})"),
        inner.map(lambda pattern: f"^{pattern}$" if "|" not in pattern else f"^(?:{pattern})$"),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), pattern=patterns)
def test_what_is_written_anew_matches_no_other_text(data, pattern):
    try:
        written = enforced(pattern)
    except PatternError:
        assume(False)  # a piece with anchors came inside another
    text = data.draw(st.from_regex(written, fullmatch=True))
    assert re.search(pattern, text)


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[", "a**", "*a", "[]a]", "{2}", "a{2", "a{3,1}", r"\k<n>", r"\p{L}", "(?<=a)b", "a++", "[[:alpha:]]"],
)
def test_what_is_no_pattern_or_cannot_be_kept_is_refused(pattern):
    with pytest.raises(PatternError):
        enforced(pattern)


def test_names_of_groups_and_laziness_change_nothing():
    assert enforced("(?<year>[0-9]{4}?)-(?P<m>x+?)") == "^([0-9]{4})\\-(x+)$"


def of_time(text: str) -> None:
    assert time.fromisoformat(text.replace("Z", "+00:00")).tzinfo is not None


def of_uri(text: str) -> None:
    parts = urlsplit(text)
    assert parts.scheme in ("http", "https")
    assert parts.hostname


MEANS = {
    "date": date.fromisoformat,
    "time": of_time,
    "date-time": lambda text: datetime.fromisoformat(text.replace("Z", "+00:00")),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": of_uri,
}


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_format_gives_texts_of_the_format_alone(name, data):
    text = data.draw(st.from_regex(FORMATS[name], fullmatch=True))
    MEANS.get(name, lambda text: None)(text)
    jsonschema.Draft202012Validator.FORMAT_CHECKER.check(text, name)


def test_days_that_a_month_does_not_have_are_not_among_the_dates():
    wanted = {"2024-02-29": True, "2023-02-29": False, "2000-02-29": True, "1900-02-29": False, "2023-04-31": False}
    assert {text: bool(re.fullmatch(FORMATS["date"], text)) for text in wanted} == wanted
