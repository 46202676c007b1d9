"""W4 grouped skinny GEMM: `grouped_skinny` for experts that are held as stored bytes and read as MXFP4.

A quarter of the bytes of bf16, which is all the time a decode step takes for its experts. The values that the product
sees are those of `mx.dequantize_mxfp4` to the bit, and its sums have the bits of `grouped_skinny.product`.

The bytes lie in tiles of 128 numbers of a row, in the order in which registers take them. `tiled` and `stored` turn the
bytes of a checkpoint into tiles and back; nothing is lost.

Letters: E matrices, b outputs, a inputs, a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.gemm import grouped_skinny
from k3rl.kernels.moe import situ
from k3rl.numerics import mx


def tiled(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Stored packed uint8 [..., b, a / 2], scale uint8 [..., b, a / 32] -> codes [..., a / 128, b, 64], scales
    [..., a / 128, b, 4].

    Word i of a tile, two bytes, holds the codes of the numbers i, 32 + i, 64 + i and 96 + i of its 128: the bits of a
    code, the sign first, are bits 15 8 7 6 of the word, or 12 5 4 3, 9 2 1 0, 13 11 10 14. Scales are those of the four
    blocks.
    """
    *lead, b, half = packed.shape
    pairs = packed.reshape(*lead, b, half // 64, 4, 16)
    numbers = torch.stack([pairs & 15, pairs >> 4], -1).view(*lead, b, half // 64, 4, 32).to(torch.int16)
    first, second, third, fourth = numbers.unbind(-2)
    words = _spread(first) << 6 | _spread(second) << 3 | _spread(third)
    words |= (fourth & 8) << 10 | (fourth & 6) << 9 | (fourth & 1) << 14
    codes = words.view(torch.uint8).transpose(-2, -3).contiguous()
    return codes, scale.reshape(*lead, b, half // 64, 4).transpose(-2, -3).contiguous()


def _spread(code: Tensor) -> Tensor:
    """Four bits -> the sign six places above the other three."""
    return code & 7 | (code & 8) << 6


def stored(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `tiled`."""
    *lead, chunks, b, _ = codes.shape
    words = codes.transpose(-2, -3).contiguous().view(torch.int16)
    numbers = [word & 7 | word >> 6 & 8 for word in (words >> 6, words >> 3, words)]
    numbers.append(words >> 10 & 8 | words >> 9 & 6 | words >> 14 & 1)
    pairs = torch.stack(numbers, -2).to(torch.uint8).view(*lead, b, chunks, 4, 16, 2)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).view(*lead, b, chunks * 64)
    return packed, scales.transpose(-2, -3).reshape(*lead, b, chunks * 4)


def product(rows: Tensor, token: Tensor | None, codes: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """`grouped_skinny.product` with matrices [E, b, a] in tiles: codes [E, a / 128, b, 64], scales [E, a / 128, b,
    4].
    """
    count = len(rows) if token is None else len(token)
    if limits.W4_GROUPED_SKINNY.takes(rows, count, codes):
        from k3rl.kernels.gemm import w4_grouped_skinny_kernels

        return w4_grouped_skinny_kernels.product(rows, token, codes, scales, ends)
    return product_reference(rows, token, codes, scales, ends)


def product_reference(rows: Tensor, token: Tensor | None, codes: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """`product` in plain torch."""
    return grouped_skinny.product_reference(rows, token, decode_reference(codes, scales, rows.dtype), ends)


def activated(
    rows: Tensor, token: Tensor | None, codes: Tensor, scales: Tensor, ends: Tensor,
    beta: float, linear_beta: float, rule: str | None,
) -> Tensor:  # fmt: skip
    """`situ.situ` of `product` with gates and ups in tiles [E, a / 128, 2n, 64] -> [R, n]; rule: of MXFP8, if any.

    One kernel where products are short, with the bits of two.
    """
    count = len(rows) if token is None else len(token)
    if not limits.W4_GROUPED_SKINNY.takes(rows, count, codes):
        return activated_reference(rows, token, codes, scales, ends, beta, linear_beta, rule)
    if codes.shape[1] > limits.W4_GROUPED_SKINNY.activated_chunks:
        return situ.situ(product(rows, token, codes, scales, ends), beta, linear_beta, rule)
    from k3rl.kernels.gemm import w4_grouped_skinny_kernels

    return w4_grouped_skinny_kernels.product(rows, token, codes, scales, ends, unit=(beta, linear_beta, rule))


def activated_reference(
    rows: Tensor, token: Tensor | None, codes: Tensor, scales: Tensor, ends: Tensor,
    beta: float, linear_beta: float, rule: str | None,
) -> Tensor:  # fmt: skip
    """`activated` in plain torch."""
    return situ.situ_reference(product_reference(rows, token, codes, scales, ends), beta, linear_beta, rule)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices [E, b, a] of tiles, exact; in bf16 by a kernel on a GPU."""
    if limits.W4_GROUPED_SKINNY.takes_decode(codes.device, dtype):
        from k3rl.kernels.gemm import w4_grouped_skinny_kernels

        return w4_grouped_skinny_kernels.decode(codes, scales)
    return decode_reference(codes, scales, dtype)


def decode_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`decode` in plain torch."""
    return mx.dequantize_mxfp4(*stored(codes, scales), dtype)
