"""Forward, loss and backward of a rank's micro-batches: one interface, computed eagerly here.

captured.py has the other implementation, which replays captured steps where it can and comes back here where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from k3rl.data import TrainBatch
from k3rl.losses import LossInputs, LossOutput
from k3rl.optim import AuxiliaryLoss
from k3rl.parallel.context import ContextShare
from k3rl.parallel.model_on_mesh import ModelOnMesh
from k3rl.parallel.nonfinite import NonFiniteLoss, bad_loss, explain_loss, listed
from k3rl.parallel.statistics import Statistics
from k3rl.run import Accumulator

Loss = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True)
class StepInputs:
    """What a rank computes in one optimizer step.

    number: of the step. micros: this rank's micro-batches. forwards: how many it takes part in, those of other ranks
    that it meets included. overlaps: all ranks sum gradients behind the backward, before the host has seen its end.
    clips: the gradients are clipped next.
    """

    number: int
    micros: list[TrainBatch]
    forwards: int
    loss: Loss
    temperature: float
    overlaps: bool
    clips: bool


class Failure(NamedTuple):
    """The micro-batches that follow are not computed; error: this rank's, None where another rank has it."""

    error: Exception | None


class ForwardBackward(Protocol):
    """Adds the gradients of micro-batches to `.grad`, and their losses to the metrics of a step."""

    is_eager: bool
    """Whether parameters without a gradient must have none when a step begins."""

    @property
    def running(self) -> bool:
        """Whether the device has micro-batches to do or has done them, whose losses `finish` waits for."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Bytes of memory of CUDA graphs, which torch counts as used by nobody."""
        ...

    def begin(self) -> None:
        """Before a step."""
        ...

    def will_replay(self, micros: list[TrainBatch], loss: Loss, temperature: float) -> bool:
        """Whether `run` will replay all of these, so that what they leave is known beforehand. After `begin`."""
        ...

    def run(self, micro: TrainBatch | None, step: StepInputs, metrics: Accumulator) -> Failure | None:
        """Forward, loss and backward of a micro-batch; None: of one that only other ranks have."""
        ...

    def finish(self, step: StepInputs, metrics: Accumulator) -> Exception | None:
        """Adds the metrics of micro-batches that the host has not seen the end of; what is wrong with the first."""
        ...

    def end(self) -> None:
        """After a step, failed or not."""
        ...

    def take_notes(self) -> list[str]:
        """What a person should read, each text once."""
        ...


class EagerForwardBackward:
    """Computes each micro-batch at once, by autograd (a `ForwardBackward`)."""

    is_eager, running, graph_bytes = True, False, 0

    def __init__(self, on_mesh: ModelOnMesh, statistics: Statistics) -> None:
        self._on_mesh, self._model, self._statistics = on_mesh, on_mesh.model, statistics
        self._auxiliary: AuxiliaryLoss | None = None
        if on_mesh.config.balance_by == "auxiliary_loss":
            self._auxiliary = AuxiliaryLoss(on_mesh.config.auxiliary_weight, on_mesh.model.config.num_experts_per_token)

    def begin(self) -> None:
        """Nothing is kept from step to step."""

    def will_replay(self, micros: list[TrainBatch], loss: Loss, temperature: float) -> bool:
        return False

    def run(self, micro: TrainBatch | None, step: StepInputs, metrics: Accumulator) -> Failure | None:
        self._model.observer = self._statistics
        self._watch_routers(self._auxiliary)
        total, error = self.loss_of(micro, step, metrics)
        if not self._fine_everywhere(error):
            return Failure(error)
        total.backward()
        return None

    def _fine_everywhere(self, error: Exception | None) -> bool:
        """Whether to go on into the backward: where ranks meet in it, all of them go or none."""
        if self._on_mesh.meets:
            return self._on_mesh.mesh.world.first_failed(error is None) is None
        return error is None

    def loss_of(
        self, micro: TrainBatch | None, step: StepInputs, metrics: Accumulator
    ) -> tuple[torch.Tensor, Exception | None]:
        """The loss to call backward on, and what is wrong with it."""
        if micro is None:
            return self._model.dummy_forward(), None
        share = self._on_mesh.share(micro)
        self._statistics.count(micro, share, self._on_mesh.config.balance, metrics)
        inputs = self._on_mesh.target_inputs(micro, step.temperature, share)
        try:
            out = step.loss(inputs)
        except Exception as error:
            return inputs.logprobs, error
        if not torch.isfinite(out.loss):
            return out.loss, self.explain(out.loss.item(), micro, step)
        add_loss(metrics, out)
        self._statistics.scores.add(micro, share, inputs)
        if self._auxiliary is None:
            return out.loss, None
        return out.loss + self._auxiliary_loss(micro, share, metrics), None

    def explain(self, value: float, micro: TrainBatch, step: StepInputs) -> NonFiniteLoss:
        """The error for a loss that is not finite, with where it comes from."""
        self.end()
        if self._on_mesh.meets:  # another forward pass would need the other ranks
            origin = f"It is that of the micro-batch of {listed(micro.sequence_ids)}"
        else:
            origin = explain_loss(
                self._model, micro, lambda batch: self._on_mesh.target_inputs(batch, step.temperature)
            )
        return bad_loss(step.number, value, origin)

    def _watch_routers(self, auxiliary: AuxiliaryLoss | None) -> None:
        if self._auxiliary is not None:
            self._auxiliary.clear()
            for part in self._model.moe_parts():
                part.router_loss = auxiliary

    def _auxiliary_loss(self, micro: TrainBatch, share: ContextShare, metrics: Accumulator) -> torch.Tensor:
        """The loss on the routers, weighted by this part's share of the global batch."""
        assert self._auxiliary is not None
        weights = micro.weights if share.communicator is None else micro.weights[share.targets]
        part, term = float(weights.sum()), self._auxiliary.take()
        metrics.add("moe/auxiliary_loss", float(term.detach()) * part, part)
        return term * part

    def finish(self, step: StepInputs, metrics: Accumulator) -> Exception | None:
        return None

    def end(self) -> None:
        self._model.observer = None
        self._watch_routers(None)

    def take_notes(self) -> list[str]:
        return []


def add_loss(metrics: Accumulator, out: LossOutput) -> None:
    """Adds what a loss reports of a micro-batch."""
    metrics.update(out.metrics)
    for name, value in out.maxima.items():
        metrics.maximum(name, value)
