"""The tiny model of the engine's tests: test folders are no packages, so their fixtures are loaded by path."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("engine_fixtures", Path(__file__).parents[1] / "engine" / "conftest.py")
_engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_engine)
build_model, model, run_alone = _engine.build_model, _engine.model, _engine.run_alone
