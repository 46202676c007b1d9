"""An episode between two turns, as a value and as bytes: what was sampled, what was said, and the environment's part.

The bytes are a tar file of JSON, arrays and the environment's own snapshot; reading them runs nothing.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3rl.packed import Packed, SamplingMasks, TurnColumns
from k3rl.types import EncodedImage, Message, StopReason, ToolCall, Turn

VERSION = 5


class BrokenState(ValueError):
    """Bytes that are no episode, or one of another version."""


@dataclass(frozen=True, slots=True)
class BranchState:
    """A branch so far. parent: number of the branch that it came from; conversation: what its next prompt renders.

    images: of its next prompt, one for each placeholder, in order.
    """

    parent: int | None
    turns: tuple[Turn, ...] = ()
    conversation: tuple[Message, ...] = ()
    images: tuple[EncodedImage, ...] = ()

    def with_turn(self, turn: Turn) -> BranchState:
        """After one more turn."""
        return dataclasses.replace(self, turns=(*self.turns, turn))

    def with_last(self, turn: Turn) -> BranchState:
        """With another record of the last turn."""
        return dataclasses.replace(self, turns=(*self.turns[:-1], turn))

    def with_messages(self, messages: Sequence[Message], images: Sequence[EncodedImage] = ()) -> BranchState:
        """After these were said and shown."""
        said = (*self.conversation, *messages)
        return dataclasses.replace(self, conversation=said, images=(*self.images, *images))


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """Where an episode stands before its next turn.

    prompt: token ids of that turn. branches: all so far, in the order in which they began; open: numbers of those
    that go on, the one that acts last. messages: all that was said. wall_s: time spent so far. env: what
    `Env.snapshot` gave.
    """

    task_id: str
    prompt: Packed
    branches: tuple[BranchState, ...]
    open: tuple[int, ...]
    messages: tuple[Message, ...]
    metrics: Mapping[str, float]
    tokens: int
    tool_calls: int
    wall_s: float
    env: bytes

    def to_bytes(self) -> bytes:
        """For a file; `from_bytes` gives an equal value."""
        arrays: list[np.ndarray] = []
        files: dict[EncodedImage, int] = {}
        rows = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "env"}
        rows["branches"] = [_branch_row(branch, files) for branch in self.branches]
        turns = [branch.turns for branch in self.branches]
        rows["turns"] = _columns_row(TurnColumns.of(turns, [branch.parent for branch in self.branches]), arrays, files)
        rows["prompt"] = _kept(Packed.of(self.prompt, np.int32).array, arrays)
        rows["messages"] = [message_row(message) for message in self.messages]
        rows["metrics"] = dict(self.metrics)
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w") as archive:
            _add(archive, "state.json", json.dumps({"version": VERSION, **rows}).encode())
            _add(archive, "env", self.env)
            for number, array in enumerate(arrays):
                body = io.BytesIO()
                np.save(body, array)
                _add(archive, f"{number}.npy", body.getvalue())
            for image, number in files.items():
                _add(archive, f"{number}.image", image.data)
        return target.getvalue()

    def with_versions(self, shift: int) -> EpisodeState:
        """The same with all weight versions counted from elsewhere: `shift` is added to each."""

        def turn(one: Turn) -> Turn:
            first, last = one.first_version + shift, one.last_version + shift
            return dataclasses.replace(one, first_version=first, last_version=last)

        branches = tuple(dataclasses.replace(b, turns=tuple(map(turn, b.turns))) for b in self.branches)
        return dataclasses.replace(self, branches=branches)

    @property
    def first_version(self) -> int | None:
        """Of the oldest token that was sampled; None before the first."""
        return min((turn.first_version for branch in self.branches for turn in branch.turns), default=None)

    @classmethod
    def from_bytes(cls, data: bytes) -> EpisodeState:
        """Raises BrokenState."""
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                members = {item.name: _content(archive, item) for item in archive if item.isreg()}
            rows = json.loads(members["state.json"])
            if rows.pop("version") != VERSION:
                raise BrokenState(f"this episode was written by another version of k3rl; wants {VERSION}")
            rows["prompt"] = Packed.of(_array(rows["prompt"], members), np.int32)
            rows["open"] = tuple(rows["open"])
            turns = _columns(rows.pop("turns"), members).turns(Turn)
            pairs = zip(rows["branches"], turns, strict=True)
            rows["branches"] = tuple(_branch(row, own, members) for row, own in pairs)
            rows["messages"] = tuple(map(message_of, rows["messages"]))
            return cls(env=members["env"], **rows)
        except (tarfile.TarError, KeyError, TypeError, ValueError) as error:
            raise BrokenState(f"these bytes are no episode that can go on: {type(error).__name__}: {error}") from error


class KeptState:
    """The newest state of an episode that is being played, taken between two turns, at most every so many seconds."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The first one is due after `every_s`, so that short episodes never pay for one."""
        self.state: EpisodeState | None = None
        self._every_s, self._clock = every_s, clock
        self._next: float | None = clock() + every_s

    @property
    def due(self) -> bool:
        """Whether the next turn should be preceded by `keep`."""
        return self._next is not None and self._clock() >= self._next

    def keep(self, state: EpisodeState) -> None:
        """Replaces the state before."""
        self.state, self._next = state, self._clock() + self._every_s

    def stop(self) -> None:
        """The environment gives no state; none is due any more."""
        self._next = None


