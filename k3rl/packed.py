"""Tokens of an episode as arrays: each id once, whoever looks at it.

Packed         a sequence of numbers in an array that grows at its end and is shared by those who saw less of it
Record         a dataclass with slots that is quick to pickle
SamplingMasks  the ids that each token was drawn from, equal sets once
TurnColumns    the turns of all branches of an episode, as they travel and are stored
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

T = TypeVar("T")


class Record:
    """Base of dataclasses with slots that travel by the thousand: pickled as their values, which is several times
    quicker than by their fields' names."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        names: tuple[str, ...] = type(self).__slots__
        return type(self), tuple([getattr(self, name) for name in names])


class _Log:
    """An array with room at its end. used: how much of it someone sees."""

    __slots__ = ("array", "used")

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.used = array, len(array)


class Packed(Sequence[Any]):
    """A slice of a growing array, as an immutable sequence of Python numbers.

    It is equal to any sequence whose numbers are stored as the same ones. Slices share the array. `extended` writes
    behind the last number where nobody has yet, and copies otherwise, so a conversation that grows by small pieces
    costs what its pieces cost. Pickled it has its own numbers only.
    """

    __slots__ = ("_log", "_start", "_stop")
    __hash__ = None  # type: ignore[assignment]  # it is equal to lists

    def __init__(self, log: _Log, start: int, stop: int) -> None:
        """Use `of`."""
        self._log, self._start, self._stop = log, start, stop

    @classmethod
    def of(cls, values: Sequence[Any] | np.ndarray, dtype: Any) -> Packed:
        """These numbers, rounded to `dtype`; a `Packed` of this dtype is itself."""
        if isinstance(values, Packed) and values._log.array.dtype == dtype:
            return values
        array = np.array(values, dtype)
        if array.ndim != 1:
            raise ValueError(f"got values of shape {list(array.shape)}; wanted one dimension")
        return cls(_Log(array), 0, len(array))

    @property
    def array(self) -> np.ndarray:
        """The numbers, [len], not to be written to."""
        view = self._log.array[self._start : self._stop]
        view.flags.writeable = False
        return view

    def extended(self, more: Sequence[Any] | np.ndarray) -> Packed:
        """These numbers and `more` behind them."""
        log, size = self._log, len(more)
        if isinstance(more, Packed) and more._log is log and more._start == self._stop:
            return Packed(log, self._start, more._stop)
        if log.used != self._stop or self._stop + size > len(log.array):
            room = np.empty(max(64, 2 * (len(self) + size)), log.array.dtype)
            room[: len(self)] = self.array
            log = _Log(room)
            log.used = len(self)
            return Packed(log, 0, len(self)).extended(more)
        log.array[self._stop : self._stop + size] = more.array if isinstance(more, Packed) else more
        log.used = self._stop + size
        return Packed(log, self._start, log.used)

    def common(self, other: Packed) -> int:
        """How many leading numbers are equal."""
        size = min(len(self), len(other))
        if self._log is other._log and self._start == other._start:
            return size
        differ = np.flatnonzero(self.array[:size] != other.array[:size])
        return int(differ[0]) if len(differ) else size

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Packed: ...
    def __getitem__(self, place: int | slice) -> Any:
        if not isinstance(place, slice):
            return self.array[place].item()
        start, stop, step = place.indices(len(self))
        if step != 1:
            return Packed.of(self.array[place], self._log.array.dtype)
        return Packed(self._log, self._start + start, self._start + max(start, stop))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __contains__(self, value: object) -> bool:
        return value in self.array.tolist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed) and self._log is other._log:
            same = (self._start, self._stop) == (other._start, other._stop)
            return same or bool(np.array_equal(self.array, other.array, equal_nan=self._log.array.dtype.kind == "f"))
        if not isinstance(other, Sequence | np.ndarray) or isinstance(other, str) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence | np.ndarray) else False
        theirs = other.array if isinstance(other, Packed) else np.asarray(other, self._log.array.dtype)
        return bool(np.array_equal(self.array, theirs))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy or dtype is not None else self.array

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed.of, (self.array.copy(), self._log.array.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMasks:
    """The ids that each of T tokens was drawn from, in compact form: D distinct sets, each written down once.

    which int32 [T]: number of the token's set, -1 where nothing was cut or nothing was sampled; ends int64 [D]: where
    each set ends in ids int32, ascending within a set. Sets are numbered in the order of their first token.
    """

    which: np.ndarray
    ends: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, sampling_mask: Sequence[np.ndarray]) -> SamplingMasks:
        """`Completion.sampling_mask`: one array of ids per token; an array that occurs again is one set."""
        numbers: dict[int, int] = {}
        distinct: list[np.ndarray] = []
        which = np.empty(len(sampling_mask), np.int32)
        for place, own in enumerate(sampling_mask):
            which[place] = numbers.setdefault(id(own), len(distinct))
            if which[place] == len(distinct):
                distinct.append(own)
        ends = np.cumsum([len(own) for own in distinct], dtype=np.int64)
        return cls(which, ends, np.concatenate([np.empty(0, np.int32), *distinct]).astype(np.int32))

    @classmethod
    def join(cls, parts: Sequence[SamplingMasks | int]) -> SamplingMasks:
        """Parts end to end; a number stands for so many tokens without a set."""
        which, ends, ids = [np.empty(0, np.int32)], [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        sets, size = 0, 0
        for part in parts:
            if isinstance(part, int):
                which.append(np.full(part, -1, np.int32))
                continue
            which.append(np.where(part.which < 0, part.which, part.which + np.int32(sets)))
            ends.append(part.ends + size)
            ids.append(part.ids)
            sets, size = sets + len(part.ends), size + len(part.ids)
        return cls(np.concatenate(which), np.concatenate(ends), np.concatenate(ids))

    def take(self, places: np.ndarray) -> SamplingMasks:
        """Of the tokens at these places, int64 or a mask, with the sets that they use."""
        which = self.which[places]
        used, first = np.unique(which, return_index=True)
        used = used[np.argsort(first)]
        used = used[used >= 0]
        number = np.full(len(self.ends) + 1, -1, np.int32)  # the last one is that of -1
        number[used] = np.arange(len(used), dtype=np.int32)
        distinct = [self.set(int(own)) for own in used]
        ends = np.cumsum([len(own) for own in distinct], dtype=np.int64)
        return SamplingMasks(number[which], ends, np.concatenate([np.empty(0, np.int32), *distinct]))

    def set(self, number: int) -> np.ndarray:
        """The ids of a set."""
        return self.ids[self.ends[number - 1] if number else 0 : self.ends[number]]

    def __len__(self) -> int:
        return len(self.which)

    def __eq__(self, other: object) -> bool:
        names = ("which", "ends", "ids")
        return isinstance(other, SamplingMasks) and all(
            np.array_equal(getattr(self, n), getattr(other, n)) for n in names
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none either


@dataclass(frozen=True, slots=True)
class TurnColumns:
    """The turns of all branches of one episode, or of many, each token once: B branches, N turns in their order.

    ends int64 [B]: where each branch ends among the turns. parents: number of the branch that it left, or None.
    Of a turn, counts int64 [N, 5]: how many ids its prompt has in common with the ids before it (those through the
    turn before, or of the parent where the branch begins), how many follow in the prompt, how many were sampled, how
    many images it has in common with the turn before, and how many follow. ids int32: what follows in each prompt and
    what was sampled, end to end; logprobs float32; versions int64 [N, 2], seconds float64 [N, 2]: of the model and of
    the environment.
    """

    parents: tuple[int | None, ...]
    ends: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    seconds: np.ndarray
    stop_reasons: tuple[Any, ...]
    routes: tuple[np.ndarray | None, ...]
    images: tuple[Any, ...]
    sampling_masks: tuple[SamplingMasks | None, ...]

    @classmethod
    def of(cls, branches: Sequence[Sequence[Any]], parents: Sequence[int | None]) -> TurnColumns:
        """branches: the turns of each (`k3rl.types.Turn`)."""
        counts, ids, images = [], [np.empty(0, np.int32)], []
        turns = [turn for branch in branches for turn in branch]
        for number, (branch, parent) in enumerate(zip(branches, parents, strict=True)):
            known, shown = _before(branches, parent if parent is None or parent < number else None), ()
            for turn in branch:
                same = turn.prompt_ids.common(known)
                seen = len(shown) if turn.images[: len(shown)] == shown else 0
                fresh = turn.prompt_ids.array[same:]
                counts.append((same, len(fresh), len(turn.sampled_ids), seen, len(turn.images) - seen))
                ids += [fresh, turn.sampled_ids.array]
                images += turn.images[seen:]
                known, shown = turn.ids, turn.images
        return cls(
            parents=tuple(parents),
            ends=np.cumsum([len(branch) for branch in branches], dtype=np.int64),
            counts=np.array(counts, np.int64).reshape(-1, 5),
            ids=np.concatenate(ids),
            logprobs=np.concatenate([np.empty(0, np.float32), *(turn.logprobs.array for turn in turns)]),
            versions=np.array([(t.first_version, t.last_version) for t in turns], np.int64).reshape(-1, 2),
            seconds=np.array([(t.model_s, t.env_s) for t in turns], np.float64).reshape(-1, 2),
            stop_reasons=tuple(turn.stop_reason for turn in turns),
            routes=tuple(turn.routes for turn in turns),
            images=tuple(images),
            sampling_masks=tuple(turn.sampling_mask for turn in turns),
        )

    def turns(self, make: Callable[..., T]) -> list[tuple[T, ...]]:
        """The turns of each branch. make: `k3rl.types.Turn`."""
        branches: list[tuple[Any, ...]] = []
        ids, scores, images = (Packed.of(self.ids, np.int32), Packed.of(self.logprobs, np.float32), list(self.images))
        at = scored = seen = 0
        for number, end in enumerate(self.ends.tolist()):
            own: list[Any] = []
            known, shown = _before(branches, self.parents[number]), ()
            for place in range(self.ends[number - 1] if number else 0, end):
                same, fresh, sampled, kept, new = self.counts[place].tolist()
                prompt = known[:same].extended(ids[at : at + fresh])
                known = prompt.extended(ids[at + fresh : at + fresh + sampled])
                shown = (*shown[:kept], *images[seen : seen + new])
                own.append(
                    make(
                        known[: len(prompt)],
                        known[len(prompt) :],
                        scores[scored : scored + sampled],
                        self.stop_reasons[place],
                        *self.versions[place].tolist(),
                        self.routes[place],
                        *self.seconds[place].tolist(),
                        shown,
                        self.sampling_masks[place],
                    )
                )
                at, scored, seen = at + fresh + sampled, scored + sampled, seen + new
            branches.append(tuple(own))
        return branches


def _before(branches: Sequence[Sequence[Any]], parent: int | None) -> Packed:
    """The ids that a branch may begin with: all that its parent has."""
    if parent is None or parent >= len(branches) or not branches[parent]:
        return Packed.of((), np.int32)
    ids: Packed = branches[parent][-1].ids
    return ids
