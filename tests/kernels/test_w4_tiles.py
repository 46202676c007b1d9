"""Tiles of packed matrices: nothing is lost on the way there and back, and they hold the values of the stored bytes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.kernels.gemm import grouped_skinny, w4_grouped_skinny
from k3rl.numerics import mx


def stored(lead: tuple[int, ...], outputs: int, chunks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*lead, outputs, 64 * chunks), dtype=torch.uint8, generator=generator)
    return packed, torch.randint(0, 255, (*lead, outputs, 4 * chunks), dtype=torch.uint8, generator=generator)


@settings(max_examples=30)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2), outputs=st.integers(1, 5), chunks=st.integers(1, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_tiles_hold_every_number_once_and_give_the_bytes_back(lead, outputs, chunks, seed):
    packed, scale = stored(tuple(lead), outputs, chunks, seed)
    codes, scales = w4_grouped_skinny.tiled(packed, scale)
    back = w4_grouped_skinny.stored(codes, scales)
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], scale)
    # Written another way: bit by bit, from the sign to the lowest, of the codes of i, 32 + i, 64 + i and 96 + i.
    plain = torch.stack([packed & 15, packed >> 4], -1).view(*lead, outputs, chunks, 4, 32).transpose(-3, -4)
    words = codes.view(torch.int16).to(torch.int32) & 0xFFFF
    for block, places in enumerate(((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14))):
        bits = [(words >> place & 1) << (3 - at) for at, place in enumerate(places)]
        assert torch.equal(sum(bits), plain[..., block, :].to(torch.int32))


def test_products_are_those_of_the_decoded_matrices():
    packed, scale = stored((3,), 64, 2, 0)
    scale = scale % 20 + 115
    rows, ends = torch.randn(5, 256, dtype=torch.float64), torch.tensor([2, 2, 5], dtype=torch.int32)
    tiles = w4_grouped_skinny.tiled(packed, scale)
    matrices = mx.dequantize_mxfp4(packed, scale, torch.float64)
    assert torch.equal(w4_grouped_skinny.decode(*tiles, torch.float64), matrices)
    found = w4_grouped_skinny.product(rows, None, *tiles, ends)
    assert torch.equal(found, grouped_skinny.product(rows, None, matrices, ends))
