"""The loops: SFT, RL, distillation, and the quickstart that chains them.

Read `rl.py` first. Configs are in `configs.py`, presets in `presets.py`; what a loop keeps on disk is in `stage.py`,
what it runs with in `session.py`. Actors are in `k3rl.actors`, one optimizer step in `k3rl.parallel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3rl.config import Config
    from k3rl.run import RunOptions


def run(pipeline: str, config: Config, options: RunOptions) -> dict[str, Any]:
    """Runs a pipeline to its end and returns what `--json` prints."""
    from k3rl.pipelines import launch

    return launch.run(pipeline, config, options)


def evaluate(checkpoint: str, env: str, **options: Any) -> dict[str, Any]:
    """Measures a checkpoint on held-out tasks; see `k3rl.pipelines.launch.evaluate`."""
    from k3rl.pipelines import launch

    return launch.evaluate(checkpoint, env, **options)
