"""Reserves what the actors of a run need, or says within a deadline what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from k3rl.config import MissingResource

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Bundle = dict[str, float]


def reserve(roles: list[tuple[str, Bundle]], *, deadline_s: float) -> PlacementGroup:
    """A ready placement group with one bundle for each (role, bundle), in order.

    Raises MissingResource with a table of what was asked for and what exists when the cluster cannot place it
    within `deadline_s`; nothing stays reserved then.
    """
    group = placement_group([bundle for _, bundle in roles], strategy="PACK")
    try:
        ready = group.wait(deadline_s)
    except BaseException:
        remove_placement_group(group)
        raise
    if not ready:
        remove_placement_group(group)
        raise MissingResource(shortage(roles, ray.cluster_resources(), ray.available_resources(), deadline_s))
    return group


def shortage(roles: list[tuple[str, Bundle]], total: Bundle, free: Bundle, deadline_s: float) -> str:
    """The message of a placement that did not come about: a row for each role and each resource."""
    lines = [f"the cluster could not place this run's actors within {deadline_s:g} s", "", "asked for:"]
    asked: Bundle = {}
    for role, bundle in roles:
        lines.append(f"  {role:<16}" + ", ".join(f"{name} {amount:g}" for name, amount in bundle.items()))
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0.0) + amount
    lines += ["", f"  {'resource':<14}{'asked':>8}{'cluster has':>14}{'free now':>11}"]
    for name, amount in asked.items():
        lines.append(f"  {name:<14}{amount:>8g}{total.get(name, 0.0):>14g}{free.get(name, 0.0):>11g}")
    short = [name for name, amount in asked.items() if amount > total.get(name, 0.0)]
    if short:
        lines += [
            "",
            f"The cluster is too small in {', '.join(short)}: add nodes, or lower --cluster.*-cpus or *-actors.",
        ]
    else:
        lines += [
            "",
            "The cluster is large enough but busy, or no single node fits one bundle: wait, or stop other jobs.",
        ]
    return "\n".join(lines)
