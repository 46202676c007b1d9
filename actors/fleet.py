"""All actors of one run behind plain calls, so that a pipeline reads as its algorithm."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from k3rl.actors.cluster import ClusterConfig
from k3rl.actors.environment import EnvironmentActor
from k3rl.actors.learner import LearnerActor
from k3rl.actors.placement import reserve
from k3rl.actors.reward import RewardActor
from k3rl.actors.rollout import RolloutActor
from k3rl.actors.rollouts import Rollouts
from k3rl.actors.weight_sync.publisher import WeightPublisher
from k3rl.actors.worker_pool import ActorHung, ActorLost, Crew, no_answer, wait
from k3rl.config import K3Error
from k3rl.data.batch import TrainBatch
from k3rl.data.packing import sequence_costs
from k3rl.envs import make
from k3rl.envs.faults import FaultConfig
from k3rl.parallel import LearnerConfig, Loss, PeerFailed, TrainerConfig, balanced_shares, find_lost
from k3rl.run.metrics import Accumulator

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class Learner:
    """The ranks of the learner as one. Each method is `LearnerActor`'s of the same name, on all ranks, and waits."""

    def __init__(self, actors: list[Any], timeout_s: float) -> None:
        self.actors = actors
        self.notes: list[str] = []  # about steps, for a person; who shows them clears them
        self._said: list[Any] = []  # calls for the notes of a step that is under way
        self._timeout_s = timeout_s
        self._context = 1  # ranks that share each sequence
        self._pair = 0.0  # what a pair of tokens costs the model, see `sequence_costs`
        self._address = ""  # where ranks meet
        if len(actors) > 1:
            address = wait(actors[0].address.remote(), timeout_s, "learner.address")
            self._every("join", [(address, rank, len(actors), timeout_s) for rank in range(len(actors))])
            self._address = address

    def create(self, config: Mapping[str, Any], trainer: TrainerConfig, seed: int, learner: LearnerConfig) -> int:
        return self._with_model(trainer, self._every("create", [(config, trainer, seed, learner)] * len(self.actors)))

    def load(self, checkpoint: str, trainer: TrainerConfig, learner: LearnerConfig) -> int:
        return self._with_model(trainer, self._every("load", [(checkpoint, trainer, learner)] * len(self.actors)))

    def _with_model(self, trainer: TrainerConfig, sizes: list[int]) -> int:
        """What dealing sequences to the ranks needs to know of a model that they have just made."""
        self._context = trainer.context_parallel
        if len(self.actors) > self._context:
            self._pair = wait(self.actors[0].pair_cost.remote(), self._timeout_s, "learner.pair_cost")
        return sizes[0]

    def load_teachers(self, checkpoints: Mapping[str, str], trainer: TrainerConfig) -> None:
        self._every("load_teachers", [(checkpoints, trainer)] * len(self.actors))

    def load_state(self, directory: str) -> dict[str, Any]:
        return self._every("load_state", [(directory,)] * len(self.actors))[0]

    def set_version(self, number: int) -> None:
        self._every("set_version", [(number,)] * len(self.actors))

    def save_checkpoint(self, directory: str, card: Mapping[str, Any]) -> str:
        return self._every("save_checkpoint", [(directory, card)] * len(self.actors))[0]

    def save_adapter(self, directory: str, base: str, card: Mapping[str, Any]) -> str:
        return self._every("save_adapter", [(directory, base, card)] * len(self.actors))[0]

    def save_state(self, directory: str, extra: Mapping[str, Any]) -> None:
        """Returns once the state is copied; it is written while training goes on, and `state_saved` waits for that."""
        save_id = secrets.token_hex(4)
        self._every("save_state", [(directory, extra, save_id)] * len(self.actors))

    def state_saved(self) -> None:
        self._every("state_saved", [()] * len(self.actors))

    def start_training(
        self, batches: Sequence[TrainBatch], loss: Loss, lr_scale: float = 1.0, temperature: float = 1.0
    ) -> list[Any]:
        """Begins one optimizer step for each global batch; `trained` waits for it."""
        dealt = [self._deal(batch) for batch in batches]
        started = [
            actor.train.remote([share[rank][1] for share in dealt], loss, lr_scale, temperature)
            for rank, actor in enumerate(self.actors)
        ]
        self._said = [actor.notes.remote() for actor in self.actors]  # what they have to say of it, right behind it
        return started

    def trained(self, started: list[Any]) -> Accumulator:
        """The metrics of `start_training`, added up over the ranks."""
        metrics = Accumulator()
        for part in self._results("learner.train", started):
            metrics.merge(part)
        said, self._said = self._said, []
        self.notes += dict.fromkeys(note for notes in self._results("learner.notes", said) for note in notes)
        return metrics

    def evaluate(self, batch: TrainBatch, loss: Loss) -> Accumulator:
        metrics = Accumulator()
        shares = self._deal(batch)
        for part in self._every("evaluate", [(share, loss) for _, share in shares]):
            metrics.merge(part)
        return metrics

    def teacher_logprobs(self, batch: TrainBatch, domains: Sequence[str], temperature: float = 1.0) -> np.ndarray:
        """float32 [N]: each sequence scored by the teacher of its domain."""
        calls, rows = [], []
        for actor, (members, part) in zip(self.actors, self._deal(batch, context=1), strict=True):
            if part is not None:
                calls.append(actor.teacher_logprobs.remote(part, [domains[i] for i in members], temperature))
                rows.append(np.concatenate([np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in members]))
        out = np.zeros(batch.tokens, np.float32)
        for places, values in zip(rows, self._results("learner.teacher_logprobs", calls), strict=True):
            out[places] = values
        return out

    def _deal(self, batch: TrainBatch, context: int | None = None) -> list[tuple[list[int], TrainBatch | None]]:
        """(indices, share) for each rank; `context` neighbours, by default those of the mesh, get one together."""
        context = context or self._context
        if len(self.actors) == context:
            return [(list(range(len(batch.sequence_ids))), batch)] * context
        dealt = balanced_shares(sequence_costs(batch.row_lengths.tolist(), self._pair), len(self.actors) // context)
        shares = [(members, batch.select(members) if members else None) for members in dealt]
        return [share for share in shares for _ in range(context)]

    def _every(self, method: str, args: list[tuple[Any, ...]]) -> list[Any]:
        calls = [getattr(actor, method).remote(*own) for actor, own in zip(self.actors, args, strict=True)]
        return self._results(f"learner.{method}", calls)

    def _results(self, what: str, calls: list[Any]) -> list[Any]:
        """All ranks' answers, in one timeout. A lost rank ends it at once: on a GPU the others wait in a collective.

        Where several fail by themselves, the error of one that did not fail because of another. Where ranks give no
        answer because they wait for another, the error has that one's name.
        """
        answers: dict[int, Any] = {}
        errors: list[K3Error] = []
        waiting = {call: rank for rank, call in enumerate(calls)}
        deadline = time.monotonic() + self._timeout_s
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), timeout=left_s, fetch_local=False)
            if not ready:
                raise self._late(what, min(waiting.values()))
            rank = waiting.pop(ready[0])
            try:
                answers[rank] = wait(ready[0], self._timeout_s, f"{what} of rank {rank}")
            except ActorLost:
                raise
            except K3Error as error:
                errors.append(error)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerFailed))
        return [answers[rank] for rank in range(len(calls))]

    def _late(self, what: str, rank: int) -> ActorHung:
        """The error of ranks that gave no answer in time, of which this is the first."""
        lost = find_lost(self._address, len(self.actors), self._timeout_s) if self._address else None
        if lost is not None:
            return ActorHung(f"{what} gave no answer within {self._timeout_s:g} s: {lost}")
        return no_answer(f"{what} of rank {rank}", self._timeout_s)


