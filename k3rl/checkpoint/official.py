"""The official tensors of a model: what a checkpoint stores of it, whole, of one rank, or one at a time (k3.md 1.3).

A parameter holds the value its entry stores, so nothing is lost on the way: bf16 and float32 entries are casts that
change nothing, and an MXFP4 expert is packed again, or given byte for byte where a block still equals what was loaded.
`official_tensors` is the one way out, for files and for weight updates alike; `assign_official_tensors` and `fill` are
the ways in, `StoredView` and `copy_with` those for single tensors.

Where experts are spread over ranks, a layer's are gathered, packed, by the rank that writes its file, because the
official layout keeps a layer in one; the ranks of one expert axis take the files in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3rl.checkpoint.threads import map_in_order
from k3rl.config import K3Error
from k3rl.model import (
    EXPERT_NAME,
    PACKED_RUN_BYTES,
    K3Config,
    K3ForCausalLM,
    PackedExperts,
    QuantizationLoss,
    assign_parameter,
    fill_packed,
    packed_entry,
    stored_block,
)
from k3rl.numerics import mx, stored_dtype
from k3rl.parallel import Mesh, expert_run

NAN_SCALE = 255
STACK_ELEMENTS = 2**22  # of experts packed or unpacked in one call
_PACKED, _SCALE = "_packed", "_scale"
_READERS = 4  # threads that bring packed experts to a GPU, which decodes them
_RUNS = 3  # that a view holds: who reads in order is ahead, by less than one, of who asks again for a neighbour

Named = tuple[str, Tensor]


class CheckpointError(K3Error, ValueError):
    """A checkpoint that is missing, torn, of another shape, or in the way; the message names the tensor or file.

    tensor: the official name of the one that the message is about, where it is about one.
    """

    exit_code = 3

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


def bank_of(name: str) -> str | None:
    """The layer's prefix of a routed expert's name, packed or plain; None for other parameters."""
    plain = name.removesuffix("_packed").removesuffix("_scale")
    return name.partition(".experts.")[0] if stored_dtype(plain) == "mxfp4" else None


# -------------------------------------------------------------------------------------------- model -> tensors


def _packed_with_source(value: Tensor, source: tuple[Tensor, Tensor] | None, scale_rule: str) -> tuple[Tensor, Tensor]:
    """value [..., n] -> (packed, scale); blocks that equal what `source` decodes to keep the bytes of `source`."""
    if source is None:
        return mx.quantize_mxfp4(value, scale_rule)
    packed, scale = (part.to(value.device) for part in source)
    decoded = mx.dequantize_mxfp4(packed, scale, value.dtype)
    blocks = (*scale.shape, mx.BLOCK)
    same = (decoded.view(blocks) == value.reshape(blocks)).all(-1)
    if bool(same.all()):
        return packed.clone(), scale.clone()
    fresh_packed, fresh_scale = mx.quantize_mxfp4(value, scale_rule)
    bytes_shape = (*scale.shape, mx.BLOCK // 2)
    merged = torch.where(same.unsqueeze(-1), packed.view(bytes_shape), fresh_packed.view(bytes_shape))
    return merged.view(packed.shape), torch.where(same, scale, fresh_scale)


def official_tensors(model: K3ForCausalLM, *, shipped: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) exactly as stored: packed uint8, scale uint8, bf16, float32; A_log padded to head_dim.

    A model with a run of experts gives only those. Every tensor owns its memory, on the model's device.
    shipped: as an exported checkpoint stores them, which differs from what the model computes with only where weights
    are quantized after training (`QuantizationConfig.shipped`).
    """
    quantization = model.config.quantization
    weights = (quantization.shipped() if shipped else quantization).weights
    listed = model.official_parameters(decoded=False)
    for bank, members in itertools.groupby(listed, key=lambda item: bank_of(item[0])):
        if bank is not None and weights == "mxfp4":
            own = list(members)
            yield from _stored_bank(model, own) if model.packed else _packed_bank(model, own)
            continue
        for name, parameter in members:
            yield name, _plain_tensor(model, name, parameter.detach(), shipped=shipped)


def _plain_tensor(model: K3ForCausalLM, name: str, value: Tensor, *, shipped: bool = False) -> Tensor:
    """What a checkpoint stores of a parameter that is no MXFP4 expert, in memory of its own.

    Numbers that were rounded to the parameter's dtype when they were loaded keep their digits until they change.
    """
    config = model.config
    kind = torch.float32 if config.stored(name, shipped=shipped) == "fp32" else torch.bfloat16
    if name.endswith(".A_log") and not config.flat:
        value = nn.functional.pad(value, (0, _padding(config)))
    source = model.stored_wide.get(name)
    if source is None:
        return value.to(kind, copy=True)
    source = source.to(value.device)
    return torch.where(source.to(value.dtype) == value, source, value.to(kind))


