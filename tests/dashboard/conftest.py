"""A run that a test writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("dashboard_runs", Path(__file__).with_name("recorded.py"))
dashboard_runs = sys.modules["dashboard_runs"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(dashboard_runs)


@pytest.fixture
def write(tmp_path):
    """Begins a run in the folder of the test's runs."""
    return lambda name="one", options=None: dashboard_runs.Written(tmp_path / "runs" / name, options)
