from __future__ import annotations

import os

from hypothesis import settings

# The same examples on every run and machine, and no deadline, because the cores are shared.
# HYPOTHESIS_PROFILE=default searches at random instead.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
