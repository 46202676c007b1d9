"""The packed batch that a learner trains on, and how episodes become one.

Dimension letters: N packed tokens, S sequences, M MoE layers in depth order, k experts per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from k3rl.config import K3Error
from k3rl.data.images import ImagePatches, preprocess_files, rows_per_token
from k3rl.data.packing import SequenceTooLong, balanced_fit, best_fit
from k3rl.packed import SamplingMasks
from k3rl.types import Branch, EncodedImage, Episode, Failed

WeightMode: TypeAlias = Literal["token", "sequence"]


class BatchError(K3Error, ValueError):
    """Training data that do not fit together; the message names the sequence and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence before packing, T tokens.

    ids int64 [T]; loss_mask bool [T]; sampler_logprobs float32 [T]; advantages float32 [T]; the last two are 0
    where not masked. routes int16 [R, M, k] or None, R rows in the model; teacher_logprobs float32 [T] or None; fresh
    bool [T] or None; images, one for each placeholder among the ids that is no target, in order; sampling_mask, what
    each target was drawn from, or None.
    """

    id: str
    ids: np.ndarray
    loss_mask: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    routes: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    fresh: np.ndarray | None = None
    images: tuple[ImagePatches, ...] = ()
    sampling_mask: SamplingMasks | None = None

    @property
    def rows(self) -> int:
        """R, rows in the model: tokens, with each image as all its rows."""
        return len(self.ids) + sum(image.rows - 1 for image in self.images)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Sequences laid end to end, without padding.

    input_ids int64 [N]; cu_seqlens int32 [S+1], the sequence boundaries from 0 to N; loss_mask bool [N], token i
    is a target, predicted from the tokens before it in its sequence; sampler_logprobs float32 [N], advantages
    float32 [N] and weights float64 [N], all 0 where not masked. weights sum to 1 over the whole global batch, so a
    loss is the plain sum of weight times per-token loss whatever the split. routes int16 [R, M, k] or None, in rows of
    the model (R = N without images); the row of a sequence's last token was never computed by the sampler and holds
    experts 0..k-1, which no target depends on. teacher_logprobs float32 [N] or None. sequence_ids name the S sequences.

    fresh bool [N] or None: True for tokens that the newest weights of the global batch have read or sampled first.
    False for what an earlier version did, as in a rollout that was carried over or replayed, and for turns during
    which the weights changed. None where nothing was sampled (supervised data): then every token counts as fresh.
    images: for each sequence the images of its placeholder ids, in order; None without images. One placeholder
    becomes all rows of its image in the model, so `row_lengths`, not `lengths`, say how large a sequence is there. A
    placeholder that is a target was sampled, and what is sampled is never an image: it stays one token.
    sampling_mask: over the N tokens, the sets that top-p, top-k and the like left for a target; its logprobs are those
    of the set renormalized. None when nothing was cut.
    """

    input_ids: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    sequence_ids: tuple[str, ...]
    routes: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    fresh: np.ndarray | None = None
    images: tuple[tuple[ImagePatches, ...], ...] | None = None
    sampling_mask: SamplingMasks | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 [S]."""
        return np.diff(self.cu_seqlens.astype(np.int64))

    @property
    def row_lengths(self) -> np.ndarray:
        """Rows of each sequence in the model, images expanded, int64 [S]."""
        if self.images is None:
            return self.lengths
        return self.lengths + [sum(image.rows - 1 for image in images) for images in self.images]

    def rows_per_token(self, placeholder: int) -> np.ndarray:
        """int64 [N]: rows of the model that each token becomes; `placeholder` is the id that stands for an image.

        Raises BatchError when a sequence has more or fewer of them than images.
        """
        if self.images is None:
            return np.ones(self.tokens, np.int64)
        counts = []
        for name, images, ids in zip(
            self.sequence_ids,
            self.images,
            np.split(np.where(self.loss_mask, -1, self.input_ids), self.cu_seqlens[1:-1]),
            strict=True,
        ):
            try:
                counts.append(rows_per_token(ids, images, placeholder))
            except ValueError as error:
                raise BatchError(f"sequence {name}: {error}") from error
        return np.concatenate(counts)

    @property
    def tokens(self) -> int:
        """N, all packed tokens."""
        return len(self.input_ids)

    @property
    def target_tokens(self) -> int:
        """How many tokens are targets."""
        return int(self.loss_mask.sum())

    @classmethod
    def pack(
        cls, sequences: Sequence[TrainSequence], mode: WeightMode = "token", *, owners: Sequence[int] | None = None
    ) -> TrainBatch:
        """The batch of these sequences in their order, weighted over all of them. Raises BatchError.

        owners: of each sequence the number of its episode, for the mode "sequence"; None: each is one of its own.
        """
        if not sequences:
            raise BatchError("no sequences to pack; a batch needs at least one")
        for sequence in sequences:
            _check_lengths(sequence)
        lengths = [len(sequence.ids) for sequence in sequences]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        loss_mask = np.concatenate([sequence.loss_mask for sequence in sequences])
        batch = cls(
            input_ids=np.concatenate([sequence.ids for sequence in sequences]),
            cu_seqlens=cu_seqlens,
            loss_mask=loss_mask,
            sampler_logprobs=np.concatenate([sequence.sampler_logprobs for sequence in sequences]),
            advantages=np.concatenate([sequence.advantages for sequence in sequences]),
            weights=token_weights(loss_mask, cu_seqlens, mode, owners),
            sequence_ids=tuple(sequence.id for sequence in sequences),
            routes=_optional(sequences, "routes", lambda sequence: sequence.routes),
            teacher_logprobs=_optional(sequences, "teacher_logprobs", lambda sequence: sequence.teacher_logprobs),
            fresh=_optional(sequences, "fresh", lambda sequence: sequence.fresh),
            images=tuple(s.images for s in sequences) if any(s.images for s in sequences) else None,
            sampling_mask=_joined_masks(sequences),
        )
        batch.validate()
        return batch

    def select(self, indices: Iterable[int]) -> TrainBatch:
        """The batch of some of the sequences, in the order of `indices`, their weights unchanged."""
        chosen = list(indices)
        rows = np.concatenate([np.arange(self.cu_seqlens[i], self.cu_seqlens[i + 1]) for i in chosen])
        ends = np.concatenate([[0], np.cumsum(self.row_lengths)])
        routed = rows if self.images is None else np.concatenate([np.arange(ends[i], ends[i + 1]) for i in chosen])
        return TrainBatch(
            input_ids=self.input_ids[rows],
            cu_seqlens=np.concatenate([[0], np.cumsum(self.lengths[chosen])]).astype(np.int32),
            loss_mask=self.loss_mask[rows],
            sampler_logprobs=self.sampler_logprobs[rows],
            advantages=self.advantages[rows],
            weights=self.weights[rows],
            sequence_ids=tuple(self.sequence_ids[i] for i in chosen),
            routes=None if self.routes is None else self.routes[routed],
            teacher_logprobs=None if self.teacher_logprobs is None else self.teacher_logprobs[rows],
            fresh=None if self.fresh is None else self.fresh[rows],
            images=None if self.images is None else tuple(self.images[i] for i in chosen),
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.take(rows),
        )

    def split(self, token_budget: int, pair: float | None = None) -> list[TrainBatch]:
        """Micro-batches of at most `token_budget` rows (tokens, images expanded; best fit), weights unchanged.

        pair: with it as many micro-batches, of equal cost (`balanced_fit`). Deterministic. Raises SequenceTooLong when
        one sequence alone is longer than the budget.
        """
        lengths = self.row_lengths.tolist()
        try:
            fitted = best_fit(lengths, token_budget) if pair is None else balanced_fit(lengths, token_budget, pair)
            return [self.select(chosen) for chosen in fitted]
        except SequenceTooLong as error:
            name = self.sequence_ids[error.index]
            raise SequenceTooLong(error.index, error.length, error.budget, name) from None

    def validate(self) -> None:
        """Raise BatchError unless shapes, dtypes and values are as the class says."""
        n, s = len(self.input_ids), len(self.sequence_ids)
        _shaped("cu_seqlens", self.cu_seqlens, np.int32, (s + 1,))
        _shaped("input_ids", self.input_ids, np.int64, (n,))
        _shaped("loss_mask", self.loss_mask, np.bool_, (n,))
        _shaped("weights", self.weights, np.float64, (n,))
        for name in ("sampler_logprobs", "advantages", "teacher_logprobs"):
            if getattr(self, name) is not None:
                _shaped(name, getattr(self, name), np.float32, (n,))
        if self.fresh is not None:
            _shaped("fresh", self.fresh, np.bool_, (n,))
        if self.sampling_mask is not None:
            _check_sampling_masks(self.sampling_mask, self.loss_mask)
        if self.images is not None and len(self.images) != s:
            raise BatchError(f"images are given for {len(self.images)} of {s} sequences; give each its own, maybe none")
        if len(set(self.sequence_ids)) != s:
            raise BatchError("two sequences of the batch have one id; ids join advantages to sequences")
        if s == 0 or self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != n or (self.lengths < 1).any():
            raise BatchError(f"cu_seqlens {self.cu_seqlens.tolist()[:8]} must rise from 0 to {n} tokens")
        if self.routes is not None:
            rows = int(self.row_lengths.sum())
            if self.routes.ndim != 3:
                raise BatchError(
                    f"routes have the shape {self.routes.shape}; wanted [{rows}, MoE layers, experts per token]"
                )
            _shaped("routes", self.routes, np.int16, (rows, *self.routes.shape[1:]))
        self._validate_values()

    def _validate_values(self) -> None:
        if self.loss_mask[self.cu_seqlens[:-1]].any():
            raise BatchError("the first token of a sequence is masked as a target; nothing before it can predict it")
        if (self.input_ids < 0).any():
            raise BatchError("a token id is negative")
        for name in ("sampler_logprobs", "advantages", "weights", "teacher_logprobs"):
            values = getattr(self, name)
            if values is None:
                continue
            if not np.isfinite(values).all():
                raise BatchError(f"{name} holds NaN or infinity in sequence {self._sequence_of(~np.isfinite(values))}")
            if (values[~self.loss_mask] != 0).any():
                raise BatchError(f"{name} is not 0 at tokens that are no targets; mask it with loss_mask")
        for name in ("sampler_logprobs", "teacher_logprobs"):
            values = getattr(self, name)
            if values is not None and (values > 1e-3).any():
                raise BatchError(
                    f"{name} is above 0 in sequence {self._sequence_of(values > 1e-3)}; a logprob is at most 0"
                )

    def check_fits(self, vocabulary: int, experts: int) -> None:
        """Raises BatchError for a token id or an expert of a route that a model of so many does not have; only a table
        would notice, and on a GPU too late."""
        beyond = self.input_ids >= vocabulary
        if beyond.any():
            found = f"sequence {self._sequence_of(beyond)} has the token id {int(self.input_ids[beyond][0])}"
            raise BatchError(f"{found}; the model has {vocabulary}. Encode the data with the model's own tokenizer")
        if self.routes is not None and self.routes.size and not 0 <= self.routes.min() <= self.routes.max() < experts:
            wrong = self.routes[(self.routes < 0) | (self.routes >= experts)]
            raise BatchError(f"a recorded route goes to expert {int(wrong[0])}; the model has {experts}")

    def _sequence_of(self, where: np.ndarray) -> str:
        """The id of the sequence that holds the first True of `where` [N]."""
        return self.sequence_ids[int(np.searchsorted(self.cu_seqlens, int(where.argmax()), side="right")) - 1]


def token_weights(
    loss_mask: np.ndarray, cu_seqlens: np.ndarray, mode: WeightMode = "token", owners: Sequence[int] | None = None
) -> np.ndarray:
    """Weights float64 [N] that sum to 1 over the targets of a whole global batch.

    "token": every target weighs the same, 1 / targets. "sequence": every episode that has targets weighs the same,
    each of its targets 1 / (such episodes * its targets), whatever branches they are in. owners int [S]: the episode
    of each sequence, None where each is one of its own. loss_mask bool [N], cu_seqlens int [S+1].
    Raises BatchError when there is no target, or for an unknown mode.
    """
    if not loss_mask.any():
        raise BatchError("no token of the batch is a target; there is nothing to train on")
    if mode == "token":
        return loss_mask / np.float64(loss_mask.sum())
    if mode != "sequence":
        raise BatchError(f"weight mode is {mode!r}; wanted token or sequence")
    of_sequence = np.arange(len(cu_seqlens) - 1) if owners is None else np.asarray(owners)
    _, episode = np.unique(of_sequence, return_inverse=True)
    targets = np.bincount(episode, weights=np.add.reduceat(loss_mask.astype(np.int64), cu_seqlens[:-1]))
    per_token = np.zeros(len(targets))
    per_token[targets > 0] = 1.0 / (targets[targets > 0] * np.count_nonzero(targets))
    return loss_mask * np.repeat(per_token[episode], np.diff(cu_seqlens))


def from_episodes(
    episodes: Sequence[Episode],
    advantages: Mapping[str, float],
    *,
    mode: WeightMode = "token",
    routes: bool = False,
    version: int | None = None,
) -> TrainBatch:
    """The batch of all branches of these episodes, one advantage per episode id. Sequence ids are `EPISODE/BRANCH`.

    A branch that starts with turns of its parent trains only the turns after them, so no sampled token counts
    twice; a branch with no turn of its own is skipped. With `routes` the recorded experts come along for replay.
    `version` is the weight version whose tokens are fresh, by default the newest that sampled any of them. Raises
    BatchError, also
    for a failed episode: it has no reward, so any advantage of it would be invented.
    """
    _check_ids([episode.id for episode in episodes], advantages)
    for episode in episodes:
        if isinstance(episode.score, Failed):
            raise BatchError(f"episode {episode.id} failed ({episode.score.reason}); remove it before the baseline")
    version = _newest([b for episode in episodes for b in episode.branches]) if version is None else version
    sequences, owners = [], []
    shown = iter(branch_images([branch for episode in episodes for branch in episode.branches]))
    for number, episode in enumerate(episodes):
        by_id = {branch.id: branch for branch in episode.branches}
        for branch in episode.branches:
            shared, own = shared_turns(branch, by_id), next(shown)
            if shared < len(branch.turns):
                name = f"{episode.id}/{branch.id}"
                sequences.append(branch_sequence(branch, name, advantages[episode.id], shared, routes, version, own))
                owners.append(number)
    return TrainBatch.pack(sequences, mode, owners=owners)


def branch_routes(branch: Branch, images: Sequence[ImagePatches] = ()) -> np.ndarray:
    """Recorded experts of a branch, int16 [R, M, k] in rows of the model, of the rows that each turn computed first.

    images: those of the branch, prepared; each counts as all its rows (R = T without any).
    A row belongs to the turn that first computed it, so tokens sampled in one turn keep the experts they were
    sampled with when a later turn reads them again. The last row was never computed and holds experts 0..k-1.
    Raises BatchError when a turn has no routes or too few.
    """
    rows: list[np.ndarray] = []
    known = 0
    for number, turn in enumerate(branch.turns):
        shown = sum(image.rows - 1 for image in images[: len(turn.images)])
        computed = len(turn.prompt_ids) + len(turn.sampled_ids) + shown - 1
        if turn.routes is None or turn.routes.shape[0] != computed - known:
            got = "none" if turn.routes is None else f"{turn.routes.shape[0]} rows"
            raise BatchError(f"branch {branch.id}, turn {number}: routes are {got}, wanted {computed - known} rows")
        rows.append(turn.routes)
        known = computed
    last = np.broadcast_to(np.arange(rows[0].shape[2], dtype=np.int16), (1, *rows[0].shape[1:]))
    return np.concatenate([*rows, last]).astype(np.int16, copy=False)


def branch_images(branches: Sequence[Branch]) -> list[tuple[ImagePatches, ...]]:
    """The images of each branch, prepared; an image that several branches show is one object."""
    made: dict[EncodedImage, ImagePatches] = {}
    try:
        return [preprocess_files(branch.images, made) for branch in branches]
    except ValueError as error:
        raise BatchError(str(error)) from error


def _newest(branches: Sequence[Branch]) -> int:
    """The newest weight version that sampled any token of these branches."""
    return max((turn.last_version for branch in branches for turn in branch.turns), default=0)


def _fresh(branch: Branch, version: int) -> np.ndarray:
    """bool [T]: tokens of turns that `version` alone sampled. A prompt token belongs to the first turn that has it."""
    parts, known = [], 0
    for turn in branch.turns:
        length = len(turn.prompt_ids) + len(turn.sampled_ids)
        parts.append(np.full(length - known, turn.first_version == turn.last_version == version))
        known = length
    return np.concatenate(parts)


def branch_sequence(
    branch: Branch,
    name: str,
    advantage: float,
    shared: int,
    routes: bool,
    version: int,
    images: tuple[ImagePatches, ...],
) -> TrainSequence:
    """A branch as a sequence that trains the turns from number `shared` on."""
    if not branch.turns:
        raise BatchError(f"sequence {name} has no turns; skip episodes without a completion")
    try:
        ids, mask, logprobs = branch.tokens()
    except ValueError as error:
        raise BatchError(f"sequence {name}: {error}") from error
    if len(ids) != len(logprobs):
        raise BatchError(f"sequence {name} has {len(ids)} tokens and {len(logprobs)} logprobs")
    if shared:
        last = branch.turns[shared - 1]
        mask = mask.copy()
        mask[: len(last.prompt_ids) + len(last.sampled_ids)] = False
    return TrainSequence(
        id=name,
        ids=ids,
        loss_mask=mask,
        sampler_logprobs=np.where(mask, logprobs, np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        routes=branch_routes(branch, images) if routes else None,
        fresh=_fresh(branch, version),
        images=images,
        sampling_mask=_masks_of_targets(branch, mask),
    )


def shared_turns(branch: Branch, by_id: Mapping[str, Branch]) -> int:
    """How many leading turns `branch` has in common with its parent."""
    if branch.parent is None:
        return 0
    if branch.parent not in by_id:
        raise BatchError(f"branch {branch.id} has the parent {branch.parent}, which its episode does not hold")
    count = 0
    for ours, theirs in zip(branch.turns, by_id[branch.parent].turns, strict=False):
        same = (ours.prompt_ids, ours.sampled_ids, ours.logprobs, ours.images) == (
            theirs.prompt_ids,
            theirs.sampled_ids,
            theirs.logprobs,
            theirs.images,
        )
        if not same:
            break
        count += 1
    return count


def _check_ids(episodes: Sequence[str], advantages: Mapping[str, float]) -> None:
    """Raise BatchError unless there is an advantage for each of the episode ids, each once, and none more."""
    if len(set(episodes)) != len(episodes):
        twice = next(name for name in episodes if episodes.count(name) > 1)
        raise BatchError(f"the id {twice} occurs twice; ids join advantages to episodes")
    missing, extra = sorted(set(episodes) - set(advantages)), sorted(set(advantages) - set(episodes))
    if missing or extra:
        raise BatchError(f"advantages are missing for {missing[:4]} and given for unknown {extra[:4]}; ids must match")


def _optional(
    sequences: Sequence[TrainSequence], name: str, get: Callable[[TrainSequence], np.ndarray | None]
) -> np.ndarray | None:
    """The values of all sequences end to end, None when no sequence has any. Raises BatchError for a mixture."""
    values = [value for sequence in sequences if (value := get(sequence)) is not None]
    if not values:
        return None
    if len(values) != len(sequences):
        lacking = next(sequence.id for sequence in sequences if get(sequence) is None)
        raise BatchError(f"sequence {lacking} has no {name} and others have; give them to all or to none")
    return np.concatenate(values)


def _masks_of_targets(branch: Branch, mask: np.ndarray) -> SamplingMasks | None:
    """The sampling masks of a branch's tokens [T], without those of tokens that are no targets of this sequence."""
    sampling_mask = branch.sampling_mask
    if sampling_mask is None:
        return None
    return dataclasses.replace(sampling_mask, which=np.where(mask, sampling_mask.which, np.int32(-1))).take(
        np.arange(len(mask))
    )


