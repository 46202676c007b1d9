"""Cached prefix states: those of earlier prompts and turns, for prompts that begin with them, and of conversations
that go on.

`chain.py` names them, `parts.py` says what they are made of, `cache.py` finds them, `memory_tier.py` keeps them in
memory, `disk_tier.py` in files; `shared.py` knows what prompts have in common, `states.py` is what an engine asks and
gives. The states of running rows are in `engine/cache.py`.
"""

from k3rl.engine.prefix.cache import PrefixCache
from k3rl.engine.prefix.disk_tier import DiskTier
from k3rl.engine.prefix.memory_tier import MemoryTier
from k3rl.engine.prefix.parts import FixedState, Hit

__all__ = ["DiskTier", "FixedState", "Hit", "MemoryTier", "PrefixCache"]
