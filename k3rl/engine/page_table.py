"""Which pages of a paged cache each row has. Bookkeeping on the host; the pages themselves are in `paged.py`.

Page 0 is nobody's. Rows may have pages in common; a page is free when no row has it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.protocol import EngineError
from k3rl.engine.uploads import upload


class PageTable:
    """`pages` pages of `page` tokens for `rows` rows, which have none at first."""

    def __init__(self, rows: int, pages: int, page: int, device: torch.device) -> None:
        self.page, self.pages = page, pages
        self.table = np.zeros((rows, 8), np.int64)  # page of each block of a row; 0 behind the last one
        self.held = np.zeros(rows, np.int64)  # pages of each row
        self.free = list(range(pages, 0, -1))
        self.users = np.zeros(pages + 2, np.int64)  # rows that have each page
        self.changes = 0  # so that copies of the table on the device are known to be old
        self._device = device

    def blocks(self, tokens: np.ndarray | int) -> np.ndarray | int:
        """Pages that so many tokens need."""
        return -(-tokens // self.page)

    def on_device(self, rows: slice | Tensor | int, blocks: slice = slice(None)) -> Tensor:
        """The pages of rows, int64 on the device."""
        return upload(torch.from_numpy(self.table)[rows, blocks], self._device)

    def claim(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Gives rows int64 [n] pages for so many tokens [n] -> the pages that they did not have.

        Raises EngineError when there are none: admission miscounted.
        """
        needed = np.asarray(self.blocks(tokens))
        given = [np.empty(0, np.int64)]
        for place in np.flatnonzero(needed > self.held[rows]).tolist():  # a decode step crosses few pages
            row, wanted = int(rows[place]), int(needed[place])
            if wanted > self.table.shape[1]:
                wider = np.zeros((len(self.held), max(wanted, 2 * self.table.shape[1])), np.int64)
                wider[:, : self.table.shape[1]] = self.table
                self.table = wider
            missing = wanted - int(self.held[row])
            if missing > len(self.free):
                raise EngineError(f"row {row} needs {missing} pages and {len(self.free)} are free")
            fresh = np.array(self.free[: -missing - 1 : -1])
            del self.free[-missing:]
            self.table[row, self.held[row] : wanted] = fresh
            self.held[row], self.users[fresh] = wanted, 1
            given.append(fresh)
        self.changes += len(given) > 1
        return np.concatenate(given)

    def release(self, rows: np.ndarray) -> np.ndarray:
        """Rows int64 [n] have no pages any more -> those that nobody else has; they are free."""
        having = rows[self.held[rows] > 0]
        if not having.size:
            return np.empty(0, np.int64)
        listed = np.arange(self.table.shape[1]) < self.held[having][:, None]
        had = self.table[having][listed]
        np.subtract.at(self.users, had, 1)
        had = np.unique(had)
        freed = had[self.users[had] == 0]
        self.free += freed.tolist()
        self.table[having], self.held[having] = 0, 0
        self.changes += 1
        return freed

    def share(self, source: int, target: int, count: int) -> None:
        """An empty row has the first `count` pages of another in common with it."""
        shared = self.table[source, :count]
        self.table[target, :count] = shared
        self.users[shared] += 1
        self.held[target] = count
        self.changes += 1

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Pages of rows [n] change hands to empty ones [n]."""
        self.table[target], self.held[target] = self.table[source], self.held[source]
        self.table[source], self.held[source] = 0, 0
        self.changes += 1

    def places(self, rows: np.ndarray, past: np.ndarray) -> np.ndarray:
        """Where the latent of token past [N] of each row [N] goes, counted in tokens over all pages, int64 [N].

        Raises EngineError for a row without room.
        """
        block = past // self.page
        page = np.zeros_like(block) if block.max() >= self.table.shape[1] else self.table[rows, block]
        if not page.all():
            raise EngineError("a token is written to a row without room for it; claim it before the forward")
        return page * self.page + past % self.page
