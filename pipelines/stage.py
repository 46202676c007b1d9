"""A stage: the bookkeeping of one training loop, in steps, time, files and metrics, and where to go on after a stop."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.checkpoint import chosen_train_state, clear_unfinished, go_back_to, prune_train_states
from k3rl.config import ConfigError
from k3rl.pipelines.configs import StageConfig
from k3rl.pipelines.session import Session
from k3rl.run import Accumulator, Signalled, read_object, write_atomic

if TYPE_CHECKING:
    from k3rl.pipelines.rollout_buffer import RolloutBuffer

_PACE_STEPS = 20  # the first steps are slow and would make the pace look worse than it is
_NEARLY = 0.95  # a stage that plans its last steps by the time left ends a little before its limit


@dataclass(frozen=True)
class StageResult:
    """What a finished stage leaves. Tokens are counted where they are spent; seconds include everything.

    cut_at: of how many steps `max_seconds` left the rest undone; None where time was enough.
    """

    name: str
    checkpoint: str
    steps: int
    trained_tokens: float
    sampled_tokens: float
    seconds: float
    notes: Mapping[str, Any] = field(default_factory=dict)
    cut_at: int | None = None

    @property
    def compute(self) -> float:
        """Forward passes over tokens: a trained token costs three (forward and backward), a sampled one one."""
        return 3 * self.trained_tokens + self.sampled_tokens


def cut_notes(results: Iterable[StageResult]) -> list[str]:
    """What the user of a machine too slow for the stages' time limits is told; nothing where time was enough."""
    cut = [f"{result.name} after {result.steps} of {result.cut_at} steps" for result in results if result.cut_at]
    if not cut:
        return []
    return [f"max_seconds ended {', '.join(cut)}: expect less of such a run, or raise the stage's max_seconds"]


def memory_note(held: Mapping[str, float]) -> str:
    """What the fullest rank of the learner held, bytes by part; the peak, of a GPU, comes first."""

    def size(value: float) -> str:
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"

    parts = ", ".join(f"{part} {size(value)}" for part, value in held.items() if part != "peak")
    peak = f"peak {size(held['peak'])}, of which " if "peak" in held else ""
    return f"memory of a learner's rank: {peak}{parts}"


class Interrupted(Signalled):
    """The run was asked to end; its last whole step is saved."""


