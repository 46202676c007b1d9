"""All actors of one run behind plain calls, so that a pipeline reads as its algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from k3rl.actors.cluster import ClusterConfig
from k3rl.actors.environment import EnvironmentActor
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.learner import LearnerActor
from k3rl.actors.placement import reserve
from k3rl.actors.reward import RewardActor
from k3rl.actors.rollout import RolloutActor
from k3rl.actors.weights import WeightPublisher
from k3rl.config import K3Error
from k3rl.data.batch import TrainBatch
from k3rl.parallel import Loss, PeerFailed, TrainerConfig, deal
from k3rl.run.metrics import Accumulator
from k3rl.types import Episode, Group, SamplingParams


class ActorFailure(K3Error):
    """An actor died, hung, or raised what no one is meant to handle."""


def wait(ref: Any, timeout_s: float, what: str) -> Any:
    """The value of a Ray reference. A typed error of k3rl comes through as itself; others become ActorFailure."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise ActorFailure(
            f"{what} gave no answer within {timeout_s:g} s; raise --cluster.call-timeout-s if that is normal"
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, K3Error):
            raise error.cause from None
        raise ActorFailure(f"{what} failed:\n{error}") from error
    except RayActorError as error:
        raise ActorFailure(f"the actor of {what} died:\n{error}") from error


class Learner:
    """The ranks of the learner as one. Each method is `LearnerActor`'s of the same name, on all ranks, and waits."""

    def __init__(self, actors: list[Any], timeout_s: float) -> None:
        self.actors = actors
        self._timeout_s = timeout_s
        self._context = 1  # ranks that share each sequence
        if len(actors) > 1:
            address = wait(actors[0].address.remote(), timeout_s, "learner.address")
            self._every("join", [(address, rank, len(actors), timeout_s) for rank in range(len(actors))])

    def create(self, config: Mapping[str, Any], trainer: TrainerConfig, seed: int) -> int:
        self._context = trainer.context_parallel
        return self._every("create", [(config, trainer, seed)] * len(self.actors))[0]

    def load(self, checkpoint: str, trainer: TrainerConfig) -> int:
        self._context = trainer.context_parallel
        return self._every("load", [(checkpoint, trainer)] * len(self.actors))[0]

    def load_teachers(self, checkpoints: Mapping[str, str], trainer: TrainerConfig) -> None:
        self._every("load_teachers", [(checkpoints, trainer)] * len(self.actors))

    def load_state(self, directory: str) -> dict[str, Any]:
        return self._every("load_state", [(directory,)] * len(self.actors))[0]

    def set_version(self, number: int) -> None:
        self._every("set_version", [(number,)] * len(self.actors))

    def save_checkpoint(self, directory: str, card: Mapping[str, Any]) -> str:
        return self._every("save_checkpoint", [(directory, card)] * len(self.actors))[0]

    def save_state(self, directory: str, extra: Mapping[str, Any]) -> None:
        self._every("save_state", [(directory, extra)] * len(self.actors))

    def start_training(
        self, batches: Sequence[TrainBatch], loss: Loss, lr_scale: float = 1.0, temperature: float = 1.0
    ) -> list[Any]:
        """Begins one optimizer step for each global batch; `trained` waits for it."""
        dealt = [self._deal(batch) for batch in batches]
        return [
            actor.train.remote([share[rank][1] for share in dealt], loss, lr_scale, temperature)
            for rank, actor in enumerate(self.actors)
        ]

    def trained(self, started: list[Any]) -> Accumulator:
        """The metrics of `start_training`, added up over the ranks."""
        metrics = Accumulator()
        for part in self._results("learner.train", started):
            metrics.merge(part)
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
        dealt = deal(batch.row_lengths.tolist(), len(self.actors) // context)
        shares = [(members, batch.select(members) if members else None) for members in dealt]
        return [share for share in shares for _ in range(context)]

    def _every(self, method: str, args: list[tuple[Any, ...]]) -> list[Any]:
        calls = [getattr(actor, method).remote(*own) for actor, own in zip(self.actors, args, strict=True)]
        return self._results(f"learner.{method}", calls)

    def _results(self, what: str, calls: list[Any]) -> list[Any]:
        """All ranks' answers; where several fail, the error of the rank that failed by itself."""
        answers: list[Any] = []
        errors: list[K3Error] = []
        for rank, call in enumerate(calls):
            try:
                answers.append(wait(call, self._timeout_s, f"{what} of rank {rank}"))
            except K3Error as error:
                errors.append(error)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerFailed))
        return answers


