"""Training state on disk: safetensors for tensors, JSON for the rest, whole or not there.

A step is written beside its final name, flushed, renamed; `latest` names it only after that. So a kill at any
moment leaves either the older state or the newer one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from k3rl.config import K3Error

_TENSORS, _EXTRA, _LATEST = "state.safetensors", "state.json", "latest"
_SCHEMA = 1


class TrainStateError(K3Error):
    """A training state is missing, torn, or of another schema."""


def save_train_state(directory: Path, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
    """Writes `directory` and then points `latest` beside it at it. An existing state of that name is replaced."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = directory.with_name(directory.name + ".tmp")
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.mkdir()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, scratch / _TENSORS)
    (scratch / _EXTRA).write_text(json.dumps({"schema_version": _SCHEMA, **extra}))
    for name in (_TENSORS, _EXTRA):
        _flush(scratch / name)
    if directory.exists():
        shutil.rmtree(directory)
    os.replace(scratch, directory)
    _flush(directory.parent)
    pointer = directory.parent / (_LATEST + ".tmp")
    pointer.write_text(directory.name)
    _flush(pointer)
    os.replace(pointer, directory.parent / _LATEST)
    _flush(directory.parent)


def load_train_state(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, extra) of one saved state. Raises TrainStateError."""
    missing = [name for name in (_TENSORS, _EXTRA) if not (directory / name).is_file()]
    if missing:
        raise TrainStateError(
            f"{directory} is no training state: {', '.join(missing)} missing; resume from another step"
        )
    extra = json.loads((directory / _EXTRA).read_text())
    if extra.pop("schema_version", None) != _SCHEMA:
        raise TrainStateError(f"{directory} has another schema than {_SCHEMA}; resume it with the k3rl that wrote it")
    return load_file(directory / _TENSORS), extra


def latest_train_state(parent: Path) -> Path | None:
    """The newest whole state under `parent`, or None when there is none yet."""
    pointer = parent / _LATEST
    if not pointer.is_file():
        return None
    directory = parent / pointer.read_text().strip()
    if not directory.is_dir():
        raise TrainStateError(f"{pointer} names {directory.name}, which is not there; name a step that exists in it")
    return directory


def prune_train_states(parent: Path, keep: int) -> None:
    """Removes all but the `keep` newest whole states (by step number in their names)."""
    states = sorted((p for p in parent.glob("step_*") if p.suffix != ".tmp"), key=lambda p: int(p.name.split("_")[1]))
    for old in states[:-keep]:
        shutil.rmtree(old)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
