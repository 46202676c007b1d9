"""A cache whose MLA latents live in pages, so that memory follows the tokens that are there.

The model sees what it sees of `k3rl.model.Cache`: rows of recurrent, conv and latent state that it reads and updates.
KDA states are one fixed slot a row. Latents of all rows share `pages` pages of `page` tokens; a row has the pages that
its table lists, in order. Copies of a row have its whole pages in common with it, and nobody writes to those: a page is
free when no row has it. Page 0 is nobody's and always zero: what is masked must still be finite. One more page behind
the last takes what padding rows write.
Storage stays where it is for good, so that a captured step finds it.
Whoever runs a forward first claims room for its tokens; nothing grows by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.protocol import EngineError
from k3rl.kernels.kda.decode import PendingRows, flush_pending
from k3rl.kernels.kda.operator import CHUNK
from k3rl.model import K3Config
from k3rl.model.cache import Slots, StepCache, slot_index


class _Late:
    """Tokens that the recurrent states have not taken in, at most 15 of a row (`kda_decode.PendingRows`).

    A row is late from its first step of fixed shapes on, until its states are brought up to date. Whoever reads or
    copies recurrent states settles their rows before.
    """

    def __init__(self, recurrent: dict[int, Tensor]) -> None:
        like = next(iter(recurrent.values()))
        slots, heads, width, _ = like.shape
        self._recurrent = recurrent
        self._span = torch.zeros(len(recurrent), slots, heads, 2, dtype=torch.int32, device=like.device)
        self.pending = {}
        for place, layer in enumerate(recurrent):
            keys, updates = (like.new_zeros(slots, heads, CHUNK, width) for _ in range(2))
            self.pending[layer] = PendingRows(keys, updates, like.new_zeros(slots, heads, width), self._span[place])
        self._is_late = np.zeros(slots, bool)

    def begin(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Rows int64 [n] of so many tokens are stepped; chunks of those that were whole end as in training."""
        fresh = ~self._is_late[rows]
        if fresh.any():
            index, phase = torch.from_numpy(rows[fresh]), torch.from_numpy(lengths[fresh] % CHUNK).to(torch.int32)
            phases = phase.view(1, -1, 1, 1).expand(len(self._span), -1, *self._span.shape[2:])
            self._span[:, index.to(self._span.device)] = phases.to(self._span.device)
            self._is_late[rows[fresh]] = True

    @torch.inference_mode()
    def settle(self, rows: np.ndarray) -> None:
        """Brings the states of rows int64 [n] up to date."""
        late = rows[self._is_late[rows]]
        if late.size:
            index = torch.from_numpy(late).to(self._span.device, torch.int32)
            for layer, pending in self.pending.items():
                flush_pending(self._recurrent[layer], pending, index)
            self._is_late[late] = False

    def forget(self, rows: list[int], value: float) -> None:
        """The states of these rows are of no use; what waits beside them becomes `value`, unless that is 0."""
        self._is_late[rows] = False
        if value == 0.0:  # which nobody would see
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self._span.device)
        for pending in self.pending.values():
            for storage in (pending.keys, pending.updates, pending.decay):
                storage.index_fill_(0, index, value)


class _Store:
    """What a paged cache and its views share."""

    def __init__(
        self,
        config: K3Config,
        batch: int,
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
        deferred: bool,
    ) -> None:
        linear = config.linear_attn_config
        heads, width = linear.num_heads, linear.head_dim
        wide = torch.promote_types(dtype, torch.float32)
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        self.page, self.pages, self.device = page, pages, device
        # Of all layers together, so that whole rows and pages are copied at once; below, each layer's part of them.
        kda, mla = sorted(config.kda_layers), sorted(config.mla_layers)
        self.every_recurrent = torch.zeros(len(kda), batch, heads, width, width, dtype=wide, device=device)
        self.every_conv = torch.zeros(len(kda), batch, 3, 3 * heads * width, dtype=dtype, device=device)
        self.every_latent = torch.zeros(len(mla), pages + 2, page, latent, dtype=dtype, device=device)
        self.recurrent = dict(zip(kda, self.every_recurrent.unbind(), strict=True))
        self.conv = dict(zip(kda, self.every_conv.unbind(), strict=True))
        self.latent = dict(zip(mla, self.every_latent.unbind(), strict=True))
        self.late = _Late(self.recurrent) if deferred and self.recurrent else None
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.table = torch.zeros(batch, 8, dtype=torch.int64)  # page of each block of a row; 0 behind the last one
        self.held = np.zeros(batch, np.int64)  # pages of each row
        self.free = list(range(pages, 0, -1))
        self.users = np.zeros(pages + 2, np.int64)  # rows that have each page
        self.changes = 0  # of tables, so that copies of them on the device are known to be old

    @property
    def owned(self) -> list[int]:
        """Pages of each row."""
        return self.held.tolist()


