"""Environment, rollout and reward actors as one: jobs in, graded groups out, with patience for what misbehaves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3rl.actors.calls import outcome, wait
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.worker_pool import WorkerPool
from k3rl.envs import Breaker, FaultConfig, gradable, worth_retrying
from k3rl.run import Accumulator
from k3rl.types import Episode, Failed, FailureKind, Group, SamplingParams

_FETCH_S = 30.0
_BROKEN = (FailureKind.HUNG, FailureKind.DIED)  # one episode may have taken the others of its call with it


@dataclass(frozen=True, slots=True)
class Call:
    """Jobs that one environment worker runs and one reward worker grades, by their places, with both references."""

    jobs: Sequence[EpisodeJob]
    environment: int
    reward: int
    ran: Any
    graded: Any


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rollouts under way: all jobs in order, the calls that run some of them, and episodes that are skipped."""

    jobs: Sequence[EpisodeJob]
    sampling: SamplingParams
    calls: Sequence[Call]
    skipped: Mapping[str, Episode]


class RolloutWorkers:
    """`start` and `result`, or `run` for both.

    An episode that gets no reward is run again within `faults.retries`; a worker that hangs or dies is replaced, and
    the episodes of its call are halved until the guilty one stands alone. Raises EnvironmentTripped.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        environments: WorkerPool,
        rewards: WorkerPool,
        *,
        env: str = "environment",
        faults: FaultConfig | None = None,
        timeout_s: float,
    ) -> None:
        """engines: rollout actors. env: the environment's own name; a run may have found it by a path. timeout_s: of
        a call, where `faults` has no deadline of its own."""
        self.engines = list(engines)
        self.env = env
        """The name under which metrics stand."""
        self._environments, self._rewards = environments, rewards
        self._faults = faults or FaultConfig(retries=0)
        self._timeout_s = timeout_s
        self._next_reward = itertools.count()
        self._breaker = Breaker(self._faults, env)
        self._checkpoint: str | None = None
        self._counts: Counter[str] = Counter()

    def load(self, checkpoint: str) -> None:
        """Every engine serves this checkpoint, and environments use its tokenizer."""
        self._checkpoint = checkpoint
        calls = [actor.load.remote(checkpoint) for actor in self.engines]
        calls += [actor.set_tokenizer.remote(checkpoint) for actor in self._environments.actors]
        wait(calls, self._timeout_s, "loading a checkpoint into the engines")

    @property
    def skipped_families(self) -> frozenset[str]:
        """Families that are not run any more, because most of their last attempts failed."""
        return frozenset(part for part in self._breaker.open if part is not None)

    def run(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> list[Group]:
        return self.result(self.start(jobs, sampling))

    def start(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> Dispatched:
        """Begins the episodes, spread by group over the environment workers; `result` waits for them."""
        self._breaker.check([job.task.family for job in jobs])
        skipped = {job.episode_id: self._skipped(job) for job in jobs if job.task.family in self._breaker.open}
        groups: dict[str, list[EpisodeJob]] = {}
        for job in jobs:
            if job.episode_id not in skipped:
                groups.setdefault(job.group_id, []).append(job)
        shares: list[list[EpisodeJob]] = [[] for _ in range(len(self._environments))]
        for members, share in zip(groups.values(), itertools.cycle(shares)):
            share.extend(members)
        calls = [self._call(share, sampling, place) for place, share in enumerate(shares) if share]
        return Dispatched(jobs, sampling, calls, skipped)

    def result(self, dispatched: Dispatched) -> list[Group]:
        """The groups of `start`, in the order of their jobs."""
        episodes = {**dispatched.skipped}
        for call in dispatched.calls:
            episodes |= self._collect(call, dispatched.sampling)
        self._count(dispatched.jobs, episodes, dispatched.skipped)
        for _ in range(self._faults.retries):
            again = [job for job in dispatched.jobs if self._goes_again(job, episodes[job.episode_id])]
            if not again:
                break
            self._counts["retried"] += len(again)
            episodes = self._again(again, episodes, dispatched)
            self._count(again, episodes, {})
        for job in dispatched.jobs:
            if job.task.family in self._breaker.open and isinstance(episodes[job.episode_id].score, Failed):
                tripped = self._breaker.tripped(job.task.family)
                episodes[job.episode_id] = replace(episodes[job.episode_id], score=tripped)
        self._breaker.check([job.task.family for job in dispatched.jobs])
        members: dict[str, list[Episode]] = {}
        for job in dispatched.jobs:
            members.setdefault(job.group_id, []).append(episodes[job.episode_id])
        return [Group(group, own[0].task_id, tuple(own)) for group, own in members.items()]

    def take_metrics(self) -> Accumulator:
        """What went wrong since the last call, counted: retries, replaced actors, attempts without a reward by kind."""
        metrics = Accumulator()
        replaced = self._environments.replaced + self._rewards.replaced
        self._environments.replaced = self._rewards.replaced = 0
        for name in ("retried", *(f"failed_{kind}" for kind in FailureKind)):
            if self._counts[name] or name == "retried":
                metrics.add(f"env/{self.env}/{name}_attempts", self._counts[name])
        metrics.add(f"env/{self.env}/replaced_actors", replaced)
        metrics.add(f"env/{self.env}/parts_left_out", len(self._breaker.open))
        self._counts.clear()
        return metrics

    # ------------------------------------------------------------------------------------------------ one call

    def _call(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams, environment: int) -> Call:
        reward = next(self._next_reward) % len(self._rewards)
        ran = self._environments.actors[environment].run.remote(jobs, sampling)
        return Call(jobs, environment, reward, ran, self._rewards.actors[reward].grade.remote(jobs, ran))

    def _collect(self, call: Call, sampling: SamplingParams) -> dict[str, Episode]:
        """Every episode of a call; those that an actor took with it are split up until the guilty one is found."""
        graded = outcome(call.graded, self._deadline_s, f"running {len(call.jobs)} episodes")
        if not isinstance(graded, Failed):
            return _by_id(graded)
        # It was waited for already: what is not there now is what held the grader up.
        ran = outcome(call.ran, min(_FETCH_S, self._deadline_s), f"running {len(call.jobs)} episodes")
        if not isinstance(ran, Failed):
            return self._graded_anew(call, ran)
        if ran.kind is FailureKind.HUNG:
            ran = graded
        if ran.kind in _BROKEN:
            self._renew_environment(call.environment)
        if ran.kind in _BROKEN and len(call.jobs) > 1 and self._environments.can_replace:
            middle = len(call.jobs) // 2
            parts = (call.jobs[:middle], call.jobs[middle:])
            found = [self._collect(self._call(part, sampling, call.environment), sampling) for part in parts]
            return found[0] | found[1]
        return {job.episode_id: job.failed(self.env, ran) for job in call.jobs}

    def _graded_anew(self, call: Call, ran: Sequence[Episode]) -> dict[str, Episode]:
        """Episodes that ran and whose grader broke: each group by itself, in a grader that may be a fresh one."""
        episodes = _by_id(ran)
        groups: dict[str, list[EpisodeJob]] = {}
        for job in call.jobs:
            groups.setdefault(job.group_id, []).append(job)
        self._rewards.replace(call.reward)
        for members in groups.values():
            episodes |= self._grade(members, episodes, call.reward)
        return episodes

    def _grade(self, jobs: Sequence[EpisodeJob], episodes: Mapping[str, Episode], place: int) -> dict[str, Episode]:
        """Another attempt at the grades of a whole group; an earlier reward stays where this gives none."""
        given = [episodes[job.episode_id] for job in jobs]
        ref = self._rewards.actors[place].grade.remote(jobs, given)
        graded = outcome(ref, self._deadline_s, f"grading group {jobs[0].group_id}")
        if isinstance(graded, Failed):
            if graded.kind in _BROKEN:
                self._rewards.replace(place)
            graded = [replace(episode, score=graded) for episode in given]
        pairs = zip(given, graded, strict=True)
        return {
            new.id: old if isinstance(new.score, Failed) and not isinstance(old.score, Failed) else new
            for old, new in pairs
        }

    def _again(
        self, jobs: Sequence[EpisodeJob], episodes: Mapping[str, Episode], dispatched: Dispatched
    ) -> dict[str, Episode]:
        """Another attempt at these jobs: at the episode, or at the grade where only that is missing.

        A grade is tried again for the whole group, because some graders compare the answers of a group.
        """
        found = {**episodes}
        lost = [job for job in jobs if not gradable(episodes[job.episode_id])]
        for place in range(len(self._environments)):
            share = lost[place :: len(self._environments)]
            if share:
                found |= self._collect(self._call(share, dispatched.sampling, place), dispatched.sampling)
        for group in dict.fromkeys(job.group_id for job in jobs):
            members = [job for job in dispatched.jobs if job.group_id == group]
            own = [found[job.episode_id] for job in members]
            if any(isinstance(episode.score, Failed) and gradable(episode) for episode in own):
                found |= self._grade(members, found, next(self._next_reward) % len(self._rewards))
        return found

    # --------------------------------------------------------------------------------------------------- records

    @property
    def _deadline_s(self) -> float:
        return self._faults.deadline_s or self._timeout_s

    def _renew_environment(self, place: int) -> None:
        self._environments.replace(place)
        if self._checkpoint is not None and self._environments.can_replace:
            self._environments.actors[place].set_tokenizer.remote(self._checkpoint)

    def _goes_again(self, job: EpisodeJob, episode: Episode) -> bool:
        return worth_retrying(episode) and job.task.family not in self._breaker.open

    def _count(
        self, jobs: Sequence[EpisodeJob], episodes: Mapping[str, Episode], skipped: Mapping[str, Episode]
    ) -> None:
        for job in jobs:
            if job.episode_id in skipped:
                continue
            score = episodes[job.episode_id].score
            if isinstance(score, Failed):
                self._counts[f"failed_{score.kind}"] += 1
            self._breaker.saw(job.task.family, score)

    def _skipped(self, job: EpisodeJob) -> Episode:
        return job.failed(self.env, self._breaker.tripped(job.task.family))


def _by_id(episodes: Sequence[Episode]) -> dict[str, Episode]:
    return {episode.id: episode for episode in episodes}
