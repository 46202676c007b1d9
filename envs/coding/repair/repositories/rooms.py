"""The repository `rooms`: the use of meeting rooms."""

from __future__ import annotations

import random

from k3rl.envs.coding.repair.repositories.base import Mistake, Repository


def _intervals(rng: random.Random) -> list[list[int]]:
    starts = [rng.randint(0, 40) for _ in range(rng.randint(1, 6))]
    return [[start, start + rng.randint(1, 9)] for start in starts]


ROOMS = Repository(
    "rooms",
    "plans the use of meeting rooms",
    {
        "rooms/__init__.py": '"""Meeting rooms."""\n',
        "rooms/span.py": '''"""Spans of time are [start, end), in hours."""


def overlap(one, other):
    """Whether two spans share time; spans that only touch do not."""
    return one[0] < other[1] and other[0] < one[1]


def merged(spans):
    """The same time as few spans, in order; spans that touch become one."""
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def hours(spans):
    """How long anything goes on."""
    return sum(end - start for start, end in merged(spans))
''',
        "rooms/plan.py": '''"""Bookings are spans; rooms are numbered from 0."""

from rooms.span import merged, overlap


def assign(bookings):
    """A room for each booking, in the order given: the lowest number that is free then."""
    rooms, chosen = [], []
    for booking in bookings:
        number = 0
        while number < len(rooms) and any(overlap(booking, other) for other in rooms[number]):
            number += 1
        if number == len(rooms):
            rooms.append([])
        rooms[number].append(booking)
        chosen.append(number)
    return chosen


def free(bookings, day):
    """The spans of `day` in which nothing goes on."""
    found, now = [], day[0]
    for start, end in merged(bookings):
        if start > now:
            found.append([now, min(start, day[1])])
        now = max(now, end)
        if now >= day[1]:
            break
    if now < day[1]:
        found.append([now, day[1]])
    return [span for span in found if span[0] < span[1]]


def busiest(bookings):
    """The most bookings that go on at once."""
    events = sorted([(start, 1) for start, _ in bookings] + [(end, -1) for _, end in bookings])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
''',
        "rooms/notice.py": '''"""Texts for the door."""

from rooms.plan import assign, free
from rooms.span import hours


def sign(bookings, room):
    """The spans of one room, in order of time."""
    mine = [span for span, number in zip(bookings, assign(bookings)) if number == room]
    return ", ".join(f"{start:02d}-{end:02d}" for start, end in sorted(mine)) or "free all day"


def summary(bookings):
    """How many rooms are used, for how long, and how much of 0-50 is free."""
    rooms = len(set(assign(bookings)))
    return f"{rooms} rooms, {hours(bookings)} h busy, {sum(e - s for s, e in free(bookings, [0, 50]))} h free"
''',
    },
    (
        Mistake(
            "rooms/span.py",
            "one[0] < other[1] and other[0] < one[1]",
            "one[0] <= other[1] and other[0] <= one[1]",
            "bookings that follow one another get different rooms",
            ("span.overlap", "plan.assign", "notice.sign", "notice.summary"),
        ),
        Mistake(
            "rooms/span.py",
            "max(found[-1][1], end)",
            "end",
            "the busy time is too short when one meeting lies within another",
            ("span.merged", "span.hours", "plan.free", "notice.summary"),
        ),
        Mistake(
            "rooms/plan.py",
            "now = max(now, end)",
            "now = end + 1",
            "an hour after each meeting is never free",
            ("plan.free", "notice.summary"),
        ),
        Mistake(
            "rooms/plan.py",
            "min(start, day[1])",
            "start",
            "free time goes on after the end of the day",
            ("plan.free",),
        ),
        Mistake(
            "rooms/plan.py",
            "most = max(most, now)",
            "most = max(most, now + 1)",
            "the greatest number of meetings at once is too large",
            ("plan.busiest",),
        ),
        Mistake(
            "rooms/notice.py",
            "in sorted(mine)",
            "in mine",
            "the sign at the door is not in order",
            ("notice.sign",),
        ),
    ),
    {
        "span.overlap": lambda rng: [*(_intervals(rng) + _intervals(rng))[:2]],
        "span.merged": lambda rng: [_intervals(rng)],
        "span.hours": lambda rng: [_intervals(rng)],
        "plan.assign": lambda rng: [_intervals(rng)],
        "plan.free": lambda rng: [_intervals(rng), [rng.randint(0, 10), rng.randint(20, 45)]],
        "plan.busiest": lambda rng: [_intervals(rng)],
        "notice.sign": lambda rng: [_intervals(rng), rng.randint(0, 2)],
        "notice.summary": lambda rng: [_intervals(rng)],
    },
)
