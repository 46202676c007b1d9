"""A cache whose MLA latents live in pages, so that memory follows the tokens that are there.

KDA states are one fixed slot a row. Latents of all rows share `pages` pages of `page` tokens; a row has the pages that
its table lists, in order (`page_table.py`). Copies of a row have its whole pages in common with it, and nobody writes
to those. Page 0 is nobody's and always zero: what is masked must still be finite. One more page behind the last takes
what padding rows write.
Storage stays where it is for good, so that a captured step finds it.
Whoever runs a forward first claims room for its tokens; nothing grows by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.deferred import DeferredTokens
from k3rl.engine.page_table import PageTable
from k3rl.engine.protocol import EngineError
from k3rl.engine.uploads import upload
from k3rl.model import K3Config, Slots, StepCache, slot_index


class PagedCache:
    """The states of B rows. `select` gives rows as the model reads and updates them.

    deferred: steps of fixed shapes write a recurrent state once in 16 tokens, and keep a quarter more beside it.
    """

    def __init__(
        self,
        config: K3Config,
        batch: int,
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        deferred: bool = False,
    ) -> None:
        linear = config.linear_attn_config
        heads, width = linear.num_heads, linear.head_dim
        wide = torch.promote_types(dtype, torch.float32)
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        self.page, self.device = page, torch.device(device)
        # Of all layers together, so that whole rows and pages are copied at once; below, each layer's part of them.
        kda, mla = sorted(config.kda_layers), sorted(config.mla_layers)
        self.every_recurrent = torch.zeros(len(kda), batch, heads, width, width, dtype=wide, device=device)
        self.every_conv = torch.zeros(len(kda), batch, 3, 3 * heads * width, dtype=dtype, device=device)
        self.every_latent = torch.zeros(len(mla), pages + 2, page, latent, dtype=dtype, device=device)
        self.recurrent = dict(zip(kda, self.every_recurrent.unbind(), strict=True))
        self.conv = dict(zip(kda, self.every_conv.unbind(), strict=True))
        self.latent = dict(zip(mla, self.every_latent.unbind(), strict=True))
        self.deferred = DeferredTokens(kda, self.every_recurrent) if deferred and kda else None
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.table = PageTable(batch, pages, page, self.device)

    def select(self, rows: Tensor) -> PagedRows:
        """A view of rows [R]; what is written to it is written here."""
        return PagedRows(self, rows)

    def settle(self, rows: np.ndarray) -> None:
        """Brings the recurrent states of rows int64 [n] up to date."""
        if self.deferred is not None:
            self.deferred.settle(rows)

    # ---- decode steps of fixed shapes

    @property
    def scratch_place(self) -> int:
        """Where padding rows write: a token of the page behind the last one, which nobody reads."""
        return (self.table.pages + 1) * self.page

    def step_blocks(self, rows: np.ndarray) -> np.ndarray:
        """Pages [n] that each of rows int64 [n] has with its next token."""
        return self.lengths.numpy()[rows] // self.page + 1

    def step_places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For the next token of rows int64 [n], which have room for it: tokens before it [n]; where its latent goes,
        counted in tokens over all pages, and that of padding [n + 1]; the rows' pages [n, blocks], as few as needed.

        Raises EngineError for a row without room.
        """
        past = self.lengths.numpy()[rows]
        places = self.table.places(rows, past)
        if self.deferred is not None:
            self.deferred.begin(rows, past)
        blocks = int(past.max()) // self.page + 1
        return past, np.append(places, self.scratch_place), self.table.table[rows, :blocks]

    def chunk_places(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For the next counts int64 [n] tokens of rows int64 [n], which have room for them, N in all: tokens before
        each in its row [N]; where its latent goes, as in `step_places` [N]; the rows' pages [n, blocks].

        States that steps deferred are brought up to date. Raises EngineError for a row without room.
        """
        before, segment = self.lengths.numpy()[rows], np.repeat(np.arange(len(rows)), counts)
        past = np.arange(len(segment)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
        places = self.table.places(rows[segment], past)
        self.settle(rows)
        blocks = -(-int((before + counts).max()) // self.page)
        return past, places, self.table.table[rows, :blocks]

    def stepped(self, rows: np.ndarray, counts: np.ndarray | int = 1) -> None:
        """The rows have read so many more tokens."""
        self.lengths.numpy()[rows] += counts

    def step_cache(self, slot: Tensor, past: Tensor, place: Tensor, table: Tensor) -> StepCache:
        """The states as a step of fixed shapes reads and writes them."""
        pending = {} if self.deferred is None else self.deferred.pending
        return StepCache(self.conv, self.recurrent, self.latent, slot, past, place, table, pending)

    # ---- whole rows

    def fixed(self, row: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's recurrent [L, heads, K, V] and conv states [L, 3, channels], by layer."""
        self.settle(np.array([row]))
        return self.every_recurrent[:, row].clone(), self.every_conv[:, row].clone()

    def latents(self, row: int, start: int, stop: int) -> Tensor:
        """A copy of the latents [L, stop - start, width] of a row's tokens, by layer."""
        first = start // self.page
        pages = self.table.on_device(row, slice(first, -(-stop // self.page)))
        found = self.every_latent.index_select(1, pages).flatten(1, 2)
        whole = start % self.page == 0 and stop % self.page == 0
        return found if whole else found[:, start - first * self.page : stop - first * self.page].clone()

    def restore(self, row: int, recurrent: Tensor, conv: Tensor, latent: Tensor) -> None:
        """Gives an empty row with room for it the states that `fixed` and `latents` copied of another."""
        length = latent.shape[1]
        self.every_recurrent[:, row].copy_(recurrent)
        self.every_conv[:, row].copy_(conv)
        self.lengths[row] = length
        if latent.numel():
            latent = latent.to(self.device, self.every_latent.dtype)
            whole = length // self.page
            kept = latent[:, : whole * self.page].unflatten(1, (whole, self.page))
            self.every_latent.index_copy_(1, self.table.on_device(row, slice(whole)), kept)
            if length > whole * self.page:
                rest = latent[:, whole * self.page :]
                self.every_latent[:, int(self.table.table[row, whole]), : rest.shape[1]].copy_(rest)

    def claim(self, rows: Sequence[int], lengths: Sequence[int] | np.ndarray) -> None:
        """Gives each row pages for so many tokens. Raises EngineError when there are none: admission miscounted."""
        self._fill_pages(self.table.claim(np.asarray(rows, np.int64), np.asarray(lengths, np.int64)), 0.0)

    def _fill_pages(self, pages: np.ndarray, value: float) -> None:
        if pages.size:
            self.every_latent.index_fill_(1, upload(pages, self.device), value)

    def release(self, rows: Tensor) -> np.ndarray:
        """Rows [R] become empty and give their pages back -> those that nobody else had. Their slots stay as they are,
        which nobody may read before `reset`, `copy_rows` or `restore` has written them; the device does nothing."""
        self.lengths[rows] = 0
        if self.deferred is not None:
            self.deferred.defers[rows.numpy()] = False
        return self.table.release(rows.numpy())

    def reset(self, rows: Tensor) -> None:
        """Rows [R] become empty and give their pages back; their slots are as new."""
        self._clear(rows, 0.0)

    def poison(self, rows: Tensor) -> None:
        """Rows [R] become empty, their slots and the pages that they alone had NaN until somebody claims them."""
        self._fill_pages(self._clear(rows, float("nan")), float("nan"))

    def _clear(self, rows: Tensor, value: float) -> np.ndarray:
        freed = self.release(rows)
        index = upload(rows, self.device)
        for storage in (self.every_recurrent, self.every_conv):
            storage.index_fill_(1, index, value)
        if self.deferred is not None:
            self.deferred.fill(rows.numpy(), value)
        return freed

    def copy_rows(self, source: Tensor, destination: Tensor) -> None:
        """Row source[i] -> row destination[i]. Whole pages are shared; the ones that go on are copied."""
        self.release(destination)
        here, there = source.numpy(), destination.numpy()
        lengths = self.lengths.numpy()[here]
        whole = lengths // self.page
        for row, copy, count in zip(here.tolist(), there.tolist(), whole.tolist(), strict=True):
            self.table.share(row, copy, count)
        fresh = self.table.claim(there, lengths)  # one page for each row that ends inside of one
        if fresh.size:
            goes_on = lengths > whole * self.page
            old = self.table.table[here[goes_on], whole[goes_on]]
            read, write = upload(old, self.device), upload(fresh, self.device)
            self.every_latent.index_copy_(1, write, self.every_latent.index_select(1, read))
        self._copy_slots(source, destination)

    def move_rows(self, source: Tensor, destination: Tensor) -> None:
        """Like `copy_rows`, but the pages change hands: the source row is empty afterwards."""
        self.release(destination)
        self.table.move(source.numpy(), destination.numpy())
        self._copy_slots(source, destination)
        self.lengths[source] = 0

    def _copy_slots(self, source: Tensor, destination: Tensor) -> None:
        self.settle(source.numpy())
        read, write = upload(source, self.device), upload(destination, self.device)
        for storage in (self.every_recurrent, self.every_conv):
            storage.index_copy_(1, write, storage.index_select(1, read))
        self.lengths[destination] = self.lengths[source]


class PagedRows:
    """Some rows of a paged cache, B of them; a stand-in for `k3rl.model.Cache`."""

    def __init__(self, cache: PagedCache, rows: Tensor) -> None:
        picked = rows.tolist()
        self._cache, self.batch = cache, len(picked)
        contiguous = picked == list(range(picked[0], picked[0] + len(picked)))
        self._rows = slice(picked[0], picked[0] + len(picked)) if contiguous else torch.tensor(picked)
        self._index = np.array(picked, np.int64)
        self._slots: Tensor | None = None
        self._tables: tuple[int, Tensor] | None = None

    def select(self, rows: Tensor) -> PagedRows:
        """A view of some of these rows, by their place among them."""
        return PagedRows(self._cache, torch.from_numpy(self._index)[rows])

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens seen by each row."""
        return self._cache.lengths[self._rows]

    def recurrent(self, layer: int) -> Tensor:
        """[B, heads, K, V]; shares storage unless the rows are scattered."""
        self._cache.settle(self._index)
        return self._read(self._cache.recurrent[layer])

    def conv(self, layer: int) -> Tensor:
        """[B, 3, channels]."""
        return self._read(self._cache.conv[layer])

    def _read(self, storage: Tensor) -> Tensor:
        return storage[self._rows] if isinstance(self._rows, slice) else storage.index_select(0, self._places())

    def _places(self) -> Tensor:
        """The rows on the device, int32."""
        if self._slots is None:
            self._slots = slot_index(self._rows, self._cache.device)
        return self._slots

    def slots(self, layer: int) -> Slots:
        """The KDA states of a layer where they lie, for a step that reads and writes them there."""
        self._cache.settle(self._index)
        return Slots(self._cache.conv[layer], self._cache.recurrent[layer], self._places())

    def _table(self) -> Tensor:
        """[B, blocks] int64 on the device: the pages of these rows, copied when they changed."""
        table = self._cache.table
        if self._tables is None or self._tables[0] != table.changes:
            self._tables = table.changes, table.on_device(self._rows)
        return self._tables[1]

    def latent(self, layer: int, length: int | None = None) -> Tensor:
        """[B, S, width], S = `length` or the longest row: a copy, gathered from the pages."""
        page, length = self._cache.page, int(self.lengths.max()) if length is None else length
        blocks = -(-length // page)
        table = self._table()[:, :blocks]
        if table.shape[1] < blocks:
            table = torch.nn.functional.pad(table, (0, blocks - table.shape[1]))
        pages = self._cache.latent[layer].index_select(0, table.reshape(-1))
        return pages.view(self.batch, blocks * page, pages.shape[-1])[:, :length]

    def store_recurrent(self, layer: int, state: Tensor) -> None:
        """Puts [B, heads, K, V] back."""
        self._write(self._cache.recurrent[layer], state)

    def store_conv(self, layer: int, history: Tensor) -> None:
        """Puts [B, 3, channels] back."""
        self._write(self._cache.conv[layer], history)

    def _write(self, storage: Tensor, value: Tensor) -> None:
        if isinstance(self._rows, slice):
            target = storage[self._rows]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
        else:
            storage.index_copy_(0, self._places().long(), value.to(storage.dtype))

    def append_latent(self, layer: int, segment: Tensor, position: Tensor, latent: Tensor) -> None:
        """Writes latent [N, width] at row segment [N], token position [N]; its page must have been claimed."""
        size = self._cache.page
        page = self._table()[segment, position // size]
        if self._cache.device.type == "cpu" and not page.all():  # elsewhere the host would wait for the answer
            raise EngineError("a token is written to a row without room for it; claim it before the forward")
        self._cache.latent[layer].index_put_((page, position % size), latent)

    def next_places(self) -> Tensor:
        """[B] int64: where `put_latent` puts the next token of each row; its page must have been claimed."""
        places = self._cache.table.places(self._index, self.lengths.numpy())
        return upload(places, self._cache.device)

    def put_latent(self, layer: int, places: Tensor, latent: Tensor) -> None:
        """Writes latent [B, width] of one token of each row, at `next_places`."""
        held = self._cache.latent[layer]
        held.view(-1, held.shape[2]).index_copy_(0, places, latent)

    def reserve(self, length: int) -> None:
        """Nothing: room is claimed row by row, before."""

    def advance(self, tokens: Tensor) -> None:
        """Adds tokens [B] to the lengths."""
        self._cache.lengths[self._rows] += tokens
