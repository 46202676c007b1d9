"""The live requests of an engine, and the rows that some of them have.

The scheduler says who has which row. The model's states (`StatePool`) and the columns of sampled tokens (`RowTable`)
follow it here, together: a request that ends, is preempted or moves does so in all three.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3rl.engine.cache import StatePool
from k3rl.engine.outcomes import Outcomes
from k3rl.engine.prefix.states import PrefixStates
from k3rl.engine.protocol import EngineError, Outcome, UnknownRequest
from k3rl.engine.rows import RowTable
from k3rl.engine.running import Progress, Running
from k3rl.engine.sampling.sampler import request_seed
from k3rl.engine.scheduler import Plan, PromptGroup, Scheduler
from k3rl.types import Completion, StopReason


class Batch:
    """Requests by number, and the outcomes of those that ended.

    prefix: where states go when a request leaves its row, if there is a prefix cache. seed: of requests without one.
    """

    def __init__(
        self, scheduler: Scheduler, pool: StatePool, table: RowTable, prefix: PrefixStates | None, seed: int
    ) -> None:
        self.scheduler, self.pool, self.table, self.prefix = scheduler, pool, table, prefix
        self.requests: dict[int, Running] = {}
        self._of_session: dict[str, list[Running]] = {}
        self.ended = Outcomes()
        self._seed, self._submitted = seed, 0

    def add(self, running: Running) -> int:
        """Queues a request behind those that wait, with equal prompts in one group -> its number."""
        params = running.params
        running.number, self._submitted = self._submitted, self._submitted + 1
        running.seed = request_seed(params.seed, self._seed, running.number)
        self.requests[running.number] = running
        if self.prefix is not None:
            self.prefix.saw(running)
        if running.session:
            self._of_session.setdefault(running.session, []).append(running)
        key = running.key, params.cache_salt, params.adapter
        self.scheduler.submit(running.number, key, len(running.prompt), urgent=running.params.priority > 0)
        return running.number

    def find(self, number: int) -> Running:
        """Raises UnknownRequest for a number that is not live."""
        if number not in self.requests:
            raise UnknownRequest(f"request {number} is neither waiting nor running: it ended or never was")
        return self.requests[number]

    def held(self, running: Running, start: int = 0) -> Progress | None:
        """What a request has sampled from its `start`-th token on, without its routes; None before any."""
        if running.row is not None:
            return self.table.held(running.row, start)
        return None if running.progress is None else running.progress.after(start)

    def routes(self, running: Running, start: int) -> np.ndarray | None:
        """int16 [n, M, k] of its tokens from the `start`-th on, as far as known; None without any."""
        if running.row is not None:
            return self.table.routes_of(running.row, start)
        known = None if running.progress is None else running.progress.routes
        return None if known is None else known[start:]

    def aborted(self, running: Running, version: int) -> Completion:
        """The completion of a request that is taken back; version: that it would sample from, had it not begun."""
        if running.row is not None:
            return self.table.completion(running.row, aborted=True)
        return running.completion(running.progress or Progress.none(version), StopReason.ABORTED)

    def clear(self) -> None:
        """Forgets every request and frees every row, in whatever state a step that raised has left them."""
        self.scheduler.clear()
        self._drop_parked()
        rows = range(self.scheduler.rows)
        self.pool.free(rows)
        self.table.free(rows)
        self.requests.clear()
        self._of_session.clear()
        self.ended.take()
        if self.prefix is not None:
            self.prefix.forget()

    # ---- a step

    def make_room(self) -> int:
        """Takes rows where the next step would need more memory than there is; from how many running requests."""
        excess = self.scheduler.overcommitted()
        if excess:
            self.preempt([self.requests[number] for number in excess.requests], excess.groups)
        self._drop_parked()
        return len(excess.requests)

    def plan(self, admit: bool) -> Plan:
        """The scheduler's next step; leaders of admitted groups have their `hit`."""
        return self.scheduler.plan(admit, None if self.prefix is None else self._cached)

    def _cached(self, members: Sequence[int]) -> int | None:
        """How many tokens of these requests' prompt the prefix cache has; None while another prompt computes some."""
        assert self.prefix is not None
        leader, *others = (self.requests[number] for number in members)
        if self.prefix.waits(leader):
            return None
        leader.hit = self.prefix.find(leader, others)
        return 0 if leader.hit is None else leader.hit.length

    # ---- leaving rows

    def end(self, ended: Sequence[tuple[Running, Outcome]]) -> None:
        """Forgets requests; those that end well leave their states to the prefix cache."""
        if not ended:
            return
        if self.prefix is not None:
            for running, outcome in ended:
                self.prefix.leave_checkpoint(running)
                if not isinstance(outcome, EngineError) and not _taken_back(running, outcome):
                    self.prefix.keep_turn(running)
        self._follow(self.scheduler.remove([running.number for running, _ in ended]))
        for running, _ in ended:
            del self.requests[running.number]
            self._leave_session(running)
        self.ended.add((running.number, outcome) for running, outcome in ended)

    def _leave_session(self, running: Running) -> None:
        if running in (own := self._of_session.get(running.session, [])):
            own.remove(running)
            if not own:
                del self._of_session[running.session]

    def end_sessions(self, names: Sequence[str]) -> None:
        """These conversations do not go on: their states are let go, and those of their live requests not kept."""
        if self.prefix is None:
            return
        for name in names:
            for running in self._of_session.pop(name, ()):
                running.session = ""
        self.prefix.end_sessions(names)

    def recompute(self, adapter: str | None) -> int:
        """Preempts the running requests of an adapter, or all (None), whose states other weights made; how many tokens
        will be computed again."""
        running = [one for one in self.requests.values() if one.row is not None]
        mine = [one for one in running if adapter is None or one.params.adapter == adapter]
        return self.preempt(sorted(mine, key=lambda one: -one.number), keep=False)

    def preempt(self, victims: Sequence[Running], groups: Sequence[PromptGroup] = (), *, keep: bool = True) -> int:
        """Running requests, the youngest first, lose their rows and wait, with what they have sampled, to be computed
        again -> how many tokens that is; groups begin with their prompts again. keep: states of running ones are of use
        to the prefix cache."""
        waiting = []
        for running in victims:
            assert running.row is not None
            if keep and self.prefix is not None:
                self.prefix.keep_turn(running, goes_on=True)
            running.progress = self.table.progress(running.row)
            waiting.append((running.number, len(running.prompt) + len(running.progress.tokens)))
        for running in victims:
            running.row = None
        self._follow(self.scheduler.preempt(waiting, groups))
        return sum(length for _, length in waiting)

    def restart(self) -> None:
        """Prompts that nothing was sampled from start over: other weights are served."""
        self.scheduler.restart()
        self._drop_parked()

    def _follow(self, moves: list[tuple[int, int]]) -> None:
        """Moves rows as the scheduler did, and frees those that are nobody's now."""
        self.pool.move(moves)
        self.table.move(moves)
        freed = self.scheduler.freed
        self.pool.free(freed)
        self.table.free(freed)
        self._drop_parked()

    def _drop_parked(self) -> None:
        """Frees the parked state when no group waits for it."""
        if self.scheduler.parked is None:
            self.pool.drop_parked()


def _taken_back(running: Running, completion: Completion) -> bool:
    """Whether a turn of a session was aborted: the state of the turn before it is the one to go on from."""
    return bool(running.session) and completion.stop_reason is StopReason.ABORTED
