"""Makes the fake services beside these tests importable as `sandbox_fakes`: test folders are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).with_name("fakes")
if "sandbox_fakes" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "sandbox_fakes", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sandbox_fakes"] = _module
    _spec.loader.exec_module(_module)
