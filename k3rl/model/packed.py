"""Frozen routed experts as the bytes that a checkpoint stores: 17/32 of a byte a number.

Few rows are multiplied with the bytes, where a kernel does that (`k3rl.kernels.gemm.w4_grouped_skinny`). Otherwise a
layer's experts are decoded when they are computed with, and again for the backward, so no more than one layer's are
there in the compute dtype at a time. Decoding gives the values that a parameter would hold, to the bit. Letters: E
experts, Z latent width, I expert width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from k3rl.config import K3Error
from k3rl.kernels import limits
from k3rl.kernels.gemm import w4_grouped_skinny
from k3rl.numerics import mx

if TYPE_CHECKING:
    from k3rl.model.config import K3Config
    from k3rl.model.decoder import K3ForCausalLM

EXPERT_NAME = re.compile(
    r"(?:language_model\.)?model\.layers\.(?P<layer>\d+)\.block_sparse_moe\.experts\.(?P<expert>\d+)\."
    r"(?P<leaf>w[123])\.weight"
)
"""The official name of a routed expert's matrix."""
PACKED_RUN_BYTES = 8 << 20
"""Of experts that a device gives or takes at a time: one by one, each costs it dozens of calls."""
_DECODED = 1 << 22  # numbers decoded in one call; it needs a few times their bytes for a moment


class PackError(K3Error, ValueError):
    """Experts that cannot be kept packed; the message says why."""


