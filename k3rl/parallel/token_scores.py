"""What the learner computes for each target token of a step, kept for those who look at the run."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from k3rl.data import SequenceScores, TrainBatch
from k3rl.losses import LossInputs
from k3rl.parallel.context import ContextShare


class TokenScores:
    """Logprobs and entropies of the targets of eager micro-batches, on their device until they are taken.

    A captured step overwrites its tensors, so its micro-batches are not here.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[TrainBatch, np.ndarray, Tensor, Tensor | None]] = []

    def clear(self) -> None:
        self._kept.clear()

    def add(self, micro: TrainBatch, share: ContextShare, inputs: LossInputs) -> None:
        """Keeps this rank's share of a micro-batch; copies nothing to the host."""
        entropy = None if inputs.entropy is None else inputs.entropy.detach()
        self._kept.append((micro, share.targets, inputs.logprobs.detach(), entropy))

    def take(self) -> dict[str, SequenceScores]:
        """By sequence id what was kept since `clear`, and forgets it."""
        found: dict[str, SequenceScores] = {}
        for micro, targets, logprobs, entropy in self._kept:
            streams = []
            for values in (logprobs, entropy):
                stream = np.full(micro.tokens, np.nan, np.float32)
                if values is not None:
                    stream[targets] = values.float().cpu().numpy()
                streams.append(np.split(stream, micro.cu_seqlens[1:-1]))
            for name, *own in zip(micro.sequence_ids, *streams, strict=True):
                found[name] = SequenceScores(*own)
        self.clear()
        return found