def _joined_masks(sequences: Sequence[TrainSequence]) -> SamplingMasks | None:
    """The sampling masks of all sequences end to end, None when there are none."""
    if all(sequence.sampling_mask is None for sequence in sequences):
        return None
    return SamplingMasks.join([len(s.ids) if s.sampling_mask is None else s.sampling_mask for s in sequences])


def _check_sampling_masks(sampling_mask: SamplingMasks, loss_mask: np.ndarray) -> None:
    """Raise BatchError unless the sets are over these tokens [N], and of targets only."""
    _shaped("sampling_mask.which", sampling_mask.which, np.int32, loss_mask.shape)
    sizes = np.diff(sampling_mask.ends, prepend=0)
    if (
        (sampling_mask.which >= len(sampling_mask.ends)).any()
        or (sizes < 1).any()
        or (sampling_mask.ends[-1:] != len(sampling_mask.ids)).any()
    ):
        raise BatchError(
            "sampling_mask names sets that it does not hold, or an empty one; a token was drawn from something"
        )
    if (sampling_mask.which[~loss_mask] >= 0).any():
        raise BatchError("sampling_mask has sets at tokens that are no targets; mask it with loss_mask")


def _check_lengths(sequence: TrainSequence) -> None:
    """Per sequence, because lengths that are wrong twice could still add up to the right total."""
    if len(sequence.ids) == 0:
        raise BatchError(f"sequence {sequence.id} has no tokens")
    for name in ("loss_mask", "sampler_logprobs", "advantages", "routes", "teacher_logprobs", "fresh", "sampling_mask"):
        values = getattr(sequence, name)
        wanted = sequence.rows if name == "routes" else len(sequence.ids)
        if values is not None and len(values) != wanted:
            raise BatchError(f"sequence {sequence.id} has {wanted} tokens and {len(values)} {name}")


def _shaped(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise BatchError(f"{name} is {array.dtype} {list(array.shape)}; wanted {np.dtype(dtype)} {list(shape)}")
