"""Optional second places for metrics: TensorBoard and Weights & Biases, each an extra of the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3rl.config import MissingResource
from k3rl.run.metrics import Sink


class TensorBoardSink:
    """Event files below `folder`."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        writer: Any = _import("torch.utils.tensorboard", "tensorboard")
        self._writer = writer.SummaryWriter(log_dir=str(folder))

    def write(self, step: int, source: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{source}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One W&B run with the run's name. The key comes from W&B's own environment variable or login."""

    name = "wandb"

    def __init__(self, run_name: str, folder: Path) -> None:
        wandb: Any = _import("wandb", "wandb")
        self._run = wandb.init(name=run_name, dir=str(folder))

    def write(self, step: int, source: str, values: Mapping[str, float]) -> None:
        # Sources report the same step at different times, so the step is a value and not W&B's rising counter.
        self._run.log({f"{source}/{name}": value for name, value in values.items()} | {f"{source}/step": step})

    def close(self) -> None:
        self._run.finish()


def open_sinks(names: Iterable[str], run_name: str, folder: Path) -> list[Sink]:
    """The sinks of these names ("tensorboard", "wandb"). Raises MissingResource naming the extra to install."""
    makers: dict[str, Any] = {
        "tensorboard": lambda: TensorBoardSink(folder / "tensorboard"),
        "wandb": lambda: WandbSink(run_name, folder),
    }
    return [makers[name]() for name in names]


def _import(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        message = f"the {extra} sink needs a package that is not installed ({error}): pip install 'k3rl[{extra}]'"
        raise MissingResource(message) from None
