"""The tokens of many episodes as a few arrays: what an environment worker stores and a learner's rank packs.

Dimension letters: E episodes, B branches, N turns, T tokens that follow each other in prompts and samples, D sampled
tokens, R rows with recorded experts, M MoE layers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from k3rl.data.headers import Payload, PlayedGroup, header_of
from k3rl.packed import SamplingMasks, TurnColumns
from k3rl.types import Branch, Episode, Group, Turn


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeColumns:
    """The branches of E episodes.

    names: of the episodes; branch_names: of the branches, and branch_ends int64 [E] where those of each episode end
    among them. turns: of all branches, without recorded experts and sampling masks, which are here: routes int16
    [R, M, k] of all turns end to end, None without any, and route_rows int64 [N] how many are a turn's, -1 where it has
    none; sampling_masks: over the D sampled tokens, None where no turn has any, and masked bool [N] which turns have.
    """

    names: tuple[str, ...]
    branch_names: tuple[str, ...]
    branch_ends: np.ndarray
    turns: TurnColumns
    routes: np.ndarray | None
    route_rows: np.ndarray
    sampling_masks: SamplingMasks | None
    masked: np.ndarray

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> EpisodeColumns:
        """Raises ValueError as `check_turns` does."""
        parents: list[int | None] = []
        branches: list[Branch] = []
        for episode in episodes:
            check_turns(episode)
            parents += [None if parent is None else parent + len(branches) for parent in episode.parents]
            branches += episode.branches
        columns = TurnColumns.of([branch.turns for branch in branches], parents)
        sampled = columns.counts[:, 2].tolist()
        masks = [count if own is None else own for own, count in zip(columns.sampling_masks, sampled, strict=True)]
        masked = np.array([own is not None for own in columns.sampling_masks], bool)
        routed = [own for own in columns.routes if own is not None]
        if len(kinds := {own.shape[1:] for own in routed}) > 1:
            raise ValueError(f"turns have routes of the shapes {sorted(kinds)}; one model gives one shape")
        return cls(
            names=tuple(episode.id for episode in episodes),
            branch_names=tuple(branch.id for branch in branches),
            branch_ends=np.cumsum([len(episode.branches) for episode in episodes], dtype=np.int64),
            turns=replace(columns, routes=(), sampling_masks=()),
            routes=np.concatenate(routed) if routed else None,
            route_rows=np.array([-1 if own is None else len(own) for own in columns.routes], np.int64),
            sampling_masks=SamplingMasks.join(masks) if masked.any() else None,
            masked=masked,
        )

    def branches(self, place: int) -> tuple[Branch, ...]:
        """Those of one episode."""
        begin, end = _range(self.branch_ends, place)
        columns = self._turns_of(begin, end)
        ids = self.branch_names[begin:end]
        named = [None if parent is None else ids[parent] for parent in columns.parents]
        return tuple(Branch(*each) for each in zip(ids, columns.turns(Turn), named, strict=True))

    def episode(self, place: int, words: Episode) -> Episode:
        """One episode as it was. words: the same one without branches."""
        return replace(words, branches=self.branches(place))

    def _turns_of(self, begin: int, end: int) -> TurnColumns:
        """The turns of these branches, which have their parents among them."""
        every = self.turns
        first, last = (int(every.ends[number - 1]) if number else 0 for number in (begin, end))
        _, fresh, sampled, _, images = every.counts[:first].sum(0).tolist()
        counts = every.counts[first:last]
        _, more, drawn, _, shown = counts.sum(0).tolist()
        routed = int(np.maximum(self.route_rows[:first], 0).sum())
        routes: list[np.ndarray | None] = []
        masks: list[SamplingMasks | None] = []
        at = sampled
        for number, rows in enumerate(self.route_rows[first:last].tolist(), start=first):
            routes.append(None if rows < 0 or self.routes is None else self.routes[routed : routed + rows])
            routed += max(0, rows)
            size = int(every.counts[number, 2])
            own = self.sampling_masks if self.masked[number] else None
            masks.append(None if own is None else own.take(np.arange(at, at + size)))
            at += size
        return TurnColumns(
            parents=tuple(None if own is None else own - begin for own in every.parents[begin:end]),
            ends=every.ends[begin:end] - first,
            counts=counts,
            ids=every.ids[fresh + sampled : fresh + sampled + more + drawn],
            logprobs=every.logprobs[sampled : sampled + drawn],
            versions=every.versions[first:last],
            seconds=every.seconds[first:last],
            stop_reasons=every.stop_reasons[first:last],
            routes=tuple(routes),
            images=every.images[images : images + shown],
            sampling_masks=tuple(masks),
        )


def check_turns(episode: Episode) -> None:
    """Raises ValueError for an episode with a turn that has more or fewer logprobs than sampled ids, or sampling masks
    of other tokens: laid end to end, they would be those of the tokens after it."""
    for branch in episode.branches:
        for number, turn in enumerate(branch.turns):
            size = len(turn.sampled_ids)
            for what, values in (("logprobs", turn.logprobs), ("sampling masks", turn.sampling_mask)):
                if values is not None and len(values) != size:
                    raise ValueError(
                        f"turn {number} of {branch.id} has {size} sampled ids and {len(values)} {what}; wanted one each"
                    )


def payload_of(episodes: Sequence[Episode]) -> Payload:
    """The contents of episodes that are here. Raises ValueError as `EpisodeColumns.of` does."""
    return Payload(EpisodeColumns.of(episodes), [without_turns(episode) for episode in episodes])


def without_turns(episode: Episode) -> Episode:
    """What is said of an episode, and what it is called, without its tokens."""
    return replace(episode, branches=())


def played(groups: Sequence[Group | PlayedGroup]) -> list[PlayedGroup]:
    """Groups as headers; the contents of those that are here are held as they are."""
    here = [episode for group in groups if isinstance(group, Group) for episode in group.episodes]
    payload = payload_of(here) if here else None
    places = {episode.id: place for place, episode in enumerate(here)}
    found = []
    for group in groups:
        if isinstance(group, PlayedGroup):
            found.append(group)
            continue
        own = tuple(header_of(episode, payload, places[episode.id]) for episode in group.episodes)
        found.append(PlayedGroup(group.id, group.task_id, own))
    return found


def _range(ends: np.ndarray, number: int) -> tuple[int, int]:
    """Where the run with this number begins and ends."""
    return int(ends[number - 1]) if number else 0, int(ends[number])
