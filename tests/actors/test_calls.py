"""Ray's errors become errors that say whether fresh actors may help; those of k3rl come through."""

from __future__ import annotations

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from k3rl.actors.calls import ActorFailure, ActorHung, ActorLost, typed_errors
from k3rl.config import K3Error


def _task_error(cause: Exception) -> RayTaskError:
    """What `ray.get` raises for a method that raised `cause`."""
    return RayTaskError("method", "a remote traceback", cause)


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (GetTimeoutError("late"), ActorHung, "publishing gave no answer within 7 s"),
        (RayActorError(), ActorLost, "the actor of publishing died"),
        (_task_error(RayActorError()), ActorLost, "an actor that publishing needs died, or hangs"),
        (_task_error(GetTimeoutError("late")), ActorLost, "an actor that publishing needs died, or hangs"),
        (_task_error(ValueError("of its own")), ActorFailure, "publishing failed"),
        (_task_error(K3Error("as it was")), K3Error, "^as it was$"),
        (K3Error("of this process"), K3Error, "^of this process$"),
        (ValueError("of this process"), ValueError, "^of this process$"),
    ],
)
def test_what_goes_wrong_in_a_block_of_calls_has_a_type(raised, kind, says):
    with pytest.raises(kind, match=says) as found, typed_errors(7.0, "publishing"):
        raise raised
    assert type(found.value) is kind
