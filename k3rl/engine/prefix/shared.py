"""Beginnings that prompts have in common, such as an environment's system prompt: each is computed once.

A state stands at one boundary, so the engine has to know where to stop: where a prompt leaves one that came before it.
The first of those that wait computes up to there and keeps that state; the others begin behind it. Nothing depends on
time, so that equal requests in equal order are computed alike.
"""

from __future__ import annotations

from collections import OrderedDict

from k3rl.engine.prefix.chain import Chain, Key

_BLOCKS = 1 << 16  # that are remembered, of the prompts that came last


class SharedBeginnings:
    """What prompts of one version of the weights have in common, in whole blocks."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # blocks of prompts
        self._prompts: OrderedDict[Key, None] = OrderedDict()
        self._ends: OrderedDict[bytes, None] = OrderedDict()  # blocks behind which prompts differ

    def saw(self, chain: Chain) -> None:
        """A prompt came."""
        key = chain.key(len(chain.ids))
        if key not in self._prompts:  # one that is the same shares all of its state
            shared = next((d for d in reversed(chain.digests[1:]) if d in self._seen), None)
            if shared is not None:
                self._ends[shared] = None
        self._prompts[key] = None
        for digest in chain.digests[1:]:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        for table in (self._seen, self._prompts, self._ends):
            while len(table) > _BLOCKS:
                table.popitem(last=False)

    def end_of(self, chain: Chain) -> int:
        """Tokens of the longest beginning of a prompt that others have, too; 0 without one."""
        for blocks in range(len(chain.digests) - 1, 0, -1):
            if chain.digests[blocks] in self._ends and blocks * chain.block < len(chain.ids):
                return blocks * chain.block
        return 0

    def clear(self) -> None:
        """Other weights are served."""
        for table in (self._seen, self._prompts, self._ends):
            table.clear()
