"""Rollouts that a loop has begun and not trained on yet; a training state holds them, so that none is played twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from k3rl.data.trajectories import ManifestEntry, TrajectoryWriter, read_groups
from k3rl.types import Group


class InFlight:
    """One step's rollouts and the weight version they are sampled with (`published`, what `Fleet.publish` said)."""

    def __init__(self, collect: Callable[[], list[Group]], published: Mapping[str, float]) -> None:
        self._collect = collect
        self._groups: list[Group] | None = None
        self.published = dict(published)

    def groups(self) -> list[Group]:
        """The graded groups; waits for them the first time."""
        if self._groups is None:
            self._groups = self._collect()
        return self._groups

    def save(self, folder: Path, step: int, tokenizer_hash: str) -> dict[str, Any]:
        """Writes the groups into `folder`, durable; what `load` needs, as JSON."""
        writer = TrajectoryWriter(folder, actor="in-flight", tokenizer_hash=tokenizer_hash)
        entry = writer.write(self.groups(), generation=step)
        fields = {name: getattr(entry, name) for name in ManifestEntry.__slots__}
        return {"folder": folder.name, "entry": fields, "published": self.published}

    @classmethod
    def load(cls, parent: Path, saved: Mapping[str, Any]) -> InFlight:
        """The inverse of `save`. Raises TrajectoryError for files that are not those that were written."""
        entry = ManifestEntry(**saved["entry"])
        groups = read_groups(parent / saved["folder"], entry, routes=entry.routes_file is not None)
        return cls(lambda: groups, saved["published"])
