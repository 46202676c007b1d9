"""Walking over examples in batches, in an order that a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from k3rl.data.batch import BatchError


class IndexStream:
    """Endless batches of example indices: a fresh permutation each epoch, no example twice in an epoch.

    The last count % batch_size examples of an epoch's permutation fill no batch and wait for the next epoch.
    `fingerprint` names the data (for example a file's SHA-256): a state is refused for other data.
    """

    def __init__(self, count: int, batch_size: int, *, seed: int, fingerprint: str) -> None:
        if not 1 <= batch_size <= count:
            raise BatchError(f"batch_size is {batch_size} for {count} examples; it must be in 1 .. {count}")
        self._count = count
        self._batch_size = batch_size
        self._identity = {"count": count, "batch_size": batch_size, "seed": seed, "fingerprint": fingerprint}
        self._seed = seed
        self._drawn = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """The next batch of indices, int64 [batch_size]."""
        epoch, number = divmod(self._drawn, self._count // self._batch_size)
        self._drawn += 1
        order = np.random.default_rng([self._seed, epoch]).permutation(self._count)
        return order[number * self._batch_size : (number + 1) * self._batch_size]

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._drawn / (self._count // self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; the next batch after `load_state_dict` is the next batch now."""
        return {**self._identity, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a stream of the same data and settings stood. Raises BatchError for any other."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise BatchError(
                    f"the saved data position has {name} {state.get(name)!r}, this run has {value!r}; "
                    "resume with the same data and settings or start anew"
                )
        self._drawn = int(state["drawn"])