def _stored_bank(model: K3ForCausalLM, members: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of routed experts that are kept packed."""
    for name, _ in members:
        stored = stored_block(model, name)
        assert stored is not None
        yield f"{name}_packed", stored[0].clone()
        yield f"{name}_scale", stored[1].clone()


def _packed_bank(model: K3ForCausalLM, members: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of one layer's routed experts, packed a stack of equal matrices at a time."""
    stored: dict[str, tuple[Tensor, Tensor]] = {}
    blocks = model.stored_blocks
    for names in _stacks([(name, (tuple(value.shape), name in blocks)) for name, value in members]):
        values = torch.stack([value.detach() for name, value in members if name in names])
        source = None
        if names[0] in blocks:
            source = torch.stack([blocks[n][0] for n in names]), torch.stack([blocks[n][1] for n in names])
        packed, scale = _packed_with_source(values, source, model.config.quantization.scale_rule)
        stored |= {name: (packed[i].clone(), scale[i].clone()) for i, name in enumerate(names)}
    for name, _ in members:
        yield f"{name}_packed", stored[name][0]
        yield f"{name}_scale", stored[name][1]


def _stacks(items: list[tuple[str, Any]]) -> Iterator[list[str]]:
    """Names of equal kind together, in order, in stacks small enough to copy: one call serves many small matrices."""
    kinds: dict[Any, list[str]] = {}
    for name, kind in items:
        kinds.setdefault(kind, []).append(name)
    for (shape, _), names in kinds.items():
        size = max(1, STACK_ELEMENTS // math.prod(shape))
        yield from (names[start : start + size] for start in range(0, len(names), size))


def _padding(config: K3Config) -> int:
    """Zeros behind the per-head values of A_log: the official tensor has head_dim entries (k3.md 2.4)."""
    linear = config.linear_attn_config
    return max(0, linear.head_dim - linear.num_heads)


# -------------------------------------------------------------------------------------------- gathered from ranks


def collected_tensors(
    stored: Iterator[Named], model: K3ForCausalLM, mesh: Mesh, writer: Callable[[str], int]
) -> Iterator[Named]:
    """The official tensors that this rank has to write, all experts among them, in official order.

    stored: `official_tensors` of this rank's model. writer: the place on the expert axis that writes a tensor, by
    official name; equal for all experts of a layer. Only the first copy of the model (data and context rank 0) writes;
    others get nothing. A collective of the ranks of that copy, which must all exhaust it.
    """
    if mesh.data.rank or mesh.context.rank:
        return
    for bank, members in itertools.groupby(stored, key=lambda item: bank_of(item[0])):
        if bank is None or mesh.expert.size == 1:
            yield from (item for item in members if writer(item[0]) == mesh.expert.rank)
        else:
            own = list(members)
            yield from _gathered(model, mesh, own, writer(own[0][0]))


def _gathered(model: K3ForCausalLM, mesh: Mesh, own: list[Named], root: int) -> Iterator[Named]:
    """One layer's experts from all ranks, on place `root` of the expert axis."""
    axis, count = mesh.expert, model.config.num_experts
    sent = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in own])
    each = len(sent) // len(model.experts)  # bytes of an expert
    here = axis.rank == root
    sizes = [each * len(expert_run(count, place, axis.size)) if here else 0 for place in range(axis.size)]
    arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=sent.device)
    with mesh.world.during("gathering experts"):
        dist.all_to_all_single(
            arrived, sent, sizes, [len(sent) if place == root else 0 for place in range(axis.size)], group=axis.group
        )
    if not here:
        return
    per_expert = own[: len(own) // len(model.experts)]
    first = f".experts.{model.experts.start}."
    for number, data in enumerate(arrived.split(each)):
        pieces = data.split([tensor.numel() * tensor.element_size() for _, tensor in per_expert])
        for (name, like), piece in zip(per_expert, pieces, strict=True):
            yield name.replace(first, f".experts.{number}."), piece.clone().view(like.dtype).view(like.shape)


# -------------------------------------------------------------------------------------------- tensors -> model


def assign_official_tensors(model: K3ForCausalLM, mapping: Mapping[str, Tensor]) -> None:
    """Puts stored tensors into the model in place, all of them or none. Experts that other ranks hold are left alone.

    Raises CheckpointError, with the name, for a tensor that is missing, unknown, mis-shaped, of a dtype that is not
    its own kind, not finite, or with a scale byte 255; the model is then unchanged.
    """
    values = list(_decode(model, mapping))
    _commit(model, values)


def fill(model: K3ForCausalLM, mapping: Mapping[str, Tensor], *, quantizes: bool = False) -> None:
    """`assign_official_tensors` for a model that nobody uses yet: a stack of tensors at a time, so that no third copy
    is made; after an error the model is of no use.

    quantizes: experts that come plain become MXFP4 where the model stores them so (`quantization_loss`).
    """
    waiting: dict[str, tuple[Tensor, Tensor]] = {}
    size, losses = 0, _Losses() if quantizes else None
    for item in _decode(model, mapping, losses):
        if item.source is None or not model.packed:
            _commit(model, [item])
            continue
        waiting[item.name] = item.source
        size += sum(part.nbytes for part in item.source)
        if size >= PACKED_RUN_BYTES:
            fill_packed(model, waiting)
            waiting, size = {}, 0
    fill_packed(model, waiting)
    if losses is not None:
        model.quantization_loss = losses.total()


class _Losses:
    """What quantizing does to one matrix after the other, kept on their device."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[Tensor] = []  # of the squared change, and of the squares

    def quantize(self, name: str, value: Tensor, rule: str) -> tuple[Tensor, Tensor]:
        """value [..., n] -> (packed, scale)."""
        packed, scale = mx.quantize_mxfp4(value, rule)
        exact = value.to(torch.float32)
        change = mx.dequantize_mxfp4(packed, scale, torch.float32) - exact
        self._names.append(name)
        self._sums.append(torch.stack([change.square().sum(), exact.square().sum()]).double())
        return packed, scale

    def total(self) -> QuantizationLoss | None:
        """Of all of them; None where there was none."""
        if not self._sums:
            return None
        changes, squares = torch.stack(self._sums).unbind(1)
        each = (changes / squares.clamp(min=1e-300)).sqrt()
        place = int(each.argmax())
        relative = float((changes.sum() / squares.sum().clamp(min=1e-300)).sqrt())
        return QuantizationLoss(len(self._names), relative, float(each[place]), self._names[place])


class _Value(NamedTuple):
    """One parameter's new value [its shape], and the packed bytes it came from, if any."""

    name: str
    value: Tensor
    source: tuple[Tensor, Tensor] | None
    exact: Tensor | None = None  # the stored float32 numbers, where the parameter holds less of them


@torch.no_grad()
def _commit(model: K3ForCausalLM, values: list[_Value]) -> None:
    for item in values:
        assign_parameter(model, item.name, item.value, item.source)
        if item.exact is None:
            model.stored_wide.pop(item.name, None)
        else:
            model.stored_wide[item.name] = item.exact.cpu()


def _decode(model: K3ForCausalLM, mapping: Mapping[str, Tensor], losses: _Losses | None = None) -> Iterator[_Value]:
    """Checks names, then yields every parameter's value in the model's dtypes; losses: quantizes experts."""
    parameters = dict(model.named_parameters())  # of which shapes are read
    known: set[str] = set()
    missing = []
    for name in parameters:
        forms = ({name}, {f"{name}_packed", f"{name}_scale"})
        found = [form for form in forms if form <= mapping.keys()]
        if len(found) == 1:
            known |= found[0]
        else:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing or stored twice, {missing[0]} among them; found {len(mapping)} "
            f"tensors, wanted each of {len(parameters)} parameters once, plain or as _packed and _scale",
            missing[0],
        )
    extra = sorted(name for name in mapping.keys() - known if not model.elsewhere(name))
    if extra:
        raise CheckpointError(
            f"{len(extra)} tensors belong to no parameter of this model, {extra[0]} among them", extra[0]
        )
    packed_names = []
    for name, parameter in parameters.items():
        if name in known:
            yield _plain(model, name, parameter, mapping[name], losses)
        else:
            _check_packed(name, parameter, mapping[f"{name}_packed"], mapping[f"{name}_scale"])
            packed_names.append((name, (tuple(parameter.shape), parameter.dtype)))
    for name, _ in packed_names if model.packed else ():
        source = mapping[f"{name}_packed"], mapping[f"{name}_scale"]
        yield _Value(name, parameters[name], source)
    device = model.device

    def read(names: list[str]) -> tuple[list[str], Tensor, list[tuple[Tensor, Tensor]]]:
        """A stack of equal matrices as stored, and their values, decoded where the model is."""
        sources = [(mapping[f"{name}_packed"], mapping[f"{name}_scale"]) for name in names]
        packed, scale = (torch.stack(parts).to(device) for parts in zip(*sources, strict=True))
        return names, mx.dequantize_mxfp4(packed, scale, parameters[names[0]].dtype), sources

    stacks = _stacks([] if model.packed else packed_names)
    for names, values, sources in map_in_order(read, stacks, _READERS if device.type == "cuda" else 1):
        for name, value, source in zip(names, values, sources, strict=True):
            yield _Value(name, value, source)


