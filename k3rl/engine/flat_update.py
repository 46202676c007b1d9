"""A weight version that arrives in flat buffers, one from each rank of the learner that has a part of it.

Every tensor of a shard is proved by its digest, where it lies, before anything of it is taken into the model that is
built beside the one that serves. That model stays: the next version is built in it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3rl.checkpoint import CheckpointError, FlatError, FlatShard, layouts_of, prove, read_flat
from k3rl.engine.protocol import WeightUpdateError
from k3rl.model import K3ForCausalLM


class FlatUpdate:
    """One update being received; methods raise WeightUpdateError and leave the served model alone.

    spare: a model like `model` that nobody uses, to build the version in; None makes one.
    """

    def __init__(
        self, version: int, shards: Sequence[FlatShard], model: K3ForCausalLM, spare: K3ForCausalLM | None
    ) -> None:
        self.version, self._shards, self._spare = version, tuple(shards), spare
        self._missing = set(range(len(self._shards)))
        try:
            self._layouts = layouts_of(model.config, self._shards)
        except FlatError as error:
            raise self._refused(str(error)) from error
        if not model.holds_all or model.adapter is not None:
            raise self._refused("this model has an adapter, or experts elsewhere, and a version is of a whole one")
        self._like = model

    def add(self, number: int, buffer: Tensor) -> None:
        """Proves shard `number`, uint8 [n] on the model's device, and takes it in."""
        if number not in self._missing:
            raise self._refused(f"shard {number} came twice, or is none of {len(self._shards)}")
        shard, layout = self._shards[number], self._layouts[number]
        if self._spare is None:
            like = self._like
            self._spare = K3ForCausalLM(like.config, dtype=like.dtype, device=like.device, packed=like.packed)
        try:
            prove(shard, layout, buffer)
            self._spare.stored_blocks.clear()  # of a version that it held before
            read_flat(self._spare, layout, buffer)
        except (FlatError, CheckpointError) as error:
            raise self._refused(str(error)) from error
        self._missing.remove(number)

    def build(self, model: K3ForCausalLM) -> tuple[K3ForCausalLM, dict[str, str] | None]:
        """(the second model, no manifest: its digests are of another kind), once every shard is there and proved."""
        if self._missing or self._spare is None:
            raise self._refused(f"{self._shards[min(self._missing)]} is missing")
        return self._spare, None

    def _refused(self, reason: str) -> WeightUpdateError:
        return WeightUpdateError(f"weight version {self.version} refused: {reason}; send the whole version again")


class ValuesCopy:
    """Copies all that a model computes with into another one like it, in a few calls, where that one's values lie.

    Made once for a pair of models, so that the copy itself asks neither of them for its thousands of modules.
    """

    def __init__(self, into: K3ForCausalLM, source: K3ForCausalLM) -> None:
        self.into, self.source = into, source
        self._own, self._given = (
            [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
            for model in (into, source)
        )

    @torch.no_grad()
    def run(self) -> None:
        """Queues the copies; the host does not wait."""
        self.into.stored_blocks.clear()
        torch._foreach_copy_(self._own, self._given)
        for layer, bank in self.into.packed_banks.items():
            bank.copy_(self.source.packed_banks[layer])
