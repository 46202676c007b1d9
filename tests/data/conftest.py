from __future__ import annotations

from hypothesis import settings

# The same examples on every run and machine; no deadline, because the cores are shared.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
