"""Who computes what in the next step. Pure bookkeeping: no tensors, no torch, no clock.

A request is waiting, prefilling or running. Requests with equal prompts form a group: its prompt is prefilled
once, in the row of its first member, and the state is copied to the others. Rows in use are always 0..n-1:
when one is released, the last rows move into the holes, so that a decode step reads one contiguous block.

Order is first come, first served by group. A group takes as many free rows as it has members; when rows run
out, its prompt state is parked in one row more and its other members are admitted from there, before any new
group. A group closes to newcomers when it starts, so a stream of equal prompts starves nobody. An urgent request goes
before all of them, and takes the row of the youngest where none is free.

A step with a few prompts costs nearly what one with many does, and the decoding rows wait for it. So while many rows
decode, new groups wait until they are some share of those, or for a few steps.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from k3rl.engine.throttle import Throttle


@dataclass(slots=True, eq=False)
class PromptGroup:
    """Requests with one prompt. `rows[i]` is reserved for `members[i]`; the prompt is computed in `rows[0]`."""

    key: Hashable
    length: int  # tokens of the prompt
    members: OrderedDict[int, None]  # in order, and left in any order, each in no time
    rows: list[int] = field(default_factory=list)
    done: int = 0  # prompt tokens computed

    @property
    def oldest(self) -> int:
        """The member that came first."""
        return min(self.members)


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens start..stop of the requests `members`, to be computed in `row`; none when a cache had the whole
    prompt.

    When they end the prompt, `starts` lists (request, row) of everyone who samples from the last of them (the first
    pair holds `row` itself), and `parks` says that members without a row still need the prompt's state.
    """

    members: tuple[int, ...]
    row: int
    start: int
    stop: int
    starts: tuple[tuple[int, int], ...] = ()
    parks: bool = False

    @property
    def leader(self) -> int:
        """The request whose row it is."""
        return self.members[0]


