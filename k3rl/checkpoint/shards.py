"""Which file of a checkpoint holds which tensor, and writing those files.

K3's split is a file for each layer, then the rest. A model that was loaded from a checkpoint of the flat dialect is
written back in the files that it came in. Files that several ranks write together come out byte for byte as one process
writes them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3rl.checkpoint.official import CheckpointError, collected_tensors, official_tensors
from k3rl.checkpoint.replace import flush
from k3rl.model import K3Config, K3ForCausalLM, TensorEntry, tensor_table
from k3rl.numerics import mx
from k3rl.parallel import Mesh

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ELEMENT_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
SHARD = re.compile(r"model-\d{5}-of-\d{5,6}\.safetensors")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def stored_names(entry: TensorEntry) -> Iterator[tuple[str, int]]:
    """(name in the files, bytes) of every tensor of an entry."""
    for name in _copies(entry):
        if entry.stored == "mxfp4":
            elements = math.prod(entry.shape)
            yield f"{name}_packed", elements // 2
            yield f"{name}_scale", elements // mx.BLOCK
        else:
            yield name, entry.bytes // entry.copies


def _copies(entry: TensorEntry) -> Iterator[str]:
    if entry.part != "routed_experts":
        yield entry.name
        return
    for expert in range(entry.copies):
        yield entry.name.replace(".experts.0.", f".experts.{expert}.")


class Shards:
    """The files of one model's checkpoint, in their order."""

    def __init__(self, model: K3ForCausalLM) -> None:
        self._config = model.config
        self._came_in = {} if model.origin is None else model.origin.shards
        config = model.config.replace(quantization=model.config.quantization.shipped())
        names = [name for entry in tensor_table(config) for name, _ in stored_names(entry)]
        self.expected = Counter(self.file_of(name) for name in names)
        """Tensors of each file."""

    @property
    def files(self) -> list[str]:
        return sorted(self.expected)

    @property
    def single(self) -> bool:
        """Whether one file holds all, which has no index."""
        return self.files == [SINGLE]

    def file_of(self, name: str) -> str:
        """The file of a tensor, by official name; an expert's bytes go where its values were."""
        plain = name.removesuffix("_packed").removesuffix("_scale")
        return self._came_in.get(plain) or self._came_in.get(name) or _by_layer(name, self._config)

    def writer(self, name: str, ranks: int) -> int:
        """Which of the ranks of an expert axis writes the file of a tensor: one for all experts of a layer."""
        return 0 if self._came_in else _number(name, self._config) % ranks

    def write(self, model: K3ForCausalLM, mesh: Mesh, scratch: Path) -> None:
        """This rank's files, each as soon as it is whole, read back and compared.

        Goes on to the end of the gathering when one fails.
        """
        pending: dict[str, dict[str, Tensor]] = {}
        failure: Exception | None = None
        stored = official_tensors(model, shipped=True)
        for name, tensor in collected_tensors(stored, model, mesh, lambda name: self.writer(name, mesh.expert.size)):
            if failure is not None:
                continue
            file = self.file_of(name)
            pending.setdefault(file, {})[name] = tensor.cpu().contiguous()
            if len(pending[file]) == self.expected[file]:
                try:
                    _write(scratch / file, pending.pop(file))
                except (OSError, SafetensorError, CheckpointError) as error:
                    failure = error
        if failure is not None:
            raise failure
        if pending:
            raise CheckpointError(f"{scratch / min(pending)} has {len(pending[min(pending)])} of its tensors only")

    def written(self, scratch: Path) -> tuple[int, dict[str, str]]:
        """What is on the disk: (bytes of all tensors, tensor name -> file name). Raises CheckpointError."""
        total, weight_map = 0, {}
        for file in self.files:
            shard = open_shard(scratch / file)
            for name in shard.keys():  # noqa: SIM118 (a shard is no mapping)
                piece = shard.get_slice(name)
                total += math.prod(piece.get_shape()) * ELEMENT_BYTES[piece.get_dtype()]
                weight_map[name] = file
        return total, dict(sorted(weight_map.items()))


def _number(name: str, config: K3Config) -> int:
    """Official split: layer L in shard L + 1, then embedding, head and final norm, then projector, then tower."""
    layers, match = config.num_hidden_layers, _LAYER.search(name)
    if match and not name.startswith("vision_tower."):
        return int(match.group(1)) + 1
    if name.startswith("mm_projector."):
        return layers + 2
    return layers + 3 if name.startswith("vision_tower.") else layers + 1


def _by_layer(name: str, config: K3Config) -> str:
    count = config.num_hidden_layers + (1 if config.vision_config is None else 3)
    width = 5 if config.flat else 6
    return f"model-{_number(name, config):05d}-of-{count:0{width}d}.safetensors"


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})
    with safe_open(path, framework="pt") as written:
        for name, tensor in tensors.items():
            back = written.get_tensor(name)
            equal = back.dtype == tensor.dtype and back.shape == tensor.shape
            if not equal or not torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                raise CheckpointError(f"{path}: {name} does not read back as it was written; check the disk")
    flush(path)


def open_shard(path: Path) -> Any:
    """A safetensors file, open. Raises CheckpointError."""
    try:
        return safe_open(path, framework="pt")
    except (FileNotFoundError, PermissionError) as error:
        if path.exists() and not os.access(path, os.R_OK):
            raise CheckpointError(f"{path} is there and may not be read by this user; give it read access") from error
        raise CheckpointError(f"{path} is missing; the index names it") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error})") from error


def stored_bytes_of(shard: Any) -> int:
    """Bytes of all tensors of an open file, without reading them."""
    pieces = (shard.get_slice(name) for name in shard.keys())  # noqa: SIM118 (a shard is no mapping)
    return sum(math.prod(piece.get_shape()) * ELEMENT_BYTES[piece.get_dtype()] for piece in pieces)


def weight_map(directory: Path) -> tuple[dict[str, str], int | None, bool]:
    """Tensor name -> file name, from the index or from the single file; the index's total size; whether files exist."""
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise CheckpointError(f"{directory} holds neither {INDEX} nor {SINGLE}; it is no checkpoint")
        return dict.fromkeys(open_shard(directory / SINGLE).keys(), SINGLE), None, True
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        given: dict[str, str] = content["weight_map"]
        total: int | None = (content.get("metadata") or {}).get("total_size")
        bad = next(((name, file) for name, file in given.items() if not isinstance(file, str)), None)
        if bad is not None:
            raise CheckpointError(f"{index}: the file of {bad[0]} is {json.dumps(bad[1])}; wanted a file's name")
        if total is not None and (isinstance(total, bool) or not isinstance(total, int)):
            raise CheckpointError(f"{index}: metadata.total_size is {json.dumps(total)}; wanted a number of bytes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{index} has no readable weight_map ({error})") from error
    names_in: dict[str, set[str]] = {}
    for name, file in given.items():
        names_in.setdefault(file, set()).add(name)
    for file in sorted(names_in):
        if Path(file).name != file:
            raise CheckpointError(f"{index} names {file!r}, which is not a file name in this directory")
    if not any((directory / file).exists() for file in names_in):
        return given, total, False
    for file, indexed in sorted(names_in.items()):
        inside = set(open_shard(directory / file).keys())
        if inside != indexed:
            raise CheckpointError(f"{directory / file} and {INDEX} disagree about {min(inside ^ indexed)}")
    return given, total, True
