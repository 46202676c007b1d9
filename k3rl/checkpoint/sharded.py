"""Official tensors of a model whose experts are spread over ranks, and how ranks write one checkpoint together.

The official layout keeps a layer in one file, so a layer's experts are gathered, packed, by the rank that writes it;
the ranks of one expert axis take the files in turn. Files come out byte for byte as one process writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.model import K3ForCausalLM
from k3rl.numerics import stored_dtype
from k3rl.parallel.mesh import Mesh, expert_run

Named = tuple[str, Tensor]


def bank_of(name: str) -> str | None:
    """The layer's prefix of a routed expert's name, packed or plain; None for other parameters."""
    plain = name.removesuffix("_packed").removesuffix("_scale")
    return name.partition(".experts.")[0] if stored_dtype(plain) == "mxfp4" else None


def collected_tensors(
    stored: Iterator[Named], model: K3ForCausalLM, mesh: Mesh, writer: Callable[[str], int]
) -> Iterator[Named]:
    """The official tensors that this rank has to write, all experts among them, in official order.

    stored: `official_tensors` of this rank's model. writer: the place on the expert axis that writes a tensor, by
    official name; equal for all experts of a layer. Only the first copy of the model (data and context rank 0) writes;
    others get nothing. A collective of the ranks of that copy, which must all exhaust it.
    """
    if mesh.data.rank or mesh.context.rank:
        return
    for bank, members in itertools.groupby(stored, key=lambda item: bank_of(item[0])):
        if bank is None or mesh.expert.size == 1:
            yield from (item for item in members if writer(item[0]) == mesh.expert.rank)
        else:
            own = list(members)
            yield from _gathered(model, mesh, own, writer(own[0][0]))


def _gathered(model: K3ForCausalLM, mesh: Mesh, own: list[Named], root: int) -> Iterator[Named]:
    """One layer's experts from all ranks, on place `root` of the expert axis."""
    axis, count = mesh.expert, model.config.num_experts
    sent = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in own])
    each = len(sent) // len(model.experts)  # bytes of an expert
    here = axis.rank == root
    sizes = [each * len(expert_run(count, place, axis.size)) if here else 0 for place in range(axis.size)]
    arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=sent.device)
    with mesh.world.during("gathering experts"):
        dist.all_to_all_single(
            arrived, sent, sizes, [len(sent) if place == root else 0 for place in range(axis.size)], group=axis.group
        )
    if not here:
        return
    per_expert = own[: len(own) // len(model.experts)]
    first = f".experts.{model.experts.start}."
    for number, data in enumerate(arrived.split(each)):
        pieces = data.split([tensor.numel() * tensor.element_size() for _, tensor in per_expert])
        for (name, like), piece in zip(per_expert, pieces, strict=True):
            yield name.replace(first, f".experts.{number}."), piece.clone().view(like.dtype).view(like.shape)
