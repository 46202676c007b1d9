"""Reserves what the actors of a run need, or says within a deadline what is missing."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from k3rl.config import MissingResource

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Bundle = dict[str, float]
_ANSWER_S = 5.0  # for a node that lives to take a connection, however busy it is


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


class Reservation:
    """What a run holds of a cluster: a bundle for each of its actors, made anew where a node has gone with some."""

    def __init__(self, roles: list[tuple[str, Bundle]], *, deadline_s: float) -> None:
        """See `reserve`."""
        self._roles, self._deadline_s = roles, deadline_s
        self._reserve()

    def _reserve(self) -> None:
        self.group = reserve(self._roles, deadline_s=self._deadline_s)
        # Kept, because Ray forgets where bundles were as soon as it knows that a node is dead.
        placed = placement_group_table(self.group)["bundles_to_node_id"]
        self._roles_of: dict[str, list[str]] = {}
        for index, node in placed.items():
            self._roles_of.setdefault(node, []).append(self._roles[int(index)][0])
        self._answering = {
            node["NodeID"] for node in ray.nodes() if node["NodeID"] in self._roles_of and _answers(node)
        }

    def lost_nodes(self) -> list[str]:
        """Nodes with bundles of this run that answer no more, each with the roles that it had: a sentence for each.

        They are asked themselves, where that has worked before, because Ray says that a node is dead only after its
        health checks have failed for some time.
        """
        known = {node["NodeID"]: node for node in ray.nodes()}
        return [
            f"node {known[name]['NodeManagerAddress'] if name in known else name}, which had {', '.join(own)}, is gone"
            for name, own in self._roles_of.items()
            if name not in known or not known[name]["Alive"] or (name in self._answering and not _answers(known[name]))
        ]

    def renew(self) -> None:
        """Reserves anew where a node with bundles is lost; what is whole is kept, so that nobody else gets it.

        Raises MissingResource with a table where what is left of the cluster has no room.
        """
        if self.lost_nodes():
            self.release()
            self._reserve()

    def release(self) -> None:
        """Gives everything back."""
        remove_placement_group(self.group)


def _answers(node: dict[str, Any]) -> bool:
    """Whether the daemon of a node that Ray lists takes a connection."""
    with suppress(OSError), socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _ANSWER_S):
        return True
    return False


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