class PagedCache:
    """B rows of state; a stand-in for `k3rl.model.Cache`. `select` gives views that write through.

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
        self._store = _Store(config, batch, pages, page, dtype, torch.device(device), deferred)
        self._rows: slice | Tensor = slice(0, batch)
        self._slots: Tensor | None = None
        self._tables: tuple[int, Tensor] | None = None
        self.batch = batch

    def select(self, rows: Tensor) -> PagedCache:
        """A view of rows [R] of the whole cache or, of a view, of its own rows."""
        picked = self._all()[rows].tolist()
        view = object.__new__(PagedCache)
        view._store, view.batch, view._slots, view._tables = self._store, len(picked), None, None
        contiguous = picked == list(range(picked[0], picked[0] + len(picked)))
        view._rows = slice(picked[0], picked[0] + len(picked)) if contiguous else torch.tensor(picked)
        return view

    def _all(self) -> Tensor:
        return torch.arange(self._rows.start, self._rows.stop) if isinstance(self._rows, slice) else self._rows

    # ---- what the model uses

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens seen by each row."""
        return self._store.lengths[self._rows]

    def recurrent(self, layer: int) -> Tensor:
        """[B, heads, K, V]; shares storage unless the rows are scattered."""
        self._settle()
        return self._read(self._store.recurrent[layer])

    def conv(self, layer: int) -> Tensor:
        """[B, 3, channels]."""
        return self._read(self._store.conv[layer])

    def _settle(self) -> None:
        if self._store.late is not None:
            self._store.late.settle(self._all().numpy())

    def _read(self, storage: Tensor) -> Tensor:
        return storage[self._rows] if isinstance(self._rows, slice) else storage.index_select(0, self._places())

    def _places(self) -> Tensor:
        """The rows on the device, int32."""
        if self._slots is None:
            self._slots = slot_index(self._rows, self._store.device)
        return self._slots

    def slots(self, layer: int) -> Slots:
        """The KDA states of a layer where they lie, for a step that reads and writes them there."""
        self._settle()
        return Slots(self._store.conv[layer], self._store.recurrent[layer], self._places())

    def _table(self) -> Tensor:
        """[B, blocks] int64 on the device: the pages of these rows, copied when they changed."""
        store = self._store
        if self._tables is None or self._tables[0] != store.changes:
            self._tables = store.changes, store.table[self._rows].to(store.device)
        return self._tables[1]

    def latent(self, layer: int, length: int | None = None) -> Tensor:
        """[B, S, width], S = `length` or the longest row: a copy, gathered from the pages."""
        store, length = self._store, int(self.lengths.max()) if length is None else length
        blocks = -(-length // store.page)
        table = self._table()[:, :blocks]
        if table.shape[1] < blocks:
            table = torch.nn.functional.pad(table, (0, blocks - table.shape[1]))
        pages = store.latent[layer].index_select(0, table.reshape(-1))
        return pages.view(self.batch, blocks * store.page, pages.shape[-1])[:, :length]

    def store_recurrent(self, layer: int, state: Tensor) -> None:
        """Puts [B, heads, K, V] back."""
        self._write(self._store.recurrent[layer], state)

    def store_conv(self, layer: int, history: Tensor) -> None:
        """Puts [B, 3, channels] back."""
        self._write(self._store.conv[layer], history)

    def _write(self, storage: Tensor, value: Tensor) -> None:
        if isinstance(self._rows, slice):
            target = storage[self._rows]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
        else:
            storage.index_copy_(0, self._places().long(), value.to(storage.dtype))

    def append_latent(self, layer: int, segment: Tensor, position: Tensor, latent: Tensor) -> None:
        """Writes latent [N, width] at row segment [N], token position [N]; its page must have been claimed."""
        store = self._store
        page = self._table()[segment, position // store.page]
        if store.device.type == "cpu" and not page.all():  # elsewhere the host would wait for the answer
            raise EngineError("a token is written to a row without room for it; claim it before the forward")
        store.latent[layer].index_put_((page, position % store.page), latent)

    def next_places(self) -> Tensor:
        """[B] int64: where `put_latent` puts the next token of each row; its page must have been claimed."""
        store, past = self._store, self.lengths
        page = self._table()[torch.arange(self.batch), past // store.page]
        if not page.all():
            raise EngineError("a token is written to a row without room for it; claim it before the forward")
        return page * store.page + past % store.page

    def put_latent(self, layer: int, places: Tensor, latent: Tensor) -> None:
        """Writes latent [B, width] of one token of each row, at `next_places`."""
        held = self._store.latent[layer]
        held.view(-1, held.shape[2]).index_copy_(0, places, latent)

    def reserve(self, length: int) -> None:
        """Nothing: room is claimed row by row, before."""

    def advance(self, tokens: Tensor) -> None:
        """Adds tokens [B] to the lengths."""
        self._store.lengths[self._rows] += tokens

    # ---- decode steps of fixed shapes

    @property
    def scratch_place(self) -> int:
        """Where padding rows write: a token of the page behind the last one, which nobody reads."""
        return (self._store.pages + 1) * self._store.page

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self._store.page

    def latent_pages(self) -> list[Tensor]:
        """The pages [P, page, width] of every layer that has them."""
        return list(self._store.latent.values())

    def step_blocks(self, rows: np.ndarray) -> np.ndarray:
        """Pages [n] that each of rows int64 [n] has with its next token."""
        return self._store.lengths.numpy()[rows] // self._store.page + 1

    def step_places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For the next token of rows int64 [n], which have room for it: tokens before it [n]; where its latent goes,
        counted in tokens over all pages, and that of padding [n + 1]; the rows' pages [n, blocks], as few as needed.

        Raises EngineError for a row without room.
        """
        store = self._store
        past = store.lengths.numpy()[rows]
        block = past // store.page
        blocks = int(block.max()) + 1
        table = store.table.numpy()[rows, :blocks]
        page = np.take_along_axis(table, block[:, None], 1)[:, 0] if blocks <= store.table.shape[1] else block * 0
        if not page.all():
            raise EngineError("a token is written to a row without room for it; claim it before the forward")
        if store.late is not None:
            store.late.begin(rows, past)
        return past, np.append(page * store.page + past % store.page, self.scratch_place), table

    def step_done(self, rows: np.ndarray) -> None:
        """The rows have read one more token."""
        self._store.lengths.numpy()[rows] += 1

    def step_cache(self, slot: Tensor, past: Tensor, place: Tensor, table: Tensor) -> StepCache:
        """The states as a step of fixed shapes reads and writes them."""
        store = self._store
        pending = {} if store.late is None else store.late.pending
        return StepCache(store.conv, store.recurrent, store.latent, slot, past, place, table, pending)

    # ---- runs of new tokens in fixed shapes

    def chunk_places(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For the next counts int64 [n] tokens of rows int64 [n], which have room for them, N in all: tokens before
        each in its row [N]; where its latent goes, as in `step_places` [N]; the rows' pages [n, blocks].

        States that steps put off are brought up to date. Raises EngineError for a row without room.
        """
        store = self._store
        before, segment = store.lengths.numpy()[rows], np.repeat(np.arange(len(rows)), counts)
        past = np.arange(len(segment)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
        needed = -(-(before + counts) // store.page)
        if (needed > store.held[rows]).any():
            raise EngineError("a token is written to a row without room for it; claim it before the forward")
        table = store.table.numpy()[rows, : needed.max()]
        if store.late is not None:
            store.late.settle(rows)
        return past, table[segment, past // store.page] * store.page + past % store.page, table

    def chunk_done(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """The rows have read so many more tokens."""
        self._store.lengths.numpy()[rows] += counts

    # ---- whole rows

    def fixed(self, row: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's recurrent [L, heads, K, V] and conv states [L, 3, channels], by layer."""
        store = self._store
        if store.late is not None:
            store.late.settle(np.array([row]))
        return store.every_recurrent[:, row].clone(), store.every_conv[:, row].clone()

    def latents(self, row: int, start: int, stop: int) -> Tensor:
        """A copy of the latents [L, stop - start, width] of a row's tokens, by layer."""
        store = self._store
        first = start // store.page
        pages = store.table[row, first : -(-stop // store.page)].to(store.device)
        found = store.every_latent.index_select(1, pages).flatten(1, 2)
        whole = start % store.page == 0 and stop % store.page == 0
        return found if whole else found[:, start - first * store.page : stop - first * store.page].clone()

    def restore(self, row: int, recurrent: Tensor, conv: Tensor, latent: Tensor) -> None:
        """Gives an empty row with room for it the states that `fixed` and `latents` copied of another."""
        store, length = self._store, latent.shape[1]
        store.every_recurrent[:, row].copy_(recurrent)
        store.every_conv[:, row].copy_(conv)
        store.lengths[row] = length
        if latent.numel():
            latent = latent.to(store.device, store.every_latent.dtype)
            whole = length // store.page
            pages = store.table[row, :whole].to(store.device)
            kept = latent[:, : whole * store.page].unflatten(1, (whole, store.page))
            store.every_latent.index_copy_(1, pages, kept)
            if length > whole * store.page:
                rest = latent[:, whole * store.page :]
                store.every_latent[:, int(store.table[row, whole]), : rest.shape[1]].copy_(rest)

    def claim(self, rows: Sequence[int], lengths: Sequence[int] | np.ndarray) -> None:
        """Gives each row pages for so many tokens. Raises EngineError when there are none: admission miscounted."""
        store = self._store
        needed = -(-np.asarray(lengths, np.int64) // store.page)
        short = np.flatnonzero(needed > store.held[np.asarray(rows, np.int64)])  # a decode step crosses few pages
        if not short.size:
            return
        store.changes += 1
        given: list[np.ndarray] = []
        for place in short.tolist():
            row, wanted = rows[place], int(needed[place])
            if wanted > store.table.shape[1]:
                more = torch.zeros(len(store.held), max(wanted, 2 * store.table.shape[1]) - store.table.shape[1])
                store.table = torch.cat([store.table, more.to(torch.int64)], 1)
            missing = wanted - int(store.held[row])
            if missing > len(store.free):
                raise EngineError(f"row {row} needs {missing} pages and {len(store.free)} are free")
            fresh = np.array(store.free[: -missing - 1 : -1])
            del store.free[-missing:]
            store.table.numpy()[row, store.held[row] : wanted] = fresh
            store.held[row] = wanted
            store.users[fresh] = 1
            given.append(fresh)
        self._fill_pages(given[0] if len(given) == 1 else np.concatenate(given), 0.0)

    def _fill_pages(self, pages: np.ndarray, value: float) -> None:
        if pages.size:
            self._store.every_latent.index_fill_(1, torch.from_numpy(pages).to(self._store.device), value)

    def reset(self, rows: Tensor) -> None:
        """Rows [R] become empty and give their pages back."""
        self._clear(rows.tolist(), 0.0)

    def poison(self, rows: Tensor) -> None:
        """Rows [R] become empty, their slots and the pages that they alone had NaN until somebody claims them."""
        self._clear(rows.tolist(), float("nan"))

    def _clear(self, rows: list[int], value: float) -> None:
        store = self._store
        store.changes += 1
        for row in rows:
            had = store.table.numpy()[row, : store.held[row]]
            store.users[had] -= 1
            given = had[store.users[had] == 0]
            if value != 0.0:
                self._fill_pages(given, value)
            store.free += given.tolist()
            store.table[row], store.held[row], store.lengths[row] = 0, 0, 0
        index = torch.tensor(rows, dtype=torch.int64, device=store.device)
        for storage in (store.every_recurrent, store.every_conv):
            storage.index_fill_(1, index, value)
        if store.late is not None and rows:
            store.late.forget(rows, value)

    def copy_rows(self, source: Tensor, destination: Tensor) -> None:
        """Row source[i] -> row destination[i]. Whole pages are shared; the one that goes on is copied."""
        self.reset(destination)
        store, table = self._store, self._store.table.numpy()
        for here, there in zip(source.tolist(), destination.tolist(), strict=True):
            length = int(store.lengths[here])
            whole = length // store.page
            table[there, :whole] = table[here, :whole]
            store.users[table[here, :whole]] += 1
            store.held[there] = whole
            self.claim([there], [length])
            if length > whole * store.page:
                old, new = int(table[here, whole]), int(table[there, whole])
                store.every_latent[:, new].copy_(store.every_latent[:, old])
        self._copy_slots(source, destination)

    def move_rows(self, source: Tensor, destination: Tensor) -> None:
        """Like `copy_rows`, but the pages change hands: the source row is empty afterwards."""
        self.reset(destination)
        store = self._store
        store.changes += 1
        store.table[destination] = store.table[source]
        store.table[source] = 0
        for here, there in zip(source.tolist(), destination.tolist(), strict=True):
            store.held[there], store.held[here] = store.held[here], 0
        self._copy_slots(source, destination)
        store.lengths[source] = 0

    def _copy_slots(self, source: Tensor, destination: Tensor) -> None:
        if self._store.late is not None:
            self._store.late.settle(source.numpy())
        read, write = source.to(self._store.device), destination.to(self._store.device)
        for storage in (self._store.every_recurrent, self._store.every_conv):
            storage.index_copy_(1, write, storage.index_select(1, read))
        self._store.lengths[destination] = self._store.lengths[source]
