"""When rollouts of a stage run, and what a layout of actors would leave idle, said before anything is started."""

from __future__ import annotations

from k3rl.actors import ClusterConfig, Mode, Schedule
from k3rl.pipelines.configs import RolloutStageConfig, SFTConfig, StageConfig

_EQUAL = 1e-6  # shares are sums of decimals
_UNSAID = 0.01  # of a GPU: what three engines with a share of 0.333 leave


def schedule_of(config: RolloutStageConfig) -> Schedule:
    """When rollouts of a stage start, and what becomes of old ones."""
    chosen, mode = config.rollouts, Mode(config.rollouts.mode)
    groups = config.batch_size // config.group_size
    retries = config.env.faults.retries
    match mode:
        case Mode.SYNCHRONOUS:  # one batch a publication; when that comes is the loop's affair
            return Schedule(mode, groups, config.group_size, 0, retries=retries)
        case Mode.PARTIAL:
            bound = chosen.max_off_policy_steps
        case _:
            bound = chosen.max_off_policy_steps or 1
    return Schedule(mode, groups, config.group_size, bound, chosen.fraction, chosen.in_flight, retries)


def idle_parts(cluster: ClusterConfig, *stages: StageConfig) -> list[str]:
    """A sentence for each kind of actor, or share of a GPU, that no stage can keep busy, with what to change."""
    found = _gpu_shares(cluster, any(isinstance(stage, RolloutStageConfig) for stage in stages))
    return list(dict.fromkeys([*found, *(text for stage in stages for text in _of_stage(cluster, stage))]))


def places_at_once(config: RolloutStageConfig) -> tuple[int, str]:
    """(workers, or engines, that can be busy at the same time, what bounds them): groups begin on one each, unless
    `rollouts.in_flight` cuts them up."""
    schedule = schedule_of(config)
    groups = schedule.groups
    if schedule.mode is Mode.ASYNCHRONOUS:
        groups *= (schedule.max_off_policy_steps or 0) + 1
    if schedule.in_flight is not None and schedule.in_flight < groups * schedule.group_size:
        return schedule.in_flight, f"{schedule.in_flight} episodes run at once (rollouts.in_flight)"
    return groups, f"{groups} groups run at once, and each begins on one"


def _of_stage(cluster: ClusterConfig, stage: StageConfig) -> list[str]:
    found = _learner(cluster, stage)
    if not isinstance(stage, RolloutStageConfig):
        return found
    (most, bound), size = places_at_once(stage), stage.group_size
    more = "a larger batch_size" if stage.rollouts.in_flight is None else "a larger batch_size or rollouts.in_flight"
    busy = {"rollout_actors": most, "environment_actors": most, "reward_actors": most * size}
    for key, count in ((key, getattr(cluster, key)) for key in busy):
        if count > busy[key]:
            found.append(
                f"{count - busy[key]} of {count} {key} have nothing to do in training: {bound}; set cluster.{key} to "
                f"{busy[key]}, or take {more}"
            )
    return found


def _learner(cluster: ClusterConfig, stage: StageConfig) -> list[str]:
    """Ranks without a sequence in a step: ranks of a context axis share theirs, all others have their own."""
    steps = getattr(stage, "optimizer_steps", 1)
    if not isinstance(stage, SFTConfig | RolloutStageConfig):
        return []
    per_step = stage.batch_size // steps
    ranks = cluster.learner_actors // stage.trainer.context_parallel
    if ranks <= per_step:
        return []
    return [
        f"{(ranks - per_step) * stage.trainer.context_parallel} of {cluster.learner_actors} learner_actors have no "
        f"sequence of their own: an optimizer step has {per_step}; set cluster.learner_actors to "
        f"{per_step * stage.trainer.context_parallel}, or take a larger batch_size"
    ]


def _gpu_shares(cluster: ClusterConfig, samples: bool) -> list[str]:
    """Parts of GPUs that nobody asks for."""
    engines = samples and cluster.rollout_device == "cuda" and cluster.rollout.backend == "k3rl"
    count, share = (cluster.rollout_actors, cluster.rollout_gpus) if engines else (0, 1.0)
    learner = cluster.learner_gpus if cluster.learner_device == "cuda" and cluster.learner_gpus < 1 else 0.0
    free, on = _packed(learner, count, share)
    idle = sum(free)
    if idle <= _UNSAID * len(free):
        return []
    who = [f"a rank with learner_gpus {learner:g}"] if learner else []
    who += [f"{count} engines with rollout_gpus {share:g}"] if count else []
    more = sum(int(left / share + _EQUAL) for left in free) if count else 0
    wider = min(((left + n * share) / n for left, n in zip(free, on, strict=True) if n), default=share)
    tried: list[tuple[str, float, tuple[float, int, float]]] = []
    tried += [("rollout_actors", count + n, (learner, count + n, share)) for n in (more, 1) if count]
    tried += [("rollout_gpus", one, (learner, count, one)) for one in map(_down, (wider, 1 - learner, 1)) if count]
    if learner:
        whole = _down(learner + free[0])
        tried += [("learner_gpus", one, (one if one < 1 else 0.0, count, share)) for one in (whole, 1)]
    helpful = {key: value for key, value, layout in reversed(tried) if sum(_packed(*layout)[0]) < idle - _EQUAL}
    fixes = [f"cluster.{key} to {value:g}" for key, value in helpful.items()]
    fix = f"set {', or '.join(fixes)}" if fixes else "set shares that add up to 1"
    return [f"{idle:.2g} of {len(free)} GPUs is asked for by nobody: {' and '.join(who)}; {fix}"]


def _packed(learner: float, engines: int, share: float) -> tuple[list[float], list[int]]:
    """(what is left, engines) of each GPU that somebody has a part of; engines come beside the learner's rank first."""
    free, on = ([1 - learner], [0]) if learner else ([], [])
    for _ in range(engines):
        place = next((number for number, left in enumerate(free) if left > share - _EQUAL), len(free))
        if place == len(free):
            free.append(1.0)
            on.append(0)
        free[place] -= share
        on[place] += 1
    return free, on


def _down(share: float) -> float:
    """A share with three digits that is no more than this one."""
    return int(share * 1000 + _EQUAL) / 1000
