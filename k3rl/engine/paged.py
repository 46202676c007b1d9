"""A cache whose MLA latents live in pages, so that memory follows the tokens that are there.

The model sees what it sees of `k3rl.model.Cache`: rows of recurrent, conv and latent state that it reads and updates.
KDA states are one fixed slot a row. Latents of all rows share `pages` pages of `page` tokens; a row owns the pages
that its table lists, in order. Page 0 is nobody's and always zero: what is masked must still be finite.
Whoever runs a forward first claims room for its tokens; nothing grows by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3rl.engine.protocol import EngineError
from k3rl.model import K3Config


class _Store:
    """What a paged cache and its views share."""

    def __init__(
        self, config: K3Config, batch: int, pages: int, page: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        linear = config.linear_attn_config
        heads, width = linear.num_heads, linear.head_dim
        wide = torch.promote_types(dtype, torch.float32)
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        self.page, self.device = page, device
        self.recurrent = {
            n: torch.zeros(batch, heads, width, width, dtype=wide, device=device) for n in config.kda_layers
        }
        self.conv = {n: torch.zeros(batch, 3, 3 * heads * width, dtype=dtype, device=device) for n in config.kda_layers}
        self.latent = {n: torch.zeros(pages + 1, page, latent, dtype=dtype, device=device) for n in config.mla_layers}
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.table = torch.zeros(batch, 8, dtype=torch.int64)  # page of each block of a row; 0 behind the last one
        self.owned = [0] * batch
        self.free = list(range(pages, 0, -1))


class PagedCache:
    """B rows of state; a stand-in for `k3rl.model.Cache`. `select` gives views that write through."""

    def __init__(
        self,
        config: K3Config,
        batch: int,
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._store = _Store(config, batch, pages, page, dtype, torch.device(device))
        self._rows: slice | Tensor = slice(0, batch)
        self.batch = batch

    def select(self, rows: Tensor) -> PagedCache:
        """A view of rows [R] of the whole cache or, of a view, of its own rows."""
        picked = self._all()[rows].tolist()
        view = object.__new__(PagedCache)
        view._store, view.batch = self._store, len(picked)
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
        return self._store.recurrent[layer][self._rows]

    def conv(self, layer: int) -> Tensor:
        """[B, 3, channels]."""
        return self._store.conv[layer][self._rows]

    def latent(self, layer: int, length: int | None = None) -> Tensor:
        """[B, S, width], S = `length` or the longest row: a copy, gathered from the pages."""
        return self.latent_slice(layer, 0, int(self.lengths.max()) if length is None else length)

    def latent_slice(self, layer: int, start: int, stop: int) -> Tensor:
        """[B, stop - start, width] of these tokens, gathered from their pages."""
        store = self._store
        first, last = start // store.page, -(-stop // store.page)
        table = store.table[self._rows, first:last]
        if table.shape[1] < last - first:
            table = torch.nn.functional.pad(table, (0, last - first - table.shape[1]))
        pages = store.latent[layer].index_select(0, table.reshape(-1).to(store.device))
        offset = first * store.page
        return pages.view(self.batch, (last - first) * store.page, pages.shape[-1])[:, start - offset : stop - offset]

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
            storage.index_copy_(0, self._rows.to(storage.device), value.to(storage.dtype))

    def append_latent(self, layer: int, segment: Tensor, position: Tensor, latent: Tensor) -> None:
        """Writes latent [N, width] at row segment [N], token position [N]; its page must have been claimed."""
        position = position.cpu()
        page = self._store.table[self._all()[segment.cpu()], position // self._store.page]
        if not page.all():
            raise EngineError("a token is written to a row without room for it; claim it before the forward")
        place = (page.to(self._store.device), (position % self._store.page).to(self._store.device))
        self._store.latent[layer].index_put_(place, latent)

    def reserve(self, length: int) -> None:
        """Nothing: room is claimed row by row, before."""

    def advance(self, tokens: Tensor) -> None:
        """Adds tokens [B] to the lengths."""
        self._store.lengths[self._rows] += tokens

    # ---- whole rows

    def claim(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Gives each row pages for so many tokens. Raises EngineError when there are none: admission miscounted."""
        store = self._store
        for row, length in zip(rows, lengths, strict=True):
            wanted = -(-length // store.page)
            if wanted > store.table.shape[1]:
                more = torch.zeros(len(store.owned), max(wanted, 2 * store.table.shape[1]) - store.table.shape[1])
                store.table = torch.cat([store.table, more.to(torch.int64)], 1)
            missing = wanted - store.owned[row]
            if missing <= 0:
                continue
            if missing > len(store.free):
                raise EngineError(f"row {row} needs {missing} pages and {len(store.free)} are free")
            fresh = [store.free.pop() for _ in range(missing)]
            store.table[row, store.owned[row] : wanted] = torch.tensor(fresh)
            store.owned[row] = wanted
            for latent in store.latent.values():
                latent[fresh] = 0.0

    def reset(self, rows: Tensor) -> None:
        """Rows [R] become empty and give their pages back."""
        self._clear(rows.tolist(), 0.0)

    def poison(self, rows: Tensor) -> None:
        """Rows [R] become empty, their slots and the pages that they owned NaN until somebody claims them."""
        self._clear(rows.tolist(), float("nan"))

    def _clear(self, rows: list[int], value: float) -> None:
        store = self._store
        for row in rows:
            given = store.table[row, : store.owned[row]].tolist()
            if value != 0.0 and given:
                for latent in store.latent.values():
                    latent[given] = value
            store.free += given
            store.table[row], store.owned[row], store.lengths[row] = 0, 0, 0
        for storage in (*store.recurrent.values(), *store.conv.values()):
            storage[rows] = value

    def copy_rows(self, source: Tensor, destination: Tensor) -> None:
        """Row source[i] -> row destination[i], on pages of its own."""
        self.reset(destination)
        for here, there in zip(source.tolist(), destination.tolist(), strict=True):
            self.claim([there], [int(self._store.lengths[here])])
            count = self._store.owned[there]
            old, new = self._store.table[here, :count], self._store.table[there, :count]
            for latent in self._store.latent.values():
                latent[new] = latent[old]
        self._copy_slots(source, destination)

    def move_rows(self, source: Tensor, destination: Tensor) -> None:
        """Like `copy_rows`, but the pages change hands: the source row is empty afterwards."""
        self.reset(destination)
        store = self._store
        store.table[destination] = store.table[source]
        store.table[source] = 0
        for here, there in zip(source.tolist(), destination.tolist(), strict=True):
            store.owned[there], store.owned[here] = store.owned[here], 0
        self._copy_slots(source, destination)
        store.lengths[source] = 0

    def _copy_slots(self, source: Tensor, destination: Tensor) -> None:
        for storage in (*self._store.recurrent.values(), *self._store.conv.values()):
            storage[destination] = storage[source]
        self._store.lengths[destination] = self._store.lengths[source]
