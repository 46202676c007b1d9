"""Contents of episodes behind their headers: what is sent along with a call, and what a process fetches for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import ray

from k3rl.actors.calls import wait
from k3rl.data import BatchPlan, Payload, PlayedGroup
from k3rl.types import Episode, Group

T = TypeVar("T")


def sent(groups: Sequence[PlayedGroup]) -> tuple[list[PlayedGroup], list[Any]]:
    """(groups whose payloads are places in a list, that list): a call that takes the list as arguments has Ray bring
    the contents to where it runs."""
    places: dict[int, Payload] = {}
    parts: list[Any] = []

    def placed(payload: Payload | None) -> Payload | None:
        if payload is not None and id(payload) not in places:
            places[id(payload)] = Payload(len(parts), len(parts) + 1)
            parts.extend(payload)
        return None if payload is None else places[id(payload)]

    moved = [
        replace(group, episodes=tuple(replace(e, payload=placed(e.payload)) for e in group.episodes))
        for group in groups
    ]
    return moved, parts


def plans_sent(parts: Sequence[T]) -> tuple[list[T], list[Any]]:
    """(parts whose plans, if they are any, name payloads by their places in a list, that list), each payload once."""
    payloads: list[Any] = []
    places: dict[int, int] = {}
    moved: list[Any] = []
    for part in parts:
        if isinstance(part, BatchPlan):
            for payload in part.payloads:
                if places.setdefault(id(payload), len(payloads)) == len(payloads):
                    payloads.append(payload)
            number = np.array([places[id(payload)] for payload in part.payloads], np.int64)
            moved.append(replace(part, payloads=(), payload=number[part.payload]))
        else:
            moved.append(part)
    return moved, payloads


def contents(groups: Sequence[PlayedGroup], parts: Sequence[Any]) -> list[Group]:
    """The groups whole again. parts: what `sent` gave with them, brought here."""
    return [Group(group.id, group.task_id, tuple(_episode(e, parts) for e in group.episodes)) for group in groups]


def fetched(groups: Sequence[PlayedGroup], timeout_s: float) -> list[Group]:
    """The groups whole, in this process. Raises ActorLost where the node that had them is gone."""
    moved, parts = sent(groups)
    refs = [part for part in parts if isinstance(part, ray.ObjectRef)]
    here = dict(zip(refs, wait(refs, timeout_s, "fetching episodes") if refs else (), strict=True))
    return contents(moved, [here[part] if isinstance(part, ray.ObjectRef) else part for part in parts])


def _episode(header: Any, parts: Sequence[Any]) -> Episode:
    if header.payload is not None:
        tokens, words = (parts[place] for place in header.payload)
        episode: Episode = tokens.episode(header.place, words[header.place])
        return replace(episode, score=header.score)
    return Episode(
        id=header.id,
        task_id=header.task_id,
        env=header.env,
        family=header.family,
        level=header.level,
        branches=(),
        stop_reason=header.stop_reason,
        score=header.score,
    )
