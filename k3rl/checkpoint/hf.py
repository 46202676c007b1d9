"""A model as a directory in the official checkpoint layout: read, and written whole or not at all (k3.md 1.3).

What its tensors are is a matter of `k3rl.checkpoint.official`. Files that several ranks write together come out byte
for byte as one process writes them.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3rl.checkpoint.adapter import check_base, is_adapter, load_adapter, read_adapter_config, trained_activations
from k3rl.checkpoint.card import CARD, card_text
from k3rl.checkpoint.official import CheckpointError, collected_tensors, fill, official_tensors
from k3rl.checkpoint.replace import flush, locked, put_in_place, recover, scratch_beside, scratch_name
from k3rl.data import ImageConfig
from k3rl.model import K3Config, K3ForCausalLM, QuantizationConfig, VisionConfig, serves_packed
from k3rl.parallel import Mesh
from k3rl.tokens import TOKENIZER_FILES

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION, PREPROCESSOR = "generation_config.json", "preprocessor_config.json"
_ELEMENT_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}

_OURS = {CONFIG, INDEX, SINGLE, GENERATION, CARD, PREPROCESSOR, *TOKENIZER_FILES}
_SHARD = re.compile(r"model-\d{5}-of-\d{6}\.safetensors")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class SavesItself(Protocol):
    """A tokenizer, as far as saving a checkpoint needs one."""

    def save(self, folder: Path) -> None: ...


# -------------------------------------------------------------------------------------------------- reading


class StoredFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint directory, read one at a time.

    has_weights: False for an index without any of its files, whose names can be listed but not read. total_size: what
    the index says of all bytes, None without an index.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._where, self.total_size, self.has_weights = _weight_map(directory)
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shard(name)
        try:
            return shard.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._directory / self._where[name]}: {name} cannot be read ({error})") from error

    def _shard(self, name: str) -> Any:
        file = self._where[name]
        if file not in self._open:
            self._open[file] = _open_shard(self._directory / file)
        return self._open[file]

    def stored_bytes(self, name: str) -> int:
        """Bytes of one tensor, without reading it."""
        piece = self._shard(name).get_slice(name)
        return math.prod(piece.get_shape()) * _ELEMENT_BYTES[piece.get_dtype()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the index names it") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error})") from error


def _weight_map(directory: Path) -> tuple[dict[str, str], int | None, bool]:
    """Tensor name -> file name, from the index or from the single file; the index's total size; whether files exist."""
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise CheckpointError(f"{directory} holds neither {INDEX} nor {SINGLE}; it is no checkpoint")
        return dict.fromkeys(_open_shard(directory / SINGLE).keys(), SINGLE), None, True
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        given: dict[str, str] = content["weight_map"]
        total: int | None = content.get("metadata", {}).get("total_size")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
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
        inside = set(_open_shard(directory / file).keys())
        if inside != indexed:
            raise CheckpointError(f"{directory / file} and {INDEX} disagree about {min(inside ^ indexed)}")
    return given, total, True


def load_checkpoint(
    directory: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    mesh: Mesh | None = None,
    packed: bool | Literal["served"] = False,
    activations: str | None = None,
) -> K3ForCausalLM:
    """The model of a checkpoint directory in the official layout; on a mesh with this rank's run of experts only.

    Whether experts are quantized is read off what is stored, not off the configuration. dtype: of the parameters that
    are stored as bf16 or MXFP4 (others are float32 or wider). packed: MXFP4 experts stay the stored bytes, frozen;
    "served": where a kernel multiplies with them, which is what an engine wants. activations: what the inputs of routed
    experts are rounded to ("mxfp8" or "none") instead of what the configuration says.
    A directory with an adapter gives the model that it belongs to, with the adapter attached.
    Raises CheckpointError, also where images are to be prepared another way than k3rl does it, or ModelConfigError for
    a configuration that is not a K3.
    """
    path = Path(directory)
    if mesh is None or mesh.world.rank == 0:
        recover(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the directory that holds {CONFIG}")
    if is_adapter(path):
        return _load_adapted(path, dtype, device, mesh, packed, activations)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} holds no {CONFIG}; it is no checkpoint")
    begun = path.stat()
    config = K3Config.from_json(path / CONFIG)
    _check_preprocessor(path / PREPROCESSOR, config)
    files = StoredFiles(path)
    experts = None if mesh is None else mesh.experts(config.num_experts)
    config = as_stored(config, files.keys())
    if activations is not None:
        config = config.replace(quantization=replace(config.quantization, activations=activations))
    packs = bool(packed) and config.quantization.weights == "mxfp4"
    if packed == "served":
        latent, width = config.expert_hidden_size, config.moe_intermediate_size
        packs = packs and serves_packed(latent, width, torch.device(device), dtype)
    model = K3ForCausalLM(config, dtype=dtype, device=device, experts=experts, packed=packs)
    fill(model, files)
    if not (path.is_dir() and os.path.samestat(begun, path.stat())):
        raise CheckpointError(f"{path} was replaced while it was read, so what was read is of two; load it again")
    return model


