"""Cache: what a sequence leaves behind, per layer, for rows of different lengths.

KDA layers keep the recurrent state [B, heads, K, V] and the last three projections before the short convolution
[B, 3, q|k|v channels] (k3.md 2.3). MLA layers keep, per token, the normed latent and the shared key part
[B, S, kv_lora + rope] (k3.md 3). `lengths` [B] counts the tokens of each row. A row is restored whole or not at all:
`copy_rows`, `reset` and `poison` touch all layers together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from k3rl.config import K3Error
from k3rl.kernels.kda import PendingRows
from k3rl.kernels.mla import chunked_prefill
from k3rl.model.config import K3Config
from k3rl.model.layout import HISTORY


class CacheError(K3Error, ValueError):
    """Rows that the cache does not have, or a layer of the other kind."""


class Slots(NamedTuple):
    """KDA states of one layer where they lie: the whole pools, and which slot each row reads and writes.

    conv [slots, 3, q|k|v channels]; recurrent [slots, heads, K, V]; rows int [R], -1 for a row that is padding.
    pending: tokens that the recurrent states have not taken in, where that is put off.
    """

    conv: Tensor
    recurrent: Tensor
    rows: Tensor
    pending: PendingRows | None = None


@dataclass(frozen=True)
class StepCache:
    """The states of R rows for one decode step whose shapes do not depend on what the rows hold.

    Everything that differs from step to step is in tensors on the device, so that a step can be captured once and
    replayed. conv and recurrent: pools by layer, as in `Slots`. latent: pages [P, page, kv_lora + rope] by layer.
    slot int64 [R], -1 for padding. past int64 [R]: tokens that a row has seen, 0 for padding. place int64 [R]: where
    the latent of its next token goes, counted in tokens over all pages; padding rows share one that nobody reads.
    table int64 [R, n]: pages of each row in order, which hold n * page tokens at most. pending: by layer, see `Slots`.
    """

    conv: Mapping[int, Tensor]
    recurrent: Mapping[int, Tensor]
    latent: Mapping[int, Tensor]
    slot: Tensor
    past: Tensor
    place: Tensor
    table: Tensor
    pending: Mapping[int, PendingRows] = field(default_factory=dict)

    def slots(self, layer: int) -> Slots:
        """The KDA states of a layer."""
        return Slots(self.conv[layer], self.recurrent[layer], self.slot, self.pending.get(layer))

    def append_latent(self, layer: int, latent: Tensor) -> None:
        """Writes latent [R, width] of the next token of each row."""
        pages = self.latent[layer]
        pages.view(-1, pages.shape[2]).index_copy_(0, self.place, latent.to(pages.dtype))


@dataclass(frozen=True)
class ChunkCache:
    """The states of S sequences that read N packed tokens, in shapes that do not depend on what they hold.

    Behind the sequences comes one more segment of rows that are padding: it starts from nothing, and what it leaves is
    kept nowhere. at: where everything lies, as in `StepCache`, with slot [S], past and place [N] (0 and the shared
    place for padding), table [S + 1, n]. source int64 [S]: whose states go to the slot of each sequence. A sequence
    that is not there has no tokens and the slot and source of one that is, so that the same states are written twice.
    ends int32 [S + 2]: where segments begin, and N.
    """

    at: StepCache
    source: Tensor
    ends: Tensor

    @property
    def past(self) -> Tensor:
        """int64 [N]: tokens before each of these in its sequence."""
        return self.at.past

    def recurrent(self, layer: int) -> Tensor:
        """[S + 1, heads, K, V], the last one of padding: a copy."""
        return self._read(self.at.recurrent[layer])

    def conv(self, layer: int) -> Tensor:
        """[S + 1, 3, channels], the last one of padding: a copy."""
        return self._read(self.at.conv[layer])

    def store_recurrent(self, layer: int, state: Tensor) -> None:
        """Puts [S + 1, heads, K, V] back."""
        self._write(self.at.recurrent[layer], state)

    def store_conv(self, layer: int, history: Tensor) -> None:
        """Puts [S + 1, 3, channels] back."""
        self._write(self.at.conv[layer], history)

    def _read(self, pool: Tensor) -> Tensor:
        count = len(self.at.slot)
        held = pool.new_zeros(count + 1, *pool.shape[1:])
        torch.index_select(pool, 0, self.at.slot, out=held[:count])
        return held

    def _write(self, pool: Tensor, value: Tensor) -> None:
        pool.index_copy_(0, self.at.slot, value.index_select(0, self.source).to(pool.dtype))

    def append_latent(self, layer: int, latent: Tensor) -> None:
        """Writes latent [N, width] of the tokens."""
        self.at.append_latent(layer, latent)

    def attend(self, layer: int, absorbed: Tensor, q_r: Tensor, scale: float) -> Tensor:
        """Queries of the tokens, absorbed [h, N, Z] and q_r [N, h, r], over the latents of their sequences -> [h, N, Z]
        (`mla.chunked_prefill`)."""
        at = self.at
        return chunked_prefill.attend(absorbed, q_r, at.latent[layer], at.table, at.past, self.ends, scale)


class _Pool:
    """The storage that a cache and its views share."""

    def __init__(self, config: K3Config, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        linear = config.linear_attn_config
        wide = torch.promote_types(dtype, torch.float32)
        heads, width = linear.num_heads, linear.head_dim
        self.batch = batch
        self.device = device
        self.recurrent = {
            layer: torch.zeros(batch, heads, width, width, dtype=wide, device=device) for layer in config.kda_layers
        }
        self.conv = {
            layer: torch.zeros(batch, HISTORY, 3 * heads * width, dtype=dtype, device=device)
            for layer in config.kda_layers
        }
        self.latent_width = config.kv_lora_rank + config.qk_rope_head_dim
        self.latent = {
            layer: torch.zeros(batch, 0, self.latent_width, dtype=dtype, device=device) for layer in config.mla_layers
        }
        self.lengths = torch.zeros(batch, dtype=torch.int64)

    def tensors(self) -> list[Tensor]:
        return [*self.recurrent.values(), *self.conv.values(), *self.latent.values()]

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens a row, doubling. New room is zero: what is masked must still be finite."""
        for layer, old in self.latent.items():
            if old.shape[1] < length:
                room = max(length, 2 * old.shape[1], 32)
                grown = torch.zeros(self.batch, room, self.latent_width, dtype=old.dtype, device=old.device)
                grown[:, : old.shape[1]] = old
                self.latent[layer] = grown


