"""Whose masters and optimizer state are where: the owners that a learner assigns, matrix by matrix.

A matrix has one owner, so a device keeps no less than the largest one, whatever the number of ranks. The learner's rule
(`k3rl.parallel.assign_owners`: costliest first, each to the rank with the least) is followed here for equal matrices
together, because the full model has a quarter of a million.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from k3rl.model import K3Config, tensor_table
from k3rl.model.costs import ROUTED
from k3rl.optim import ParamInfo, classify
from k3rl.parallel import expert_run, step_cost
from k3rl.planner.inputs import Layout, Method
from k3rl.planner.optimizer import newton_schulz_flops
from k3rl.planner.shares import is_adapted

_HALVINGS = 12  # of the search for a level within the cost of one matrix


@dataclass(frozen=True)
class Matrix:
    """A trained tensor as an owner counts it: its numbers, by which optimizer, its cost, and work of Newton-Schulz."""

    numbers: int
    muon: bool
    cost: float
    flops: float


@dataclass(frozen=True)
class Owned:
    """What one rank owns: numbers with Muon and with AdamW, and operations of its step."""

    muon: int = 0
    adamw: int = 0
    flops: float = 0.0

    @property
    def numbers(self) -> int:
        return self.muon + self.adamw

    def state_bytes(self, momentum_bytes: int) -> float:
        """Bytes of masters and momenta."""
        return (4.0 + momentum_bytes) * self.muon + 12.0 * self.adamw


def owners(config: K3Config, layout: Layout, method: Method) -> tuple[Owned, ...]:
    """What ranks of one stage own, equal ones once."""
    layout = replace(layout, data=layout.replicas, context=1)  # who holds what they hold does not matter
    return _owners(config, layout, method.optimizer, method.lora_rank, method.shard_optimizer)


@lru_cache(maxsize=1 << 12)
def _owners(config: K3Config, layout: Layout, variant: str, lora_rank: int, sharded: bool) -> tuple[Owned, ...]:
    routed, rest = _matrices(config, layout.pipeline, variant, lora_rank)
    kinds = [*routed, *rest]
    of_expert = np.array([*routed.values()] + [0] * len(rest), np.int64)
    of_rest = np.array([0] * len(routed) + [*rest.values()], np.int64)
    runs = [len(expert_run(config.num_experts, place, layout.expert)) for place in range(layout.expert)]
    if not sharded:
        return _owned(kinds, (of_expert * max(runs) + of_rest)[None])
    held = np.zeros((layout.stage_devices, len(kinds)), np.int64)
    if layout.expert == 1:
        _assign(held, kinds, of_rest + of_expert * runs[0])
    else:  # experts have the fewest possible owners, and come first
        among = {run: np.zeros((layout.data, len(kinds)), np.int64) for run in set(runs)}
        for run, replicas in among.items():
            _assign(replicas, kinds, of_expert * run)
        held = np.concatenate([among[run] for run in runs])
        _assign(held, kinds, of_rest)
    return _owned(kinds, held)


def _matrices(config: K3Config, pipeline: int, variant: str, lora_rank: int) -> tuple[Counter[Matrix], Counter[Matrix]]:
    """Matrices of one expert of each layer, and all others, of the stage that has most."""
    routed: Counter[Matrix] = Counter()
    rest: Counter[Matrix] = Counter()
    first = config.num_hidden_layers - math.ceil(config.num_hidden_layers / pipeline)
    for entry in tensor_table(config):
        _, inside, below = entry.name.partition(".layers.")
        if inside and entry.name.startswith("language_model.") and int(below.partition(".")[0]) < first:
            continue
        if pipeline > 1 and entry.part == "embedding":  # the head is as large, and on another stage
            continue
        found = routed if entry.part == ROUTED else rest
        if lora_rank:
            if is_adapted(entry):
                for width in entry.shape:
                    found[_matrix(ParamInfo("adamw", decay=True), (lora_rank, width))] += 1
            continue
        info = classify(entry.name, entry.shape, config)
        if info.group == "balanced" or entry.part == "vision_tower":
            continue
        if info.group == "muon" and variant != "per_head_muon":
            whole = ParamInfo("muon", info.decay, heads=1, segments=(entry.shape[0],))
            info = whole if variant == "muon_whole" else ParamInfo("adamw", info.decay)
        found[_matrix(info, entry.shape)] += entry.copies if entry.part != ROUTED else 1
    return routed, rest


@lru_cache(maxsize=1 << 12)
def _matrix(info: ParamInfo, shape: tuple[int, ...]) -> Matrix:
    muon = info.group == "muon"
    flops = sum(newton_schulz_flops(rows, shape[1]) for rows in info.row_blocks) if muon else 0.0
    return Matrix(math.prod(shape), muon, step_cost(info, shape), flops)


def _assign(held: np.ndarray, kinds: Sequence[Matrix], counts: np.ndarray) -> None:
    """Adds `counts` [K] matrices of each kind to what ranks hold [ranks, K], each to the rank with the least cost."""
    costs = np.array([kind.cost for kind in kinds])
    load = held @ costs
    for number in np.argsort(-costs, kind="stable"):
        if counts[number]:
            given = _level(load, float(costs[number]), int(counts[number]))
            held[:, number] += given
            load += given * costs[number]


def _level(load: np.ndarray, cost: float, count: int) -> np.ndarray:
    """How many of `count` equal matrices each rank gets when each goes to the least loaded: they fill up to a level."""

    def below(level: float) -> np.ndarray:
        return np.ceil(np.maximum(level - load, 0.0) / cost).astype(np.int64)

    rising = np.sort(load)
    poured = (count * cost + rising.cumsum()) / np.arange(1, len(load) + 1)  # the level if the first n ranks take all
    high = float(poured[int((rising < poured).sum()) - 1])
    low = high - cost  # matrices do not divide: by then each of those ranks has at most what pouring gives it
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle).sum() <= count else (low, middle)
    given = below(low)
    rest = count - int(given.sum())
    given[np.argsort(load + given * cost, kind="stable")[:rest]] += 1
    return given


def _owned(kinds: Sequence[Matrix], held: np.ndarray) -> tuple[Owned, ...]:
    """What ranks own [ranks, K], equal ones once."""
    numbers = np.array([kind.numbers for kind in kinds], np.int64)
    muon = np.array([kind.muon for kind in kinds])
    both = (held @ (numbers * muon)).tolist(), (held @ (numbers * ~muon)).tolist()
    flops = (held @ np.array([kind.flops for kind in kinds])).tolist()
    return tuple(Owned(*row) for row in dict.fromkeys(zip(*both, flops, strict=True)))