def _load_adapted(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    mesh: Mesh | None,
    packed: bool | Literal["served"],
    activations: str | None,
) -> K3ForCausalLM:
    _, base = read_adapter_config(path)
    if not (base / CONFIG).is_file():
        raise CheckpointError(
            f"the adapter {path} belongs to {base}, which holds no checkpoint; put that in place, or beside the adapter"
        )
    check_base(path, base)
    chosen = activations or trained_activations(path)
    model = load_checkpoint(base, dtype, device, mesh=mesh, packed=packed, activations=chosen)
    load_adapter(path, model).attach(model)
    return model


def _image_config(vision: VisionConfig) -> ImageConfig:
    """The released numbers, for this tower's patches."""
    return ImageConfig(patch_size=vision.patch_size, merge=vision.merge_kernel_size[0])


def _check_preprocessor(file: Path, config: K3Config) -> None:
    """Engine and learner prepare images by the released numbers; a file that wants others must not be passed over."""
    if config.vision_config is None or not file.is_file():
        return
    wanted = _image_config(config.vision_config)
    try:
        found = ImageConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is no preprocessor configuration: {type(error).__name__}: {error}") from error
    if found != wanted:
        raise CheckpointError(f"{file} wants {found}; k3rl prepares images by {wanted}. Store those numbers")


def as_stored(config: K3Config, names: Any) -> K3Config:
    """The configuration with `quantization.weights` as the stored expert names say. Raises CheckpointError."""
    expert = re.compile(r"\.experts\.\d+\.w[123]\.weight(_packed)?$")
    packed = {match.group(1) is not None for match in map(expert.search, names) if match}
    if len(packed) == 2:
        raise CheckpointError("some routed experts are packed and some are plain; store all of them one way")
    weights = "mxfp4" if packed == {True} else "none"
    old = config.quantization
    if old.weights == weights:
        return config
    return config.replace(quantization=QuantizationConfig(weights, old.scale_rule, old.activations))


# -------------------------------------------------------------------------------------------------- writing


