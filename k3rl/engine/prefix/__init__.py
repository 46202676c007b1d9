"""Cached prefix states: those of earlier prompts and turns, for prompts that begin with them.

`cache.py` names them, finds them and keeps them in memory, `disk_tier.py` keeps them in files, `states.py` is what an
engine asks and gives. The states of running rows are in `engine/cache.py`.
"""

from k3rl.engine.prefix.cache import FixedState, Hit, MemoryTier, PrefixCache
from k3rl.engine.prefix.disk_tier import DiskTier

__all__ = ["DiskTier", "FixedState", "Hit", "MemoryTier", "PrefixCache"]
