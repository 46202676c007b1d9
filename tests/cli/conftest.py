"""A preset of a user's own, so that the command line is tested apart from any pipeline's configuration."""

from __future__ import annotations

import sys
import types

import pytest

from k3rl.config import Config


class Optim(Config):
    lr: float = 0.1
    """Learning rate."""


class Settings(Config):
    seed: int = 0
    steps: int = 5
    """Steps of the run."""
    optim: Optim = Optim()


def small() -> Settings:
    return Settings(steps=7)


def broken() -> Settings:
    return Settings(stepz=7)


@pytest.fixture(autouse=True)
def user_presets(monkeypatch):
    """The module `mine` with the presets small and broken."""
    module = types.ModuleType("mine")
    module.small, module.broken = small, broken
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


@pytest.fixture
def launched(monkeypatch):
    """Calls of `k3rl.pipelines.run` as (pipeline, config, options); each answers {"reward_after": 0.5}."""
    from k3rl import pipelines

    calls = []

    def run(pipeline, config, options):
        calls.append((pipeline, config, options))
        return {"reward_after": 0.5, "missing": float("nan")}

    monkeypatch.setattr(pipelines, "run", run)
    return calls
