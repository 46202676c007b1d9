"""Frozen routed experts as the bytes that a checkpoint stores: 17/32 of a byte a number.

A layer's experts are decoded when they are computed with, and again for the backward, so no more than one layer's are
there in the compute dtype at a time. Decoding gives the values that a parameter would hold, to the bit.

Letters: E experts, Z latent width, I expert width.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from k3rl.config import K3Error
from k3rl.numerics import mx

if TYPE_CHECKING:
    from k3rl.model.config import K3Config
    from k3rl.model.decoder import K3ForCausalLM

EXPERT = re.compile(
    r"language_model\.model\.layers\.(?P<layer>\d+)\.block_sparse_moe\.experts\.(?P<expert>\d+)\."
    r"(?P<leaf>w[123])\.weight"
)
"""The official name of a routed expert's matrix."""
_DECODED = 1 << 22  # numbers decoded in one call; it needs a few times their bytes for a moment


class PackError(K3Error, ValueError):
    """Experts that cannot be kept packed; the message says why."""


class _Stack:
    """Matrices [E, rows, columns] as packed [E, rows, columns / 2] and scale [E, rows, columns / 32], uint8."""

    def __init__(self, experts: int, rows: int, columns: int, device: torch.device | str) -> None:
        self.shape = (experts, rows, columns)
        self.packed = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8, device=device)
        self.scale = torch.zeros(experts, rows, columns // mx.BLOCK, dtype=torch.uint8, device=device)

    def to(self, device: torch.device) -> None:
        self.packed, self.scale = self.packed.to(device), self.scale.to(device)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.packed.device)
        size = max(1, _DECODED // out[0].numel())
        for here, packed, scale in zip(out.split(size), self.packed.split(size), self.scale.split(size), strict=True):
            here.copy_(mx.dequantize_mxfp4(packed, scale, dtype))
        return out


class PackedExperts:
    """The experts `numbers` of one layer. Frozen: there is nothing that a gradient could reach."""

    def __init__(self, numbers: range, latent: int, width: int, device: torch.device | str) -> None:
        self._numbers, self._width = numbers, width
        self._gate_up = _Stack(len(numbers), 2 * width, latent, device)
        self._down = _Stack(len(numbers), latent, width, device)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return sum(part.nbytes for stack in (self._gate_up, self._down) for part in (stack.packed, stack.scale))

    def stored(self, number: int, leaf: str) -> tuple[Tensor, Tensor]:
        """(packed, scale) of w1, w3 or w2 of an expert, as a checkpoint stores them: views to read or to fill."""
        place = number - self._numbers.start
        if leaf == "w2":
            return self._down.packed[place], self._down.scale[place]
        rows = slice(0, self._width) if leaf == "w1" else slice(self._width, None)
        return self._gate_up.packed[place, rows], self._gate_up.scale[place, rows]

    def to(self, device: torch.device) -> None:
        """Moves the bytes; views of them that were given out stay where they are."""
        self._gate_up.to(device)
        self._down.to(device)

    def value(self, number: int, leaf: str, dtype: torch.dtype) -> Tensor:
        """What the parameter would hold [rows, columns]."""
        return mx.dequantize_mxfp4(*self.stored(number, leaf), dtype)

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gate and up [E, 2I, Z] and down [E, Z, I], decoded anew at each call."""
        return self._gate_up.tensor(dtype), self._down.tensor(dtype)


# ------------------------------------------------------------------------------------------ of a whole model


def entry(model: K3ForCausalLM, name: str) -> tuple[PackedExperts, int, str] | None:
    """(bank, expert, leaf) of a parameter that is kept packed, by official name; None for any other."""
    found = EXPERT.fullmatch(name)
    bank = None if found is None else model.packed_banks.get(int(found["layer"]))
    return None if bank is None or found is None else (bank, int(found["expert"]), found["leaf"])


def check_packable(config: K3Config) -> None:
    """Raises PackError for experts that are not stored as MXFP4."""
    if config.quantization.weights != "mxfp4":
        raise PackError(
            f"this model's experts are stored with weights {config.quantization.weights!r}; only those of 'mxfp4' are "
            "kept packed"
        )


def share_stored_blocks(model: K3ForCausalLM) -> None:
    """What an export writes back are the bytes that the experts are kept in."""
    for name, _ in model.named_parameters():
        if (found := entry(model, name)) is not None:
            bank, number, leaf = found
            model.stored_blocks[name] = bank.stored(number, leaf)


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
        packed = PackedExperts(model.experts, config.expert_hidden_size, config.moe_intermediate_size, model.device)
        for number, expert in zip(model.experts, part.experts, strict=True):
            for leaf, weight in (("w1", expert.w1), ("w2", expert.w2), ("w3", expert.w3)):
                name = f"language_model.model.layers.{part.layer}.block_sparse_moe.experts.{number}.{leaf}.weight"
                source = model.stored_blocks.get(name)
                if source is None:
                    source = mx.quantize_mxfp4(weight.weight, rule)
                _fill(packed.stored(number, leaf), source)
                empty = torch.empty(weight.weight.shape, dtype=model.dtype, device="meta")
                weight.weight = nn.Parameter(empty, requires_grad=False)
        part.bank.keep(packed)
        model.packed_banks[part.layer] = packed
    share_stored_blocks(model)


@torch.no_grad()
def assign(model: K3ForCausalLM, name: str, value: Tensor, stored: tuple[Tensor, Tensor] | None = None) -> None:
    """Gives a parameter, by official name, a value that its entry in a checkpoint can hold.

    stored: the (packed, scale) bytes that the value was decoded from, which an export writes back.
    """
    if (found := entry(model, name)) is not None:
        bank, number, leaf = found
        rule = model.config.quantization.scale_rule
        _fill(bank.stored(number, leaf), mx.quantize_mxfp4(value, rule) if stored is None else stored)
        return
    model.get_parameter(name).copy_(value)
    if stored is None:
        model.stored_blocks.pop(name, None)
    else:
        # On the host, wherever they came from: a GPU would hold a quarter more for bytes that only an export reads.
        model.stored_blocks[name] = stored[0].to("cpu", copy=True), stored[1].to("cpu", copy=True)


def _fill(kept: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(kept, given, strict=True):
        mine.copy_(other)