def portions(segments: Sequence[Segment], tokens: int | None) -> list[list[Segment]]:
    """The segments in order, cut into runs of at most so many tokens, or of one segment; None: all in one."""
    runs: list[list[Segment]] = []
    held = 0
    for segment in segments:
        length = segment.stop - segment.start
        if not runs or (tokens is not None and held + length > tokens):
            runs.append([])
            held = 0
        runs[-1].append(segment)
        held += length
    return runs


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: rows to decode, (request, row) pairs admitted from the parked state, (members, row) of prompts whose
    first tokens a cache has, prompt segments to compute. drop_parked: nobody needs the parked state after those
    admissions."""

    decode: list[int]
    from_parked: list[tuple[int, int]]
    cached: list[tuple[tuple[int, ...], int]]
    drop_parked: bool
    segments: list[Segment]


GATHER_FROM = 128  # decoding rows from which on new groups wait for company
_SHARE = 8  # they wait until one in so many rows could begin,
_STEPS = 4  # or for so many steps


class Excess(NamedTuple):
    """Running requests, and groups whose prompt is being computed, that take more memory than there is."""

    requests: list[int]
    groups: list[PromptGroup]

    def __bool__(self) -> bool:
        return bool(self.requests or self.groups)


class RunningTokens(Mapping[int, int]):
    """Running request -> tokens in its state: one more for all of them with each step, which costs the same for any
    number of them. pages: of `page` tokens, that they may claim in the next step."""

    def __init__(self, page: int) -> None:
        self._page, self._steps, self.pages = page, 0, 0
        self._first: dict[int, int] = {}  # tokens at step 0, had they run then
        self._phases = [0] * page  # requests by that, modulo a page

    def start(self, request: int, tokens: int) -> None:
        """A request runs."""
        first = self._first[request] = tokens - self._steps
        self._phases[first % self._page] += 1
        self.pages += tokens // self._page + 1

    def stop(self, request: int) -> None:
        """It runs no longer."""
        first = self._first.pop(request)
        self._phases[first % self._page] -= 1
        self.pages -= (first + self._steps) // self._page + 1

    def step(self) -> None:
        """Each has one token more."""
        self._steps += 1
        self.pages += self._phases[-self._steps % self._page]  # of those whose last page is full

    def __getitem__(self, request: int) -> int:
        return self._first[request] + self._steps

    def __iter__(self) -> Iterator[int]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


class Scheduler:
    """Plans steps over `rows` rows, computing at most `prefill_tokens` prompt tokens in each.

    pages: of `page` tokens each, shared by all rows; None when memory is not bounded. Any one request must fit alone.
    dense: see the module; without it rows that are released stay empty until the next requests take them, the first
    first, and nothing moves.
    """

    def __init__(
        self, rows: int, prefill_tokens: int, pages: int | None = None, page: int = 1, *, dense: bool = True
    ) -> None:
        if rows < 1 or prefill_tokens < 1:
            raise ValueError(f"rows is {rows}, prefill_tokens is {prefill_tokens}; both must be at least 1")
        self.rows, self.prefill_tokens = rows, prefill_tokens
        self.pages, self.page, self._dense = pages, page, dense
        self.throttle = None if pages is None else Throttle(pages)
        self.clear()

    def clear(self) -> None:
        """Forgets every request."""
        self._gathered = 0  # steps that groups have waited for company
        self.waiting: OrderedDict[Hashable, PromptGroup] = OrderedDict()
        self.urgent: OrderedDict[Hashable, PromptGroup] = OrderedDict()  # wait too, before those
        self.prefilling: list[PromptGroup] = []
        self._restarted: list[PromptGroup] = []  # of those, whose first tokens a cache may have
        self.parked: PromptGroup | None = None  # its prompt state is parked; its members have no row
        self.occupants: list[int | PromptGroup | None] = []  # of rows 0..n-1: a running request, a prefilling group
        self._holes: list[int] = []  # rows among them that nobody has, a heap
        self.freed: list[int] = []  # rows that the last `remove` or `preempt` left to nobody
        self.row_of: dict[int, int] = {}  # running requests
        self.tokens = RunningTokens(self.page)
        self.group_of: dict[int, PromptGroup] = {}  # of those that do not run

    @property
    def num_rows(self) -> int:
        """Rows up to the last one in use."""
        return len(self.occupants)

    @property
    def num_running(self) -> int:
        """Rows that somebody has."""
        return len(self.occupants) - len(self._holes)

    @property
    def _free(self) -> int:
        """Rows that nobody has."""
        return self.rows - self.num_running

    @property
    def idle(self) -> bool:
        """Nothing is prefilling or running."""
        return not self.occupants

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.group_of) - sum(len(group.rows) for group in self.prefilling)

    def submit(self, request: int, key: Hashable, length: int, urgent: bool = False) -> None:
        """Queues a request whose prompt of `length` tokens is identified by `key`."""
        waiting, key = (self.urgent, ("urgent", request)) if urgent else (self.waiting, key)
        group = waiting.get(key)
        if group is None:
            group = waiting[key] = PromptGroup(key, length, OrderedDict())
        self._join(request, group)

    def _join(self, request: int, group: PromptGroup) -> None:
        group.members[request] = None
        self.group_of[request] = group

    def plan(self, admit: bool = True, cached: Callable[[Sequence[int]], int | None] | None = None) -> Plan:
        """The next step; the state is already that after it. `admit` False gives no row to anyone new.

        cached(members) of a group that is next: how many tokens of its prompt need no computing; None while they are
        being computed for another one, which it waits for.
        """
        decode = [row for row, occupant in enumerate(self.occupants) if isinstance(occupant, int)]
        self.tokens.step()  # of the requests in these rows
        known = cached or (lambda members: 0)
        looked_up = [group for group in self._restarted if group in self.prefilling]
        self._restarted = []
        for group in looked_up:
            group.done = known(tuple(group.members)) or 0
        before, parked = len(self.prefilling), self.parked
        from_parked = self._admit(known) if admit else []
        drop_parked = parked is not None and self.parked is None
        looked_up += self.prefilling[before:]
        restored = [(tuple(group.members), group.rows[0]) for group in looked_up if group.done]
        segments: list[Segment] = []
        budget = self.prefill_tokens
        for group in list(self.prefilling):
            stop = min(group.length, group.done + budget)
            if stop == group.done < group.length:
                break
            budget -= stop - group.done
            segments.append(self._advance(group, stop))
        return Plan(decode, from_parked, restored, drop_parked, segments)

    def overcommitted(self) -> Excess:
        """What has to give up its rows before the next step, the youngest first and never the oldest; drops the parked
        prompt before any.

        Call `preempt` with it.
        """
        excess = Excess([], [])
        if self.urgent and self.tokens:
            first = next(iter(self.urgent.values()))
            if not self._free or not self._room(first.length + 1):
                return Excess([max(self.tokens)], [])
        if self.throttle is None or self.pages is None:
            return excess
        if self._committed() <= self.pages:
            if self.num_waiting:
                self.throttle.waited()
            return excess
        if self.parked is not None:
            self._requeue_parked()
        left = self._committed() - self.pages
        holders: list[tuple[int, int | PromptGroup]] = [(request, request) for request in self.tokens]
        holders += [(group.oldest, group) for group in self.prefilling]
        for _, holder in sorted(holders, key=lambda one: -one[0])[:-1]:
            if left <= 0:
                break
            if isinstance(holder, int):
                excess.requests.append(holder)
                left -= self._pages(self.tokens[holder] + 1)
            else:
                excess.groups.append(holder)
                left -= len(holder.rows) * self._pages(holder.length + 1)
        if excess:
            self.throttle.preempted()
        return excess

    def preempt(self, requests: Sequence[tuple[int, int]], groups: Sequence[PromptGroup] = ()) -> list[tuple[int, int]]:
        """(request, tokens so far) pairs, youngest first, wait again in front of everyone, and so do groups whose
        prompt is being computed; moves as `remove` gives."""
        released: set[int] = set()
        again: list[PromptGroup] = []
        for group in groups:
            self.prefilling.remove(group)
            released.update(group.rows)
            group.rows = []
            again.append(group)
        for request, length in requests:
            released.add(self._stop(request))
            again.append(PromptGroup(("preempted", request), length, OrderedDict()))
            self._join(request, again[-1])
        for group in sorted(again, key=lambda one: -one.oldest):
            self._wait_again(group)
        return self._compact(released)

    def remove(self, requests: Iterable[int]) -> list[tuple[int, int]]:
        """Forgets requests in any state; returns the moves (source row, target row) that close the holes.

        No row is source of one move and target of another. Rows from `len(occupants)` on are free afterwards.
        Raises KeyError for a request that is not here.
        """
        released: set[int] = set()
        for request in requests:
            row = self._stop(request) if request in self.row_of else self._leave_group(request)
            if row is not None:
                released.add(row)
        return self._compact(released)

    def _stop(self, request: int) -> int:
        """A running request has no row any more -> the row that it had."""
        self.tokens.stop(request)
        return self.row_of.pop(request)

    def restart(self) -> None:
        """Prompt states are of no use any more (other weights): prompts that have not been sampled from start over."""
        for group in self.prefilling:
            group.done = 0
        self._restarted = list(self.prefilling)
        self._requeue_parked()

    def _requeue_parked(self) -> None:
        """The members of the parked prompt wait in front of everyone, for their prompt to be computed again."""
        if self.parked is not None:
            group, self.parked = self.parked, None
            self._wait_again(group)

    def _wait_again(self, group: PromptGroup) -> None:
        younger = self.waiting.pop(group.key, None)
        if younger is not None:
            for request in younger.members:
                self._join(request, group)
        group.done = 0
        self.waiting[group.key] = group
        self.waiting.move_to_end(group.key, last=False)

    # ---- memory

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _committed(self) -> int:
        """Pages that rows may claim in the next step, and those of the parked state."""
        groups = sum(len(group.rows) * self._pages(group.length + 1) for group in self.prefilling)
        return groups + self.tokens.pages + (self._pages(self.parked.length) if self.parked is not None else 0)

    def fits(self) -> bool:
        """Whether the next step needs no preemption, if nobody comes or goes before it."""
        return self.pages is None or self._committed() <= self.pages

    def _room(self, tokens: int) -> bool:
        """Whether so many tokens more can be committed: within the throttle beside others, within everything alone."""
        return self.throttle is None or self._committed() + self._pages(tokens) <= self._limit(self.throttle)

    def _limit(self, throttle: Throttle) -> int:
        return throttle.limit if self.occupants else throttle.pages

    # ---- rows

    def _admit(self, known: Callable[[Sequence[int]], int | None]) -> list[tuple[int, int]]:
        """Gives out free rows: to urgent requests, to members of the parked prompt, to started groups that lack rows,
        then to new ones."""
        from_parked = []
        while self.urgent and self._free:
            group = next(iter(self.urgent.values()))
            if not self._room(group.length + 1):
                break
            self.urgent.popitem(last=False)
            group.done = known(tuple(group.members)) or 0
            self.prefilling.append(group)
            self._reserve(group)
        if self.parked is not None and not self.occupants and not self._room(self.parked.length + 1):
            self._requeue_parked()  # nobody runs who could make room beside it
        while self.parked is not None and self._free and self._room(self.parked.length + 1):
            request = self.parked.members.popitem(last=False)[0]
            row = self._take_row(request)
            self._run(request, row, self.parked.length)
            from_parked.append((request, row))
            if not self.parked.members:
                self.parked = None
        for group in self.prefilling:
            self._reserve(group)
        if self._gathers():
            return from_parked
        while self.waiting and self.parked is None and self._free:
            group = next(iter(self.waiting.values()))
            if not self._room(group.length + 1) or (done := known(tuple(group.members))) is None:
                break
            self.waiting.popitem(last=False)
            group.done = done
            self.prefilling.append(group)
            self._reserve(group)
        return from_parked

    def _gathers(self) -> bool:
        """Whether new groups wait for more of them to begin together."""
        free = self._free
        if not self.waiting or not free or len(self.tokens) < GATHER_FROM or self.parked is not None:
            return False
        begin = min(free, self.num_waiting)
        self._gathered = 0 if begin * _SHARE >= len(self.tokens) or self._gathered == _STEPS else self._gathered + 1
        return self._gathered > 0

    def _reserve(self, group: PromptGroup) -> None:
        committed, each = self._committed(), self._pages(group.length + 1)
        while len(group.rows) < len(group.members) and self._free:
            if self.throttle is not None and committed + each > self._limit(self.throttle):
                break
            group.rows.append(self._take_row(group))
            committed += each

    def _take_row(self, occupant: int | PromptGroup) -> int:
        """The first row that nobody has is the occupant's."""
        if self._holes:
            row = heapq.heappop(self._holes)
            self.occupants[row] = occupant
            return row
        self.occupants.append(occupant)
        return len(self.occupants) - 1

    def _run(self, request: int, row: int, length: int) -> None:
        self.tokens.start(request, length)
        del self.group_of[request]
        self.occupants[row] = request
        self.row_of[request] = row

    def _advance(self, group: PromptGroup, stop: int) -> Segment:
        """Computes the group's prompt up to `stop`; at its end members with a row run, and it is parked for others."""
        members, row, start = tuple(group.members), group.rows[0], group.done
        group.done = stop
        if stop < group.length:
            return Segment(members, row, start, stop)
        self.prefilling.remove(group)
        starts = tuple(zip(group.members, group.rows, strict=False))
        for member, member_row in starts:
            self._run(member, member_row, group.length)
        rest = PromptGroup(group.key, group.length, OrderedDict(), done=stop)
        for request in islice(members, len(group.rows), None):
            self._join(request, rest)
        parks = bool(rest.members) and self._room(group.length)
        if parks:
            self.parked = rest
        elif rest.members:
            self._wait_again(rest)
        return Segment(members, row, start, stop, starts, parks)

    def _leave_group(self, request: int) -> int | None:
        """Takes a request out of its group; returns the row that the group then no longer needs, if any."""
        group = self.group_of.pop(request)
        del group.members[request]
        if not group.members:
            if group is self.parked:
                self.parked = None
            elif group in self.prefilling:
                self.prefilling.remove(group)
            else:
                del (self.urgent if group.key in self.urgent else self.waiting)[group.key]
        return group.rows.pop() if len(group.rows) > len(group.members) else None

    def _compact(self, released: set[int]) -> list[tuple[int, int]]:
        if not self._dense:
            self._leave(released)
            return []
        before = len(self.occupants)
        count = len(self.occupants) - len(released)
        holes = sorted(row for row in released if row < count)
        movers = [row for row in range(count, len(self.occupants)) if row not in released]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            occupant = self.occupants[source]
            self.occupants[target] = occupant
            if isinstance(occupant, int):
                self.row_of[occupant] = target
            elif occupant is not None:
                occupant.rows[occupant.rows.index(source)] = target
        del self.occupants[count:]
        self.freed = list(range(count, before))
        return moves

    def _leave(self, released: set[int]) -> None:
        """Rows that were released are nobody's, where they are."""
        for row in released:
            self.occupants[row] = None
        used = next((row + 1 for row in range(len(self.occupants) - 1, -1, -1) if self.occupants[row] is not None), 0)
        del self.occupants[used:]
        self._holes = [row for row in (*self._holes, *released) if row < used]
        heapq.heapify(self._holes)
        self.freed = list(released)
