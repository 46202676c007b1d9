"""The Triton kernels of `draw_cut`, and of `draw` over vocabularies that no program holds as a whole.

A row is cut into chunks, a program each. `scan` finds the largest logit of each. A threshold is found among the 2^32
ordered bit patterns of float32, four bits at a time: `search` sums every chunk (ranks, or masses) above fifteen
candidates, `pick` takes the largest one whose sum is enough. After eight rounds it is exactly the last logit that
stays; `edge` counts what is above it and equal to it, `settle` how many of the equal ones stay, `finish` draws, and
`list` writes down what stays. All sums are trees of one shape, so results do not depend on which program is first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.sampling.cut import CutDraws, Cuts
from k3rl.kernels.triton_ops import begin, early

CHUNK = 4096
_DIGITS = 8  # of four bits


@triton.jit
def order_of(x):
    """float32 -> int64 in [0, 2^32), in the order of the numbers; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def read_chunk(logits, row, chunk, tokens, logits_t, finite, CHUNK: tl.constexpr):
    """(place in the row, whether it is there, logits float32) of a chunk; 0 in rows that are not finite."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    here = token < tokens
    x = tl.load(logits + row * logits_t + token, mask=here, other=0.0).to(tl.float32)
    return token, here, tl.where(finite > 0.0, x, 0.0)


@triton.jit
def z_of(x, largest, heat):
    """Logits less the largest, at a temperature, in float64; temperature 0 is read as 1."""
    return (x.to(tl.float64) - largest) / tl.where(heat == 0.0, 1.0, heat)


@triton.jit(do_not_specialize=["tokens", "parts"])
def scan_kernel(logits, maxima, sums, tokens, logits_t, parts, CHUNK: tl.constexpr):
    """maxima, sums float64 [B, parts] of each chunk."""
    begin()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    here = token < tokens
    x = tl.load(logits + row * logits_t + token, mask=here, other=0.0).to(tl.float64)
    tl.store(sums + row * parts + chunk, tl.sum(x, axis=0))
    tl.store(maxima + row * parts + chunk, tl.max(tl.where(here, x, float("-inf")), axis=0))


@triton.jit(do_not_specialize=["parts"])
def total_kernel(maxima, sums, largest, finite, parts, PARTS: tl.constexpr):
    """largest, finite float64 [B] of each row; the largest of a row that is not finite is 0."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    here = part < parts
    total = tl.sum(tl.load(sums + row * parts + part, mask=here, other=0.0), axis=0)
    fine = tl.abs(total) < float("inf")
    most = tl.max(tl.load(maxima + row * parts + part, mask=here, other=float("-inf")), axis=0)
    tl.store(largest + row, tl.where(fine, most, 0.0))
    tl.store(finite + row, fine.to(tl.float64))


