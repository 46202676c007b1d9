"""The loops: SFT, and the one policy loop of RL and distillation; and the quickstart that chains them.

Read `policy.py` first, then `rl.py` and `distill.py`, which say what an algorithm adds to it. `rollout_buffer.py` and
`curriculum.py` are where its batches come from, `guard.py` and `evaluation.py` what watches it. Configs are in
`configs.py`, presets in `presets.py`; a loop's steps and files are in `stage.py`, its first weights in `start.py`, what
a run is open with in `session.py`. `launch.py` runs a config to its end. Actors are in `k3rl.actors`, one optimizer
step in `k3rl.parallel`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3rl.config import Config
    from k3rl.pipelines import ablate, submit
    from k3rl.pipelines.configs import (
        DistillConfig,
        EnvConfig,
        EvalConfig,
        ModelConfig,
        QuickstartConfig,
        RLConfig,
        SamplingConfig,
        SFTConfig,
    )
    from k3rl.pipelines.presets import PRESETS
    from k3rl.pipelines.replay import KL_BOUND, TOLERANCE, Rescored, Stored, find_episode, rescore
    from k3rl.run import RunOptions

_HOMES = {
    "KL_BOUND": "replay",
    "PRESETS": "presets",
    "TOLERANCE": "replay",
    "DistillConfig": "configs",
    "EnvConfig": "configs",
    "EvalConfig": "configs",
    "ModelConfig": "configs",
    "QuickstartConfig": "configs",
    "RLConfig": "configs",
    "Rescored": "replay",
    "SFTConfig": "configs",
    "SamplingConfig": "configs",
    "Stored": "replay",
    "find_episode": "replay",
    "rescore": "replay",
}
"""Name -> the module that has it, imported when it is first asked for: a command that only reads needs no actors."""


def run(pipeline: str, config: Config, options: RunOptions) -> dict[str, Any]:
    """Runs a pipeline to its end and returns what `--json` prints."""
    from k3rl.pipelines import launch

    return launch.run(pipeline, config, options)


def evaluate(checkpoint: str, env: str, **options: Any) -> dict[str, Any]:
    """Measures a checkpoint on held-out tasks; see `k3rl.pipelines.launch.evaluate`."""
    from k3rl.pipelines import launch

    return launch.evaluate(checkpoint, env, **options)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in ("ablate", "submit"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "KL_BOUND",
    "PRESETS",
    "TOLERANCE",
    "DistillConfig",
    "EnvConfig",
    "EvalConfig",
    "ModelConfig",
    "QuickstartConfig",
    "RLConfig",
    "Rescored",
    "SFTConfig",
    "SamplingConfig",
    "Stored",
    "ablate",
    "evaluate",
    "find_episode",
    "rescore",
    "run",
    "submit",
]