class Rollouts:
    """Environment, rollout and reward actors as one: jobs in, graded groups out."""

    def __init__(self, config: ClusterConfig, rollouts: list[Any], environments: list[Any], rewards: list[Any]) -> None:
        self._config = config
        self.actors = rollouts
        self._environments = environments
        self._rewards = rewards

    def load(self, checkpoint: str) -> None:
        """Every engine serves this checkpoint, and environments use its tokenizer."""
        calls = [actor.load.remote(checkpoint) for actor in self.actors]
        calls += [actor.set_tokenizer.remote(checkpoint) for actor in self._environments]
        wait(calls, self._config.call_timeout_s, "loading a checkpoint into the engines")

    def start(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> list[tuple[Sequence[EpisodeJob], Any]]:
        """Begins the episodes, spread by group over the environment actors; `result` waits for them."""
        groups: dict[str, list[EpisodeJob]] = {}
        for job in jobs:
            groups.setdefault(job.group_id, []).append(job)
        shares: list[list[EpisodeJob]] = [[] for _ in self._environments]
        for members, share in zip(groups.values(), itertools.cycle(shares)):
            share.extend(members)
        rewards = itertools.cycle(self._rewards)
        started: list[tuple[Sequence[EpisodeJob], Any]] = []
        for share, environment in zip(shares, self._environments, strict=True):
            if share:
                episodes = environment.play.remote(share, sampling)
                started.append((share, next(rewards).grade.remote(share, episodes)))
        return started

    def result(self, started: list[tuple[Sequence[EpisodeJob], Any]]) -> list[Group]:
        """The groups of `start`, in the order of their jobs."""
        members: dict[str, list[Episode]] = {}
        for share, ref in started:
            episodes = wait(ref, self._config.call_timeout_s, "playing and grading episodes")
            for job, episode in zip(share, episodes, strict=True):
                members.setdefault(job.group_id, []).append(episode)
        return [Group(group, episodes[0].task_id, tuple(episodes)) for group, episodes in members.items()]

    def play(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> list[Group]:
        return self.result(self.start(jobs, sampling))


class Fleet:
    """The actors of one run. Use `fleet(...)`; members that a pipeline did not ask for are absent."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.learner: Learner
        self.rollouts: Rollouts
        self._publisher: Any = None

    def publish(self) -> dict[str, float]:
        """The learner's weights to every engine, two-phase, with the canary."""
        return wait(self._publisher.publish.remote(), self.config.call_timeout_s, "publishing weights")


@contextmanager
def fleet(
    config: ClusterConfig,
    *,
    env: str,
    env_args: Mapping[str, Any],
    sandbox: str,
    max_running: int,
    seed: int,
    canary_prompt: list[int] | None = None,
    canary_tolerance: float = 0.05,
    learner: bool = True,
    rollouts: bool = True,
) -> Iterator[Fleet]:
    """Starts the actors in one placement group and ends them, reservation included, with the block.

    Raises MissingResource with a table when the cluster cannot place them in time.
    """
    roles: list[tuple[str, dict[str, float]]] = []
    if learner:
        roles += [(f"learner {i}", {"CPU": config.learner_cpus}) for i in range(config.learner_actors)]
    if rollouts:
        roles += [(f"rollout {i}", {"CPU": config.rollout_cpus}) for i in range(config.rollout_actors)]
        roles += [(f"environment {i}", {"CPU": config.environment_cpus}) for i in range(config.environment_actors)]
        roles += [(f"reward {i}", {"CPU": config.reward_cpus}) for i in range(config.reward_actors)]
    group = reserve(roles, deadline_s=config.placement_deadline_s)
    bundles = iter(enumerate(roles))

    def place(cls: type, *args: Any, **options: Any) -> Any:
        index, (_, bundle) = next(bundles)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        return ray.remote(cls).options(num_cpus=bundle["CPU"], scheduling_strategy=strategy, **options).remote(*args)

    started: list[Any] = []
    try:
        members = Fleet(config)
        if learner:
            ranks = [place(LearnerActor, config.learner_threads) for _ in range(config.learner_actors)]
            started += ranks
            members.learner = Learner(ranks, config.call_timeout_s)
        if rollouts:
            engines = [
                place(RolloutActor, config.rollout_threads, max_running, seed + i, config.engine)
                for i in range(config.rollout_actors)
            ]
            serving = itertools.cycle(engines)
            environments = [
                place(EnvironmentActor, env, dict(env_args), sandbox, next(serving), max_concurrency=8)
                for _ in range(config.environment_actors)
            ]
            rewards = [place(RewardActor, env, dict(env_args), sandbox) for _ in range(config.reward_actors)]
            members.rollouts = Rollouts(config, engines, environments, rewards)
            started += [*engines, *environments, *rewards]
        if learner and rollouts and canary_prompt:
            members._publisher = (
                ray.remote(WeightPublisher)
                .options(num_cpus=0)
                .remote(
                    members.learner.actors,
                    members.rollouts.actors,
                    canary_prompt,
                    canary_tolerance,
                    config.call_timeout_s,
                )
            )
            started.append(members._publisher)
        yield members
    finally:
        for actor in started:
            ray.kill(actor)
        remove_placement_group(group)
