"""Calls of actors: their answer, or a typed error that says whether fresh actors may get through the same work."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from k3rl.config import K3Error
from k3rl.types import Failed, FailureKind


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
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise no_answer(what, timeout_s) from error
    except RayTaskError as error:
        if isinstance(error.cause, K3Error):
            raise error.cause from None
        if isinstance(error.cause, RayActorError | GetTimeoutError):  # one actor found another one dead, or hanging
            raise ActorLost(f"an actor that {what} needs died, or hangs:\n{error}") from error
        raise ActorFailure(f"{what} failed:\n{error}") from error
    except (RayActorError, OutOfMemoryError, WorkerCrashedError) as error:
        raise ActorLost(f"the actor of {what} died:\n{error}") from error


def outcome(ref: Any, timeout_s: float, what: str) -> Any:
    """The value of a Ray reference, or `Failed` when the actor hung, died or raised.

    A typed error of k3rl is raised as itself, and so is an actor that cannot be started at all.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        return Failed(f"{what} gave no answer within {timeout_s:g} s and was ended", FailureKind.HUNG)
    except RayActorError as error:
        if error.actor_init_failed:
            raise ActorFailure(f"the actor for {what} cannot be started:\n{error}") from error
        return Failed(f"the process of {what} died: {_first_line(error)}", FailureKind.DIED)
    except RayTaskError as error:
        if isinstance(error.cause, K3Error):
            raise error.cause from None
        return Failed(f"{what}: {type(error.cause).__name__}: {error.cause}"[:500], FailureKind.RAISED)
    except OutOfMemoryError as error:
        return Failed(f"the process of {what} was ended for lack of memory: {_first_line(error)}", FailureKind.DIED)
    except RayError as error:  # an object that was lost with its node
        return Failed(f"{what}: {type(error).__name__}: {_first_line(error)}", FailureKind.DIED)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
