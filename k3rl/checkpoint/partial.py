"""Single stored tensors of a model: read as a checkpoint would store them, and replaced in a copy of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from k3rl.checkpoint.hf import (
    CheckpointError,
    _check_packed,
    _commit,
    _packed_with_source,
    _padding,
    _plain_value,
    _stacks,
    _Value,
    official_tensors,
)
from k3rl.checkpoint.sharded import bank_of
from k3rl.model import K3ForCausalLM
from k3rl.model.packed import (
    EXPERT_NAME,
    PACKED_RUN_BYTES,
    PackedExperts,
    assign_parameter,
    fill_packed,
    packed_entry,
    stored_block,
)
from k3rl.numerics import mx, stored_dtype

_PACKED, _SCALE = "_packed", "_scale"
_RUNS = 3  # that a view holds: who reads in order is ahead, by less than one, of who asks again for a neighbour


class _Run(NamedTuple):
    """Experts of one layer that are read together."""

    layer: int
    experts: tuple[int, ...]


def _runs(model: K3ForCausalLM, names: Iterable[str]) -> Iterator[tuple[str, _Run]]:
    """(official name of a matrix, run) for each of these tensors' experts that the model keeps packed."""
    found = [EXPERT_NAME.match(name) for name in names] if model.packed else []
    members = {(int(each["layer"]), int(each["expert"])): None for each in found if each is not None}
    for layer, pairs in itertools.groupby(members, key=lambda pair: pair[0]):
        bank, experts = model.packed_banks[layer], [expert for _, expert in pairs]
        size = max(1, PACKED_RUN_BYTES * len(model.experts) // bank.nbytes)
        for start in range(0, len(experts), size):
            run = _Run(layer, tuple(experts[start : start + size]))
            prefixes = (f"language_model.model.layers.{layer}.block_sparse_moe.experts.{n}." for n in run.experts)
            yield from ((f"{prefix}{leaf}.weight", run) for prefix in prefixes for leaf in ("w1", "w2", "w3"))


class StoredView:
    """Random access to what `official_tensors(model)` gives, one tensor at a time, on the CPU.

    trusted: bytes that the model keeps of its experts are taken as they are, for a caller who proves what it makes of
    them; otherwise they are those of the values. expected: names that will be asked for, in about this order; of
    experts that are kept packed, a run of these is then read at a time.
    """

    def __init__(self, model: K3ForCausalLM, *, trusted: bool = False, expected: Iterable[str] = ()) -> None:
        self._trusted = trusted
        self._model, self._parameters = model, dict(model.official_parameters(decoded=False))
        self._expert: tuple[str, tuple[Tensor, Tensor]] | None = None  # the last one packed: two tensors ask for it
        self._run_of = dict(_runs(model, expected))
        self._held: dict[_Run, dict[tuple[int, str], tuple[Tensor, Tensor]]] = {}

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
        if (found := packed_entry(self._model, expert)) is not None and (run := self._run_of.get(expert)) is not None:
            bank, number, leaf = found
            return self._of_run(bank, run)[number, leaf][part == "scale"]
        if self._expert is None or self._expert[0] != expert:
            source = stored_block(self._model, expert)
            if source is not None and (self._trusted or self._model.packed):
                packed, scale = source
            else:
                value, rule = self._parameters[expert].detach(), self._model.config.quantization.scale_rule
                packed, scale = _packed_with_source(value, source, rule)
            self._expert = expert, (packed.cpu(), scale.cpu())
        return self._expert[1][part == "scale"]

    def _of_run(self, bank: PackedExperts, run: _Run) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        if run not in self._held:
            if len(self._held) == _RUNS:
                del self._held[next(iter(self._held))]
            self._held[run] = bank.stored_many(run.experts)
        return self._held[run]


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
            assign_parameter(copy, name.removesuffix(_PACKED), scale, (codes, scale))
    return copy


def copy_with(
    model: K3ForCausalLM, changed: Iterable[tuple[str, Tensor]], base: Callable[[str], Tensor] | None = None
) -> K3ForCausalLM:
    """A second model that differs from `model` in these stored tensors only, which are taken one after the other.

    The two tensors of a packed expert follow each other; where only one comes, the other stays. base: gives that one
    by its name, by default from the values. Peak memory: both models, one tensor, and a few MiB of experts, which are
    put in a run at a time. Raises CheckpointError as `assign_official_tensors` does.
    """
    copy = second_model(model, packed=model.packed)
    parameters = dict(copy.official_parameters(decoded=False))
    stored = base or StoredView(model).__getitem__
    waiting: dict[str, dict[str, Tensor]] = {}
    size, most = 0, PACKED_RUN_BYTES if copy.packed or copy.device.type != "cpu" else 0  # of what waits

    def flush() -> None:
        given: dict[str, tuple[Tensor, Tensor]] = {}
        for expert, parts in waiting.items():
            packed, scale = (parts[part] if part in parts else stored(expert + part) for part in (_PACKED, _SCALE))
            _check_packed(expert, parameters[expert], packed, scale)
            given[expert] = packed, scale
        _put_experts(copy, parameters, given)
        waiting.clear()

    for name, tensor in changed:
        expert, _, part = name.rpartition("_")
        if name in parameters:
            value = _plain_value(name, parameters[name], tensor.to(copy.device))
            _commit(copy, [_Value(name, value, None)])
        elif expert in parameters and part in ("packed", "scale"):
            if expert not in waiting and size > most:
                flush()
                size = 0
            waiting.setdefault(expert, {})[f"_{part}"] = tensor
            size += tensor.nbytes
        else:
            raise CheckpointError(f"{name} is no stored tensor of this model")
    flush()
    return copy


def _put_experts(
    model: K3ForCausalLM, parameters: Mapping[str, Tensor], given: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Gives experts, by official name, what these (packed, scale), which fit them, hold."""
    if model.packed:
        fill_packed(model, given)
        return
    for names in _stacks([(name, (tuple(parameters[name].shape), parameters[name].dtype)) for name in given]):
        packed, scale = (torch.stack(parts) for parts in zip(*(given[name] for name in names), strict=True))
        values = mx.dequantize_mxfp4(packed.to(model.device), scale.to(model.device), parameters[names[0]].dtype)
        _commit(model, [_Value(name, value, given[name]) for name, value in zip(names, values, strict=True)])
