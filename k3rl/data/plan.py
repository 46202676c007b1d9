"""A batch by reference: which sequences of which payloads a step trains, packed by the rank that trains them.

Dimension letters as in `batch.py`; S sequences of N tokens in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from k3rl.data.batch import BatchError, TrainBatch, WeightMode, branch_images, branch_sequence, shared_turns
from k3rl.data.columns import EpisodeColumns
from k3rl.data.headers import EpisodeHeader
from k3rl.data.images import ImagePatches
from k3rl.packed import SamplingMasks
from k3rl.types import Failed


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """What `TrainBatch` holds once it is packed, without its tokens.

    payloads: references to `EpisodeColumns`, or these. Of each sequence, int64 [S]: payload, the number of its payload;
    place, of its episode there; branch, in the episode; lengths in tokens, row_lengths in rows of the model, targets.
    advantages float32 [S] of its targets, weights float64 [S] of each of them. version: of the weights whose tokens are
    fresh. routes: whether recorded experts come along; masked: whether a sequence of the global batch has sampling
    masks, so that all of its shares have them. teacher_logprobs float32 [N] of all tokens in the order of the
    sequences, or None.
    """

    payloads: tuple[Any, ...]
    payload: np.ndarray
    place: np.ndarray
    branch: np.ndarray
    lengths: np.ndarray
    row_lengths: np.ndarray
    targets: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    version: int
    routes: bool
    masked: bool = False
    teacher_logprobs: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """N, all packed tokens."""
        return int(self.lengths.sum())

    @property
    def target_tokens(self) -> int:
        """How many tokens are targets."""
        return int(self.targets.sum())

    @property
    def sequences(self) -> int:
        """S, how many there are."""
        return len(self.lengths)

    @classmethod
    def of(
        cls,
        episodes: Sequence[EpisodeHeader],
        advantages: Sequence[float],
        *,
        mode: WeightMode = "token",
        routes: bool = False,
    ) -> BatchPlan:
        """The batch that `from_episodes` packs of these episodes, one advantage each.

        Raises BatchError where nothing can be trained, and for a failed episode.
        """
        if len(advantages) != len(episodes):
            raise BatchError(f"{len(episodes)} episodes have {len(advantages)} advantages; give each its own")
        for episode in episodes:
            if isinstance(episode.score, Failed):
                raise BatchError(f"episode {episode.id} failed ({episode.score.reason}); remove it before the baseline")
        chosen = [(number, own, each) for number, own in enumerate(episodes) for each in own.sequences]
        if not chosen:
            raise BatchError("no sequences to pack; a batch needs at least one")
        found, numbers = _numbered([own.payload for _, own, _ in chosen])
        columns = np.array([each for _, _, each in chosen], np.int64).reshape(-1, 4)
        owners = np.array([number for number, _, _ in chosen], np.int64)
        return cls(
            payloads=tuple(payload.tokens for payload in found),
            payload=numbers,
            place=np.array([own.place for _, own, _ in chosen], np.int64),
            branch=columns[:, 0],
            lengths=columns[:, 1],
            row_lengths=columns[:, 2],
            targets=columns[:, 3],
            advantages=np.array(advantages, np.float32)[owners],
            weights=sequence_weights(columns[:, 3], owners, mode),
            version=max((own.versions[2] for own in episodes if own.versions is not None), default=0),
            routes=routes,
            masked=any(own.masked for _, own, _ in chosen),
        )

    def select(self, indices: Iterable[int]) -> BatchPlan:
        """Some of the sequences in the order of `indices`, with the payloads that they are in."""
        chosen = np.array(list(indices), np.int64)
        used, payload = np.unique(self.payload[chosen], return_inverse=True)
        scores = self.teacher_logprobs
        if scores is not None:
            scores = scores[ranges(_starts(self.lengths)[chosen], self.lengths[chosen])]
        return replace(
            self,
            payloads=tuple(self.payloads[number] for number in used.tolist()),
            payload=payload.astype(np.int64),
            place=self.place[chosen],
            branch=self.branch[chosen],
            lengths=self.lengths[chosen],
            row_lengths=self.row_lengths[chosen],
            targets=self.targets[chosen],
            advantages=self.advantages[chosen],
            weights=self.weights[chosen],
            teacher_logprobs=scores,
        )

    def pack(self, payloads: Sequence[EpisodeColumns] | None = None) -> TrainBatch:
        """The batch, equal to that of `from_episodes` in each bit. payloads: what `self.payloads` refer to.

        Raises BatchError for contents that do not fit together.
        """
        packing = _Packing(self)
        for number, columns in enumerate(self.payloads if payloads is None else payloads):
            packing.add(columns, np.flatnonzero(self.payload == number))
        return packing.batch()


def sequence_weights(targets: np.ndarray, owners: np.ndarray, mode: WeightMode) -> np.ndarray:
    """The weight of each target of a sequence, float64 [S], as `token_weights` gives it for the tokens themselves.

    targets int [S]; owners int [S]: the episode of each sequence. Raises BatchError as `token_weights` does.
    """
    total = int(targets.sum())
    if not total:
        raise BatchError("no token of the batch is a target; there is nothing to train on")
    if mode == "token":
        return np.full(len(targets), 1.0 / np.float64(total))
    if mode != "sequence":
        raise BatchError(f"weight mode is {mode!r}; wanted token or sequence")
    _, episode = np.unique(owners, return_inverse=True)
    counts = np.bincount(episode, weights=targets)
    per_token = np.zeros(len(counts))
    per_token[counts > 0] = 1.0 / (counts[counts > 0] * np.count_nonzero(counts))
    return per_token[episode]


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of each run of so many places, end to end, int64."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(int(lengths.sum()))


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where runs of these lengths begin that follow each other."""
    return np.cumsum(lengths) - lengths


