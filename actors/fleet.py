"""All actors of one run: started in one reservation, started again when one is lost, ended with the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from k3rl.actors.calls import ActorLost, typed_errors
from k3rl.actors.cluster import ClusterConfig, most_rows
from k3rl.actors.engine_places import home_engines
from k3rl.actors.environment import EnvironmentWorker
from k3rl.actors.learner import LearnerActor
from k3rl.actors.learner_group import LearnerGroup
from k3rl.actors.placement import Bundle, Reservation
from k3rl.actors.reward import RewardWorker
from k3rl.actors.rollout import RolloutActor
from k3rl.actors.rollout_workers import RolloutWorkers
from k3rl.actors.weight_sync import Canary, WeightPublisher
from k3rl.actors.worker_pool import WorkerPool
from k3rl.config import K3Error
from k3rl.envs import EnvConfig, made


@dataclass(frozen=True)
class FleetConfig:
    """What a fleet is made of.

    cluster: how many actors of each kind, and what each may use. env: None for a run without rollouts. max_running:
    sequences that one engine decodes at a time; None: as many as suit model and device, `cluster.most_rows` at most.
    seed: of the engines; each adds its number. canary: checked after each switch of weights; None for a fleet that
    publishes none. learner: whether there is one.
    """

    cluster: ClusterConfig
    env: EnvConfig | None = None
    max_running: int | None = None
    seed: int = 0
    canary: Canary | None = None
    learner: bool = True

    def roles(self) -> list[tuple[str, Bundle]]:
        """(name, resources) of every actor that needs any, in the order in which they are placed."""
        cluster = self.cluster
        roles: list[tuple[str, Bundle]] = []
        if self.learner:
            gpus = {"GPU": cluster.learner_gpus} if cluster.learner_device == "cuda" else {}
            learner = {"CPU": cluster.learner_cpus} | gpus
            roles += [(f"learner {i}", learner) for i in range(cluster.learner_actors)]
        if self.env is not None:
            rollout = {"CPU": cluster.rollout_cpus}
            if cluster.rollout_device == "cuda" and cluster.rollout.backend == "k3rl":  # a server has GPUs of its own
                rollout["GPU"] = cluster.rollout_gpus
            environment, reward = {"CPU": cluster.environment_cpus}, {"CPU": cluster.reward_cpus}
            roles += [(f"rollout {i}", rollout) for i in range(cluster.rollout_actors)]
            roles += [(f"environment {i}", environment) for i in range(cluster.environment_actors)]
            roles += [(f"reward {i}", reward) for i in range(cluster.reward_actors)]
        return roles


class Fleet:
    """The actors of one run. Use `start_fleet(...)`; members that a pipeline did not ask for are absent."""

    def __init__(self, config: FleetConfig, reservation: Reservation) -> None:
        self.learner: LearnerGroup
        self.rollouts: RolloutWorkers
        self.restarts_left = config.cluster.restarts
        self._config = config
        self._reservation = reservation
        self._places = {name: (index, bundle) for index, (name, bundle) in enumerate(config.roles())}
        self._publisher: WeightPublisher | None = None
        self._started: list[Any] = []
        self._pools: list[WorkerPool] = []

    def publish(self) -> dict[str, float]:
        """The learner's weights to every engine, two-phase, with the canary; see `WeightPublisher.publish`.

        Raises its errors, and ActorLost or ActorFailure for an actor that did not answer it.
        """
        assert self._publisher is not None, "a fleet that publishes has a learner, engines and a canary"
        with typed_errors(self._config.cluster.call_timeout_s, "publishing weights"):
            done = self._publisher.publish()
        if done["fell_back"]:
            self.learner.notes += self._publisher.notes()
        return done

    def slow_paths(self) -> list[str]:
        """What of the GPUs runs without kernels: a sentence for each kind of actor and reason."""
        found: list[str] = []
        if self._config.learner and self._config.cluster.learner_device == "cuda":
            found += [f"learner: {text}" for text in self.learner.slow_paths()]
        if self._config.env is not None and self._config.cluster.rollout_device == "cuda":
            found += [f"engines: {text}" for text in self.rollouts.slow_paths()]
        return found

    def start(self) -> None:
        """Makes the actors, each in its part of the reservation."""
        cluster = self._config.cluster
        ranks: list[Any] = []
        if self._config.learner:
            ranks = self._make_learner()
        if self._config.env is not None:
            self._start_rollouts(self._config.env)
        if ranks:  # they wait for each other while the other actors come up
            self.learner = LearnerGroup(ranks, cluster.call_timeout_s, keeps_base=cluster.sends_deltas)
        if self._config.learner and self._config.env is not None and self._config.canary is not None:
            self._publisher = WeightPublisher(
                self.learner.actors, self.rollouts.engines, self._config.canary, self._config.cluster
            )

    def _make_learner(self) -> list[Any]:
        cluster = self._config.cluster
        ranks = [
            self._place(f"learner {i}", LearnerActor, cluster.learner_threads, cluster.learner_device)
            for i in range(cluster.learner_actors)
        ]
        self._started += ranks
        return ranks

    def _start_rollouts(self, env: EnvConfig) -> None:
        config, cluster, about = self._config, self._config.cluster, made(env)
        engines = [
            self._place(f"rollout {i}", RolloutActor, cluster, i, config.max_running, config.seed + i)
            for i in range(cluster.rollout_actors)
        ]
        self._started += engines
        rows = config.max_running or most_rows(cluster)

        def environment(i: int) -> Any:
            home = home_engines(len(engines), i, cluster.environment_actors)
            return self._place(f"environment {i}", EnvironmentWorker, env, *engines, home=home, rows=rows)

        def reward(i: int) -> Any:
            return self._place(f"reward {i}", RewardWorker, env, cluster.reward_workers, cluster.reward_actors)

        for role, count in ((environment, cluster.environment_actors), (reward, cluster.reward_actors)):
            self._pools.append(WorkerPool([role(i) for i in range(count)], role))
        self.rollouts = RolloutWorkers(
            engines,
            *self._pools,
            env=about.name,
            faults=env.faults,
            compares=about.compares,
            timeout_s=cluster.call_timeout_s,
            rows=rows * len(engines),
            lost_nodes=self._reservation.lost_nodes,
        )

    def _place(self, role: str, actor: type, *args: Any, **named: Any) -> Any:
        index, bundle = self._places[role]
        strategy = PlacementGroupSchedulingStrategy(self._reservation.group, placement_group_bundle_index=index)
        where: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        where["scheduling_strategy"] = strategy
        return ray.remote(actor).options(**where).remote(*args, **named)

    @property
    def begun(self) -> int:
        """Groups with lower numbers than this were begun by the rollouts that are open; 0 without any."""
        return self.rollouts.begun if self._pools and "rollouts" in vars(self) else 0

    def lost_nodes(self) -> list[str]:
        """Which nodes of the run answer no more, and which of its actors they had: a sentence for each."""
        return self._reservation.lost_nodes()

    def restart(self) -> None:
        """Ends all actors, what they were doing included, and makes new ones in the same reservation, or, where a node
        of it is gone, in one on the nodes that are left.

        Raises MissingResource with a table where these have no room, and ActorLost where a new actor is lost too; it
        may be called again then.
        """
        self.restarts_left -= 1
        self.stop()
        self._reservation.renew()
        self.start()

    def settle(self) -> None:
        """Waits for a training state that is being written; its error gives way to the one under way."""
        if self._started and "learner" in vars(self):  # its ranks may never have met
            with suppress(K3Error):
                self.learner.state_saved()

    def stop(self) -> None:
        """Ends all actors."""
        if self._pools and "rollouts" in vars(self):
            self.rollouts.close()
        for pool in self._pools:
            pool.end()
        for actor in self._started:
            ray.kill(actor)
        self._pools.clear()
        self._started.clear()


@contextmanager
def start_fleet(config: FleetConfig) -> Iterator[Fleet]:
    """Starts the actors in one placement group and ends them, reservation included, with the block.

    A training state that is being written when the block fails is waited for, where its learner still lives.
    Raises MissingResource with a table when the cluster cannot place them in time.
    """
    reservation = Reservation(config.roles(), deadline_s=config.cluster.placement_deadline_s)
    members = Fleet(config, reservation)
    try:
        members.start()
        yield members
    except ActorLost:
        raise
    except Exception:
        members.settle()
        raise
    finally:
        members.stop()
        reservation.release()