@dataclass(frozen=True)
class _Parts:
    """What a fleet is made of."""

    env: str
    env_args: Mapping[str, Any]
    sandbox: str
    max_running: int
    seed: int
    faults: FaultConfig
    canary_prompt: list[int] | None
    canary_tolerance: float
    learner: bool
    rollouts: bool


class Fleet:
    """The actors of one run. Use `fleet(...)`; members that a pipeline did not ask for are absent."""

    def __init__(self, config: ClusterConfig, parts: _Parts, group: PlacementGroup) -> None:
        self.config = config
        self.learner: Learner
        self.rollouts: Rollouts
        self.restarts_left = config.restarts
        self._parts = parts
        self._group = group
        self._publisher: Any = None
        self._started: list[Any] = []
        self._crews: list[Crew] = []

    def publish(self) -> dict[str, float]:
        """The learner's weights to every engine, two-phase, with the canary."""
        done = wait(self._publisher.publish.remote(), self.config.call_timeout_s, "publishing weights")
        if done["fell_back"]:
            self.learner.notes += wait(self._publisher.notes.remote(), self.config.call_timeout_s, "publishing weights")
        return done

    def start(self) -> None:
        """Makes the actors, each in its part of the reservation."""
        config, parts = self.config, self._parts
        places = {name: (index, bundle) for index, (name, bundle) in enumerate(_roles(config, parts))}

        def place(role: str, cls: type, *args: Any, **options: Any) -> Any:
            index, bundle = places[role]
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            where: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
            where["scheduling_strategy"] = strategy
            return ray.remote(cls).options(**where, **options).remote(*args)

        if parts.learner:
            for i in range(config.learner_actors):
                own = config.learner_threads, config.learner_device
                self._started.append(place(f"learner {i}", LearnerActor, *own))
            self.learner = Learner(list(self._started), config.call_timeout_s)
        if parts.rollouts:
            urls = config.rollout.url
            servers = [(config.rollout, url) for url in urls] if urls else [None] * config.rollout_actors
            sampling = config.rollout_threads, parts.max_running
            device = config.rollout_device
            engines = [
                place(f"rollout {i}", RolloutActor, *sampling, parts.seed + i, config.engine, server, device)
                for i, server in enumerate(servers)
            ]
            self._started += engines
            played = parts.env, dict(parts.env_args), parts.sandbox

            def player(i: int) -> Any:
                engine = engines[i % len(engines)]
                return place(f"environment {i}", EnvironmentActor, *played, engine, parts.faults, max_concurrency=8)

            def judge(i: int) -> Any:
                return place(f"reward {i}", RewardActor, *played)

            for role, count in ((player, config.environment_actors), (judge, config.reward_actors)):
                self._crews.append(Crew([role(i) for i in range(count)], role))
            name = make(parts.env, **parts.env_args).name
            self.rollouts = Rollouts(config, engines, *self._crews, faults=parts.faults, env=name)
        if parts.learner and parts.rollouts and parts.canary_prompt:
            publisher = self.learner.actors, self.rollouts.actors, parts.canary_prompt, parts.canary_tolerance
            make_publisher = ray.remote(WeightPublisher).options(num_cpus=0)
            way = config.weight_transfer, config.transfer_timeout_s
            self._publisher = make_publisher.remote(*publisher, config.call_timeout_s, *way)
            self._started.append(self._publisher)

    def restart(self) -> None:
        """Ends all actors, what they were doing included, and makes new ones in the same reservation."""
        self.restarts_left -= 1
        self.stop()
        self.start()

    def settle(self) -> None:
        """Waits for a training state that is being written; its error gives way to the one under way."""
        if self._started and self._parts.learner:
            with suppress(K3Error):
                self.learner.state_saved()

    def stop(self) -> None:
        """Ends all actors."""
        for crew in self._crews:
            crew.end()
        for actor in self._started:
            ray.kill(actor)
        self._crews.clear()
        self._started.clear()


