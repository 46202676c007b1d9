"""Requests that ended and have not been handed out, and the calls of an engine that wait for some of them."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from k3rl.data import ImagePatches
from k3rl.engine.protocol import EngineError, Outcome, Prompt, Tokens
from k3rl.types import Completion, SamplingParams


class Outcomes:
    """Outcomes by request, in the order in which they came. One thread may add while another one takes."""

    def __init__(self) -> None:
        self._ended: collections.deque[tuple[int, Outcome]] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._ended)

    def add(self, ended: Iterable[tuple[int, Outcome]]) -> None:
        """Keeps outcomes for the next `take`."""
        self._ended.extend(ended)

    def take(self) -> list[tuple[int, Outcome]]:
        """All that came since the last call."""
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
        return taken


class BlockingCalls(ABC):
    """`generate` and `drain` of an engine, for callers that step it by waiting.

    ended: its outcomes; live: its requests, by number; refuse_to_wait: raises EngineError where no step would bring
    anything.
    """

    def __init__(self, ended: Outcomes, live: Mapping[int, object], refuse_to_wait: Callable[[], None]) -> None:
        self._ended, self._live, self._refuse_to_wait = ended, live, refuse_to_wait

    @abstractmethod
    def check(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> Prompt:
        """See `RolloutEngine`."""

    @abstractmethod
    def submit(
        self, prompt_ids: Sequence[int] | Prompt, params: SamplingParams, images: Sequence[ImagePatches] = ()
    ) -> int:
        """See `RolloutEngine`."""

    @abstractmethod
    def step(self) -> list[tuple[int, Outcome]]:
        """See `RolloutEngine`."""

    @abstractmethod
    def new_tokens(self, request: int, seen: int, routed: int = 0) -> Tokens | None:
        """See `RolloutEngine`."""

    def sampled(self, request: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """(ids, logprobs) of what a live request has sampled from its `start`-th token on; nothing while it waits."""
        found = self.new_tokens(request, start)
        return ((), ()) if found is None else (found.ids, found.logprobs)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        images: Sequence[Sequence[ImagePatches]] | None = None,
    ) -> list[Completion]:
        """Completes all prompts, in their order; images: those of each prompt.

        Raises InvalidRequest before any work, or the EngineError that ended the first of those which one ended.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        shown = [()] * len(prompts) if images is None else images
        asked = list(zip(prompts, each, shown, strict=True))
        checked = [self.check(*one) for one in asked]
        numbers = [self.submit(prompt, own) for prompt, own in zip(checked, each, strict=True)]
        found, wanted = dict[int, Outcome](), set(numbers)
        while not found.keys() >= wanted:
            found.update(self._step_on())
        mine = [found.pop(number) for number in numbers]
        self._ended.add(found.items())
        completions = []
        for outcome in mine:
            if isinstance(outcome, EngineError):
                raise outcome
            completions.append(outcome)
        return completions

    def drain(self) -> list[tuple[int, Outcome]]:
        """Runs until every submitted request has ended, and returns the outcomes not handed out yet."""
        outcomes: list[tuple[int, Outcome]] = []
        while self._live:
            outcomes += self._step_on()
        return outcomes + self.step()

    def _step_on(self) -> list[tuple[int, Outcome]]:
        """`step` for whoever waits. Raises EngineError where that would be without end."""
        if not self._ended:
            self._refuse_to_wait()
        return self.step()
