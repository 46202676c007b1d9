"""Single stored tensors of a model: read as a checkpoint would store them, and replaced in a copy of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from k3rl.checkpoint.hf import (
    CheckpointError,
    _check_packed,
    _commit,
    _packed_with_source,
    _padding,
    _plain_value,
    _Value,
    official_tensors,
)
from k3rl.checkpoint.sharded import bank_of
from k3rl.model import K3ForCausalLM
from k3rl.model.packed import assign, stored_bytes
from k3rl.numerics import mx, stored_dtype

_PACKED, _SCALE = "_packed", "_scale"


class StoredView:
    """Random access to what `official_tensors(model)` gives, one tensor at a time, on the CPU.

    trusted: bytes that the model keeps of its experts are taken as they are, for a caller who proves what it makes of
    them; otherwise they are those of the values.
    """

    def __init__(self, model: K3ForCausalLM, *, trusted: bool = False) -> None:
        self._trusted = trusted
        self._model, self._parameters = model, dict(model.official_parameters(decoded=False))
        self._expert: tuple[str, tuple[Tensor, Tensor]] | None = None  # the last one packed: two tensors ask for it

    def __getitem__(self, name: str) -> Tensor:
        weights = self._model.config.quantization.weights
        parameter = self._parameters.get(name)
        if parameter is None:
            return self._packed(name)
        kind = torch.float32 if stored_dtype(name, weights) == "fp32" else torch.bfloat16
        value = parameter.detach()
        if name.endswith(".A_log"):
            value = torch.nn.functional.pad(value, (0, _padding(self._model.config)))
        return value.to(kind).cpu()

    def _packed(self, name: str) -> Tensor:
        expert, _, part = name.rpartition("_")
        if expert not in self._parameters or part not in ("packed", "scale"):
            raise CheckpointError(f"{name} is no stored tensor of this model")
        if self._expert is None or self._expert[0] != expert:
            source = stored_bytes(self._model, expert)
            if source is not None and (self._trusted or self._model.packed):
                packed, scale = source
            else:
                value, rule = self._parameters[expert].detach(), self._model.config.quantization.scale_rule
                packed, scale = _packed_with_source(value, source, rule)
            self._expert = expert, (packed.cpu(), scale.cpu())
        return self._expert[1][part == "scale"]


@torch.no_grad()
def second_model(model: K3ForCausalLM, *, packed: bool) -> K3ForCausalLM:
    """A model of the same values that shares nothing with `model`; packed: its routed experts are kept as bytes.

    Raises PackError where `model` does not store them so, and CheckpointError where it keeps them packed and the
    second one should not.
    """
    if model.packed and not packed:
        raise CheckpointError("experts that are kept packed are copied packed; load the checkpoint again for others")
    copy = K3ForCausalLM(model.config, dtype=model.dtype, device=model.device, packed=packed)
    for own, other in zip(
        itertools.chain(copy.parameters(), copy.buffers()),
        itertools.chain(model.parameters(), model.buffers()),
        strict=True,
    ):
        if not own.is_meta:
            own.copy_(other)
    if not packed:
        copy.stored_blocks.update(model.stored_blocks)  # bytes that nobody writes to
    for layer, bank in copy.packed_banks.items():
        if model.packed:
            bank.copy_(model.packed_banks[layer])
    if packed and not model.packed:
        experts = ((name, tensor) for name, tensor in official_tensors(model) if bank_of(name) is not None)
        for (name, codes), (_, scale) in zip(experts, experts, strict=True):  # the two of each follow each other
            assign(copy, name.removesuffix(_PACKED), scale, (codes, scale))
    return copy


def copy_with(
    model: K3ForCausalLM, changed: Iterable[tuple[str, Tensor]], base: Callable[[str], Tensor] | None = None
) -> K3ForCausalLM:
    """A second model that differs from `model` in these stored tensors only, which are taken one after the other.

    The two tensors of a packed expert follow each other; where only one comes, the other stays. base: gives that one
    by its name, by default from the values. Peak memory: both models and one tensor. Raises CheckpointError as
    `assign_official_tensors` does.
    """
    copy = second_model(model, packed=model.packed)
    parameters = dict(copy.official_parameters(decoded=False))
    stored = base or StoredView(model).__getitem__
    waiting: dict[str, dict[str, Tensor]] = {}

    def flush() -> None:
        for expert, parts in waiting.items():
            packed, scale = (parts[part] if part in parts else stored(expert + part) for part in (_PACKED, _SCALE))
            parameter = parameters[expert]
            _check_packed(expert, parameter, packed, scale)
            value = parameter if copy.packed else mx.dequantize_mxfp4(packed, scale, parameter.dtype)
            _commit(copy, [_Value(expert, value, (packed, scale))])
        waiting.clear()

    for name, tensor in changed:
        expert, _, part = name.rpartition("_")
        if name in parameters:
            value = _plain_value(name, parameters[name], tensor)
            _commit(copy, [_Value(name, value, None)])
        elif expert in parameters and part in ("packed", "scale"):
            if expert not in waiting:
                flush()
            waiting.setdefault(expert, {})[f"_{part}"] = tensor
        else:
            raise CheckpointError(f"{name} is no stored tensor of this model")
    flush()
    return copy
