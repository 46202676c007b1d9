"""NaN and infinity in a step: which layer gave the first one, from which data, and what becomes of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from k3rl.config import K3Error
from k3rl.data import TrainBatch
from k3rl.losses import LossInputs
from k3rl.model import K3ForCausalLM

_NAMED = 5  # sequences that a message lists


class NonFiniteStep(K3Error):
    """A loss or a gradient came out NaN or infinite; nothing was updated."""


class NonFiniteLoss(NonFiniteStep):
    """The loss of a micro-batch is NaN or infinite."""


class NonFiniteLogprobs(NonFiniteStep):
    """A frozen policy scores tokens with NaN or infinity."""


class NonFiniteGradients(NonFiniteStep):
    """A gradient is NaN or infinite though every loss was finite."""


def bad_loss(step: int, value: float, origin: str) -> NonFiniteLoss:
    """The error for a loss; origin: a sentence without its full stop."""
    return NonFiniteLoss(
        f"the loss of step {step} is {value}; wanted a finite number. {origin}. The weights are unchanged; lower the "
        "learning rate, look at the data, or skip such steps with --trainer.on-nonfinite skip"
    )


def explain_loss(model: K3ForCausalLM, batch: TrainBatch, forward: Callable[[TrainBatch], LossInputs]) -> str:
    """One sentence on where the first bad number of this micro-batch's forward pass comes from, computed again."""
    for name, parameter in model.official_parameters():
        if not bool(parameter.isfinite().all()):
            return f"The parameter {name} holds it already"
    with torch.no_grad(), _first_output(model) as found:
        logprobs = forward(batch).logprobs
    places = np.flatnonzero(batch.loss_mask)
    bad = places[~logprobs.isfinite().cpu().numpy()]
    if found:
        return f"The first such tensor is the output of {found[0]}; {_of_sequences(batch, bad)}"
    for name in ("sampler_logprobs", "advantages", "teacher_logprobs", "weights"):
        values = getattr(batch, name)
        if values is not None and not np.isfinite(values).all():
            return f"The batch's {name} hold it; {_of_sequences(batch, np.flatnonzero(~np.isfinite(values)))}"
    if bad.size:
        return f"The logprobs hold it; {_of_sequences(batch, bad)}"
    return f"The model's logprobs are finite, so it arises in the loss itself; {_of_sequences(batch, places)}"


def explain_gradient(
    name: str, micros: list[TrainBatch], gradients: Callable[[TrainBatch], dict[str, Tensor]]
) -> str | None:
    """Which sequences of this rank give the parameter `name` a bad gradient, tried one by one; None when none does."""
    guilty = []
    for micro in micros:
        if _is_finite(gradients(micro).get(name)):
            continue
        alone = [i for i in range(len(micro.sequence_ids)) if not _is_finite(gradients(micro.select([i])).get(name))]
        guilty += [micro.sequence_ids[i] for i in alone] or list(micro.sequence_ids)
    return f"It comes from {listed(guilty)}" if guilty else None


def _is_finite(value: Tensor | None) -> bool:
    return value is None or bool(value.isfinite().all())


@contextmanager
def _first_output(model: nn.Module) -> Iterator[list[str]]:
    """Collects the names of modules whose output is not finite, in the order in which they give it."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            if not all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor) and t.is_floating_point()):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _of_sequences(batch: TrainBatch, positions: np.ndarray) -> str:
    owners = np.unique(np.searchsorted(batch.cu_seqlens, positions, side="right") - 1)
    return f"it reaches {listed([batch.sequence_ids[i] for i in owners])}"


def listed(names: Sequence[str]) -> str:
    """Sequences by name, the first few of them."""
    if not names:
        return "no sequence's logprobs"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"sequence{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"