def message_row(message: Message) -> dict[str, Any]:
    """A message as plain values."""
    return dataclasses.asdict(message)


def message_of(row: Mapping[str, Any]) -> Message:
    """The inverse of `message_row`."""
    calls = tuple(ToolCall(**call) for call in row["tool_calls"])
    return Message(**{**row, "tool_calls": calls})


def _branch_row(branch: BranchState, files: dict[EncodedImage, int]) -> dict[str, Any]:
    return {
        "parent": branch.parent,
        "conversation": [message_row(message) for message in branch.conversation],
        "images": _image_rows(branch.images, files),
    }


def _branch(row: Mapping[str, Any], turns: tuple[Turn, ...], members: Mapping[str, bytes]) -> BranchState:
    said = tuple(map(message_of, row["conversation"]))
    return BranchState(row["parent"], turns, said, _images(row["images"], members))


def _image_rows(images: Sequence[EncodedImage], files: dict[EncodedImage, int]) -> list[tuple[int, int, int]]:
    """(number of the file, width, height) each; equal images share a file."""
    return [(files.setdefault(image, len(files)), image.width, image.height) for image in images]


def _images(rows: Sequence[Sequence[int]], members: Mapping[str, bytes]) -> tuple[EncodedImage, ...]:
    return tuple(EncodedImage(members[f"{number}.image"], width, height) for number, width, height in rows)


_ARRAYS = ("ends", "counts", "ids", "logprobs", "versions", "seconds")


def _kept(array: np.ndarray, arrays: list[np.ndarray]) -> str:
    """The name of the file that this array becomes."""
    arrays.append(array)
    return f"{len(arrays) - 1}.npy"


def _columns_row(columns: TurnColumns, arrays: list[np.ndarray], files: dict[EncodedImage, int]) -> dict[str, Any]:
    masks = [None if mask is None else (mask.which, mask.ends, mask.ids) for mask in columns.sampling_masks]
    return {
        **{name: _kept(getattr(columns, name), arrays) for name in _ARRAYS},
        "parents": columns.parents,
        "stop_reasons": columns.stop_reasons,
        "routes": [None if routes is None else _kept(routes, arrays) for routes in columns.routes],
        "images": _image_rows(columns.images, files),
        "sampling_masks": [None if mask is None else [_kept(part, arrays) for part in mask] for mask in masks],
    }


def _columns(row: Mapping[str, Any], members: Mapping[str, bytes]) -> TurnColumns:
    masks = [None if names is None else [_array(name, members) for name in names] for names in row["sampling_masks"]]
    return TurnColumns(
        **{name: _array(row[name], members) for name in _ARRAYS},
        parents=tuple(row["parents"]),
        stop_reasons=tuple(map(StopReason, row["stop_reasons"])),
        routes=tuple(None if name is None else _array(name, members) for name in row["routes"]),
        images=_images(row["images"], members),
        sampling_masks=tuple(None if parts is None else SamplingMasks(*parts) for parts in masks),
    )


def _array(name: str, members: Mapping[str, bytes]) -> np.ndarray:
    return np.load(io.BytesIO(members[name]))


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise BrokenState(f"{member.name} is no plain file")
    return file.read()
