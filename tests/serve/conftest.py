"""The tiny model of the engine's tests, and `serving`: test folders are no packages, so both are loaded by path."""

import importlib.util
import sys
from pathlib import Path


def _loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_engine = _loaded("engine_fixtures", Path(__file__).parents[1] / "engine" / "conftest.py")
build_model, model, run_alone = _engine.build_model, _engine.model, _engine.run_alone
_loaded("serving", Path(__file__).with_name("serving.py"))
