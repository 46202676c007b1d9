"""The Ray actors of a run, and what starts and stops them. No algorithm lives here; loops are in `k3rl.pipelines`.

`cluster.py` configures a cluster and starts or joins Ray, `placement.py` reserves resources or says what is missing,
`fleet.py` holds all actors of a run. A file for each kind: `learner.py` (all ranks as one: `learner_group.py`, with
`teachers.py`), `rollout.py` (its engine: `engines.py`), `environment.py`, `reward.py`. `rollout_workers.py` gets
`jobs.py` done by a `worker_pool.py` of each role: `rollout_stream.py` does what `dispatcher.py` decides over
`groups.py` by a `schedule.py`, with an evaluation beside it in `evaluating.py`. `payloads.py` brings what was played to
who reads it, `recording.py` writes it. `answers.py` brings requests to engines and answers back, `conversations.py`
each of their tokens once; `calls.py` types what goes wrong between actors; `weight_sync/` brings weights to the
engines.
"""

from __future__ import annotations

import gc
import os
import secrets
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Ray reads these when it is imported, so they are set before any module of this package can import it: token
# authentication is on for every cluster that k3rl starts or joins, because Ray's control port listens on all
# interfaces. A token that is already set, or another mode that the user chose, stays.
os.environ.setdefault("RAY_AUTH_MODE", "token")
if os.environ["RAY_AUTH_MODE"] == "token" and not (
    os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
):
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets any other process hold up a step
os.environ.setdefault("PYTHONSAFEPATH", "1")

# What a process imports stays to its end. Looked through after each 700 new objects, it takes a fifth of the time in
# which an actor starts.
gc.set_threshold(20_000, 20, 20)

if TYPE_CHECKING:
    from k3rl.actors.answers import AnswerStreams
    from k3rl.actors.calls import ActorFailure, ActorHung, ActorLost
    from k3rl.actors.cluster import ClusterConfig, EngineConfig, RolloutConfig, start_ray
    from k3rl.actors.environment import EnvironmentWorker
    from k3rl.actors.fleet import Fleet, FleetConfig, start_fleet
    from k3rl.actors.jobs import EpisodeJob, TaskRef
    from k3rl.actors.learner import LearnerActor
    from k3rl.actors.learner_group import LearnerGroup
    from k3rl.actors.payloads import fetched
    from k3rl.actors.placement import reserve, shortage
    from k3rl.actors.recording import Recording, RecordingPlace
    from k3rl.actors.reward import RewardWorker
    from k3rl.actors.rollout import RolloutActor
    from k3rl.actors.rollout_stream import RolloutStream
    from k3rl.actors.rollout_workers import RolloutWorkers
    from k3rl.actors.schedule import Mode, Schedule
    from k3rl.actors.worker_pool import WorkerPool

_HOMES = {
    "ActorFailure": "calls",
    "ActorHung": "calls",
    "ActorLost": "calls",
    "AnswerStreams": "answers",
    "ClusterConfig": "cluster",
    "EngineConfig": "cluster",
    "EnvironmentWorker": "environment",
    "EpisodeJob": "jobs",
    "Fleet": "fleet",
    "FleetConfig": "fleet",
    "LearnerActor": "learner",
    "LearnerGroup": "learner_group",
    "Mode": "schedule",
    "Recording": "recording",
    "RecordingPlace": "recording",
    "RewardWorker": "reward",
    "RolloutActor": "rollout",
    "RolloutConfig": "cluster",
    "RolloutStream": "rollout_stream",
    "RolloutWorkers": "rollout_workers",
    "Schedule": "schedule",
    "TaskRef": "jobs",
    "WorkerPool": "worker_pool",
    "fetched": "payloads",
    "reserve": "placement",
    "shortage": "placement",
    "start_fleet": "fleet",
    "start_ray": "cluster",
}
"""Name -> the module that has it, imported when it is first asked for: configurations need no Ray, workers no torch."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ActorFailure",
    "ActorHung",
    "ActorLost",
    "AnswerStreams",
    "ClusterConfig",
    "EngineConfig",
    "EnvironmentWorker",
    "EpisodeJob",
    "Fleet",
    "FleetConfig",
    "LearnerActor",
    "LearnerGroup",
    "Mode",
    "Recording",
    "RecordingPlace",
    "RewardWorker",
    "RolloutActor",
    "RolloutConfig",
    "RolloutStream",
    "RolloutWorkers",
    "Schedule",
    "TaskRef",
    "WorkerPool",
    "fetched",
    "reserve",
    "shortage",
    "start_fleet",
    "start_ray",
]