@triton.jit(do_not_specialize=["tokens", "shift", "parts"])
def search_kernel(
    logits, heat, min_p, largest, finite, bases, found, tokens, logits_t, parts, shift,
    CHUNK: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """found float64 [B, parts, 16]: of a chunk, the mass (or number) of what min-p leaves and what is in order no less
    than base + (j << shift)."""
    begin()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, here, x = read_chunk(logits, row, chunk, tokens, logits_t, tl.load(finite + row), CHUNK)
    z = z_of(x, tl.load(largest + row), tl.load(heat + row))
    here = here & (z >= tl.log(tl.load(min_p + row)))
    weight = tl.where(here, tl.exp(z), 0.0) if MASS else here.to(tl.float64)
    order, base = order_of(x), tl.load(bases + row)
    one = tl.full([1], 1, tl.int64)
    for j in tl.static_range(1, 16):
        least = base + tl.sum(one * j, axis=0) * (tl.sum(one, axis=0) << shift)
        above = tl.sum(tl.where(order >= least, weight, 0.0), axis=0)
        tl.store(found + (row * parts + chunk) * 16 + j, above)


@triton.jit(do_not_specialize=["shift", "parts"])
def pick_kernel(found, targets, bases, parts, shift, PARTS: tl.constexpr):
    """Adds to the base int64 [B] of a row the largest digit whose sum is at least its target float64 [B], if any."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    part, digit = tl.arange(0, PARTS), tl.arange(0, 16)
    here = (part < parts)[:, None] & (digit > 0)[None, :]
    sums = tl.load(found + (row * parts + part[:, None]) * 16 + digit[None, :], mask=here, other=0.0)
    enough = (tl.sum(sums, axis=0) >= tl.load(targets + row)) & (digit > 0)
    best = tl.max(tl.where(enough, digit, 0), axis=0).to(tl.int64)
    tl.store(bases + row, tl.load(bases + row) + (best << shift))


@triton.jit(do_not_specialize=["tokens", "parts"])
def edge_kernel(
    logits, heat, min_p, largest, finite, bases, mass, above, equal, tokens, logits_t, parts, CHUNK: tl.constexpr
):
    """mass float64, above and equal int64 [B, parts] of a chunk: what is above the row's base, and what is equal to
    it, of what min-p leaves."""
    begin()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, here, x = read_chunk(logits, row, chunk, tokens, logits_t, tl.load(finite + row), CHUNK)
    z = z_of(x, tl.load(largest + row), tl.load(heat + row))
    here = here & (z >= tl.log(tl.load(min_p + row)))
    order, base = order_of(x), tl.load(bases + row)
    over = here & (order > base)
    place = row * parts + chunk
    tl.store(mass + place, tl.sum(tl.where(over, tl.exp(z), 0.0), axis=0))
    tl.store(above + place, tl.sum(over.to(tl.int64), axis=0))
    tl.store(equal + place, tl.sum((here & (order == base)).to(tl.int64), axis=0))


@triton.jit
def mass_at(base, largest, heat):
    """The mass of a logit of this order."""
    bits = tl.where(base >= 2147483648, base - 2147483648, -1 - base).to(tl.int32)
    z = z_of(bits.to(tl.float32, bitcast=True), largest, heat)
    return tl.where(base == 0, 0.0, tl.exp(z))


@triton.jit(do_not_specialize=["parts"])
def settle_kernel(
    heat, largest, bases, mass, above, equal, top_k, top_p, ranks, targets, stays, parts,
    PARTS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """How many logits equal to the base stay: stays int64 [B].

    First (LAST False), `ranks` int64 [B] is set to the base and targets to p times the mass that top-k leaves. Then by
    these targets, and, where the base is still the one in `ranks`, by top-k.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    place, here = row * parts + part, part < parts
    over = tl.sum(tl.load(mass + place, mask=here, other=0.0), axis=0)
    count = tl.sum(tl.load(above + place, mask=here, other=0), axis=0)
    ties = tl.sum(tl.load(equal + place, mask=here, other=0), axis=0)
    k, p, base = tl.load(top_k + row), tl.load(top_p + row), tl.load(bases + row)
    each = mass_at(base, tl.load(largest + row), tl.load(heat + row))
    room = tl.where(k > 0, tl.minimum(tl.maximum(k - count, 0), ties), ties)
    if LAST:
        target = tl.load(targets + row)
        wanted = tl.ceil(tl.maximum(target - over, 0.0) / tl.where(each > 0.0, each, 1.0))
        wanted = tl.where((p < 1.0) & (each > 0.0), wanted, ties.to(tl.float64))
        few = tl.minimum(tl.maximum(wanted, 1.0), ties.to(tl.float64)).to(tl.int64)
        stay = tl.where(base == tl.load(ranks + row), tl.minimum(few, room), few)
        tl.store(stays + row, tl.minimum(stay, ties))
    else:
        tl.store(ranks + row, base)
        tl.store(targets + row, p * (over + room.to(tl.float64) * each))
        tl.store(stays + row, room)


@triton.jit(do_not_specialize=["tokens", "parts"])
def finish_kernel(
    logits, heat, min_p, uniform, maxima, largest, finite, bases, mass, above, equal, stays, starts, kept, out,
    tokens, logits_t, parts, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Draws: out float64 [B, 3], kept int64 [B], and of each chunk starts int64 [B, parts], kept ids before it."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    place, real = row * parts + part, part < parts
    top, fine, t = tl.load(largest + row), tl.load(finite + row), tl.load(heat + row)
    base, stay = tl.load(bases + row), tl.load(stays + row)
    each = mass_at(base, top, t)
    ties = tl.load(equal + place, mask=real, other=0)
    ties_before = tl.cumsum(ties, axis=0) - ties
    own = tl.minimum(tl.maximum(stay - ties_before, 0), ties)
    size = tl.load(above + place, mask=real, other=0) + own
    ends = tl.cumsum(size, axis=0)
    tl.store(starts + place, ends - size, mask=real)
    tl.store(kept + row, tl.sum(size, axis=0))
    heavy = tl.load(mass + place, mask=real, other=0.0) + own.to(tl.float64) * each
    reach = tl.cumsum(heavy, axis=0)
    total = tl.max(reach, axis=0)
    target = tl.load(uniform + row) * total
    # The chunk in which the target lies has mass of its own; the last one that has takes what rounding leaves over.
    last = tl.max(tl.where(heavy > 0.0, part, 0), axis=0)
    chunk = tl.minimum(tl.sum((real & (reach <= target)).to(tl.int32), axis=0), last)
    tops = tl.load(maxima + place, mask=real, other=float("-inf"))
    greedy = t == 0.0
    best = tl.min(tl.where(tops == top, part, PARTS - 1), axis=0)
    chunk = tl.where(greedy, tl.minimum(best, parts - 1), chunk)
    before = tl.sum(tl.where(part < chunk, heavy, 0.0), axis=0)
    passed = tl.sum(tl.where(part < chunk, ties, 0), axis=0)

    token, here, x = read_chunk(logits, row, chunk, tokens, logits_t, fine, CHUNK)
    z = z_of(x, top, t)
    order = order_of(x)
    may = here & (z >= tl.log(tl.load(min_p + row)))
    same = may & (order == base)
    keep = (may & (order > base)) | (same & (passed + tl.cumsum(same.to(tl.int64), axis=0) <= stay))
    own_mass = tl.where(keep, tl.exp(z), 0.0)
    cumulative = tl.cumsum(own_mass, axis=0)
    beyond = keep & (own_mass > 0.0) & (before + cumulative > target)
    end = tl.max(tl.where(keep & (own_mass > 0.0), token, 0), axis=0)
    drawn = tl.min(tl.where(beyond, token, end), axis=0)
    largest_id = tl.min(tl.where(here & (z == 0.0), token, tokens - 1), axis=0)
    drawn = tl.where(greedy, largest_id, drawn)
    logprob = tl.sum(tl.where(token == drawn, z, 0.0), axis=0) - tl.log(total)
    tl.store(out + row * 3, drawn.to(tl.float64))
    tl.store(out + row * 3 + 1, logprob)
    tl.store(out + row * 3 + 2, fine)


@triton.jit(do_not_specialize=["tokens", "parts"])
def list_kernel(
    logits, heat, min_p, largest, finite, bases, equal, stays, starts, rows, ids, tokens, logits_t, parts,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the kept ids of each chunk, int32, behind `rows` int64 [B] (negative: not asked for) and `starts`."""
    begin()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, PARTS)
    ties = tl.load(equal + row * parts + part, mask=part < chunk, other=0)
    passed, base, stay = tl.sum(ties, axis=0), tl.load(bases + row), tl.load(stays + row)
    begins = tl.load(rows + row)
    token, here, x = read_chunk(logits, row, chunk, tokens, logits_t, tl.load(finite + row), CHUNK)
    here = here & (begins >= 0)
    order = order_of(x)
    may = here & (z_of(x, tl.load(largest + row), tl.load(heat + row)) >= tl.log(tl.load(min_p + row)))
    same = may & (order == base)
    keep = (may & (order > base)) | (same & (passed + tl.cumsum(same.to(tl.int64), axis=0) <= stay))
    at = begins + tl.load(starts + row * parts + chunk) + tl.cumsum(keep.to(tl.int64), axis=0) - 1
    tl.store(ids + at, token, mask=keep)


class _Drawing:
    """The buffers and launches of one call."""

    def __init__(self, logits: torch.Tensor, cuts: Cuts, chunk: int) -> None:
        self.logits = logits if logits.stride(1) == 1 else logits.contiguous()
        self.rows, self.tokens = logits.shape
        self.parts, self.chunk = triton.cdiv(self.tokens, chunk), chunk
        greedy = cuts.temperature == 0
        self.heat, self.uniform = cuts.temperature.contiguous(), cuts.uniform.contiguous()
        self.min_p = cuts.min_p.masked_fill(greedy, 0.0)
        self.top_p = cuts.top_p.masked_fill(greedy, 1.0)
        self.top_k = cuts.top_k.masked_fill(greedy, 0)
        rows, parts = (self.rows,), (self.rows, self.parts)
        real = {"dtype": torch.float64, "device": logits.device}
        whole = {"dtype": torch.int64, "device": logits.device}
        self.maxima, self.sums, self.mass = (torch.empty(parts, **real) for _ in range(3))
        self.above, self.equal, self.starts = (torch.empty(parts, **whole) for _ in range(3))
        self.largest, self.finite, self.targets = (torch.empty(rows, **real) for _ in range(3))
        self.bases, self.ranks, self.stays = (torch.zeros(rows, **whole) for _ in range(3))
        self.kept, self.out = torch.empty(rows, **whole), torch.empty(self.rows, 3, **real)
        self.found = torch.empty(self.rows, self.parts, 16, **real)
        self.wide = triton.next_power_of_2(self.parts)

    def _on_chunks(self, kernel, *given, **constants):
        shape = self.tokens, self.logits.stride(0), self.parts
        kernel[(self.rows, self.parts)](self.logits, *given, *shape, CHUNK=self.chunk, num_warps=8, **constants)

    def scan(self) -> None:
        self._on_chunks(scan_kernel, self.maxima, self.sums, **early())
        total_kernel[(self.rows,)](
            self.maxima, self.sums, self.largest, self.finite, self.parts, PARTS=self.wide, **early()
        )

    def search(self, targets: torch.Tensor, *, mass: bool) -> None:
        """Sets the bases to the last logits at which what is no less has the targets."""
        self.bases.zero_()
        for digit in reversed(range(_DIGITS)):
            search_kernel[(self.rows, self.parts)](
                self.logits, self.heat, self.min_p, self.largest, self.finite, self.bases, self.found,
                self.tokens, self.logits.stride(0), self.parts, 4 * digit, CHUNK=self.chunk, MASS=mass, num_warps=8,
                **early(),
            )  # fmt: skip
            pick_kernel[(self.rows,)](
                self.found, targets, self.bases, self.parts, 4 * digit, PARTS=self.wide, **early()
            )

    def settle(self, *, last: bool) -> None:
        given = self.heat, self.min_p, self.largest, self.finite, self.bases, self.mass, self.above, self.equal
        self._on_chunks(edge_kernel, *given, **early())
        settle_kernel[(self.rows,)](
            self.heat, self.largest, self.bases, self.mass, self.above, self.equal, self.top_k, self.top_p,
            self.ranks, self.targets, self.stays, self.parts, PARTS=self.wide, LAST=last, **early(),
        )  # fmt: skip

    def finish(self) -> None:
        finish_kernel[(self.rows,)](
            self.logits, self.heat, self.min_p, self.uniform, self.maxima, self.largest, self.finite, self.bases,
            self.mass, self.above, self.equal, self.stays, self.starts, self.kept, self.out,
            self.tokens, self.logits.stride(0), self.parts,
            CHUNK=self.chunk, PARTS=self.wide, num_warps=8, **early(),
        )  # fmt: skip

    def ids(self, counts: torch.Tensor) -> torch.Tensor:
        """See `CutDraws`."""
        ids = torch.empty(int(counts.sum()), dtype=torch.int32, device=self.logits.device)
        rows = torch.where(counts > 0, counts.cumsum(0) - counts, -1).to(self.logits.device)
        given = self.heat, self.min_p, self.largest, self.finite, self.bases, self.equal, self.stays, self.starts
        self._on_chunks(list_kernel, *given, rows, ids, PARTS=self.wide, **early())
        return ids


def draw_cut(logits: torch.Tensor, cuts: Cuts, *, by_rank: bool, by_mass: bool, chunk: int = CHUNK) -> CutDraws:
    """`k3rl.kernels.sampling.cut.draw_cut` by the kernels."""
    drawing = _Drawing(logits, cuts, chunk)
    if drawing.rows:
        drawing.scan()
        if by_rank:
            drawing.search(drawing.top_k.to(torch.float64), mass=False)
            drawing.bases.masked_fill_(drawing.top_k == 0, 0)
        drawing.settle(last=False)
        if by_mass:
            drawing.search(drawing.targets, mass=True)
            torch.maximum(torch.where(drawing.top_p < 1, drawing.bases, 0), drawing.ranks, out=drawing.bases)
            drawing.settle(last=True)
        drawing.finish()
    return CutDraws(drawing.out, drawing.kept, drawing.ids)


def draw_wide(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`k3rl.kernels.sampling.draw.draw` for any number of tokens."""
    ones, none = torch.ones_like(temperature), torch.zeros_like(temperature)
    cuts = Cuts(temperature, uniform, ones, none, none.to(torch.int64))
    return draw_cut(logits, cuts, by_rank=False, by_mass=False).drawn
