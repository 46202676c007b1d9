"""A weight version in flat buffers: the stored tensors of a model end to end, in an order that its configuration fixes.

A shard is what one rank of the learner sends: the routed experts that it holds, and on one rank everything else. Its
buffer, uint8, has four regions: tensors stored in float32, those in bfloat16, packed codes of experts, their scales.
The experts of a layer lie one after the other, a matrix at a time, so that all of them are read and written as one
tensor. Every tensor begins at a multiple of 256 bytes, with zeros behind its end.

Who sends and who takes derive the layout from the configuration each by itself, and compare its digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from k3rl.checkpoint.flat_digest import BLOCK_BYTES, FlatDigests
from k3rl.checkpoint.official import CheckpointError
from k3rl.model import EXPERT_NAME, ExpertBank, K3Config, K3ForCausalLM, tensor_table
from k3rl.numerics import mx, stored_dtype

Region = Literal["fp32", "bf16", "codes", "scales"]
_REGIONS: tuple[Region, ...] = ("fp32", "bf16", "codes", "scales")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "codes": torch.uint8, "scales": torch.uint8}
_SUFFIX = {"codes": "_packed", "scales": "_scale"}
_LEAVES = ("w1", "w3", "w2")  # the order of `ExpertBank.leaves`
_NAN_SCALE = 255


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """`copies` stored tensors of one shape, `stride` bytes apart, from byte `start` on.

    name: the official name of the parameter; with copies that of the first expert here. region: how it is stored.
    """

    name: str
    region: Region
    shape: tuple[int, ...]
    copies: int
    start: int
    stride: int

    @property
    def stop(self) -> int:
        return self.start + self.copies * self.stride

    def of(self, buffer: Tensor) -> Tensor:
        """[copies, *shape], a view of the buffer."""
        kind = _DTYPES[self.region]
        steps = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        size = kind.itemsize
        flat = buffer[self.start : self.stop].view(kind)
        return flat.as_strided((self.copies, *self.shape), (self.stride // size, *steps), flat.storage_offset())


@dataclass(frozen=True)
class FlatLayout:
    """Where each stored tensor of a shard lies. experts: the run that it has; rest: whether it has all else."""

    config: K3Config
    experts: range
    rest: bool

    @cached_property
    def entries(self) -> tuple[FlatEntry, ...]:
        """In the order of the buffer."""
        made: list[FlatEntry] = []
        start = 0
        for region, name, shape, copies in sorted(self._listed(), key=lambda one: _REGIONS.index(one[0])):
            size = math.prod(shape) * _DTYPES[region].itemsize
            stride = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            made.append(FlatEntry(name, region, shape, copies, start, stride))
            start += copies * stride
        return tuple(made)

    def _listed(self) -> Iterator[tuple[Region, str, tuple[int, ...], int]]:
        """(region, name, shape, copies) of each entry, in the order of the model."""
        weights = self.config.quantization.weights
        for entry in tensor_table(self.config):
            stored, shape = stored_dtype(entry.name, weights), entry.shape
            if not EXPERT_NAME.match(entry.name):
                if self.rest and stored != "mxfp4":
                    padded = shape if entry.stored_elements is None else (entry.stored_elements,)
                    yield stored, entry.name, padded, 1
                continue
            name = entry.name.replace(".experts.0.", f".experts.{self.experts.start}.")
            if stored != "mxfp4":
                yield stored, name, shape, len(self.experts)
                continue
            *lead, width = shape
            yield "codes", name, (*lead, width // 2), len(self.experts)
            yield "scales", name, (*lead, width // mx.BLOCK), len(self.experts)

    @cached_property
    def size(self) -> int:
        """Bytes of the buffer."""
        return self.entries[-1].stop

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the tensors alone, without padding."""
        return sum(e.copies * math.prod(e.shape) * _DTYPES[e.region].itemsize for e in self.entries)

    @cached_property
    def tensors(self) -> int:
        """How many there are."""
        return sum(entry.copies for entry in self.entries)

    @cached_property
    def digests(self) -> FlatDigests:
        """Computes the digests of a buffer, one for each tensor in the order of the entries."""
        return FlatDigests([e.stride // BLOCK_BYTES for e in self.entries for _ in range(e.copies)])

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of the whole table: names, shapes, dtypes and places."""
        table = [[e.name, e.region, e.shape, e.copies, e.start, e.stride] for e in self.entries]
        return hashlib.sha256(json.dumps(table).encode()).hexdigest()

    def name(self, number: int) -> str:
        """The official name of a stored tensor, by its place among the digests."""
        for entry in self.entries:
            if number < entry.copies:
                first = f".experts.{self.experts.start}."
                return entry.name.replace(first, f".experts.{self.experts.start + number}.") + _SUFFIX.get(
                    entry.region, ""
                )
            number -= entry.copies
        raise IndexError(f"the shard has {self.tensors} tensors")

    @cached_property
    def banks(self) -> dict[int, dict[str, dict[Region, FlatEntry]]]:
        """Entries of routed experts by layer, leaf (w1, w2, w3) and region."""
        found: dict[int, dict[str, dict[Region, FlatEntry]]] = {}
        for entry in self.entries:
            if (match := EXPERT_NAME.match(entry.name)) is not None:
                found.setdefault(int(match["layer"]), {}).setdefault(match["leaf"], {})[entry.region] = entry
        return found

    @cached_property
    def plain(self) -> tuple[FlatEntry, ...]:
        """Entries of everything else."""
        return tuple(entry for entry in self.entries if not EXPERT_NAME.match(entry.name))

    def region(self, buffer: Tensor, region: Region) -> Tensor:
        """All of a region of the buffer, padding included, flat, in its dtype."""
        inside = [entry for entry in self.entries if entry.region == region]
        start, stop = (inside[0].start, inside[-1].stop) if inside else (0, 0)
        return buffer[start:stop].view(_DTYPES[region])


def shard_layout(model: K3ForCausalLM, *, rest: bool) -> FlatLayout:
    """The layout of what this model's rank sends."""
    return FlatLayout(model.config, model.experts, rest)


# -------------------------------------------------------------------------------------------- model -> buffer


@torch.no_grad()
def write_flat(model: K3ForCausalLM, layout: FlatLayout, buffer: Tensor) -> None:
    """Fills a buffer, whose padding is zero, with the stored tensors of a model, on whatever devices the two are.

    Experts are packed anew from their values, a layer's matrices at a time; bytes that were loaded are not looked up,
    so that a block that did not change may have other bytes of equal values than its checkpoint.
    """
    into: list[Tensor] = []
    given: list[Tensor] = []
    for entry in layout.plain:  # by its name: to list all parameters takes longer than to copy them
        value = model.get_parameter(entry.name).detach()
        view = entry.of(buffer)[0]
        into.append(view[: len(value)] if entry.name.endswith(".A_log") else view)
        given.append(value)
    _copy_all(into, given)
    for part in model.moe_parts():
        for leaf, regions in layout.banks[part.layer].items():
            _write_experts(part.bank, leaf, regions, buffer, model.config.quantization.scale_rule)


def _write_experts(bank: ExpertBank, leaf: str, regions: dict[Region, FlatEntry], buffer: Tensor, rule: str) -> None:
    """All matrices of one leaf of a layer."""
    if bank.packed is not None:
        codes, scales = bank.packed.stored_leaf(leaf)
    else:
        values = torch.stack([weight.detach() for weight in bank.leaves[_LEAVES.index(leaf) :: len(_LEAVES)]])
        if "codes" not in regions:
            regions["bf16"].of(buffer).copy_(values)
            return
        codes, scales = mx.quantize_mxfp4(values, rule)
    regions["codes"].of(buffer).copy_(codes)
    regions["scales"].of(buffer).copy_(scales)


def _copy_all(into: list[Tensor], given: list[Tensor]) -> None:
    """Copies tensors one by one into others, those of like dtypes and devices in one call."""
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(into, given, strict=True):
        own, their = kinds.setdefault((one.dtype, other.dtype, other.device), ([], []))
        own.append(one)
        their.append(other)
    for own, their in kinds.values():
        torch._foreach_copy_(own, their)


# -------------------------------------------------------------------------------------------- buffer -> model


@torch.no_grad()
def read_flat(model: K3ForCausalLM, layout: FlatLayout, buffer: Tensor) -> None:
    """Gives a model that nobody uses the values of a shard.

    Raises CheckpointError for numbers that are not finite and scale bytes 255, by the tensor's name.
    """
    _check_finite(layout, buffer)
    into: list[Tensor] = []
    given: list[Tensor] = []
    for entry in layout.plain:
        parameter, view = model.get_parameter(entry.name), entry.of(buffer)[0]
        into.append(parameter)
        given.append(view[: parameter.shape[0]] if entry.name.endswith(".A_log") else view)
    _copy_all(into, given)
    for part in model.moe_parts():
        for leaf, regions in layout.banks[part.layer].items():
            if part.bank.packed is not None:
                codes, scales = regions["codes"].of(buffer), regions["scales"].of(buffer)
                part.bank.packed.fill_leaf(layout.experts, leaf, codes, scales)
                continue
            weights = part.bank.leaves[_LEAVES.index(leaf) :: len(_LEAVES)]
            own: list[Tensor] = [weights[number - model.experts.start] for number in layout.experts]
            _copy_all(own, list(_values(regions, buffer, own[0].dtype).unbind()))


def _values(regions: dict[Region, FlatEntry], buffer: Tensor, kind: torch.dtype) -> Tensor:
    """The experts' matrices [E, rows, columns] of one leaf."""
    if "codes" not in regions:
        return regions["bf16"].of(buffer)
    return mx.dequantize_mxfp4(regions["codes"].of(buffer), regions["scales"].of(buffer), kind)


def _check_finite(layout: FlatLayout, buffer: Tensor) -> None:
    """One question to the device; which tensor it is, is looked for afterwards."""
    good = [layout.region(buffer, "fp32").isfinite().all(), layout.region(buffer, "bf16").isfinite().all()]
    good.append((layout.region(buffer, "scales") != _NAN_SCALE).all())
    if bool(torch.stack(good).all()):
        return
    number = 0
    for entry in layout.entries:
        for each in entry.of(buffer):
            bad = (each == _NAN_SCALE).any() if entry.region == "scales" else not each.isfinite().all()
            if entry.region != "codes" and bool(bad):
                raise CheckpointError(f"{layout.name(number)} holds NaN or infinite values; the training diverged")
            number += 1