def _numbered(things: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """(the distinct things in the order of their first place, the number of each), by identity."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    places: list[int] = []
    for thing in things:
        if (number := numbers.setdefault(id(thing), len(found))) == len(found):
            found.append(thing)
        places.append(number)
    return found, np.array(places, np.int64)


@dataclass(slots=True)
class _Masks:
    """Sampling masks of a batch as they are gathered. which int64 [N]: set of each token, -1 without."""

    which: np.ndarray
    ends: list[np.ndarray] = field(default_factory=lambda: [np.empty(0, np.int64)])
    ids: list[np.ndarray] = field(default_factory=lambda: [np.empty(0, np.int32)])
    sets: int = 0
    size: int = 0

    def add(self, places: np.ndarray | slice, which: np.ndarray, masks: SamplingMasks) -> None:
        """The sets of the tokens at these places, which name those of `masks`."""
        self.which[places] = np.where(which < 0, -1, which.astype(np.int64) + self.sets)
        self.ends.append(masks.ends + self.size)
        self.ids.append(masks.ids)
        self.sets, self.size = self.sets + len(masks.ends), self.size + len(masks.ids)

    def joined(self) -> SamplingMasks:
        every = SamplingMasks(self.which.astype(np.int32), np.concatenate(self.ends), np.concatenate(self.ids))
        return every.take(np.arange(len(self.which)))


class _Packing:
    """A `TrainBatch` that is filled payload by payload. What follows from nothing before it, tokens of one conversation
    without images, is copied by the array; every other branch is put together from its turns."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        tokens = plan.tokens
        self._starts, self._row_starts = _starts(plan.lengths), _starts(plan.row_lengths)
        self._ids = np.zeros(tokens, np.int64)
        self._mask, self._fresh = np.zeros(tokens, bool), np.zeros(tokens, bool)
        self._logprobs = np.zeros(tokens, np.float32)
        self._routes: np.ndarray | None = None
        self._names = [""] * plan.sequences
        self._images: list[tuple[ImagePatches, ...]] = [()] * plan.sequences
        self._masks = _Masks(np.full(tokens, -1, np.int64))

    def add(self, columns: EpisodeColumns, mine: np.ndarray) -> None:
        """Packs the sequences with these numbers, which are in this payload."""
        plan = self._plan
        firsts = columns.branch_ends - np.diff(columns.branch_ends, prepend=0)
        branches = firsts[plan.place[mine]] + plan.branch[mine]
        for number, place, branch in zip(mine.tolist(), plan.place[mine].tolist(), branches.tolist(), strict=True):
            self._names[number] = f"{columns.names[place]}/{columns.branch_names[branch]}"
        plain = self._plain(columns, branches)
        self._add_plain(columns, mine[plain], branches[plain])
        self._add_others(columns, mine[~plain])

    def _plain(self, columns: EpisodeColumns, branches: np.ndarray) -> np.ndarray:
        """Which of these branches are one conversation without images, whose routes are whole where they are wanted."""
        turns = columns.turns
        counts, begins = turns.counts, turns.ends - np.diff(turns.ends, prepend=0)
        lengths = counts[:, 1] + counts[:, 2]
        starts = _starts(lengths)
        first = np.repeat(begins, np.diff(turns.ends, prepend=0))  # of each turn, the first one of its branch
        wrong = (counts[:, 0] != starts - starts[first]) | counts[:, 3:].any(1)
        if self._plan.routes:
            wrong |= columns.route_rows != lengths - (first == np.arange(len(first)))
        before = np.concatenate([[0], np.cumsum(wrong)])
        alone = np.array([turns.parents[number] is None for number in branches.tolist()], bool)
        return alone & (before[turns.ends[branches]] == before[begins[branches]])

    def _add_plain(self, columns: EpisodeColumns, mine: np.ndarray, branches: np.ndarray) -> None:
        if not len(mine):
            return
        plan, turns = self._plan, columns.turns
        begins, ends = (turns.ends - np.diff(turns.ends, prepend=0))[branches], turns.ends[branches]
        lengths = turns.counts[:, 1] + turns.counts[:, 2]
        starts = _starts(lengths)
        found = starts[ends - 1] + lengths[ends - 1] - starts[begins]
        if (found != plan.lengths[mine]).any():
            wrong = int(np.flatnonzero(found != plan.lengths[mine])[0])
            name, wanted = self._names[mine[wrong]], int(plan.lengths[mine[wrong]])
            raise BatchError(f"sequence {name} has {int(found[wrong])} tokens; its header says {wanted}")
        to, of = ranges(self._starts[mine], found), ranges(starts[begins], found)
        sampled = np.repeat(np.tile([False, True], len(lengths)), turns.counts[:, 1:3].ravel())
        logprobs = np.zeros(len(sampled), np.float32)
        logprobs[sampled] = turns.logprobs
        fresh = np.repeat((turns.versions == plan.version).all(1), lengths)
        self._ids[to], self._mask[to] = turns.ids[of], sampled[of]
        self._logprobs[to], self._fresh[to] = logprobs[of], fresh[of]
        if columns.sampling_masks is not None and np.repeat(columns.masked, lengths)[of].any():
            which = np.full(len(sampled), -1, np.int32)
            which[sampled] = columns.sampling_masks.which
            self._masks.add(to, which[of], columns.sampling_masks)
        if plan.routes and columns.routes is not None:
            rows = np.maximum(columns.route_rows, 0)
            experts = self._experts(columns.routes)
            experts[ranges(self._row_starts[mine], found - 1)] = columns.routes[
                ranges(_starts(rows)[begins], found - 1)
            ]
            last = np.arange(columns.routes.shape[2], dtype=np.int16)
            experts[self._row_starts[mine] + found - 1] = last  # never computed, see `TrainBatch.routes`

    def _add_others(self, columns: EpisodeColumns, mine: np.ndarray) -> None:
        plan = self._plan
        episodes = {place: columns.branches(place) for place in dict.fromkeys(plan.place[mine].tolist())}
        chosen = [episodes[int(plan.place[number])][int(plan.branch[number])] for number in mine]
        for number, branch, images in zip(mine.tolist(), chosen, branch_images(chosen), strict=True):
            shared = shared_turns(branch, {other.id: other for other in episodes[int(plan.place[number])]})
            made = branch_sequence(branch, self._names[number], 0.0, shared, plan.routes, plan.version, images)
            if (len(made.ids), made.rows) != (plan.lengths[number], plan.row_lengths[number]):
                got, wanted = f"{len(made.ids)} tokens in {made.rows} rows", int(plan.row_lengths[number])
                raise BatchError(f"sequence {made.id} has {got}; its header says {plan.lengths[number]} in {wanted}")
            to = slice(self._starts[number], self._starts[number] + len(made.ids))
            self._ids[to], self._mask[to], self._logprobs[to] = made.ids, made.loss_mask, made.sampler_logprobs
            self._images[number] = made.images
            if made.fresh is not None:
                self._fresh[to] = made.fresh
            if made.sampling_mask is not None:
                self._masks.add(to, made.sampling_mask.which, made.sampling_mask)
            if made.routes is not None:
                start = self._row_starts[number]
                self._experts(made.routes)[start : start + made.rows] = made.routes

    def _experts(self, like: np.ndarray) -> np.ndarray:
        """Where routes of the shape of these go. Raises BatchError where others have another one."""
        if self._routes is None:
            self._routes = np.empty((int(self._plan.row_lengths.sum()), *like.shape[1:]), np.int16)
        if self._routes.shape[1:] != like.shape[1:]:
            raise BatchError(f"routes have the shapes {self._routes.shape[1:]} and {like.shape[1:]}; wanted one")
        return self._routes

    def batch(self) -> TrainBatch:
        """The whole batch. Raises BatchError."""
        plan, mask = self._plan, self._mask
        found = np.add.reduceat(mask.astype(np.int64), self._starts)
        if (found != plan.targets).any():
            wrong = int(np.flatnonzero(found != plan.targets)[0])
            said = f"{int(found[wrong])} targets; its header says {int(plan.targets[wrong])}"
            raise BatchError(f"sequence {self._names[wrong]} has {said}")
        batch = TrainBatch(
            input_ids=self._ids,
            cu_seqlens=np.concatenate([[0], np.cumsum(plan.lengths)]).astype(np.int32),
            loss_mask=mask,
            sampler_logprobs=self._logprobs,
            advantages=np.where(mask, np.repeat(plan.advantages, plan.lengths), np.float32(0)),
            weights=np.where(mask, np.repeat(plan.weights, plan.lengths), 0.0),
            sequence_ids=tuple(self._names),
            routes=self._routes,
            teacher_logprobs=plan.teacher_logprobs,
            fresh=self._fresh,
            images=tuple(self._images) if any(self._images) else None,
            sampling_mask=self._masks.joined() if plan.masked else None,
        )
        batch.validate()
        return batch
