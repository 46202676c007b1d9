"""What a `Trainer` wants of a backend: gradients of a step, and the update that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor

from k3rl.data import TrainBatch
from k3rl.parallel.forward_backward import Loss, StepInputs
from k3rl.run import Accumulator

OPTIMIZER = "optimizer."  # before the names of masters and optimizer state in a training state


class Update(NamedTuple):
    """What an update was: the gradient norm before clipping, the learning rate, and heads that QK-clip scaled."""

    grad_norm: float
    lr: float
    clipped_heads: int


class Backend(Protocol):
    """Gradients, masters and optimizer state of a model's parameters, on one rank.

    A step calls, on all ranks, `begin`, `accumulate`, `reduce_gradients`, `clip_gradients` and `apply`, in this order;
    one that cannot be taken ends with `discard_gradients`. Parameters hold what a checkpoint stores of the masters.
    """

    @property
    def lockstep(self) -> bool:
        """Whether ranks take their micro-batches together, those with fewer of them in dummy forwards."""
        ...

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a step."""
        ...

    def warm_up(self, micro: TrainBatch, loss: Loss, temperature: float) -> None:
        """Has what a step launches compiled, where it is captured; changes nothing. No collective."""
        ...

    def overlap_key(self, micros: list[TrainBatch], loss: Loss, temperature: float) -> int:
        """A number that all ranks have to give alike for a reduction that overlaps the backward; 0: none."""
        ...

    def accumulate(self, step: StepInputs) -> Accumulator:
        """Adds up the gradients of this rank's micro-batches; metrics of their losses.

        All ranks leave it, or fail, together. Raises NonFiniteLoss on all of them, with where it comes from.
        """
        ...

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold a parameter, on its owners."""
        ...

    def clip_gradients(self, step: StepInputs) -> None:
        """Scales reduced gradients to the largest norm that is allowed. Raises NonFiniteGradients on all ranks."""
        ...

    def apply(self, max_logits: dict[int, Tensor], lr_scale: float) -> Update:
        """Takes the optimizer's step and clips query and key weights; every rank then has the new parameters.

        max_logits: by MLA layer, the largest attention logit of each head [H]. Raises NonFiniteGradients.
        """
        ...

    def discard_gradients(self) -> None:
        """Forgets the gradients of a step that is not taken."""
        ...

    # -- forward passes -------------------------------------------------------------------------------------------

    def forwards(self, batch: TrainBatch | None) -> Iterator[tuple[TrainBatch, bool]]:
        """(micro-batch, whether it counts) of a batch that is only scored, as many as ranks take together."""
        ...

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """`run()`, which computes with the model."""
        ...

    # -- parameters and state -------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """All parameters in place and under their official names; a collective where they are cut over ranks."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes on this rank's device by part, named as in `k3rl plan`."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Bytes of memory of CUDA graphs, which stays theirs and which torch counts as used by nobody."""
        ...

    def take_notes(self) -> list[str]:
        """What a person should read, each text once."""
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's part of masters and optimizer state, "optimizer.<official name>/<kind>", each tensor whole."""
        ...

    def load_owned(self, state: Mapping[str, Tensor]) -> None:
        """Takes what this rank needs of `state_tensors` of all ranks. Raises OptimizerStateError."""
        ...

    def load_shared(self, state: Mapping[str, Tensor]) -> None:
        """Completes `load_owned` once all ranks have done it; a collective."""
        ...
