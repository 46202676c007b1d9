"""Environment, rollout and reward actors as one: jobs in, graded groups out, with patience for what misbehaves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3rl.actors.cluster import ClusterConfig
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.worker_pool import Crew, outcome, wait
from k3rl.envs.faults import Breaker, FaultConfig, worth_retrying
from k3rl.envs.rollout import gradable
from k3rl.run.metrics import Accumulator
from k3rl.types import Episode, Failed, FailureKind, Group, SamplingParams, StopReason

_FETCH_S = 30.0
_BROKEN = (FailureKind.HUNG, FailureKind.DIED)  # one episode may have taken the others of its call with it


@dataclass(frozen=True, slots=True)
class Call:
    """Jobs that one environment actor plays and one reward actor grades, with the references of both."""

    jobs: Sequence[EpisodeJob]
    player: int
    judge: int
    played: Any
    graded: Any


@dataclass(frozen=True, slots=True)
class Pending:
    """Rollouts under way: all jobs in order, the calls that play some of them, and what is known already."""

    jobs: Sequence[EpisodeJob]
    sampling: SamplingParams
    calls: Sequence[Call]
    known: Mapping[str, Episode]


class Rollouts:
    """`start` and `result`, or `play` for both.

    An episode that gets no reward is played again within `faults.retries`; an actor that hangs or dies is replaced,
    and the episodes of its call are halved until the guilty one stands alone. Raises EnvironmentTripped.
    """

    def __init__(
        self,
        config: ClusterConfig,
        rollouts: list[Any],
        environments: Crew | Sequence[Any],
        rewards: Crew | Sequence[Any],
        *,
        faults: FaultConfig | None = None,
        env: str = "environment",
    ) -> None:
        self._config = config
        self._faults = faults or FaultConfig(retries=0)
        self.env = env
        """The environment's own name, under which metrics stand; a run may have found it by a path."""
        self.actors = rollouts
        self._players = environments if isinstance(environments, Crew) else Crew(environments)
        self._judges = rewards if isinstance(rewards, Crew) else Crew(rewards)
        self._next_judge = itertools.count()
        self._breaker = Breaker(self._faults, env)
        self._checkpoint: str | None = None
        self._counts: Counter[str] = Counter()

    def load(self, checkpoint: str) -> None:
        """Every engine serves this checkpoint, and environments use its tokenizer."""
        self._checkpoint = checkpoint
        calls = [actor.load.remote(checkpoint) for actor in self.actors]
        calls += [actor.set_tokenizer.remote(checkpoint) for actor in self._players.actors]
        wait(calls, self._config.call_timeout_s, "loading a checkpoint into the engines")

    @property
    def left_out(self) -> frozenset[str]:
        """Families that are not played any more."""
        return frozenset(part for part in self._breaker.open if part is not None)

    def play(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> list[Group]:
        return self.result(self.start(jobs, sampling))

    def start(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> Pending:
        """Begins the episodes, spread by group over the environment actors; `result` waits for them."""
        self._breaker.check([job.task.family for job in jobs])
        known = {job.episode_id: self._not_played(job) for job in jobs if job.task.family in self._breaker.open}
        groups: dict[str, list[EpisodeJob]] = {}
        for job in jobs:
            if job.episode_id not in known:
                groups.setdefault(job.group_id, []).append(job)
        shares: list[list[EpisodeJob]] = [[] for _ in range(len(self._players))]
        for members, share in zip(groups.values(), itertools.cycle(shares)):
            share.extend(members)
        calls = [self._call(share, sampling, place) for place, share in enumerate(shares) if share]
        return Pending(jobs, sampling, calls, known)

    def result(self, pending: Pending) -> list[Group]:
        """The groups of `start`, in the order of their jobs."""
        episodes = {**pending.known}
        for call in pending.calls:
            episodes |= self._collect(call, pending.sampling)
        self._count(pending.jobs, episodes, pending.known)
        for _ in range(self._faults.retries):
            again = [job for job in pending.jobs if self._goes_again(job, episodes[job.episode_id])]
            if not again:
                break
            self._counts["retried"] += len(again)
            episodes = self._again(again, episodes, pending)
            self._count(again, episodes, {})
        for job in pending.jobs:
            if job.task.family in self._breaker.open and isinstance(episodes[job.episode_id].score, Failed):
                tripped = self._breaker.tripped(job.task.family)
                episodes[job.episode_id] = replace(episodes[job.episode_id], score=tripped)
        self._breaker.check([job.task.family for job in pending.jobs])
        members: dict[str, list[Episode]] = {}
        for job in pending.jobs:
            members.setdefault(job.group_id, []).append(episodes[job.episode_id])
        return [Group(group, own[0].task_id, tuple(own)) for group, own in members.items()]

    def take_metrics(self) -> Accumulator:
        """What went wrong since the last call, counted: retries, replaced actors, attempts without a reward by kind."""
        metrics = Accumulator()
        replaced = self._players.replaced + self._judges.replaced
        self._players.replaced = self._judges.replaced = 0
        for name in ("retried", *(f"failed_{kind}" for kind in FailureKind)):
            if self._counts[name] or name == "retried":
                metrics.add(f"env/{self.env}/{name}_attempts", self._counts[name])
        metrics.add(f"env/{self.env}/replaced_actors", replaced)
        metrics.add(f"env/{self.env}/parts_left_out", len(self._breaker.open))
        self._counts.clear()
        return metrics

    # ------------------------------------------------------------------------------------------------ one call

    def _call(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams, player: int) -> Call:
        judge = next(self._next_judge) % len(self._judges)
        played = self._players.actors[player].play.remote(jobs, sampling)
        return Call(jobs, player, judge, played, self._judges.actors[judge].grade.remote(jobs, played))

    def _collect(self, call: Call, sampling: SamplingParams) -> dict[str, Episode]:
        """Every episode of a call; those that an actor took with it are split up until the guilty one is found."""
        graded = outcome(call.graded, self._deadline_s, f"playing {len(call.jobs)} episodes")
        if not isinstance(graded, Failed):
            return _by_id(graded)
        # It was waited for already: what is not there now is what held the grader up.
        played = outcome(call.played, min(_FETCH_S, self._deadline_s), f"playing {len(call.jobs)} episodes")
        if not isinstance(played, Failed):
            return self._graded_anew(call, played)
        if played.kind is FailureKind.HUNG:
            played = graded
        if played.kind in _BROKEN:
            self._renew_player(call.player)
        if played.kind in _BROKEN and len(call.jobs) > 1 and self._players.can_replace:
            middle = len(call.jobs) // 2
            parts = (call.jobs[:middle], call.jobs[middle:])
            found = [self._collect(self._call(part, sampling, call.player), sampling) for part in parts]
            return found[0] | found[1]
        return {job.episode_id: self._broken(job, played) for job in call.jobs}

    def _graded_anew(self, call: Call, played: Sequence[Episode]) -> dict[str, Episode]:
        """Played episodes whose grader broke: each group by itself, in a grader that may be a fresh one."""
        episodes = _by_id(played)
        groups: dict[str, list[EpisodeJob]] = {}
        for job in call.jobs:
            groups.setdefault(job.group_id, []).append(job)
        self._judges.replace(call.judge)
        for members in groups.values():
            episodes |= self._grade(members, episodes, call.judge)
        return episodes

    def _grade(self, jobs: Sequence[EpisodeJob], episodes: Mapping[str, Episode], judge: int) -> dict[str, Episode]:
        """Another attempt at the grades of a whole group; an earlier reward stays where this gives none."""
        given = [episodes[job.episode_id] for job in jobs]
        ref = self._judges.actors[judge].grade.remote(jobs, given)
        graded = outcome(ref, self._deadline_s, f"grading group {jobs[0].group_id}")
        if isinstance(graded, Failed):
            if graded.kind in _BROKEN:
                self._judges.replace(judge)
            graded = [replace(episode, score=graded) for episode in given]
        pairs = zip(given, graded, strict=True)
        return {
            new.id: old if isinstance(new.score, Failed) and not isinstance(old.score, Failed) else new
            for old, new in pairs
        }

    def _again(
        self, jobs: Sequence[EpisodeJob], episodes: Mapping[str, Episode], pending: Pending
    ) -> dict[str, Episode]:
        """Another attempt at these jobs: at the episode, or at the grade where only that is missing.

        A grade is tried again for the whole group, because some graders compare the answers of a group.
        """
        found = {**episodes}
        lost = [job for job in jobs if not gradable(episodes[job.episode_id])]
        for place in range(len(self._players)):
            share = lost[place :: len(self._players)]
            if share:
                found |= self._collect(self._call(share, pending.sampling, place), pending.sampling)
        for group in dict.fromkeys(job.group_id for job in jobs):
            members = [job for job in pending.jobs if job.group_id == group]
            own = [found[job.episode_id] for job in members]
            if any(isinstance(episode.score, Failed) and gradable(episode) for episode in own):
                found |= self._grade(members, found, next(self._next_judge) % len(self._judges))
        return found

    # --------------------------------------------------------------------------------------------------- records

    @property
    def _deadline_s(self) -> float:
        return self._faults.deadline_s or self._config.call_timeout_s

    def _renew_player(self, place: int) -> None:
        self._players.replace(place)
        if self._checkpoint is not None and self._players.can_replace:
            self._players.actors[place].set_tokenizer.remote(self._checkpoint)

    def _goes_again(self, job: EpisodeJob, episode: Episode) -> bool:
        return worth_retrying(episode) and job.task.family not in self._breaker.open

    def _count(self, jobs: Sequence[EpisodeJob], episodes: Mapping[str, Episode], known: Mapping[str, Episode]) -> None:
        for job in jobs:
            if job.episode_id in known:
                continue
            score = episodes[job.episode_id].score
            if isinstance(score, Failed):
                self._counts[f"failed_{score.kind}"] += 1
            self._breaker.saw(job.task.family, score)

    def _broken(self, job: EpisodeJob, failed: Failed) -> Episode:
        return Episode(
            id=job.episode_id,
            task_id=f"{job.task.split}/{job.task.index}",
            env=self.env,
            family=job.task.family or "unknown",
            level=job.task.level or 0,
            branches=(),
            stop_reason=StopReason.INFRA_ERROR,
            score=failed,
        )

    def _not_played(self, job: EpisodeJob) -> Episode:
        return self._broken(job, self._breaker.tripped(job.task.family))


def _by_id(episodes: Sequence[Episode]) -> dict[str, Episode]:
    return {episode.id: episode for episode in episodes}
