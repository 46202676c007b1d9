"""What ranks compare before they work together: at the start configuration and weights, before each step its data.

A rank with another learning rate or a sequence too many trains without any error, and wrongly; a hash is cheap.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3rl.config import Config, ConfigError
from k3rl.data import TrainBatch
from k3rl.model import K3ForCausalLM
from k3rl.parallel.frozen import check_slices
from k3rl.parallel.liveness import PeerFailed
from k3rl.parallel.mesh import Mesh
from k3rl.parallel.nonfinite import NonFiniteLoss
from k3rl.parallel.settings import TrainerConfig
from k3rl.parallel.world import RanksDisagree, World

_EXPERT = re.compile(r"\.experts\.\d+\.")
_WEIGHT_TOLERANCE = 1e-6  # of the sum of all weights, which are float64 numbers from one batch


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {key: leaf for name, inner in value.items() for key, leaf in flat(f"{prefix}.{name}", inner).items()}


def check_layout(mesh: Mesh, model: K3ForCausalLM, config: TrainerConfig) -> None:
    """Refuses a mesh, a model's experts or frozen weights that are not those of `config`. Raises ConfigError."""
    asked = (config.expert_parallel, config.context_parallel)
    if mesh.shape[1:] != asked:
        raise ConfigError(
            f"the trainer has expert_parallel {asked[0]} and context_parallel {asked[1]}, its mesh has "
            f"{mesh.shape[1]} and {mesh.shape[2]}; make the mesh from the trainer's config",
            key="expert_parallel",
        )
    wanted = mesh.experts(model.config.num_experts)
    if model.experts != wanted:
        raise ConfigError(
            f"the model holds experts {model.experts}, rank {mesh.world.rank} of this mesh needs {wanted}; "
            "build it with experts=mesh.experts(...)",
            key="expert_parallel",
        )
    check_slices(mesh.world.size, config.shard_frozen)
    if model.slices is not None:
        raise ConfigError("the model's weights are cut already, by another trainer; load it once more")


@torch.no_grad()
def agree_on_start(mesh: Mesh, model: K3ForCausalLM, config: Config) -> None:
    """Compares configuration over all ranks, and weights over those that hold the same. Raises RanksDisagree."""
    if mesh.world.size == 1:
        return
    mesh.world.require_equal(
        flat("trainer", config.model_dump(mode="json"))
        | flat("model", model.config.to_dict())
        | {"dtype": str(model.dtype), "torch": torch.__version__}
    )
    adapter = model.adapter.parameters() if model.adapter is not None else ()
    every = itertools.chain(model.official_parameters(), adapter)
    sums = {f"weights of {name}": _bit_sum(parameter) for name, parameter in every}
    experts = {name: value for name, value in sums.items() if _EXPERT.search(name)}
    mesh.world.require_equal({name: value for name, value in sums.items() if name not in experts})
    mesh.world.require_equal(experts, among=mesh.expert.rank)


def agree_on_step(
    mesh: Mesh, settings: Mapping[str, Any], batch: TrainBatch | None, micro_batches: int, overlap_key: int = 0
) -> tuple[int, bool]:
    """Compares a step's settings and its shares of the batch -> (the most micro-batches that any rank has, whether all
    ranks give the same overlap_key, which is not 0).

    micro_batches: of this rank; -1 when it cannot start, and then -1 comes back everywhere. Raises RanksDisagree for
    other settings, for another batch on ranks of one context axis, and for shares that are not the whole batch once.
    """
    if mesh.world.size == 1:
        return micro_batches, overlap_key != 0
    text = json.dumps(dict(settings), sort_keys=True, default=str)
    weight = 0.0 if batch is None or not mesh.first_of_context else float(batch.weights.sum())
    row = [micro_batches, _hash(text.encode()), _batch_hash(batch), mesh.batch_rank, _bits(weight), overlap_key]
    rows = mesh.world.gather(torch.tensor(row, dtype=torch.int64, device=mesh.world.device)).tolist()
    if min(row[0] for row in rows) < 0:
        return -1, False
    if len({row[1] for row in rows}) > 1:
        mesh.world.require_equal({f"step.{key}": value for key, value in settings.items()})
    for rank, (_, _, data, share, *_) in enumerate(rows):
        first = next(other for other, row in enumerate(rows) if row[3] == share)
        if rows[first][2] != data:
            raise RanksDisagree(
                rank,
                "batch",
                f"rank {rank} has another batch than rank {first}, with which it shares each sequence; "
                f"give all {mesh.context.size} ranks of a context axis the same",
            )
    weights = [struct.unpack("d", struct.pack("q", row[4]))[0] for row in rows]
    if abs(sum(weights) - 1) > _WEIGHT_TOLERANCE and any(weights):
        shares = ", ".join(f"rank {rank} {weight:.6g}" for rank, weight in enumerate(weights) if weight)
        raise RanksDisagree(
            max(range(len(weights)), key=lambda rank: weights[rank]),
            "batch",
            f"the ranks' shares of the batch weigh {sum(weights):.6g} together, wanted 1 ({shares}); "
            "each sequence must be on one rank",
        )
    return int(max(row[0] for row in rows)), {row[5] for row in rows} == {overlap_key} != {0}


def raise_together(world: World, error: Exception | None, step: int) -> None:
    """When a rank failed in a step, raises its error there and PeerFailed elsewhere; all raise a NonFiniteLoss."""
    if world.first_failed(error is None) is None:
        return
    failed = world.first_failed(error is None or isinstance(error, NonFiniteLoss))
    if failed is not None:
        if error is not None:
            raise error
        raise PeerFailed(f"rank {failed} failed in step {step}; nothing was updated")
    texts = world.exchange("" if error is None else str(error))
    raise NonFiniteLoss(next(text for text in texts if text)) from error


def _bit_sum(tensor: Tensor) -> int:
    """A sum over the bits of a tensor that is exact, so no order of summation changes it."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(kind).sum(dtype=torch.int64))


def _batch_hash(batch: TrainBatch | None) -> int:
    if batch is None:
        return 0
    return _hash(b"".join([batch.input_ids.tobytes(), batch.cu_seqlens.tobytes(), batch.weights.tobytes()]))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def _bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])
