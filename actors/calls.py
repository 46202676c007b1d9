"""Calls of actors: their answer, or a typed error that says whether fresh actors may get through the same work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from k3rl.config import K3Error


class ActorFailure(K3Error):
    """An actor died, hung, or raised what no one is meant to handle."""


class ActorLost(ActorFailure):
    """An actor died or hung. Fresh actors may well get through the same work."""


class ActorHung(ActorLost):
    """An actor gave no answer in its time."""


def no_answer(what: str, timeout_s: float) -> ActorHung:
    """The error of a call that came too late."""
    return ActorHung(f"{what} gave no answer within {timeout_s:g} s; raise --cluster.call-timeout-s if that is normal")


def wait(ref: Any, timeout_s: float, what: str) -> Any:
    """The value of a Ray reference. A typed error of k3rl comes through as itself; others become ActorFailure."""
    with typed_errors(timeout_s, what):
        return ray.get(ref, timeout=timeout_s)


@contextmanager
def typed_errors(timeout_s: float, what: str) -> Iterator[None]:
    """Within the block, Ray's errors become those of this module; a typed error of k3rl comes through as itself.

    timeout_s: what calls in the block wait. what: what the block does, for the message.
    """
    try:
        yield
    except GetTimeoutError as error:
        raise no_answer(what, timeout_s) from error
    except RayTaskError as error:
        if isinstance(error.cause, K3Error):
            raise error.cause from None
        if isinstance(error.cause, ObjectLostError):
            raise ActorLost(f"what {what} needs is gone with the node that had it:\n{error}") from error
        if isinstance(error.cause, RayActorError | GetTimeoutError):  # one actor found another one dead, or hanging
            raise ActorLost(f"an actor that {what} needs died, or hangs:\n{error}") from error
        raise ActorFailure(f"{what} failed:\n{error}") from error
    except ObjectLostError as error:
        raise ActorLost(f"what {what} needs is gone with the node that had it:\n{error}") from error
    except (RayActorError, OutOfMemoryError, WorkerCrashedError) as error:
        raise ActorLost(f"the actor of {what} died:\n{error}") from error
