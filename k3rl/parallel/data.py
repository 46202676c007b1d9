"""Data parallelism over a `torch.distributed` group: each rank trains on its share of the sequences.

Losses are sums whose weights belong to the whole global batch, so gradients are summed, never averaged, and the
result does not depend on how many ranks there are beyond the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.config import K3Error


class PeerFailed(K3Error):
    """This rank is fine, but another one failed; that one's error says why."""


class DataParallel:
    """The ranks of one learner. Every method is a collective: all ranks call it, in the same order."""

    def __init__(self, rank: int, size: int, address: str, *, timeout_s: float) -> None:
        """Joins the group at tcp://`address`. Raises RuntimeError when a rank does not come within `timeout_s`."""
        self.rank, self.size = rank, size
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    def agree(self, fine: bool) -> bool:
        """Whether every rank is fine."""
        flag = torch.tensor([int(fine)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums every gradient over the ranks in place. A parameter that no rank has a gradient for keeps None.

        One flat message a dtype: a model has hundreds of small tensors, and a collective costs more than their bytes.
        """
        groups: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members in groups.items():
            present = torch.tensor([p.grad is not None for p in members], dtype=torch.int32)
            dist.all_reduce(present, op=dist.ReduceOp.MAX)
            used = [p for p, seen in zip(members, present.tolist(), strict=True) if seen]
            flat = torch.zeros(sum(p.numel() for p in used), dtype=dtype)
            views = [part.view_as(p) for p, part in zip(used, flat.split([p.numel() for p in used]), strict=True)]
            for parameter, view in zip(used, views, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
            dist.all_reduce(flat)
            for parameter, view in zip(used, views, strict=True):
                parameter.grad = view

    def sum(self, *tensors: Tensor) -> None:
        """Sums each tensor over the ranks in place (the counts of Quantile Balancing)."""
        for tensor in tensors:
            dist.all_reduce(tensor)

    def maximum(self, values: Mapping[int, Tensor], layers: Iterable[int], like: Tensor) -> dict[int, Tensor]:
        """The largest of each layer's values over the ranks; `like` stands in where this rank saw none."""
        merged = {}
        for layer in layers:
            value = values.get(layer, torch.full_like(like, float("-inf"))).clone()
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
            if bool(torch.isfinite(value).any()):
                merged[layer] = value
        return merged

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of sequences for each rank, balanced by tokens; a rank may get none.

    Longest first, each to the rank with the fewest tokens; equal inputs give equal shares.
    """
    members: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = load.index(min(load))
        members[rank].append(index)
        load[rank] += lengths[index]
    return [sorted(chosen) for chosen in members]