def _roles(config: ClusterConfig, parts: _Parts) -> list[tuple[str, dict[str, float]]]:
    """(name, resources) of every actor that needs any, in the order in which `start` places them."""
    roles: list[tuple[str, dict[str, float]]] = []
    if parts.learner:
        gpus = {"GPU": config.learner_gpus} if config.learner_device == "cuda" else {}
        learner = {"CPU": config.learner_cpus} | gpus
        roles += [(f"learner {i}", learner) for i in range(config.learner_actors)]
    if parts.rollouts:
        rollout = {"CPU": config.rollout_cpus}
        if config.rollout_device == "cuda" and config.rollout.backend == "k3rl":  # a server has GPUs of its own
            rollout["GPU"] = config.rollout_gpus
        roles += [(f"rollout {i}", rollout) for i in range(config.rollout_actors)]
        roles += [(f"environment {i}", {"CPU": config.environment_cpus}) for i in range(config.environment_actors)]
        roles += [(f"reward {i}", {"CPU": config.reward_cpus}) for i in range(config.reward_actors)]
    return roles


@contextmanager
def fleet(
    config: ClusterConfig,
    *,
    env: str,
    env_args: Mapping[str, Any],
    sandbox: str,
    max_running: int,
    seed: int,
    faults: FaultConfig | None = None,
    canary_prompt: list[int] | None = None,
    canary_tolerance: float = 0.05,
    learner: bool = True,
    rollouts: bool = True,
) -> Iterator[Fleet]:
    """Starts the actors in one placement group and ends them, reservation included, with the block.

    A training state that is being written when the block fails is waited for, where its learner still lives.
    Raises MissingResource with a table when the cluster cannot place them in time.
    """
    parts = _Parts(
        env,
        env_args,
        sandbox,
        max_running,
        seed,
        faults or FaultConfig(),
        canary_prompt,
        canary_tolerance,
        learner=learner,
        rollouts=rollouts,
    )
    group = reserve(_roles(config, parts), deadline_s=config.placement_deadline_s)
    members = Fleet(config, parts, group)
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
        remove_placement_group(group)