class _Stack:
    """Matrices [E, rows, columns] as packed [E, rows, columns / 2] and scale [E, rows, columns / 32], uint8; tiled: in
    the tiles of `w4_grouped_skinny`."""

    def __init__(self, experts: int, rows: int, columns: int, device: torch.device | str, tiled: bool) -> None:
        self.shape, self._tiled = (experts, rows, columns), tiled
        lead = (experts, columns // limits.W4_GROUPED_SKINNY.chunk, rows) if tiled else (experts, rows)
        sizes = (64, 4) if tiled else (columns // 2, columns // mx.BLOCK)
        self.packed, self.scale = (torch.zeros(*lead, size, dtype=torch.uint8, device=device) for size in sizes)

    def to(self, device: torch.device) -> None:
        self.packed, self.scale = self.packed.to(device), self.scale.to(device)

    def copy_(self, other: _Stack) -> None:
        self.packed.copy_(other.packed)
        self.scale.copy_(other.scale)

    def stored(self, place: int, rows: slice) -> tuple[Tensor, Tensor]:
        if self._tiled:
            return w4_grouped_skinny.stored(self.packed[place, :, rows], self.scale[place, :, rows])
        return self.packed[place, rows], self.scale[place, rows]

    def fill(self, place: int, rows: slice, given: tuple[Tensor, Tensor]) -> None:
        here: tuple[int | slice, ...] = (place, slice(None), rows) if self._tiled else (place, rows)
        packed, scale = (part.to(self.packed.device) for part in given)
        if self._tiled:
            packed, scale = w4_grouped_skinny.tiled(packed, scale)
        self.packed[here].copy_(packed)
        self.scale[here].copy_(scale)

    def stored_many(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Whole matrices, [n, rows, .] each, in memory of their own."""
        packed, scale = self.packed[places], self.scale[places]
        return w4_grouped_skinny.stored(packed, scale) if self._tiled else (packed, scale)

    def fill_many(self, places: Tensor, rows: slice, packed: Tensor, scale: Tensor) -> None:
        """The same rows [n, ., .] of several matrices, from this device."""
        if self._tiled:
            packed, scale = w4_grouped_skinny.tiled(packed, scale)
        for own, given in ((self.packed, packed), (self.scale, scale)):
            (own[:, :, rows] if self._tiled else own[:, rows]).index_copy_(0, places, given)

    def tensor(self, dtype: torch.dtype, in_range: bool) -> Tensor:
        """The values; in_range: a kernel may decode them."""
        if self._tiled and in_range:
            return w4_grouped_skinny.decode(self.packed, self.scale, dtype)
        decoded = w4_grouped_skinny.decode_reference if self._tiled else mx.dequantize_mxfp4
        out = torch.empty(self.shape, dtype=dtype, device=self.packed.device)
        size = max(1, _DECODED // out[0].numel())
        for here, packed, scale in zip(out.split(size), self.packed.split(size), self.scale.split(size), strict=True):
            here.copy_(decoded(packed, scale, dtype))
        return out


class PackedExperts:
    """The experts `numbers` of one layer. Frozen: there is nothing that a gradient could reach.

    dtype: what they are decoded to. Where kernels multiply with them (`takes`), bytes lie as those read them.
    """

    def __init__(self, numbers: range, latent: int, width: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self._numbers, self._width, self._dtype = numbers, width, dtype
        self.tiled = serves_packed(latent, width, torch.device(device), dtype)
        self._gate_up = _Stack(len(numbers), 2 * width, latent, device, self.tiled)
        self._down = _Stack(len(numbers), latent, width, device, self.tiled)
        self._in_range: bool | None = None  # not known since bytes were written

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return sum(part.nbytes for stack in (self._gate_up, self._down) for part in (stack.packed, stack.scale))

    def stored(self, number: int, leaf: str) -> tuple[Tensor, Tensor]:
        """(packed, scale) of w1, w3 or w2 of an expert, as a checkpoint stores them; to read."""
        stack, place, rows = self._at(number, leaf)
        return stack.stored(place, rows)

    def fill(self, number: int, leaf: str, given: tuple[Tensor, Tensor]) -> None:
        """Takes such (packed, scale) in, from any device."""
        stack, place, rows = self._at(number, leaf)
        stack.fill(place, rows, given)
        self._in_range = None

    def stored_many(self, numbers: Sequence[int]) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        """`stored` of all matrices of these experts by (expert, leaf), on the host: four copies from the device."""
        places = self._places(numbers)
        found: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        for stack, leaves in ((self._gate_up, ("w1", "w3")), (self._down, ("w2",))):
            packed, scale = (part.cpu() for part in stack.stored_many(places))
            for i, number in enumerate(numbers):
                for leaf in leaves:
                    rows = self._at(number, leaf)[2]
                    found[number, leaf] = packed[i, rows], scale[i, rows]
        return found

    def fill_many(self, given: Mapping[tuple[int, str], tuple[Tensor, Tensor]]) -> None:
        """`fill` with several matrices by (expert, leaf), from the host: two copies to the device for each leaf."""
        for leaf in ("w1", "w2", "w3"):
            numbers = [number for number, own in given if own == leaf]
            if numbers:
                stack, _, rows = self._at(numbers[0], leaf)
                pairs = [given[number, leaf] for number in numbers]
                packed, scale = (torch.stack(parts).to(stack.packed.device) for parts in zip(*pairs, strict=True))
                stack.fill_many(self._places(numbers), rows, packed, scale)
        self._in_range = None

    def _places(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor([number - self._numbers.start for number in numbers], device=self._down.packed.device)

    def _at(self, number: int, leaf: str) -> tuple[_Stack, int, slice]:
        place = number - self._numbers.start
        if leaf == "w2":
            return self._down, place, slice(None)
        return self._gate_up, place, slice(0, self._width) if leaf == "w1" else slice(self._width, None)

    def copy_(self, other: PackedExperts) -> None:
        """Takes the bytes of experts that are kept alike."""
        self._gate_up.copy_(other._gate_up)
        self._down.copy_(other._down)
        self._in_range = other._in_range

    def to(self, device: torch.device) -> None:
        """Moves the bytes; views of them that were given out stay where they are."""
        self._gate_up.to(device)
        self._down.to(device)

    def value(self, number: int, leaf: str, dtype: torch.dtype) -> Tensor:
        """What the parameter would hold [rows, columns]."""
        return mx.dequantize_mxfp4(*self.stored(number, leaf), dtype)

    @property
    def in_range(self) -> bool:
        """Whether kernels decode all of it: no scale is beyond theirs. The host waits when bytes were written."""
        if self._in_range is None:
            most = max(int(stack.scale.max()) for stack in (self._gate_up, self._down))
            self._in_range = most <= limits.W4_GROUPED_SKINNY.scale
        return self._in_range

    def gate_up(self) -> Tensor:
        """[E, 2I, Z], decoded anew at each call."""
        return self._gate_up.tensor(self._dtype, self.tiled and self.in_range)

    def down(self) -> Tensor:
        """[E, Z, I], decoded anew at each call."""
        return self._down.tensor(self._dtype, self.tiled and self.in_range)

    def takes(self, rows: Tensor, count: int) -> bool:
        """Whether `count` rows like these meet the bytes themselves."""
        stacks = (self._gate_up, self._down)
        fits = self.tiled and all(limits.W4_GROUPED_SKINNY.takes(rows, count, stack.packed) for stack in stacks)
        return fits and self.in_range

    def gate_up_product(self, rows: Tensor, token: Tensor | None, ends: Tensor) -> Tensor:
        """`grouped_skinny.product` with gate and up, where `takes` says so: rows [., Z] -> [R, 2I]."""
        return w4_grouped_skinny.product(rows, token, self._gate_up.packed, self._gate_up.scale, ends)

    def activated(
        self, rows: Tensor, token: Tensor | None, ends: Tensor, beta: float, linear_beta: float, rule: str | None
    ) -> Tensor:
        """`gate_up_product`, then SiTU, rounded to MXFP8 by a rule or not: what down reads [R, I]."""
        tiles = self._gate_up.packed, self._gate_up.scale
        return w4_grouped_skinny.activated(rows, token, *tiles, ends, beta, linear_beta, rule)

    def down_product(self, rows: Tensor, ends: Tensor) -> Tensor:
        """The same with down: rows in expert order [R, I] -> [R, Z]."""
        return w4_grouped_skinny.product(rows, None, self._down.packed, self._down.scale, ends)


def serves_packed(latent: int, width: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel here that multiplies with packed experts of these widths."""
    table = limits.W4_GROUPED_SKINNY
    fits = table.takes_shape(2 * width, latent) and table.takes_shape(latent, width)
    return device.type == "cuda" and fits and table.takes_decode(device, dtype)


# ------------------------------------------------------------------------------------------ of a whole model


def packed_entry(model: K3ForCausalLM, name: str) -> tuple[PackedExperts, int, str] | None:
    """(bank, expert, leaf) of a parameter that is kept packed, by official name; None for any other."""
    found = EXPERT_NAME.fullmatch(name)
    bank = None if found is None else model.packed_banks.get(int(found["layer"]))
    return None if bank is None or found is None else (bank, int(found["expert"]), found["leaf"])


def check_packable(config: K3Config) -> None:
    """Raises PackError for experts that are not stored as MXFP4."""
    if config.quantization.weights != "mxfp4":
        raise PackError(
            f"this model's experts are stored with weights {config.quantization.weights!r}; only those of 'mxfp4' are "
            "kept packed"
        )


def stored_block(model: K3ForCausalLM, name: str) -> tuple[Tensor, Tensor] | None:
    """(packed, scale) of a routed expert's matrix, by official name, as far as the model keeps them; to read."""
    found = packed_entry(model, name)
    if found is None:
        return model.stored_blocks.get(name)
    bank, number, leaf = found
    return bank.stored(number, leaf)


@torch.no_grad()
def pack_experts(model: K3ForCausalLM) -> None:
    """Keeps routed experts as the bytes that a checkpoint stores, to the bit of each value, and frozen.

    Parameters of experts are then on no device; `official_parameters` gives their values, decoded anew each time.
    Raises PackError for experts that are not stored as MXFP4.
    """
    check_packable(model.config)
    config, rule = model.config, model.config.quantization.scale_rule
    for part in model.moe_parts():
        if part.layer in model.packed_banks:
            continue
        latent, width = config.expert_hidden_size, config.moe_intermediate_size
        packed = PackedExperts(model.experts, latent, width, model.device, model.dtype)
        for number, expert in zip(model.experts, part.experts, strict=True):
            for leaf, weight in (("w1", expert.w1), ("w2", expert.w2), ("w3", expert.w3)):
                name = f"{config.prefix}model.layers.{part.layer}.block_sparse_moe.experts.{number}.{leaf}.weight"
                source = model.stored_blocks.pop(name, None)
                if source is None:
                    source = mx.quantize_mxfp4(weight.weight, rule)
                packed.fill(number, leaf, source)
                empty = torch.empty(weight.weight.shape, dtype=model.dtype, device="meta")
                weight.weight = nn.Parameter(empty, requires_grad=False)
        part.bank.keep(packed)
        model.packed_banks[part.layer] = packed


@torch.no_grad()
def assign_parameter(
    model: K3ForCausalLM, name: str, value: Tensor, stored: tuple[Tensor, Tensor] | None = None
) -> None:
    """Gives a parameter, by official name, a value that its entry in a checkpoint can hold.

    stored: the (packed, scale) bytes that the value was decoded from, which an export writes back.
    """
    if (found := packed_entry(model, name)) is not None:
        bank, number, leaf = found
        rule = model.config.quantization.scale_rule
        bank.fill(number, leaf, mx.quantize_mxfp4(value, rule) if stored is None else stored)
        return
    model.get_parameter(name).copy_(value)
    if stored is None:
        model.stored_blocks.pop(name, None)
    else:
        # On the host, wherever they came from: a GPU would hold a quarter more for bytes that only an export reads.
        model.stored_blocks[name] = stored[0].to("cpu", copy=True), stored[1].to("cpu", copy=True)


@torch.no_grad()
def fill_packed(model: K3ForCausalLM, given: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Takes in (packed, scale) on the host of matrices that are kept packed, by official name, a layer's together."""
    banks: dict[int, dict[tuple[int, str], tuple[Tensor, Tensor]]] = {}
    for name, parts in given.items():
        found = EXPERT_NAME.fullmatch(name)
        assert found is not None
        banks.setdefault(int(found["layer"]), {})[int(found["expert"]), found["leaf"]] = parts
    for layer, matrices in banks.items():
        model.packed_banks[layer].fill_many(matrices)
