"""Supervised fine-tuning: packed chats, loss on what the policy would have sampled, until the held-out loss is flat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass
class Course:
    """Which rate each step of the stage has, and which step is its last.

    A constant schedule ends by a linear decay of `decay_steps`, which begins at `flat_at`: where the held-out loss is
    flat, or where the steps, the time or the compute leave just enough for it. A linear or cosine one goes over
    `total` steps, whatever the held-out loss.
    """

    config: SFTConfig
    compute: float | None
    flat_at: int | None = None
    total: int | None = None

    @property
    def waits_for_plateau(self) -> bool:
        """Whether a flat held-out loss ends the stage."""
        return self.config.schedule.kind == "constant" and self.compute is None and self.flat_at is None

    def plan(self, step: int, stage: Stage, data: ChatBatches) -> None:
        """Decides before `step` what can be decided: the last steps, once they are near, or all of them."""
        left = self.config.max_steps - step
        if self.compute is not None:
            spent = 3 * stage.totals["trained_tokens"]
            left = min(left, round((self.compute - spent) / (3 * data.tokens_per_batch)))
        if self.config.schedule.kind != "constant":
            self.total = step + max(1, left) if self.total is None else self.total
            return
        if (in_time := stage.steps_in_time()) is not None:
            left = min(left, in_time)
        if self.flat_at is None and left <= self.config.decay_steps:
            self.flat_at = step

    def ended(self, step: int) -> bool:
        """Whether no step comes after the first `step` ones."""
        if self.total is not None:
            return step >= self.total
        return self.flat_at is not None and step >= self.flat_at + self.config.decay_steps

    def lr_scale(self, step: int) -> float:
        """Warm-up, then what the schedule says."""
        chosen = self.config.schedule
        if self.total is not None:
            return chosen.build(self.total).at(step)
        warm = min(1.0, (step + 1) / max(1, chosen.warmup_steps))
        if self.flat_at is None:
            return warm
        done = min(1.0, (step - self.flat_at + 1) / max(1, self.config.decay_steps))
        return warm * (1 - done * (1 - chosen.final_fraction))


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
    plateau, course = Plateau(config.patience, config.min_gain), Course(config, compute)
    losses: list[tuple[int, float]] = []
    if (state := stage.restore()) is not None:
        plateau, losses = Plateau(**state["plateau"]), state["losses"]
        course.flat_at, course.total = state["flat_at"], state.get("total")
        data.check(state["data"], stage.step)

    def loop_state(step: int) -> dict[str, Any]:
        decided = {"flat_at": course.flat_at, "total": course.total}
        return {"plateau": vars(plateau), **decided, "losses": losses, "data": data.cursor(step)}

    batch = data.batch(stage.step)
    for step in stage.steps():
        if course.ended(step):  # resumed after its last step
            break
        course.plan(step, stage, data)
        pending = learner.start_training([batch], loss, course.lr_scale(step))
        trained, batch = batch.target_tokens, data.batch(step + 1)  # encoded while the learner works
        with stage.clock("wait_for_policy"):
            metrics = learner.trained(pending)
        if course.ended(step + 1) or (step + 1) % config.check_every == 0:
            heldout_loss = _heldout_loss(learner, heldout, loss)
            metrics.add("val/loss", heldout_loss)
            losses.append((step + 1, heldout_loss))
            if plateau.update(heldout_loss) and course.waits_for_plateau:
                course.flat_at = step + 1
        known = {"loss": metrics.values().get("loss/mean"), "held-out": losses[-1][1] if losses else None}
        shown = {label: value for label, value in known.items() if value is not None}
        stage.done(metrics, loop_state(step + 1), trained_tokens=trained, shown=shown)
        if course.ended(step + 1):
            break
    return stage.finish(loop_state(stage.step), {"heldout_losses": losses, "flat_at": course.flat_at})


def _heldout_loss(learner: LearnerGroup, heldout: TrainBatch, loss: Loss) -> float:
    return learner.evaluate(heldout, loss).values()["loss/mean"]
