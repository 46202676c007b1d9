"""Supervised fine-tuning: packed chats, loss on what the policy would have sampled, until the held-out loss is flat."""

from __future__ import annotations

from dataclasses import dataclass

from k3rl.actors import LearnerGroup
from k3rl.data import TrainBatch
from k3rl.parallel import Loss
from k3rl.pipelines.chat_data import ChatBatches, chat_data
from k3rl.pipelines.configs import SFTConfig
from k3rl.pipelines.session import Session
from k3rl.pipelines.stage import Stage, StageResult
from k3rl.pipelines.start import start_learner


@dataclass
class Plateau:
    """Whether a loss still falls: `patience` checks in a row without a relative gain of `min_gain` end it."""

    patience: int
    min_gain: float
    best: float = float("inf")
    stale: int = 0

    def update(self, loss: float) -> bool:
        """Takes the newest loss; True when it counts as flat."""
        self.stale = 0 if loss < self.best * (1 - self.min_gain) else self.stale + 1
        self.best = min(self.best, loss)
        return self.stale >= self.patience


def train(session: Session, config: SFTConfig, *, name: str = "sft", compute: float | None = None) -> StageResult:
    """Runs the stage and returns its result; a finished stage of a resumed run is returned as it was.

    compute: instead of stopping on the plateau, spend about this many forward passes over tokens
    (`StageResult.compute`), with the same decay at the end.
    """
    stage = Stage(session, name, config, config.max_steps)
    if (result := stage.finished()) is not None:
        return result
    learner, loss = session.fleet.learner, config.loss()
    start_learner(learner, config)
    stage.note_slow_paths()
    data, heldout = chat_data(session, config, name)
    plateau, flat_at = Plateau(config.patience, config.min_gain), None
    losses: list[tuple[int, float]] = []
    if (state := stage.restore()) is not None:
        plateau, flat_at, losses = Plateau(**state["plateau"]), state["flat_at"], state["losses"]
        data.check(state["data"], stage.step)

    batch = data.batch(stage.step)
    for step in stage.steps():
        flat_at = _flat_at(flat_at, step, stage, data, config, compute)
        pending = learner.start_training([batch], loss, lr_scale(step, flat_at, config))
        batch = data.batch(step + 1)  # encoded while the learner works
        with stage.clock("wait_for_policy"):
            metrics = learner.trained(pending)
        last = flat_at is not None and step + 1 >= flat_at + config.decay_steps
        if last or (step + 1) % config.check_every == 0:
            heldout_loss = _heldout_loss(learner, heldout, loss)
            metrics.add("val/loss", heldout_loss)
            losses.append((step + 1, heldout_loss))
            if plateau.update(heldout_loss) and flat_at is None and compute is None:
                flat_at = step + 1
        known = {"loss": metrics.values().get("loss/mean"), "held-out": losses[-1][1] if losses else None}
        shown = {label: value for label, value in known.items() if value is not None}
        state = {"plateau": vars(plateau), "flat_at": flat_at, "losses": losses, "data": data.cursor(step + 1)}
        stage.done(metrics, state, shown=shown)
        if last:
            break
    state = {"plateau": vars(plateau), "flat_at": flat_at, "losses": losses, "data": data.cursor(stage.step)}
    return stage.finish(state, {"heldout_losses": losses, "flat_at": flat_at})


def _flat_at(
    known: int | None, step: int, stage: Stage, data: ChatBatches, config: SFTConfig, compute: float | None
) -> int | None:
    """The step at which the decay starts, once it is decided: by the plateau, the compute, or the last steps left."""
    if known is not None:
        return known
    left = config.max_steps - step
    if (in_time := stage.steps_in_time()) is not None:
        left = min(left, in_time)
    if compute is not None:
        left = min(left, round((compute - 3 * stage.totals["trained_tokens"]) / (3 * data.tokens_per_batch)))
    return step if left <= config.decay_steps else None


def lr_scale(step: int, flat_at: int | None, config: SFTConfig) -> float:
    """Warm-up, constant until the loss is flat, then linear to the final fraction."""
    warm = min(1.0, (step + 1) / max(1, config.schedule.warmup_steps))
    if flat_at is None:
        return warm
    done = min(1.0, (step - flat_at + 1) / max(1, config.decay_steps))
    return warm * (1 - done * (1 - config.schedule.final_fraction))


def _heldout_loss(learner: LearnerGroup, heldout: TrainBatch, loss: Loss) -> float:
    return learner.evaluate(heldout, loss).values()["loss/mean"]
