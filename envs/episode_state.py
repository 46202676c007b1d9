"""An episode between two turns, as a value and as bytes: what was sampled, what was said, and the environment's part.

The bytes are a tar file of JSON, arrays and the environment's own snapshot; reading them runs nothing.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3rl.types import EncodedImage, Message, SamplingMasks, StopReason, ToolCall, Turn

VERSION = 4


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
    prompt: tuple[int, ...]
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
        rows["branches"] = [_branch_row(branch, arrays, files) for branch in self.branches]
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

    @classmethod
    def from_bytes(cls, data: bytes) -> EpisodeState:
        """Raises BrokenState."""
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                members = {item.name: _content(archive, item) for item in archive if item.isreg()}
            rows = json.loads(members["state.json"])
            if rows.pop("version") != VERSION:
                raise BrokenState(f"this episode was written by another version of k3rl; wants {VERSION}")
            rows["prompt"] = tuple(rows["prompt"])
            rows["open"] = tuple(rows["open"])
            rows["branches"] = tuple(_branch(row, members) for row in rows["branches"])
            rows["messages"] = tuple(map(message_of, rows["messages"]))
            return cls(env=members["env"], **rows)
        except (tarfile.TarError, KeyError, TypeError, ValueError) as error:
            raise BrokenState(f"these bytes are no episode that can go on: {type(error).__name__}: {error}") from error


def message_row(message: Message) -> dict[str, Any]:
    """A message as plain values."""
    return dataclasses.asdict(message)


def message_of(row: Mapping[str, Any]) -> Message:
    """The inverse of `message_row`."""
    calls = tuple(ToolCall(**call) for call in row["tool_calls"])
    return Message(**{**row, "tool_calls": calls})


def _branch_row(branch: BranchState, arrays: list[np.ndarray], files: dict[EncodedImage, int]) -> dict[str, Any]:
    return {
        "parent": branch.parent,
        "turns": [_turn_row(turn, arrays, files) for turn in branch.turns],
        "conversation": [message_row(message) for message in branch.conversation],
        "images": _image_rows(branch.images, files),
    }


def _branch(row: Mapping[str, Any], members: Mapping[str, bytes]) -> BranchState:
    turns = tuple(_turn(turn, members) for turn in row["turns"])
    said = tuple(map(message_of, row["conversation"]))
    return BranchState(row["parent"], turns, said, _images(row["images"], members))


def _image_rows(images: Sequence[EncodedImage], files: dict[EncodedImage, int]) -> list[tuple[int, int, int]]:
    """(number of the file, width, height) each; equal images share a file."""
    return [(files.setdefault(image, len(files)), image.width, image.height) for image in images]


def _images(rows: Sequence[Sequence[int]], members: Mapping[str, bytes]) -> tuple[EncodedImage, ...]:
    return tuple(EncodedImage(members[f"{number}.image"], width, height) for number, width, height in rows)


def _turn_row(turn: Turn, arrays: list[np.ndarray], files: dict[EncodedImage, int]) -> dict[str, Any]:
    row = {item.name: getattr(turn, item.name) for item in dataclasses.fields(turn)}
    for name in ("prompt_ids", "sampled_ids"):
        row[name] = list(map(int, row[name]))
    row["logprobs"] = list(map(float, turn.logprobs))
    row["images"] = _image_rows(turn.images, files)
    if turn.routes is not None:
        arrays.append(turn.routes)
        row["routes"] = f"{len(arrays) - 1}.npy"
    if turn.sampling_mask is not None:
        parts = [turn.sampling_mask.which, turn.sampling_mask.ends, turn.sampling_mask.ids]
        row["sampling_mask"] = [f"{len(arrays) + number}.npy" for number in range(len(parts))]
        arrays += parts
    return row


def _turn(row: dict[str, Any], members: Mapping[str, bytes]) -> Turn:
    if row["routes"] is not None:
        row["routes"] = _array(row["routes"], members)
    if row["sampling_mask"] is not None:
        row["sampling_mask"] = SamplingMasks(*(_array(name, members) for name in row["sampling_mask"]))
    for name in ("prompt_ids", "sampled_ids", "logprobs"):
        row[name] = tuple(row[name])
    images = _images(row["images"], members)
    return Turn(**{**row, "stop_reason": StopReason(row["stop_reason"]), "images": images})


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
