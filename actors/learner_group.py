"""The learner as its driver sees it: all ranks behind plain calls, batches balanced over them, errors by rank."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import ray

from k3rl.actors.calls import ActorHung, ActorLost, no_answer, wait
from k3rl.actors.payloads import plans_sent
from k3rl.config import K3Error
from k3rl.data import BatchPlan, SequenceScores, TrainBatch, sequence_costs
from k3rl.parallel import LearnerConfig, Loss, PeerFailed, ScorerConfig, TrainerConfig, balanced_shares, find_lost
from k3rl.run import Accumulator

Share: TypeAlias = TrainBatch | BatchPlan


class LearnerGroup:
    """The ranks of the learner as one. A method is `LearnerActor`'s of the same name, on all ranks, and waits."""

    def __init__(self, actors: list[Any], timeout_s: float, *, keeps_base: bool = True) -> None:
        """keeps_base: whether deltas start from the weights that engines are loaded with."""
        self.actors = actors
        self.notes: list[str] = []  # about steps, for a person; whoever shows them clears them
        self._warming: list[Any] = []
        self._note_calls: list[Any] = []  # for the notes of a step that is under way
        self._timeout_s, self._keeps_base = timeout_s, keeps_base
        self._context = 1  # ranks that share each sequence
        self._pair_cost = 0.0  # what a pair of tokens costs the model, see `sequence_costs`
        self._address = ""  # where ranks meet
        if len(actors) > 1:
            address = wait(actors[0].address.remote(), timeout_s, "learner.address")
            self._every("join", [(address, rank, len(actors), timeout_s) for rank in range(len(actors))])
            self._address = address

    def create(self, config: Mapping[str, Any], trainer: TrainerConfig, seed: int, learner: LearnerConfig) -> int:
        return self._with_model(trainer, self._every("create", [(config, trainer, seed, learner)] * len(self.actors)))

    def load(
        self,
        checkpoint: str,
        trainer: TrainerConfig,
        learner: LearnerConfig,
        quantization: Mapping[str, str] | None = None,
    ) -> int:
        arguments = (checkpoint, trainer, learner, quantization)
        return self._with_model(trainer, self._every("load", [arguments] * len(self.actors)))

    def _with_model(self, trainer: TrainerConfig, sizes: list[int]) -> int:
        """Asks what balancing sequences over the ranks needs to know of the model that they have just made."""
        self._context = trainer.context_parallel
        if len(self.actors) > self._context:
            self._pair_cost = wait(self.actors[0].pair_cost.remote(), self._timeout_s, "learner.pair_cost")
        return sizes[0]

    def load_teachers(self, checkpoints: Mapping[str, str], scorer: ScorerConfig) -> None:
        self._every("load_teachers", [(checkpoints, scorer)] * len(self.actors))

    def load_state(self, directory: str) -> dict[str, Any]:
        return self._every("load_state", [(directory,)] * len(self.actors))[0]

    def start_warm_up(
        self, loss: Loss, temperature: float = 1.0, *, routes: bool = False, teacher: bool = False
    ) -> None:
        """Has the ranks compile what the first step needs, before whatever they are asked next."""
        self._warming = [
            actor.warm_up.remote(loss, temperature, routes=routes, teacher=teacher) for actor in self.actors
        ]

    def slow_paths(self) -> list[str]:
        """What of the ranks' GPUs runs without kernels, each sentence once, before a first step."""
        every = self._every("notes", [()] * len(self.actors))
        return list(dict.fromkeys(text for texts in every for text in texts))

    def set_version(self, number: int) -> None:
        self._every("set_version", [(number, self._keeps_base)] * len(self.actors))

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
        self, batches: Sequence[Share], loss: Loss, lr_scale: float = 1.0, temperature: float = 1.0
    ) -> list[Any]:
        """Begins one optimizer step for each global batch; `trained` waits for it. What a plan names goes from where it
        is to the ranks that train it."""
        sharded = [self._shard(batch) for batch in batches]
        started = []
        for rank, actor in enumerate(self.actors):
            parts, payloads = plans_sent([shards[rank][1] for shards in sharded])
            started.append(actor.train.remote(parts, loss, lr_scale, temperature, *payloads))
        self._note_calls = [actor.notes.remote() for actor in self.actors]  # queued right behind the step
        return started

    def trained(self, started: list[Any]) -> Accumulator:
        """The metrics of `start_training`, added up over the ranks."""
        metrics = Accumulator()
        warming, self._warming = self._warming, []
        self._results("learner.warm_up", warming)
        for part in self._results("learner.train", started):
            metrics.merge(part)
        calls, self._note_calls = self._note_calls, []
        self.notes += dict.fromkeys(note for notes in self._results("learner.notes", calls) for note in notes)
        return metrics

    def annotations(self) -> tuple[dict[str, SequenceScores], np.ndarray | None]:
        """What the last `trained` step computed: scores by sequence id, and rank 0's load of experts."""
        merged: dict[str, SequenceScores] = {}
        every = self._every("annotations", [()] * len(self.actors))
        for scores, _ in every:
            for name, own in scores.items():
                merged[name] = merged[name].filled_by(own) if name in merged else own
        return merged, every[0][1]

    def evaluate(self, batch: TrainBatch, loss: Loss) -> Accumulator:
        metrics = Accumulator()
        for part in self._every("evaluate", [(shard, loss) for _, shard in self._shard(batch)]):
            metrics.merge(part)
        return metrics

    def teacher_logprobs(self, batch: Share, domains: Sequence[str], temperature: float = 1.0) -> np.ndarray:
        """float32 [N]: each sequence scored by the teacher of its domain."""
        calls, rows = [], []
        ends = np.cumsum(batch.lengths)
        begins = ends - batch.lengths
        for actor, (members, part) in zip(self.actors, self._shard(batch, context=1), strict=True):
            if part is not None:
                [own], payloads = plans_sent([part])
                mine = [domains[i] for i in members]
                calls.append(actor.teacher_logprobs.remote(own, mine, temperature, *payloads))
                rows.append(np.concatenate([np.arange(begins[i], ends[i]) for i in members]))
        out = np.zeros(batch.tokens, np.float32)
        for places, values in zip(rows, self._results("learner.teacher_logprobs", calls), strict=True):
            out[places] = values
        return out

    def _shard(self, batch: Share, context: int | None = None) -> list[tuple[list[int], Share | None]]:
        """(indices, shard) for each rank; `context` neighbours, by default those of the mesh, get one together."""
        context = context or self._context
        if len(self.actors) == context:
            return [(list(range(len(batch.lengths))), batch)] * context
        balanced = balanced_shares(
            sequence_costs(batch.row_lengths.tolist(), self._pair_cost), len(self.actors) // context
        )
        shards = [(members, batch.select(members) if members else None) for members in balanced]
        return [shard for shard in shards for _ in range(context)]

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