def save_checkpoint(
    model: K3ForCausalLM,
    directory: str | Path,
    *,
    tokenizer: SavesItself | None = None,
    card: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Writes the official layout: shards, index, configurations, tokenizer files and a model card.

    With a vision tower also the numbers of the image preprocessor (`k3rl.data.images`).

    Experts that are to be quantized post hoc (`QuantizationConfig`) are quantized here.
    All of it is written beside `directory`, read back and compared, and put in place at once: a kill at any moment
    leaves the previous checkpoint or the new one. An older checkpoint is replaced.
    card: facts for the model card; `title` and `summary` are its head, everything else becomes a table.
    mesh: the ranks that hold the model together; all of them call this, on one file system, and the files are those
    that one process writes.

    Raises CheckpointError when `directory` holds anything that is not a checkpoint's, or when what was written does
    not read back equal, BusyDirectory when another process writes there; PeerFailed on the other ranks.
    """
    if model.adapter is not None:
        raise CheckpointError(
            "the model has an adapter, which a checkpoint would leave out; merge it first, or save_adapter it alone"
        )
    mesh = Mesh.alone() if mesh is None else mesh
    path = Path(directory).absolute()
    scratch, first = scratch_name(path), mesh.world.rank == 0
    with ExitStack() as stack:
        with mesh.world.together("preparing a checkpoint"):
            if first:
                stack.enter_context(locked(path))
                _refuse_foreign_files(path)
                stack.callback(
                    shutil.rmtree, scratch_beside(path), ignore_errors=True
                )  # a full disk has no room for it
        with mesh.world.together("writing a checkpoint"):
            _write_shards(model, mesh, scratch)
        with mesh.world.together("completing a checkpoint"):
            if first:
                _complete(model, scratch, path.name, tokenizer, card or {})
                put_in_place(scratch, path)


def _complete(
    model: K3ForCausalLM, scratch: Path, name: str, tokenizer: SavesItself | None, card: Mapping[str, Any]
) -> None:
    """Everything beside the shards; the index says what is on the disk."""
    total, weight_map = _written(scratch, model.config)
    config = model.config.replace(quantization=model.config.quantization.shipped())
    _write_json(scratch / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(scratch / CONFIG, config.to_dict())
    _write_json(
        scratch / GENERATION,
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
        },
    )
    if config.vision_config is not None:
        _write_json(scratch / PREPROCESSOR, _image_config(config.vision_config).to_dict())
    if tokenizer is not None:
        tokenizer.save(scratch)
    (scratch / CARD).write_text(card_text(name, config, model.parameter_count(), total, card), encoding="utf-8")
    for file in scratch.iterdir():
        flush(file)


def _refuse_foreign_files(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a directory for the checkpoint")
    foreign = sorted(p.name for p in path.iterdir() if p.name not in _OURS and not _SHARD.fullmatch(p.name))
    if foreign:
        raise CheckpointError(
            f"{path} holds {foreign[0]!r}, which is not part of a checkpoint; nothing is overwritten, "
            "choose an empty or new directory"
        )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shard_number(name: str, layers: int) -> int:
    """Official split: layer L in shard L + 1, then embedding, head and final norm, then projector, then tower."""
    match = _LAYER.search(name)
    if match and name.startswith("language_model."):
        return int(match.group(1)) + 1
    if name.startswith("mm_projector."):
        return layers + 2
    return layers + 3 if name.startswith("vision_tower.") else layers + 1


def _shard_file(number: int, config: K3Config) -> str:
    count = config.num_hidden_layers + (1 if config.vision_config is None else 3)
    return f"model-{number:05d}-of-{count:06d}.safetensors"


def _write_shards(model: K3ForCausalLM, mesh: Mesh, scratch: Path) -> None:
    """This rank's shards; every file is read back and compared. Goes on to the end of the gathering when one fails."""
    layers = model.config.num_hidden_layers
    pending: dict[int, dict[str, Tensor]] = {}
    current, failure = 1, None

    def writer(name: str) -> int:
        return _shard_number(name, layers) % mesh.expert.size

    def write(number: int) -> None:
        tensors = pending.pop(number)
        save_file(tensors, scratch / _shard_file(number, model.config), metadata={"format": "pt"})
        _verify(scratch / _shard_file(number, model.config), tensors)
        flush(scratch / _shard_file(number, model.config))

    for name, tensor in collected_tensors(official_tensors(model, shipped=True), model, mesh, writer):
        if failure is not None:
            continue
        number = _shard_number(name, layers)
        try:
            if current <= layers and number > current and current in pending:
                write(current)  # layers come in order, so an earlier one is complete
        except (OSError, SafetensorError, CheckpointError) as error:
            failure = error
        current = max(current, number) if number <= layers else current
        pending.setdefault(number, {})[name] = tensor.cpu().contiguous()
    if failure is not None:
        raise failure
    for number in sorted(pending):
        write(number)


def _written(scratch: Path, config: K3Config) -> tuple[int, dict[str, str]]:
    """What is on the disk: (bytes of all tensors, tensor name -> file name). Raises CheckpointError."""
    total, weight_map = 0, {}
    files = config.num_hidden_layers + (1 if config.vision_config is None else 3)
    for file in (_shard_file(number + 1, config) for number in range(files)):
        shard = _open_shard(scratch / file)
        for name in shard.keys():  # noqa: SIM118 (a shard is no mapping)
            piece = shard.get_slice(name)
            total += math.prod(piece.get_shape()) * _ELEMENT_BYTES[piece.get_dtype()]
            weight_map[name] = file
    return total, dict(sorted(weight_map.items()))


def _verify(file: Path, tensors: Mapping[str, Tensor]) -> None:
    with safe_open(file, framework="pt") as written:
        for name, tensor in tensors.items():
            back = written.get_tensor(name)
            equal = back.dtype == tensor.dtype and back.shape == tensor.shape
            if not equal or not torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                raise CheckpointError(f"{file}: {name} does not read back as it was written; check the disk")