def _plain(
    model: K3ForCausalLM, name: str, parameter: nn.Parameter, stored: Tensor, losses: _Losses | None = None
) -> _Value:
    """The value of a parameter that is stored plain."""
    value = _plain_value(model.config, name, parameter, stored)
    if losses is not None and model.config.stored(name) == "mxfp4":
        source = losses.quantize(name, value.to(model.device), model.config.quantization.scale_rule)
        return _Value(name, parameter if model.packed else mx.dequantize_mxfp4(*source, parameter.dtype), source)
    exact = value if value.dtype == torch.float32 and parameter.dtype.itemsize < 4 else None
    if exact is not None and (model.config.stored(name) != "fp32" or exact.to(parameter.dtype).float().equal(exact)):
        exact = None
    return _Value(name, value, None, exact)


def _plain_value(config: K3Config, name: str, parameter: nn.Parameter, stored: Tensor) -> Tensor:
    wanted = tuple(parameter.shape)
    if not stored.is_floating_point():
        raise CheckpointError(f"{name} is {stored.dtype}; it must be a floating-point tensor", name)
    if name.endswith(".A_log") and not config.flat:
        stored = _unpadded(name, stored, wanted[0])
    elif name.endswith("_conv1d.weight") and not config.flat and tuple(stored.shape) == (wanted[0], wanted[2]):
        stored = stored.unsqueeze(1)
    if tuple(stored.shape) != wanted:
        raise CheckpointError(f"{name} has shape {tuple(stored.shape)}; this model needs {wanted}", name)
    if not bool(stored.isfinite().all()):
        raise CheckpointError(
            f"{name} holds NaN or infinite values; the file is damaged or the training diverged", name
        )
    return stored


def _unpadded(name: str, stored: Tensor, heads: int) -> Tensor:
    """The per-head values of A_log; the rest, if there, must be zero padding."""
    if stored.dim() != 1 or stored.shape[0] < heads:
        raise CheckpointError(
            f"{name} has shape {tuple(stored.shape)}; it needs one value for each of {heads} heads", name
        )
    if bool(stored[heads:].any()):
        raise CheckpointError(f"{name} has values behind its {heads} heads; they must be zero padding", name)
    return stored[:heads]


def _check_packed(name: str, parameter: nn.Parameter, packed: Tensor, scale: Tensor) -> None:
    rows, columns = parameter.shape[0], parameter.shape[-1]
    for key, tensor, wanted in (
        (f"{name}_packed", packed, (rows, columns // 2)),
        (f"{name}_scale", scale, (rows, columns // mx.BLOCK)),
    ):
        if tensor.dtype != torch.uint8:
            raise CheckpointError(f"{key} is {tensor.dtype}; it must be uint8", key)
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(f"{key} has shape {tuple(tensor.shape)}; this model needs {wanted}", key)
    if bool((scale == NAN_SCALE).any()):
        raise CheckpointError(f"{name}_scale holds the byte 255, which is NaN; the file is damaged", f"{name}_scale")


# -------------------------------------------------------------------------------------------- single tensors


class _ExpertRun(NamedTuple):
    """Experts of one layer that are read together."""

    layer: int
    experts: tuple[int, ...]


def _runs(model: K3ForCausalLM, names: Iterable[str]) -> Iterator[tuple[str, _ExpertRun]]:
    """(official name of a matrix, run) for each of these tensors' experts that the model keeps packed."""
    found = [EXPERT_NAME.match(name) for name in names] if model.packed else []
    members = {(int(each["layer"]), int(each["expert"])): None for each in found if each is not None}
    for layer, pairs in itertools.groupby(members, key=lambda pair: pair[0]):
        bank, experts = model.packed_banks[layer], [expert for _, expert in pairs]
        size = max(1, PACKED_RUN_BYTES * len(model.experts) // bank.nbytes)
        for start in range(0, len(experts), size):
            run = _ExpertRun(layer, tuple(experts[start : start + size]))
            prefixes = (f"{model.config.prefix}model.layers.{layer}.block_sparse_moe.experts.{n}." for n in run.experts)
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
        self._held: dict[_ExpertRun, dict[tuple[int, str], tuple[Tensor, Tensor]]] = {}

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._parameters.get(name)
        if parameter is None:
            return self._packed(name)
        return _plain_tensor(self._model, name, parameter.detach()).cpu()

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

    def _of_run(self, bank: PackedExperts, run: _ExpertRun) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
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
    copy.stored_wide.update(model.stored_wide)
    copy.origin = model.origin
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
            _commit(copy, [_plain(copy, name, parameters[name], tensor.to(copy.device))])
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