class Cache:
    """B rows of recurrent, convolution and latent state. Made by `K3ForCausalLM.new_cache`.

    A forward updates it in place and returns it. `select` gives a view of some rows that reads and writes the same
    storage; over neighbouring rows in rising order it costs nothing, otherwise rows are gathered and put back.
    """

    def __init__(self, config: K3Config, batch: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        if batch < 1:
            raise CacheError(f"a cache needs at least one row; got batch={batch}")
        self._pool = _Pool(config, batch, dtype, torch.device(device))
        self._rows: slice | Tensor = slice(0, batch)
        self._slots: Tensor | None = None  # the rows as int32, once a kernel asks for them
        self.batch = batch

    def select(self, rows: Tensor) -> Cache:
        """A view of rows [R] int64 of this cache (distinct, any order); updates write through.

        Raises CacheError when a row is repeated or out of range.
        """
        picked = rows.tolist()
        if not picked or min(picked) < 0 or max(picked) >= self.batch or len(set(picked)) != len(picked):
            raise CacheError(f"rows must be distinct and in 0..{self.batch - 1}; got {picked[:8]}")
        absolute = self._absolute(picked)
        view = object.__new__(Cache)
        view._pool, view._slots = self._pool, None
        view.batch = len(absolute)
        first = absolute[0]
        if absolute == list(range(first, first + len(absolute))):
            view._rows = slice(first, first + len(absolute))
        else:
            view._rows = torch.tensor(absolute, dtype=torch.int64, device=self._pool.device)
        return view

    def _absolute(self, rows: list[int]) -> list[int]:
        if isinstance(self._rows, slice):
            return [self._rows.start + row for row in rows]
        own = self._rows.tolist()
        return [own[row] for row in rows]

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Tensor:
        """[B] int64 on the CPU: tokens seen by each row."""
        return self._pool.lengths[self._rows if isinstance(self._rows, slice) else self._rows.cpu()]

    def recurrent(self, layer: int) -> Tensor:
        """[B, heads, K, V], key first, float32 or wider. Shares storage unless the view's rows are scattered."""
        return self._read(self._pool.recurrent, layer)

    def conv(self, layer: int) -> Tensor:
        """[B, 3, q|k|v channels]: the last projections before the convolution, oldest first, zero where none."""
        return self._read(self._pool.conv, layer)

    def latent(self, layer: int, length: int | None = None) -> Tensor:
        """[B, S, kv_lora + rope], S = `length` or the longest row; beyond a row's own length it is zero."""
        stop = int(self.lengths.max()) if length is None else length
        return self._read(self._pool.latent, layer)[:, :stop]

    def slots(self, layer: int) -> Slots:
        """The KDA states of a layer where they lie, for a step that reads and writes them there."""
        if self._slots is None:
            self._slots = slot_index(self._rows, self._pool.device)
        return Slots(self._pool.conv[layer], self._pool.recurrent[layer], self._slots)

    def _read(self, storage: dict[int, Tensor], layer: int) -> Tensor:
        if layer not in storage:
            raise CacheError(f"layer {layer} keeps no such state; the layers that do are {sorted(storage)}")
        return storage[layer][self._rows]

    # -- writing, by the model ------------------------------------------------------------------------------------

    def store_recurrent(self, layer: int, state: Tensor) -> None:
        """Puts [B, heads, K, V] back. Free when `state` is the storage itself, updated in place."""
        self._write(self._pool.recurrent[layer], state)

    def store_conv(self, layer: int, history: Tensor) -> None:
        """Puts [B, 3, channels] back."""
        self._write(self._pool.conv[layer], history)

    def _write(self, storage: Tensor, value: Tensor) -> None:
        if isinstance(self._rows, slice):
            target = storage[self._rows]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
        else:
            storage.index_copy_(0, self._rows, value.to(storage.dtype))

    def store_latent(self, layer: int, latent: Tensor) -> None:
        """Puts the latents [B, n, width] of the first n tokens of every row. Call `reserve` before."""
        pool = self._pool.latent[layer]
        pool[self._rows, : latent.shape[1]] = latent.to(pool.device, pool.dtype)

    def append_latent(self, layer: int, segment: Tensor, position: Tensor, latent: Tensor) -> None:
        """Writes latent [N, width] at row segment [N], token position [N] (absolute). Call `reserve` before."""
        rows = segment + self._rows.start if isinstance(self._rows, slice) else self._rows[segment]
        self._pool.latent[layer].index_put_((rows, position), latent)

    def next_places(self) -> Tensor:
        """[B] int64: where `put_latent` puts the next token of each row. Call `reserve` before."""
        rows = torch.arange(self._rows.start, self._rows.stop) if isinstance(self._rows, slice) else self._rows
        room = next(iter(self._pool.latent.values())).shape[1]
        return rows * room + self.lengths

    def put_latent(self, layer: int, places: Tensor, latent: Tensor) -> None:
        """Writes latent [B, width] of one token of each row, at `next_places`."""
        held = self._pool.latent[layer]
        held.view(-1, held.shape[2]).index_copy_(0, places, latent)

    def reserve(self, length: int) -> None:
        """Makes room for rows of `length` tokens."""
        self._pool.reserve(length)

    def advance(self, tokens: Tensor) -> None:
        """Adds tokens [B] to the lengths."""
        if isinstance(self._rows, slice):
            self._pool.lengths[self._rows] += tokens
        else:
            self._pool.lengths[self._rows.cpu()] += tokens

    # -- whole rows ---------------------------------------------------------------------------------------------

    def reset(self, rows: Tensor) -> None:
        """Rows [R] become empty: states zero, length 0."""
        self._fill(rows, 0.0)

    def poison(self, rows: Tensor) -> None:
        """Rows [R] become NaN throughout, length 0: whoever reads one before `reset` finds out."""
        self._fill(rows, float("nan"))

    def _fill(self, rows: Tensor, value: float) -> None:
        index = torch.tensor(self._absolute(rows.tolist()), dtype=torch.int64)
        for tensor in self._pool.tensors():
            tensor.index_fill_(0, index.to(tensor.device), value)
        self._pool.lengths[index] = 0

    def copy_rows(self, source: Tensor, destination: Tensor) -> None:
        """Row source[i] -> row destination[i], all layers and lengths: forks a prompt's state."""
        read = torch.tensor(self._absolute(source.tolist()), dtype=torch.int64)
        write = torch.tensor(self._absolute(destination.tolist()), dtype=torch.int64)
        for tensor in self._pool.tensors():
            tensor.index_copy_(0, write.to(tensor.device), tensor.index_select(0, read.to(tensor.device)))
        self._pool.lengths[write] = self._pool.lengths[read]


def slot_index(rows: slice | Tensor, device: torch.device) -> Tensor:
    """Rows of a pool as int32 on the device."""
    if isinstance(rows, slice):
        return torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)
    return rows.to(device, torch.int32)