class Stage:
    """One training loop of a run. Its files are checkpoints/<name>/ (states), export-ready checkpoint, and results."""

    def __init__(self, session: Session, name: str, config: StageConfig, total_steps: int) -> None:
        self.session = session
        self.name = name
        self.total_steps = total_steps
        self._config = config
        self._states = session.run.checkpoints_dir / name
        self._result = session.run.root / "stages" / f"{name}.json"
        self._started = time.monotonic()
        self._spent_s = 0.0
        self.step = 0
        self.totals = {"trained_tokens": 0.0, "sampled_tokens": 0.0}
        self._clocks: dict[str, float] = {}
        self._at_start = Accumulator()  # what the first step's metrics have besides
        self._memory: dict[str, float] = {}  # the most of each part
        self._loop_began = self._step_began = time.monotonic()
        self._first_step = 0
        self._promised: int | None = None
        self.saved_rollouts: tuple[Path, dict[str, Any]] | None = None
        """Of a restored state: the rollouts that were under way, as `RolloutBuffer.save` wrote them, and where."""

    # ---------------------------------------------------------------------------------------------- going on

    def finished(self) -> StageResult | None:
        """The result of this stage from an earlier attempt, when the run is resumed and the stage had ended.

        Raises ConfigError where it is to go on from a state that is named, which a stage that has ended does not.
        """
        if not self.session.resume or not self._result.is_file():
            return None
        result = self._kept()
        again, wanted = f"to train on, delete {self._result}, and those of later stages", self._config.resume_from
        if wanted != "latest" and not self.session.restarts:
            raise ConfigError(
                f"{self.name} ended after step {result.steps}, so nothing goes on from {wanted}; {again}",
                key="resume_from",
                got=wanted,
                wanted="latest",
            )
        self.session.progress.note(f"{self.name}: ended after step {result.steps} in an earlier attempt; {again}")
        # Where it lies now: the run may have been moved, or be resumed from another folder.
        return replace(result, checkpoint=str(self.session.run.root / "export" / self.name))

    def _kept(self) -> StageResult:
        """The result that an earlier attempt wrote. Raises ConfigError for a file that holds something else."""
        advice = "delete it, and --resume takes the stage's last state and writes it anew"
        values = read_object(self._result, advice)
        try:
            result = StageResult(**values)
        except TypeError as error:
            reason = str(error).removeprefix("StageResult.__init__() ")
            raise ConfigError(f"{self._result} is damaged ({reason}); {advice}", key=self.name) from error
        if not isinstance(result.steps, int) or not isinstance(result.checkpoint, str):
            raise ConfigError(f"{self._result} is damaged (steps or checkpoint is none); {advice}", key=self.name)
        return result

    def restore(self) -> dict[str, Any] | None:
        """Loads the newest state into the learner and returns the loop's own part, or None to start afresh.

        With `resume_from` another state than the newest, which is the newest from then on: when actors are lost before
        the next one, or after it, the run goes on from what it has got to. Raises TrainStateError for one that is torn
        or altered.
        """
        clear_unfinished(self._states)
        if not self.session.resume:
            return None
        wanted = "latest" if self.session.restarts else self._config.resume_from
        if (chosen := chosen_train_state(self._states, wanted)) is None:
            return None
        extra = self.session.fleet.learner.load_state(str(chosen))
        left = go_back_to(chosen)
        self.step, self._spent_s, self.totals = extra["step"], extra["seconds"], extra["totals"]
        if extra["in_flight"] is not None:
            self.saved_rollouts = self._states, extra["in_flight"]
        aside = f"; {', '.join(left)} are set aside in {self._states / 'abandoned'}" if left else ""
        self.session.progress.note(f"{self.name}: going on after step {self.step}{aside}")
        return extra["loop"]

    def note_slow_paths(self) -> None:
        """Says which GPUs run without their kernels, and keeps it in run.json and in the first step's metrics."""
        if not self._on_gpus:
            return
        found = self.session.fleet.slow_paths()
        for text in found:
            self.session.progress.note(f"{self.name}: {text}")
            self.session.run.add_note(text)
        self._at_start.add("kernels/refused", len(found))

    @property
    def _on_gpus(self) -> bool:
        return "cuda" in (self._config.cluster.learner_device, self._config.cluster.rollout_device)

    def _end_start(self, metrics: Accumulator) -> None:
        """The first step is done, so what is compiled is no longer waited for."""
        if self._on_gpus and self.session.kernels is not None:
            self.session.kernels.end()
            metrics.add("kernels/compiled", self.session.kernels.compiled)

    def steps(self) -> Iterator[int]:
        """The steps still to do. Ends early on `max_seconds`, but never before a step that `more` promised; raises
        Interrupted after saving when asked to end."""
        limit = self._config.max_seconds
        left_s = None if limit is None else limit - self.seconds()
        self._bar = self.session.progress.stage(self.name, self.total_steps, left_s=left_s)
        self._bar.resume_at(self.step)
        self._first_step = self.step
        self._loop_began = self._step_began = time.monotonic()
        try:
            while self.step < self.total_steps and (self.step == self._promised or not self.out_of_time()):
                yield self.step
        finally:
            self._bar.end()

    def more(self) -> bool:
        """Whether another step will follow the current one. It then does, so that what is begun for it is used, even if
        the time ends meanwhile; only the wish to end comes before it."""
        more = self.step + 1 < self.total_steps and not self.session.interrupts.requested and not self.out_of_time()
        self._promised = self.step + 1 if more else None
        return more

    def out_of_time(self) -> bool:
        limit = self._config.max_seconds
        return limit is not None and self.seconds() >= limit

    def steps_in_time(self) -> int | None:
        """Steps that `max_seconds` leaves time for, at this attempt's pace; None without a limit or a known pace."""
        limit, done = self._config.max_seconds, self.step - self._first_step
        if limit is None or done < _PACE_STEPS:
            return None
        pace_s = (time.monotonic() - self._loop_began) / done
        return max(0, round((limit - self.seconds()) / pace_s))

    def seconds(self) -> float:
        return self._spent_s + time.monotonic() - self._started

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the block's time to `time/<name>` of the current step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._clocks[name] = self._clocks.get(name, 0.0) + time.monotonic() - began

    # ----------------------------------------------------------------------------------------------- writing

    def done(
        self,
        metrics: Accumulator,
        loop_state: Mapping[str, Any],
        *,
        trained_tokens: int,
        rollouts: RolloutBuffer | None = None,
        reward: float | None = None,
        shown: Mapping[str, float] | None = None,
    ) -> None:
        """Ends the current step: writes its metrics, saves a state when due or asked to end, moves the bar.

        trained_tokens: targets of the step's losses. rollouts: those of the next step may be in it; a state waits for
        them and holds them. `reward` and `shown` are what the bar says. Raises Interrupted once the state is durable.
        """
        now = time.monotonic()
        self._clocks["step"], self._step_began = now - self._step_began, now
        metrics.add("perf/goodput", trained_tokens, self._clocks["step"])
        if self.step == self._first_step:
            self._clocks["first_step"] = now - self._started
            self._end_start(metrics)
        metrics.merge(self._at_start)
        self._at_start = Accumulator()
        for clock, seconds in self._clocks.items():
            metrics.add(f"time/{clock}", seconds)
        self._clocks = {}
        if self.session.resume and self.step == self._first_step:
            self.session.metrics.supersede(self.name, self.step)
        self.session.metrics.write(self.step, self.name, metrics)
        trained, sampled = (metrics.pairs().get(f"perf/{kind}_tokens", (0.0, 0.0))[0] for kind in ("train", "sampled"))
        self.totals["trained_tokens"] += trained
        self.totals["sampled_tokens"] += sampled
        for key, value in metrics.maxima().items():
            if key.startswith("memory/"):
                part = key.removeprefix("memory/")
                self._memory[part] = max(value, self._memory.get(part, 0.0))
        notes, self.session.fleet.learner.notes = self.session.fleet.learner.notes, []
        for note in notes:
            self.session.progress.note(f"{self.name}, step {self.step}: {note}")
        self.step += 1
        self._bar.step(self.step, tokens=int(trained + sampled), reward=reward, **(shown or {}))
        asked = self.session.interrupts.requested
        if asked or self.step % self._config.save_every == 0:
            self.save(loop_state, rollouts)
        if asked:
            self.saved()
            said = f"{self.name} ended after step {self.step}; --resume goes on from there"
            raise Interrupted(self.session.interrupts.number, said)

    def save(self, loop_state: Mapping[str, Any], rollouts: RolloutBuffer | None = None) -> None:
        """Begins to write a training state of the steps so far; it is durable before the next one begins."""
        self.session.recorded()  # no state is ahead of the record of what it was trained on
        name, held = f"step_{self.step}", None
        if rollouts is not None:
            folder = self._states / f"in_flight-{name}-{secrets.token_hex(4)}"
            held = rollouts.save(folder, self.step, self.session.tokenizer.hash)
        extra = {"step": self.step, "seconds": self.seconds(), "totals": self.totals, "loop": dict(loop_state)}
        self.session.fleet.learner.save_state(str(self._states / name), extra | {"in_flight": held})
        self._prune()

    def saved(self) -> None:
        """Waits until the last state is on the disk."""
        self.session.fleet.learner.state_saved()
        self._prune()

    def _prune(self) -> None:
        """Removes older states than are kept, and rollouts whose state is gone; that of this step may be on its way."""
        prune_train_states(self._states, self._config.keep_states)
        for folder in self._states.glob("in_flight-*"):
            state = folder.name.split("-")[1]
            if state != f"step_{self.step}" and not (self._states / state).exists():
                shutil.rmtree(folder)

    def finish(self, loop_state: Mapping[str, Any], notes: Mapping[str, Any]) -> StageResult:
        """Saves the last state, an official-layout checkpoint or the adapter, and the result that a resume reads."""
        self.save(loop_state)
        self.saved()
        if self._memory:
            self.session.progress.note(f"{self.name}: {memory_note(self._memory)}")
        root, learner = self.session.run.root, self.session.fleet.learner
        checkpoint = root / "export" / self.name
        card = {"stage": self.name, "steps": self.step, "config_hash": self.session.run.info.config_hash, **notes}
        if self._config.trainer.lora is None:
            learner.save_checkpoint(str(checkpoint), card)
        else:  # the weights beside it have not changed: the policy is where they came from, and this
            learner.save_adapter(str(checkpoint), str(root / "base" / self.name), card)
        seconds, limit = self.seconds(), self._config.max_seconds
        cut = limit is not None and self.step < self.total_steps and seconds >= _NEARLY * limit
        result = StageResult(
            self.name,
            str(checkpoint),
            self.step,
            **self.totals,
            seconds=seconds,
            notes=dict(notes),
            cut_at=self.total_steps if cut else None,
        )
        self._result.parent.mkdir(exist_ok=True)
        write_atomic(self._result, json.dumps(asdict(result)))
        return result
