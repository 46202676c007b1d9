"""Which way weights take from the learner to the engines, decided by where each of them keeps its own."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from k3rl.actors.weight_sync.gpu_memory import uuid_of, visible_gpus
from k3rl.config import ConfigError

Transport = Literal["object_store", "broadcast", "ipc", "shm"]
TransportSetting = Literal["auto", "object_store", "broadcast", "ipc", "shm"]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process keeps its weights. gpu: its UUID, empty on a CPU. visible: all that the process can open.

    direct: whether the process takes weights itself; an actor in front of a server does not.
    """

    host: str
    gpu: str = ""
    visible: tuple[str, ...] = ()
    direct: bool = True


def location_here(device: torch.device, *, direct: bool = True) -> Location:
    """The location of this process."""
    host = socket.gethostname()
    if device.type != "cuda":
        return Location(host, direct=direct)
    return Location(host, uuid_of(device), visible_gpus(), direct)


def choose_transport(setting: TransportSetting, learner: Location, engines: Sequence[Location]) -> Transport:
    """The transport of a run's weights. Raises ConfigError where the one that was asked for cannot work.

    auto: shared GPU memory where every engine sees the learner's GPU, a broadcast where each has a GPU of its own,
    shared host memory where all are on CPUs of one host, and the object store otherwise.
    """
    obstacles = {
        "object_store": "",
        "ipc": _against_ipc(learner, engines),
        "broadcast": _against_broadcast(engines),
        "shm": _against_shm(learner, engines),
    }
    gpus = [location.gpu for location in (learner, *engines)]
    if all(gpus) and len(set(gpus)) < len(gpus):
        obstacles["broadcast"] = obstacles["broadcast"] or "NCCL joins no two processes on one GPU"
    if setting == "auto":
        if not obstacles["ipc"]:
            return "ipc"
        if not any(gpus) and not obstacles["shm"]:
            return "shm"
        return "broadcast" if all(gpus) and not obstacles["broadcast"] else "object_store"
    if obstacles[setting]:
        raise ConfigError(
            f"cluster.weight_transfer is {setting!r}, which cannot work here: {obstacles[setting]}; take 'auto'",
            key="cluster.weight_transfer",
            got=setting,
        )
    return setting


def _against_ipc(learner: Location, engines: Sequence[Location]) -> str:
    if not learner.gpu:
        return "the learner's first rank is on no GPU"
    for number, engine in enumerate(engines):
        if not engine.direct or not engine.gpu:
            return f"rollout actor {number} keeps no weights on a GPU"
        if engine.host != learner.host or learner.gpu not in engine.visible:
            return f"rollout actor {number} does not see the learner's GPU"
    return ""


def _against_shm(learner: Location, engines: Sequence[Location]) -> str:
    for number, engine in enumerate(engines):
        if engine.host != learner.host:
            return f"rollout actor {number} is on another host than the learner"
    return _against_broadcast(engines)


def _against_broadcast(engines: Sequence[Location]) -> str:
    for number, engine in enumerate(engines):
        if not engine.direct:
            return f"rollout actor {number} stands before a server"
    return ""
