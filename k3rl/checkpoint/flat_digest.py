"""Digests of many tensors that lie in one flat buffer, computed where the buffer is, in a few launches.

A tensor takes whole blocks of 64 words of 32 bits, zeros behind its end. With fixed keys k of each lane:

    h(block)  = sum over i < 32 of (w[i] + k[i] mod 2^32) (w[i+32] + k[i+32] mod 2^32)    mod 2^64, signed words (NH)
    lane      = sum over blocks b of mix(h(block b) + (b + 1) c)                          mod 2^64
    digest    = its four lanes: int64 [4], 32 bytes

`mix` is the finalizer of SplitMix64, a bijection. All is integer arithmetic that wraps around, and sums do not depend
on their order, so a CPU and a GPU give the same bits.

Why two different tensors of one size do not share a digest: two blocks that differ have one h in a lane for a share of
at most 2^-32 of all keys (NH is 2^-32-almost-universal), so they agree in all four lanes for 2^-128. Where h differs in
one block the lane's sum differs for certain, as mix is a bijection; where it differs in several, sums of values that
mix spread over 64 bits meet by chance, 2^-64 a lane. The keys are fixed and public: this finds what memory, links and
software do to bytes, it does not stop someone who makes bytes to fit. Shapes, dtypes and places are no part of it; the
table of the buffer has them, and a digest of its own (`flat_layout.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_BYTES = 256
LANES = 4
_WORDS = BLOCK_BYTES // 4
_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = {"cpu": 1 << 11, "cuda": 1 << 17}  # blocks hashed at a time: temporaries in a core's cache, or 64 MiB


def _signed(value: int, bits: int = 64) -> int:
    """The integer of so many bits that has these."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix(value: int) -> int:
    """The finalizer of SplitMix64, of an unsigned integer of 64 bits."""
    value = ((value ^ value >> 30) * _FIRST) & _MASK
    value = ((value ^ value >> 27) * _SECOND) & _MASK
    return value ^ value >> 31


def keys() -> list[list[int]]:
    """Of each lane the 64 keys, signed integers of 32 bits: the upper halves of a SplitMix64 stream."""
    stream = (_mix((n + 1) * _GOLDEN & _MASK) >> 32 for n in range(LANES * _WORDS))
    return [[_signed(next(stream), 32) for _ in range(_WORDS)] for _ in range(LANES)]


def reference_digest(content: bytes) -> bytes:
    """The definition, in integers of any size: of a tensor's bytes its digest, 32 bytes."""
    content += bytes(-len(content) % BLOCK_BYTES)
    words = [int.from_bytes(content[i : i + 4], "little") for i in range(0, len(content), 4)]
    lanes = []
    for key in keys():
        lane = 0
        for number in range(len(words) // _WORDS):
            block = words[number * _WORDS : (number + 1) * _WORDS]
            keyed = [_signed(word + own, 32) for word, own in zip(block, key, strict=True)]
            h = sum(keyed[i] * keyed[i + _WORDS // 2] for i in range(_WORDS // 2))
            lane += _mix((h + (number + 1) * _GOLDEN) & _MASK)
        lanes.append((lane & _MASK).to_bytes(8, "little"))
    return b"".join(lanes)


class FlatDigests:
    """Digests of the tensors of one buffer. blocks: how many each of them has, one after the other, all together."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = torch.tensor(blocks, dtype=torch.int64)
        self._ends = self._blocks.cumsum(0)
        self._on: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, buffer: Tensor) -> Tensor:
        """uint8 [256 x blocks] on any device -> int64 [tensors, 4] there; the host does not wait."""
        keys, places, ends = self._tables(buffer.device)
        words = buffer.view(torch.int32).view(-1, _WORDS)
        hashed = torch.empty(len(words), LANES, dtype=torch.int64, device=buffer.device)
        size = _CHUNK.get(buffer.device.type, _CHUNK["cuda"])
        for start in range(0, len(words), size):
            part, out = words[start : start + size], hashed[start : start + size]
            for lane in range(LANES):
                keyed = (part + keys[lane]).to(torch.int64)
                out[:, lane] = keyed[:, : _WORDS // 2].mul_(keyed[:, _WORDS // 2 :]).sum(1)
        hashed += places.unsqueeze(1)
        # A GPU scans one long row with all of itself, and columns beside each other with a thread for each.
        lanes = _mixed_(hashed).t().contiguous()
        sums = torch.stack([lane.cumsum(0) for lane in lanes])
        sums = torch.nn.functional.pad(sums, (1, 0))  # a tensor of no blocks begins where it ends
        return (sums[:, ends[1:]] - sums[:, ends[:-1]]).t().contiguous()

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """On a device: keys int32 [4, 64]; of each block (b + 1) c, int64; where tensors begin, and the end."""
        if device not in self._on:
            total = int(self._blocks.sum())
            blocks, ends = self._blocks.to(device), self._ends.to(device)
            first = (ends - blocks).repeat_interleave(blocks, output_size=total)
            number = torch.arange(1, total + 1, device=device) - first
            borders = torch.cat([ends.new_zeros(1), ends])
            table = torch.tensor(keys(), dtype=torch.int32, device=device)
            self._on[device] = table, number * _signed(_GOLDEN), borders
        return self._on[device]


def _mixed_(value: Tensor) -> Tensor:
    """`_mix` of int64 [...], in place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        value.bitwise_xor_((value >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return value.bitwise_xor_((value >> 31).bitwise_and_((1 << 33) - 1))
