"""Whose optimizer state a rank keeps: what `k3rl.parallel.zero` assigns by name, counted without the names.

Owners hold whole matrices and are balanced by the time of a step, so the rank with most bytes may hold several times
the mean: a vocabulary's matrix alone is 13 GiB of state for K3. Parameters of one cost that the same ranks may own are
handed out one by one to the least loaded rank; how many each gets is known without handing them out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from k3rl.model import K3Config, tensor_table
from k3rl.model.costs import ROUTED
from k3rl.optim import ParamInfo, classify
from k3rl.parallel import expert_run, step_cost
from k3rl.planner.inputs import Layout, Method


def owned_numbers(config: K3Config, layout: Layout, method: Method) -> np.ndarray:
    """float64 [ranks, 2]: numbers that Muon and that AdamW trains, of those whose optimizer state each rank keeps.

    Of a layout without pipeline stages, whose optimizer is sharded and whose weights are trained themselves.
    """
    return _owned(config, method.optimizer, replace(layout, pipeline=1))


Kinds = dict[float, dict[tuple[int, bool], int]]
"""cost of a step -> (numbers of a matrix, whether Muon trains it) -> how many there are."""


@lru_cache(maxsize=1 << 10)
def _owned(config: K3Config, optimizer: str, layout: Layout) -> np.ndarray:
    ranks = layout.stage_devices
    rest, of_an_expert = _kinds(config, optimizer)
    owned, load = np.zeros((ranks, 2)), np.zeros(ranks)
    if layout.expert == 1:  # all ranks may have anything
        every: Kinds = {cost: dict(of) for cost, of in rest.items()}
        for cost, of in of_an_expert.items():
            into = every.setdefault(cost, {})
            for kind, count in of.items():
                into[kind] = into.get(kind, 0) + count * config.num_experts
        _hand_out(every, np.arange(ranks), load, owned)
        return owned
    alike: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # experts of a place -> load and numbers of its ranks
    for place in range(layout.expert):
        count = len(expert_run(config.num_experts, place, layout.expert))
        if count not in alike:
            held = {cost: {kind: n * count for kind, n in of.items()} for cost, of in of_an_expert.items()}
            alike[count] = np.zeros(layout.replicas), np.zeros((layout.replicas, 2))
            _hand_out(held, np.arange(layout.replicas), *alike[count])
        first = place * layout.context + np.arange(layout.context)
        mine = (first + layout.expert * layout.context * np.arange(layout.data)[:, None]).reshape(-1)
        load[mine], owned[mine] = alike[count]
    _hand_out(rest, np.arange(ranks), load, owned)
    return owned


@lru_cache(maxsize=1 << 5)
def _kinds(config: K3Config, optimizer: str) -> tuple[Kinds, Kinds]:
    """Parameters that are no routed experts, and those of one expert of every layer."""
    rest: Kinds = {}
    of_an_expert: Kinds = {}
    for entry in tensor_table(config):
        info = classify(entry.name, entry.shape, config)
        if info.group == "balanced":
            continue
        if info.group == "muon" and optimizer == "muon_whole":
            info = ParamInfo("muon", info.decay, heads=1, segments=(entry.shape[0],))
        elif optimizer == "adamw":
            info = ParamInfo("adamw", info.decay)
        cost, routed = float(round(step_cost(info, entry.shape))), entry.part == ROUTED
        of = (of_an_expert if routed else rest).setdefault(cost, {})
        kind = math.prod(entry.shape), info.group == "muon"
        of[kind] = of.get(kind, 0) + (1 if routed else entry.copies)
    return rest, of_an_expert


def _hand_out(kinds: Kinds, ranks: np.ndarray, load: np.ndarray, owned: np.ndarray) -> None:
    """Gives parameters to these ranks, the costliest first; adds to `load` [ranks] and `owned` [ranks, 2].

    Where matrices of different sizes cost the same, each counts as the largest: names alone say who gets which.
    """
    for cost in sorted(kinds, reverse=True):
        counts = least_loaded(load[ranks], cost, sum(kinds[cost].values()))
        load[ranks] += counts * cost
        numbers, muon = max(kinds[cost])
        owned[ranks, 0 if muon else 1] += counts * float(numbers)


def least_loaded(load: np.ndarray, cost: float, count: int) -> np.ndarray:
    """int64 [ranks]: how many of `count` things of one whole cost each rank gets, when they go one by one to the rank
    with the least load, of equals to the first. load: float64 [ranks], whole numbers."""
    low, high = float(load.min()), float(load.max()) + cost * (count + 1)
    while low < high:  # the least load at which everything is given out, counting what a rank has before it gets one
        middle = math.floor((low + high) / 2)
        if _given(load, cost, middle).sum() >= count:
            high = middle
        else:
            low = middle + 1
    found = _given(load, cost, low - 1)
    at_it = np.flatnonzero(_given(load, cost, low) > found)[: count - int(found.sum())]
    found[at_it] += 1
    return found


def _given(load: np.ndarray, cost: float, level: float) -> np.ndarray:
    """How many each rank gets while its load is at most `level`."""
    return np.where(load <= level, np.floor((level - load) / cost) + 1, 0).astype(np.int64)
