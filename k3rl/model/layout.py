"""Where packed rows stand: segments, KDA chunks and attention grids, as index tensors shared by all layers.

Everything per token works on rows [N, ...], all segments one after the other, no padding. Only sequence mixing needs
other orders, and this module makes the index tensors for them, once per forward.

Letters: N rows, S segments, C = 16 tokens a KDA chunk, h heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from k3rl.config import K3Error
from k3rl.types import ContextCommunicator

CHUNK = 16  # exp of 8 gates of at least -5 on each side of the middle stays inside float32
HISTORY = 3  # rows before a segment that its short convolution (width 4) can see


class LayoutError(K3Error, ValueError):
    """Lengths that do not describe the rows given; the message says what was got and wanted."""


@dataclass(frozen=True)
class HeadIndex:
    """Index tensors over (extended row, head) pairs; slots are ordered (chunk, head, token), M = chunks * heads.

    qkv [3 * M * C]: rows of an [n_ext * 3h, K] view for q, k, v slots. single [M * C]: rows of an [n_ext * h, K] view.
    out [N * h]: slot of each (row, head). padding: slots without a token. The way back has one more slot, a zero row,
    for histories: back_qkv [n_ext * 3h] into 3 * M * C + 1 slots, back_single [n_ext * h] into M * C + 1 slots.
    """

    qkv: Tensor
    single: Tensor
    out: Tensor
    padding: Tensor
    back_qkv: Tensor
    back_single: Tensor


@dataclass
class ChunkPlan:
    """KDA chunks of segments, in step-major order: chunk c of every segment that has one, then chunk c + 1.

    order [S]: segments with the most chunks first, so the ones active at a step are a prefix; rank [S] its inverse.
    active: how many segments have a chunk c. rows [chunks * C]: extended row of each slot, 0 for padding.
    slot [N]: slot of each row; extended [N]: extended row of each row. padding: slots that hold no token.
    """

    order: Tensor
    rank: Tensor
    active: list[int]
    rows: Tensor
    slot: Tensor
    extended: Tensor
    padding: Tensor
    n_extended: int
    heads: dict[int, HeadIndex] = field(default_factory=dict)

    def by_head(self, heads: int) -> HeadIndex:
        """The index tensors for `heads` heads, made once."""
        if heads not in self.heads:
            self.heads[heads] = self._by_head(torch.arange(heads, device=self.rows.device))
        return self.heads[heads]

    def chunks_of(self, segment: int) -> list[int]:
        """The chunks of one segment from first to last, as places in step-major order."""
        place, first, found = int(self.rank[segment]), 0, []
        for count in self.active:
            if place >= count:
                break
            found.append(first + place)
            first += count
        return found

    def _by_head(self, head: Tensor) -> HeadIndex:
        h, cells = len(head), len(self.rows) * len(head)
        rows = self.rows.view(-1, 1, CHUNK)  # chunk, 1, token
        single = rows * h + head.view(1, -1, 1)
        stream = torch.arange(3, device=head.device)
        qkv = (rows * (3 * h) + head.view(1, -1, 1)).view(1, -1) + h * stream.view(3, 1)
        out = _slots_by_head(self.slot, head)
        back_single = torch.full((self.n_extended, h), cells, dtype=torch.int64, device=head.device)
        back_single[self.extended] = out.view(-1, h)
        back_qkv = back_single.view(-1, 1, h) + cells * stream.view(1, 3, 1)
        back_qkv.masked_fill_((back_single == cells).view(-1, 1, h), 3 * cells)
        return HeadIndex(
            qkv.reshape(-1),
            single.reshape(-1),
            out,
            _slots_by_head(self.padding, head),
            back_qkv.reshape(-1),
            back_single.reshape(-1),
        )


def _slots_by_head(slots: Tensor, head: Tensor) -> Tensor:
    """Slots [n] in (chunk, token) order -> [n * h] in (chunk, head, token) order."""
    chunk, token = slots.view(-1, 1) // CHUNK, slots.view(-1, 1) % CHUNK
    return ((chunk * len(head) + head) * CHUNK + token).reshape(-1)


@dataclass(frozen=True)
class GridIndex:
    """Index tensors between (row, head) pairs and cells (sequence, head, column) of a grid.

    gather [b * h * t]: pair of each cell; cells [n * h]: cell of each pair of the
    grid's members; padding: cells without a token.
    """

    gather: Tensor
    cells: Tensor
    padding: Tensor


@dataclass
class Grid:
    """Some segments of similar length as a padded grid [b, t].

    group: the segments, rising, and segments [b] as a tensor; rows [b, t]: row of each cell; padding has the first row
    of its own sequence, so that no sequence ever reads another, broken ones included; valid [b, t]; members [n]: the
    rows, rising.
    seen: the grid of the rows that these ones attend to, where it is another one. It is as wide, or it has one sequence
    and its rows end with those of this grid.
    """

    group: list[int]
    segments: Tensor
    rows: Tensor
    valid: Tensor
    members: Tensor
    seen: Grid | None = None
    heads: dict[int, GridIndex] = field(default_factory=dict)

    @property
    def keys(self) -> Grid:
        """The grid of the rows that are attended to."""
        return self if self.seen is None else self.seen

    def by_head(self, heads: int) -> GridIndex:
        """The index tensors for `heads` heads, made once."""
        if heads not in self.heads:
            self.heads[heads] = self._by_head(torch.arange(heads, device=self.rows.device))
        return self.heads[heads]

    def _by_head(self, head: Tensor) -> GridIndex:
        (b, t), h = self.rows.shape, len(head)
        gather = self.rows.view(b, 1, t) * h + head.view(1, h, 1)
        valid = self.valid.view(b, 1, t).expand(b, h, t)
        every = torch.arange(b * h * t, device=head.device).view(b, h, t)
        cells = every.transpose(1, 2)[self.valid]  # [n, h]
        return GridIndex(gather.reshape(-1), cells.reshape(-1), every[~valid])


def packed_lengths(cu_seqlens: Tensor, n_rows: int) -> list[int]:
    """Lengths of packed sequences from cu_seqlens [S + 1], which must start at 0, rise and end at n_rows."""
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != n_rows:
        raise LayoutError(f"cu_seqlens must run from 0 to the {n_rows} packed tokens; got {ends[:2]} .. {ends[-1:]}")
    return [b - a for a, b in pairwise(ends)]


class Layout:
    """Lengths of the segments of a packed row array. Raises LayoutError for empty segments.

    context: the ranks that hold what comes before the first segment and after the last one; None on one process.
    """

    fixed = False  # whether only the device knows the lengths, see `FixedLayout`
    padding: Tensor | None = None  # bool [N]: rows that no sequence has; None when there is none

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        context: ContextCommunicator | None = None,
    ) -> None:
        self.context = context
        self.lengths = list(lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise LayoutError(f"every segment needs at least one token; got lengths {self.lengths[:8]}")
        self.device = torch.device(device)
        self.n_rows = sum(self.lengths)
        self.n_segments = len(self.lengths)
        self.longest = max(self.lengths)
        self._after: Tensor | None = None  # of the one forward that this layout is made for
        self._position_after: Tensor | None = None
        self._with_before: Layout | None = None
        self._ends_after: dict[int, Tensor] = {}

    @cached_property
    def starts(self) -> Tensor:
        """[S] first row of each segment."""
        lengths = self.lengths_tensor
        return torch.cumsum(lengths, 0) - lengths

    @cached_property
    def lengths_tensor(self) -> Tensor:
        """[S] int64."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [S + 1]: where the segments begin, and the number of rows."""
        ends = torch.cumsum(self.lengths_tensor, 0, dtype=torch.int32)
        return nn.functional.pad(ends, (1, 0))

    def ends_after(self, rows: int) -> Tensor:
        """`cu_seqlens` where the first segment has so many more rows at its beginning; made once."""
        if rows == 0:
            return self.cu_seqlens
        if rows not in self._ends_after:
            ends = self.cu_seqlens + rows
            ends[0] = 0
            self._ends_after[rows] = ends
        return self._ends_after[rows]

    @cached_property
    def segment(self) -> Tensor:
        """[N] segment of each row."""
        return torch.repeat_interleave(
            torch.arange(self.n_segments, device=self.device), self.lengths_tensor, output_size=self.n_rows
        )

    @cached_property
    def position(self) -> Tensor:
        """[N] token index of each row inside its segment."""
        return torch.arange(self.n_rows, device=self.device) - self.starts[self.segment]

    @cached_property
    def first_row(self) -> Tensor:
        """[N] int32: the first row of each row's segment."""
        return self.starts.to(torch.int32).index_select(0, self.segment)

    def after(self, lengths: Tensor) -> Tensor:
        """lengths int64 [S] on the CPU, tokens before each segment -> the same on the device; copied once."""
        if self._after is None:
            self._after = lengths.clone() if self.device.type == "cpu" else lengths.to(self.device)
        return self._after

    def position_after(self, lengths: Tensor) -> Tensor:
        """[N] token index of each row where `lengths` tokens come before its segment."""
        if self._position_after is None:
            self._position_after = self.after(lengths).index_select(0, self.segment) + self.position
        return self._position_after

    def with_before(self, lengths: Tensor) -> Layout:
        """The same segments with the `lengths` int64 [S] tokens before them; made once."""
        if self._with_before is None:
            total = [before + own for before, own in zip(lengths.tolist(), self.lengths, strict=True)]
            self._with_before = Layout(total, self.device)
        return self._with_before

    @cached_property
    def sequence_position(self) -> Tensor:
        """[N] token index of each row inside its sequence, rows on other ranks counted."""
        if self.context is None or self.context.before == 0:
            return self.position
        return torch.where(self.segment == 0, self.position + self.context.before, self.position)

    def rows_of(self, members: Sequence[int]) -> Tensor:
        """Rows of some segments, in their order."""
        own = Layout([self.lengths[s] for s in members], self.device)
        first = self.starts[torch.tensor(members, device=self.device)] - own.starts
        first = first.index_select(0, own.segment)
        return first + torch.arange(len(first), device=self.device)

    # -- extended rows: HISTORY rows before each segment ----------------------------------------------------------

    @property
    def n_extended(self) -> int:
        """Rows when every segment is preceded by HISTORY rows."""
        return self.n_rows + HISTORY * self.n_segments

    @cached_property
    def extended(self) -> Tensor:
        """[N] extended row of each row."""
        return torch.arange(self.n_rows, device=self.device) + HISTORY * (self.segment + 1)

    @cached_property
    def history(self) -> Tensor:
        """[S * HISTORY] extended rows of the histories, oldest first."""
        first = self.starts + HISTORY * torch.arange(self.n_segments, device=self.device)
        return (first.view(-1, 1) + torch.arange(HISTORY, device=self.device)).reshape(-1)

    @cached_property
    def tails(self) -> Tensor:
        """[S * HISTORY] extended rows of the last HISTORY projections of each segment (histories where short)."""
        return (self.history.view(-1, HISTORY) + self.lengths_tensor.view(-1, 1)).reshape(-1)

    @cached_property
    def chunks(self) -> ChunkPlan:
        """The KDA chunks of all segments."""
        counts = [-(-length // CHUNK) for length in self.lengths]
        order = sorted(range(self.n_segments), key=lambda s: -counts[s])
        active = [sum(1 for count in counts if count > c) for c in range(counts[order[0]])]
        base = torch.tensor([0, *active], device=self.device).cumsum(0)
        order_tensor = torch.tensor(order, device=self.device)
        rank = torch.empty_like(order_tensor)
        rank[order_tensor] = torch.arange(self.n_segments, device=self.device)
        slot = (base[self.position // CHUNK] + rank[self.segment]) * CHUNK + self.position % CHUNK
        total = int(base[-1]) * CHUNK
        gather = torch.full((total,), -1, dtype=torch.int64, device=self.device)
        gather[slot] = self.extended
        padding = torch.nonzero(gather < 0).view(-1)
        return ChunkPlan(
            order_tensor, rank, active, gather.clamp_min_(0), slot, self.extended, padding, self.n_extended
        )

    @cached_property
    def grids(self) -> list[Grid]:
        """All segments in padded grids; a segment much shorter than the longest of a grid opens a new one.

        A first segment with rows before it on other ranks has a grid of its own, and keys are then those rows,
        followed by the rows of this rank.
        """
        before = 0 if self.context is None else self.context.before
        order = sorted(range(1 if before else 0, self.n_segments), key=lambda s: -self.lengths[s])
        groups: list[list[int]] = []
        for segment in order:
            if groups and self._fits(groups[-1], segment):
                groups[-1].append(segment)
            else:
                groups.append([segment])
        grids = [self._grid(sorted(group)) for group in groups]
        if not before:
            return grids
        for grid in grids:
            grid.seen = Grid(grid.group, grid.segments, grid.rows + before, grid.valid, grid.members + before)
        first = self._grid([0])
        rows = torch.arange(before + self.lengths[0], device=self.device)
        own = torch.ones_like(rows, dtype=torch.bool).view(1, -1)
        first.seen = Grid(first.group, first.segments, rows.view(1, -1), own, rows)
        return [first, *grids]

    def _fits(self, group: list[int], segment: int) -> bool:
        longest, length = self.lengths[group[0]], self.lengths[segment]
        return longest <= 32 or 2 * length > longest

    def _grid(self, group: list[int]) -> Grid:
        segments = torch.tensor(group, device=self.device)
        lengths = self.lengths_tensor[segments]
        width = max(self.lengths[s] for s in group)
        column = torch.arange(width, device=self.device)
        valid = column < lengths.view(-1, 1)
        rows = self.starts[segments].view(-1, 1) + torch.where(valid, column, 0)
        return Grid(group, segments, rows, valid, rows[valid])


class FixedLayout(Layout):
    """Segments whose lengths the device alone knows: every shape follows from bounds, so a CUDA graph can hold it.

    ends int32 [S + 1] from 0 to N on the device, rising; segments may be empty, the last ones as a rule. longest: no
    segment has more rows. padding bool [N]: rows that fill a segment of their own and take part in nothing that is
    observed. What needs the lengths on the host (chunk plans, grids) is not there: LayoutError.
    """

    fixed = True

    def __init__(self, ends: Tensor, n_rows: int, longest: int, padding: Tensor) -> None:
        self.context = None
        self.device = ends.device
        self.n_rows, self.n_segments, self.longest = n_rows, len(ends) - 1, longest
        self.padding = padding
        self._ends = ends

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        raise LayoutError("the lengths of a fixed layout are on the device; use one made of lengths")

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [S + 1]."""
        return self._ends

    @cached_property
    def starts(self) -> Tensor:
        """[S] first row of each segment."""
        return self._ends[:-1].to(torch.int64)

    @cached_property
    def lengths_tensor(self) -> Tensor:
        """[S] int64."""
        return (self._ends[1:] - self._ends[:-1]).to(torch.int64)

    @cached_property
    def segment(self) -> Tensor:
        """[N] segment of each row."""
        row = torch.arange(self.n_rows, dtype=torch.int32, device=self.device)
        return torch.searchsorted(self._ends[1:], row, right=True)
