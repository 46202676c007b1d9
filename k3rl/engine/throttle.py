"""How much of its memory an engine commits to newly admitted requests: additive increase, multiplicative decrease.

Every step in which requests had to be preempted takes a quarter off, every step without one in which somebody waits
gives a little back. So concurrency settles below the point where running requests outgrow the memory, wherever that is
for the lengths at hand, and no limit is set by hand.
"""

from __future__ import annotations

_DECREASE, _STEPS_TO_RECOVER = 0.75, 200


class Throttle:
    """Pages that may be committed when somebody is admitted beside those who run: `limit`, at most `pages`.

    The oldest running request is never preempted and any one fits alone, so a limit of nothing still serves.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._limit = float(pages)

    @property
    def limit(self) -> int:
        return int(self._limit)

    def most(self, *, beside: bool) -> int:
        """Pages that may be committed when somebody is admitted beside others, or alone."""
        return self.limit if beside else self.pages

    def preempted(self) -> None:
        """Running requests outgrew the memory: admit less."""
        self._limit *= _DECREASE

    def waited(self) -> None:
        """A step without preemption in which somebody waited: admit a little more."""
        self._limit = min(float(self.pages), self._limit + self.pages / _STEPS_TO_RECOVER)
