"""Makes the helper beside the structure tests importable as `structure_source`: test folders are no packages."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("structure_source", Path(__file__).with_name("source.py"))
_module = importlib.util.module_from_spec(_spec)
sys.modules["structure_source"] = _module
_spec.loader.exec_module(_module)
