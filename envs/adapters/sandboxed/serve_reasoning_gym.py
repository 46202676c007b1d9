"""reasoning-gym for the bridge: entries by seed and index, and the scores of its own datasets."""

from __future__ import annotations

from typing import Any

from bridge_server import number, package, version

KEPT = 8  # datasets that stay open


class Serve:
    """Entries and scores of one dataset under any seeds."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._gym = package("reasoning_gym", "reasoning-gym")
        self._options = options
        self._open: dict[int, Any] = {}

    def about(self) -> dict[str, str]:
        return {"package": "reasoning-gym", "version": version("reasoning-gym")}

    def entry(self, seed: int, index: int) -> dict[str, Any]:
        """The question and an answer that is worth 1, where the dataset has one."""
        found = self._dataset(seed)[index]
        return {"question": found["question"], "answer": found["answer"]}

    def score(self, seed: int, index: int, answer: str) -> float | None:
        dataset = self._dataset(seed)
        found: Any = answer
        if self._options["tag"]:
            utils = package("reasoning_gym.utils", "reasoning-gym")
            found = utils.extract_answer(answer, tag_name=self._options["tag"])
        return number(dataset.score_answer(answer=found, entry=dataset[index]))

    def close(self) -> None:
        self._open.clear()

    def _dataset(self, seed: int) -> Any:
        if seed not in self._open:
            while len(self._open) >= KEPT:
                self._open.pop(next(iter(self._open)))
            arguments = {**self._options["kwargs"], "seed": seed, "size": self._options["size"]}
            self._open[seed] = self._gym.create_dataset(self._options["id"], **arguments)
        return self._open[seed]
