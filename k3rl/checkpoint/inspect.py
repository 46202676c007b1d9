"""What a model consists of, from its configuration alone: parameters, bytes as stored, parts (`k3rl inspect`).

Counted from `k3rl.model.table`. For a checkpoint directory the listing is also checked against what the files, or the
index alone, hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3rl.checkpoint.hf import CONFIG, as_stored, stored_files
from k3rl.checkpoint.official import CheckpointError
from k3rl.checkpoint.shards import stored_names
from k3rl.model import SIZES, K3Config, active_parameters, tensor_table


def inspect_model(directory_or_name: str | Path) -> dict[str, Any]:
    """A checkpoint directory, or one of the named sizes, as one JSON-ready object.

    A directory may hold all of a checkpoint, or only `config.json` and the index, without weights.
    parameters (A_log by its real heads, router biases, vision and projector included); active_parameters, those that
    one text token uses, without the input embedding; bytes and tensors as stored; parts {name: {parameters, bytes,
    tensors, dtypes {format: parameters}}}; quantized, the parts that are stored as MXFP4; model, the named size with
    the fewest differing keys; differences {key: [here, there]} to it; config.

    Raises ModelConfigError for an unknown name, CheckpointError when a directory's files disagree with its config.
    """
    path = Path(directory_or_name)
    if str(directory_or_name) in SIZES and not path.is_dir():
        config = K3Config.named(str(directory_or_name))
    elif path.is_dir():
        config = _checked_directory(path)
    else:
        raise CheckpointError(f"{directory_or_name} is neither a checkpoint directory nor one of {', '.join(SIZES)}")
    table = list(tensor_table(config))
    parts: dict[str, dict[str, Any]] = {}
    for entry in table:
        part = parts.setdefault(entry.part, {"parameters": 0, "bytes": 0, "tensors": 0, "dtypes": {}})
        part["parameters"] += entry.parameters
        part["bytes"] += entry.bytes
        part["tensors"] += entry.tensors
        part["dtypes"][entry.stored] = part["dtypes"].get(entry.stored, 0) + entry.parameters
    nearest, differences = _nearest(config)
    return {
        "name": str(directory_or_name),
        "parameters": sum(entry.parameters for entry in table),
        "active_parameters": active_parameters(config, table),
        "bytes": sum(entry.bytes for entry in table),
        "tensors": sum(entry.tensors for entry in table),
        "parts": parts,
        "quantized": [name for name, part in parts.items() if "mxfp4" in part["dtypes"]],
        "model": nearest,
        "differences": differences,
        "config": config.to_dict(),
    }


def _checked_directory(path: Path) -> K3Config:
    """The configuration of a directory, experts as they are stored, after its names and sizes were compared with it.

    Raises CheckpointError when a name is missing or unknown, or a tensor or the index's total has another size.
    """
    config = K3Config.from_json(path / CONFIG)
    files = stored_files(path, config)
    config = as_stored(config, files)
    sizes = {name: size for entry in tensor_table(config) for name, size in stored_names(entry)}
    if sizes.keys() != set(files):
        odd = min(sizes.keys() ^ set(files))
        side = "is not stored" if odd in sizes else "belongs to no parameter"
        raise CheckpointError(f"{path} and its {CONFIG} disagree: {odd} {side}")
    if not files.has_weights:
        total = sum(sizes.values())
        if files.total_size not in (None, total):
            raise CheckpointError(
                f"{path}: the index says {files.total_size} bytes; a model of its {CONFIG} has {total}"
            )
        return config
    for name, size in sizes.items():
        if (found := files.stored_bytes(name)) != size:
            raise CheckpointError(f"{path} and its {CONFIG} disagree: {name} has {found} bytes, wanted {size}")
    return config


def _nearest(config: K3Config) -> tuple[str, dict[str, list[Any]]]:
    """The named size with the fewest differing keys, and those keys with both values."""
    best: tuple[str, dict[str, list[Any]]] | None = None
    here = _flat(config.to_dict())
    for name in SIZES:
        there = _flat(K3Config.named(name).to_dict())
        differing = {
            key: [here.get(key), there.get(key)] for key in sorted(here.keys() | there.keys())
            if here.get(key) != there.get(key)
        }  # fmt: skip
        if best is None or len(differing) < len(best[1]):
            best = name, differing
    assert best is not None
    return best


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys; JSON types throughout."""
    if not isinstance(value, dict):
        return {prefix: json.loads(json.dumps(value))}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat
