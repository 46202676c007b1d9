"""What each Triton kernel takes: the limits of every family in one table, and the predicates that ask for them.

Front files and callers ask here, `limits.RMS_NORM.takes(x, weight)`. A limit is a field with its unit and its reason.
Device, compute capability, dtypes of rows and toolchain are the business of `dispatch`, which every predicate asks and
which says once why a reference runs instead. The end of the file names the entries, in the order of the sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from k3rl.kernels import dispatch
from k3rl.numerics import mx

if TYPE_CHECKING:
    from k3rl.kernels.moe.load_counts import Sums


def _power(number: int) -> bool:
    """Whether it is a power of two that a matrix instruction takes as a width."""
    return number >= 16 and number & (number - 1) == 0


# ------------------------------------------------------------------------------------------------------- kda


@dataclass(frozen=True)
class KDALimits:
    """`kda.operator`, `kda.decode` and a whole layer of both: compiled for `dispatch.HEAD_DIMS`."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """q, k [B, T, H, K] and v [B, T, H, V] of the chunked operator."""
        return dispatch.use_kernel("kda", q, k, v, head_dims=(q.shape[-1], v.shape[-1]), float32_rows=False)

    def takes_step(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """q, k [B, H, K] and v [B, H, V] of one decode step."""
        return dispatch.use_kernel("kda_decode", q, k, v, head_dims=(q.shape[-1], v.shape[-1]), float32_rows=False)

    def takes_states(self, state_pool: Tensor) -> bool:
        """state_pool [slots, H, K, V], whose pending rows are taken in."""
        return dispatch.use_kernel("kda_decode", state_pool, head_dims=(state_pool.shape[2], state_pool.shape[3]))

    def takes_layer(self, x: Tensor, head_dim: int) -> bool:
        """Hidden rows x [N, H] of a layer with heads of this width."""
        return dispatch.use_kernel("kda_layer", x, head_dims=(head_dim, head_dim), float32_rows=False)


@dataclass(frozen=True)
class ShortConvLimits:
    """`kda.short_conv`: all streams in one launch."""

    streams: int = 3  # at most: their addresses are arguments
    channels: int = 128  # divide those of a stream: a program's strip

    def takes(self, xs: Sequence[Tensor]) -> bool:
        """Streams xs, each [B, T, C]."""
        return (
            dispatch.use_kernel("short_conv", *xs) and len(xs) <= self.streams and xs[0].shape[-1] % self.channels == 0
        )


# ------------------------------------------------------------------------------------------------------- mla


@dataclass(frozen=True)
class PagedLatentsLimits:
    """`mla.decode_attention` and `mla.chunked_prefill`: attention over latents in pages."""

    latent: int = 512  # channels at most, a power of two as the shared key part is: a tile holds all of them
    page: int = 16  # divides the tokens of a page: a tile of tokens is inside one

    def takes(self, pages: Tensor, r: int) -> bool:
        """Pages [P, page, Z + r]; never on a CPU."""
        z = pages.shape[2] - r
        fits = _power(z) and _power(r) and z <= self.latent and pages.shape[1] % self.page == 0
        return fits and dispatch.use_kernel("paged_latents", pages, float32_rows=False)


@dataclass(frozen=True)
class MLADecodeStepLimits:
    """`mla.decode_step`: every program reads its head's matrices again."""

    rows: int = 16  # of a program
    nbytes: int = 32 << 20  # of matrices that all programs of a launch read together
    rank: int = 1024  # of the queries at most, a multiple of `depth`: a program holds a row
    depth: int = 64

    def takes_queries(self, q_a: Tensor, q_b: Tensor, kv_b: Tensor, nope: int, pages: Tensor) -> bool:
        """q_a [R, Q], q_b [h (n + r), Q], kv_b [h, n + V, Z] with n = `nope`, pages [P, page, Z + r]."""
        heads, both, z = kv_b.shape
        value, rope = both - nope, q_b.shape[0] // heads - nope
        fits = all(_power(n) for n in (nope, rope, value, z)) and z <= PAGED_LATENTS.latent
        fits = fits and q_a.shape[1] % self.depth == 0 and q_a.shape[1] <= self.rank
        fits = fits and pages.shape[1] % PAGED_LATENTS.page == 0
        fits = fits and q_b.is_contiguous() and kv_b.is_contiguous() and len(q_a) > 0
        fits = fits and -(-len(q_a) // self.rows) * max(q_b.nbytes + kv_b.nbytes // 2, kv_b.nbytes // 2) <= self.nbytes
        return fits and dispatch.use_kernel("mla_decode_step", q_a, q_b, kv_b, pages, float32_rows=False)

    def takes_attention(self, pages: Tensor, r: int, kv_b: Tensor, nope: int, gate: Tensor) -> bool:
        """Pages [P, page, Z + r], kv_b [h, n + V, Z] with n = `nope`, gate [R, h * V]."""
        fits = _power(kv_b.shape[1] - nope) and kv_b.is_contiguous() and gate.stride(-1) == 1
        fits = fits and -(-len(gate) // self.rows) * kv_b.nbytes // 2 <= self.nbytes
        return fits and PAGED_LATENTS.takes(pages, r)


@dataclass(frozen=True)
class MLAHeadsLimits:
    """`mla.heads`: copies of whole heads."""

    columns: int = 512  # of a head: a program holds them

    def takes(self, q: Tensor, k_r: Tensor) -> bool:
        """Rows of heads like q [N, h, n + r] and of shared keys [N, r]."""
        return q.shape[-1] <= self.columns and len(q) > 0 and dispatch.use_kernel("mla_heads", q, k_r)


@dataclass(frozen=True)
class MaxLogitsLimits:
    """`mla.max_logits`: a head's width is the sum of two powers of two, as its products want it."""

    width: int = 256  # of the first part

    def split(self, width: int) -> tuple[int, int] | None:
        """Both parts of a head's width, the second maybe 0; None where there are none."""
        first = 1 << (width.bit_length() - 1)
        rest = width - first
        return (first, rest) if first <= self.width and (rest == 0 or _power(rest)) else None

    def takes(self, q: Tensor, k: Tensor) -> bool:
        """q, k [N, h, D]."""
        return dispatch.use_kernel("max_logits", q, k, float32_rows=False) and self.split(q.shape[-1]) is not None


# ------------------------------------------------------------------------------------------------------- moe


@dataclass(frozen=True)
class DecodeRoutingLimits:
    """`moe.decode_routing`: a program holds all experts of a token, or reads the assignments of all tokens."""

    experts: int = 1024  # of a layer
    choices: int = 16  # of a token
    sorted: int = 4096  # assignments: each expert's program reads all of them
    normed: int = 4096  # columns of a sum that is normed in the same launch: one program holds them

    def takes_choice(self, logits: Tensor, bias: Tensor, k: int) -> bool:
        """Logits [..., E] and bias [E], of which k are chosen."""
        fits = logits.shape[-1] <= self.experts and k <= self.choices
        return fits and dispatch.use_kernel("decode_routing", logits, bias)

    def takes_sort(self, ids: Tensor, experts: int) -> bool:
        """Assignments ids [N, k] to so many experts."""
        fits = 0 < ids.numel() <= self.sorted and experts <= self.experts
        return fits and dispatch.use_kernel("decode_routing", ids.new_empty(0, dtype=torch.float32))

    def takes_sum(self, rows: Tensor) -> bool:
        """Rows [R, b] in expert order, whose sums have their dtype."""
        return dispatch.use_kernel("decode_routing", rows)


@dataclass(frozen=True)
class TrainRoutingLimits:
    """`moe.train_routing`: as in decoding, and more assignments."""

    sorted: int = 1 << 20  # assignments: one program adds up an expert's counts of 128 each

    def takes_choice(self, x: Tensor, experts: int, k: int) -> bool:
        """Rows x [N, H] with float32 logits of so many experts, of which k are chosen."""
        fits = len(x) > 0 and k < experts <= DECODE_ROUTING.experts and k <= DECODE_ROUTING.choices
        return fits and dispatch.use_kernel("train_routing", x)

    def takes_sort(self, ids: Tensor, experts: int) -> bool:
        """Assignments ids [N, k] to so many experts."""
        fits = 0 < ids.numel() <= self.sorted and experts <= DECODE_ROUTING.experts
        return fits and dispatch.use_kernel("train_routing", ids.new_empty(0, dtype=torch.float32))


@dataclass(frozen=True)
class LoadCountsLimits:
    """`moe.load_counts`: all on one GPU, in float32."""

    def takes(self, scores: Tensor, cutoff: Tensor, bias: Tensor, sums: Sums) -> bool:
        """Scores [N, E], cutoff [N] and bias [E], and what is added to."""
        alike = all(t.dtype == torch.float32 and t.device == scores.device for t in (scores, cutoff, bias, sums.bias))
        fits = alike and len(scores) > 0 and len(bias) <= DECODE_ROUTING.experts
        fits = fits and sums.counts.device == scores.device
        return fits and dispatch.use_kernel("load_counts", scores)


@dataclass(frozen=True)
class GatherRowsLimits:
    """`moe.gather_rows`."""

    columns: int = 32  # divide those of a row: it is read in whole sectors

    def takes(self, rows: Tensor, index: Tensor) -> bool:
        """Rows [N, b] that are read at index [R]."""
        fits = rows.dim() == 2 and rows.shape[1] % self.columns == 0 and len(index) > 0
        return fits and dispatch.use_kernel("gather_rows", rows)


@dataclass(frozen=True)
class AddGroupsLimits:
    """`moe.add_groups`."""

    def takes(self, total: Tensor, part: Tensor) -> bool:
        """A float32 total [G, ...] to which part [G, ...] is added."""
        return dispatch.use_kernel("add_groups", part) and total.dtype == torch.float32


@dataclass(frozen=True)
class MXFP8Limits:
    """`moe.mxfp8`: whole blocks."""

    def takes(self, x: Tensor) -> bool:
        """x [..., n]."""
        return x.shape[-1] % mx.BLOCK == 0 and x.numel() > 0 and dispatch.use_kernel("mxfp8", x)


@dataclass(frozen=True)
class SiTULimits:
    """`moe.situ`: whole MXFP8 blocks of gates and of ups."""

    def takes(self, gate_up: Tensor, *more: Tensor) -> bool:
        """gate_up [..., 2n] and rows of the same dtype beside it."""
        return (
            gate_up.shape[-1] % (2 * mx.BLOCK) == 0
            and gate_up.numel() > 0
            and dispatch.use_kernel("situ", gate_up, *more)
        )


# ------------------------------------------------------------------------------------------------------- norm


@dataclass(frozen=True)
class AttnResLimits:
    """`norm.attn_res`: a program holds a row of every source."""

    bank_rows: int = 8  # block sums that are mixed
    columns: int = 8192  # of a row

    def takes(self, last: Tensor, bank: Sequence[Tensor], norm: Tensor, proj: Tensor) -> bool:
        """The running sum [N, H], block sums [N, H], w_norm [H] and w_proj [1, H].

        Block sums are float32, or for a mix without gradients in the dtype of the running sum.
        """
        fits = 0 < len(bank) <= self.bank_rows and last.shape[-1] <= self.columns and last.numel() > 0
        fits = fits and all(row.dtype in (torch.float32, last.dtype) for row in bank)
        return fits and dispatch.use_kernel("attn_res", last, norm, proj)


@dataclass(frozen=True)
class RMSNormLimits:
    """`norm.rms_norm`."""

    columns: int = 8192  # of a row: a program holds it

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """x [..., n] and weight [n]."""
        return 0 < x.shape[-1] <= self.columns and x.numel() > 0 and dispatch.use_kernel("rms_norm", x, weight)


@dataclass(frozen=True)
class GatedNormLimits:
    """`norm.gated_norm`: compiled for one width of a head."""

    columns: int = 128

    def takes(self, x: Tensor, gate: Tensor) -> bool:
        """x and gate [..., D]."""
        return dispatch.use_kernel("gated_norm", x, gate) and x.shape[-1] == self.columns


# ------------------------------------------------------------------------------------------------------- gemm


class LargestMatrix(NamedTuple):
    """The largest matrix with which the kernel is faster than the library: every tile of rows reads it again."""

    rows: int  # at most, for this matrix
    nbytes: int
    outputs: int


@dataclass(frozen=True)
class SkinnyLimits:
    """`gemm.skinny.product`, as measured."""

    largest: tuple[LargestMatrix, ...] = (
        LargestMatrix(16, 1 << 30, 1 << 30),
        LargestMatrix(64, 16 << 20, 8192),
        LargestMatrix(256, 4 << 20, 2048),
    )
    based_rows: int = 64  # at most, where something is added to the product: the library does that too
    columns: int = 64  # divide those of a row: what a program reads at a time
    outputs: int = 64  # at least: a program's strip

    def takes(self, x: Tensor, matrix: Tensor, base: Tensor | None = None) -> bool:
        """Rows x [N, a] times matrix [b, a], with base [N, b] added or not; bf16, quietly False elsewhere."""
        if x.device.type == "cpu" or x.dim() != 2 or not x.dtype == matrix.dtype == torch.bfloat16:
            return False
        outputs, width = matrix.shape
        most = next((most for most in self.largest if len(x) <= most.rows), LargestMatrix(0, 0, 0))
        fits = len(x) > 0 and matrix.nbytes <= most.nbytes and self.outputs <= outputs <= most.outputs
        fits = fits and width % self.columns == 0 and x.stride(-1) == 1 and x.stride(0) % 8 == 0
        fits = fits and matrix.is_contiguous() and (base is None or len(x) <= self.based_rows)
        return fits and dispatch.use_kernel("skinny", x, matrix, float32_rows=False)


@dataclass(frozen=True)
class SplitKLimits:
    """`gemm.skinny.split_k`, whose partial sums are added up by whoever reads them."""

    rows: int = 64
    depth: int = 128  # inputs of a split, which divide the width of the rows
    splits: int = 16
    outputs: int = 64  # divide those of the matrix: a program's strip
    sums: int = 1 << 13  # of one split: more are slower to write and to read again than a product that is not split

    def takes(self, x: Tensor, matrix: Tensor) -> bool:
        """Rows x [N, a] times matrix [b, a]."""
        outputs, width = matrix.shape
        fits = 0 < len(x) <= self.rows and width % self.depth == 0 and width // self.depth <= self.splits
        fits = fits and outputs % self.outputs == 0 and len(x) * outputs <= self.sums
        fits = fits and x.stride(-1) == 1 and matrix.is_contiguous()
        return fits and dispatch.use_kernel("split_k", x, matrix, float32_rows=False)


@dataclass(frozen=True)
class GroupedSkinnyLimits:
    """`gemm.grouped_skinny`."""

    rows: int = 4096  # of all experts together; more are the business of a product that reuses what it reads
    tile: int = 64  # divides inputs and outputs

    def takes(self, rows: Tensor, count: int, matrices: Tensor) -> bool:
        """`count` rows like these [., a] times matrices [E, b, a]."""
        fits = 0 < count <= self.rows and matrices.is_contiguous()
        fits = fits and all(n % self.tile == 0 for n in matrices.shape[1:])
        return fits and dispatch.use_kernel("grouped_skinny", rows, matrices, float32_rows=False)


@dataclass(frozen=True)
class W4GroupedSkinnyLimits:
    """`gemm.w4_grouped_skinny`: matrices as MXFP4 in tiles."""

    rows: int = 4096  # as in `GroupedSkinnyLimits`
    chunk: int = 128  # numbers of a row that lie together in a tile, and divide its width: four blocks
    outputs: int = 64  # divide those of a matrix: a program's strip
    scale: int = 128  # bytes beyond, values above 12, and 255, which is NaN, are not for the kernels
    activated_chunks: int = 8  # of a row, at most, for SiTU to be worth its instructions in the kernel, which pads rows

    def takes_shape(self, outputs: int, width: int) -> bool:
        """Matrices [b, a] that can be held in tiles, with strips of outputs that a kernel takes."""
        return width % self.chunk == 0 and outputs % self.outputs == 0

    def takes(self, rows: Tensor, count: int, codes: Tensor) -> bool:
        """`count` rows like these [., a] times matrices in tiles [E, a / 128, b, 64].

        Scale bytes are not looked at: who holds the tiles knows that none is beyond `scale`.
        """
        fits = 0 < count <= self.rows and codes.is_contiguous() and codes.shape[2] % self.outputs == 0
        return fits and dispatch.use_kernel("w4_grouped_skinny", rows, float32_rows=False)

    def takes_decode(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Tiles on this device that become matrices of this dtype."""
        empty = torch.empty(0, dtype=dtype, device=device)
        return dtype == torch.bfloat16 and dispatch.use_kernel("w4_grouped_skinny", empty, float32_rows=False)


# ------------------------------------------------------------------------------------------------------- optim


@dataclass(frozen=True)
class MuonLimits:
    """`optim.muon`."""

    numbers: int = 1 << 26  # of one block, whose partial sums one program adds up
    columns: int = 32  # divide those of a master whose MXFP4 values are wanted: whole blocks

    def takes(self, blocks: Tensor) -> bool:
        """Blocks [n, r, c], as `start` and `finish` have them."""
        fits = dispatch.use_kernel("muon", blocks) and blocks.dtype == torch.float32 and blocks.is_contiguous()
        return fits and blocks[0].numel() <= self.numbers

    def takes_mxfp4(self, master: Tensor) -> bool:
        """A master [..., n] whose MXFP4 values are wanted."""
        fits = master.dtype == torch.float32 and master.dim() > 0 and master.shape[-1] % self.columns == 0
        return fits and master.is_contiguous() and dispatch.use_kernel("mxfp4", master)


@dataclass(frozen=True)
class SymmetricLimits:
    """`optim.symmetric`."""

    numbers: int = 1 << 31  # of one matrix, of p or of the result: places in it are 32-bit

    def takes(self, p: Tensor) -> bool:
        """Matrices like p [n, r, k], one of the last two axes without gaps."""
        fits = 1 in p.stride()[1:] and p.shape[1] * max(p.shape[1:]) < self.numbers
        return fits and dispatch.use_kernel("symmetric", p, float32_rows=False)


@dataclass(frozen=True)
class AddManyLimits:
    """`optim.add_many`."""

    def takes(self, total: Tensor, parts: Sequence[Tensor]) -> bool:
        """A float32 total to which parts of one dtype are added."""
        alike = len({part.dtype for part in parts}) == 1 and total.dtype == torch.float32
        return bool(parts) and alike and dispatch.use_kernel("add_many", parts[0])


# ------------------------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True)
class DrawLimits:
    """`sampling.draw`."""

    tokens: int = 4096  # of a vocabulary: a program holds them

    def takes(self, logits: Tensor) -> bool:
        """Logits [B, V]."""
        return logits.shape[1] <= self.tokens and dispatch.use_kernel("draw", logits)


@dataclass(frozen=True)
class LogitsSliceLimits:
    """`sampling.logits_slice`."""

    def takes(self, logits: Tensor) -> bool:
        """Logits [P, w] in float32 with rows that lie end to end."""
        fits = logits.dtype == torch.float32 and logits.is_contiguous()
        return fits and dispatch.use_kernel("logits_slice", logits)


@dataclass(frozen=True)
class DrawCutLimits:
    """`sampling.cut`: a program has a chunk of a row, and its order is that of float32."""

    chunks: int = 1024  # of a row, of `cut_kernels.CHUNK` tokens each: a program holds a number for each

    def takes(self, logits: Tensor) -> bool:
        """Logits [B, V], bf16 or float32."""
        fits = logits.shape[0] > 0 and logits.shape[1] <= self.chunks * 4096
        return fits and dispatch.use_kernel("draw_cut", logits)


KDA, SHORT_CONV = KDALimits(), ShortConvLimits()
PAGED_LATENTS, MLA_DECODE_STEP = PagedLatentsLimits(), MLADecodeStepLimits()
MLA_HEADS, MAX_LOGITS = MLAHeadsLimits(), MaxLogitsLimits()
DECODE_ROUTING, TRAIN_ROUTING, LOAD_COUNTS = DecodeRoutingLimits(), TrainRoutingLimits(), LoadCountsLimits()
GATHER_ROWS, ADD_GROUPS = GatherRowsLimits(), AddGroupsLimits()
MXFP8, SITU = MXFP8Limits(), SiTULimits()
ATTN_RES, RMS_NORM, GATED_NORM = AttnResLimits(), RMSNormLimits(), GatedNormLimits()
SKINNY, SPLIT_K = SkinnyLimits(), SplitKLimits()
GROUPED_SKINNY, W4_GROUPED_SKINNY = GroupedSkinnyLimits(), W4GroupedSkinnyLimits()
MUON, SYMMETRIC, ADD_MANY = MuonLimits(), SymmetricLimits(), AddManyLimits()
DRAW, DRAW_CUT, LOGITS_SLICE = DrawLimits(), DrawCutLimits(), LogitsSliceLimits()
