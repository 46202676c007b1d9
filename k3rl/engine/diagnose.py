"""Finding where a non-finite number came from, after the fact: one forward over few tokens, inside the step in which
something broke. Others wait for it, so that longer requests are not run again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.cache import StatePool
from k3rl.engine.images import Placed, image_inputs
from k3rl.engine.protocol import NonFiniteLogits
from k3rl.engine.rows import RowTable
from k3rl.engine.weights import ServedWeights
from k3rl.model import K3ForCausalLM

EXAMINED = 1024  # tokens that are run again, at most


def first_bad_module(model: K3ForCausalLM, ids: Tensor, images: Placed = ()) -> str | None:
    """Runs ids [T], in rows, alone and uncached; the first module, in order of completion, with a non-finite output."""
    bad: list[str] = []

    def hook(name: str) -> Callable[[torch.nn.Module, object, object], None]:
        def check(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if not bad and not all(tensor.isfinite().all() for tensor in _tensors(output)):
                bad.append(name)

        return check

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        read = image_inputs(model, [(images, {}, 0, len(ids))])
        out = model.hidden(ids.clamp(min=0)[None], images=read)
        if not bad and not model.logits(out.hidden).isfinite().all():
            bad.append("lm_head")
    finally:
        for handle in handles:
            handle.remove()
    return bad[0] if bad else None


def describe(
    model: K3ForCausalLM, pool: StatePool, row: int, ids: Tensor, images: Placed = ()
) -> tuple[str | None, str]:
    """(first bad module or None, sentence for the error) for a request whose tokens so far are ids [T] in rows."""
    short = len(ids) <= EXAMINED
    name = first_bad_module(model, ids, images) if short else None
    if name is not None:
        broken = [n for n, parameter in model.official_parameters() if not parameter.isfinite().all()]
        cause = f"not finite is {broken[0]} (and {len(broken) - 1} more)" if broken else "all weights are finite"
        return name, f"the first non-finite output is that of {name}; of the weights, {cause}"
    layer = _first_bad_state(model, pool, row)
    if not short:
        state = "is finite" if layer is None else f"is not finite in layer {layer}"
        return None, f"its cached state {state}; it has more than the {EXAMINED} tokens that are examined further"
    if layer is not None:
        return (
            None,
            f"its tokens give finite logits when run afresh, but the cached state of layer {layer} is not finite",
        )
    return None, "its tokens give finite logits when run afresh, and its cached state is finite"


def errors_of(weights: ServedWeights, pool: StatePool, table: RowTable, rows: np.ndarray) -> list[NonFiniteLogits]:
    """The errors of rows [R] whose logits are not finite. One is examined: a broken model breaks all of them."""
    found: list[NonFiniteLogits] = []
    for row in rows.tolist():
        running = table.running[row]
        ids = np.concatenate([running.prompt, table.sampled(row)])
        if found:
            layer, detail = None, f"request {found[0].request} broke in the same step and was examined"
        else:
            given = torch.from_numpy(ids).to(weights.model.device)
            with weights.adapters.serving(weights.model, running.params.adapter):
                layer, detail = describe(weights.model, pool, row, given, running.images)
        found.append(NonFiniteLogits(running.number, len(ids) - 1, layer, detail))
    return found


def _first_bad_state(model: K3ForCausalLM, pool: StatePool, row: int) -> int | None:
    config, cache = model.config, pool.view([row])
    length = int(cache.lengths[0])
    for layer in range(config.num_hidden_layers):
        if layer in config.kda_layers:
            states = [cache.recurrent(layer), cache.conv(layer)]
        else:
            states = [cache.latent(layer)[:, :length]]
        if not all(state.isfinite().all() for state in states):
            return layer
    return None


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, tuple | list):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
