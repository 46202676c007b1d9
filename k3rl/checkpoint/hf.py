"""A model as a directory in its official checkpoint layout: read, and written whole or not at all (k3.md 1.3).

What its tensors are is a matter of `k3rl.checkpoint.official`, which file has which one of `shards`.
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
from safetensors import SafetensorError
from torch import Tensor

from k3rl.checkpoint.adapter import check_base, is_adapter, load_adapter, read_adapter_config, trained_activations
from k3rl.checkpoint.card import CARD, card_text
from k3rl.checkpoint.official import CheckpointError, fill
from k3rl.checkpoint.replace import flush, locked, put_in_place, recover, scratch_beside, scratch_name
from k3rl.checkpoint.shards import ELEMENT_BYTES, INDEX, SHARD, SINGLE, Shards, open_shard, weight_map
from k3rl.data import ImageConfig
from k3rl.model import K3Config, K3ForCausalLM, Origin, QuantizationConfig, VisionConfig, serves_packed
from k3rl.numerics import stored_dtype
from k3rl.parallel import Mesh
from k3rl.tokens import TOKENIZER_FILES

CONFIG, GENERATION, PREPROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"

_TOKENIZER_CONFIG = "tokenizer_config.json"
_OURS = {CONFIG, INDEX, SINGLE, GENERATION, CARD, PREPROCESSOR, *TOKENIZER_FILES}
# What is carried over from a checkpoint of the flat dialect, beside its tensors: configurations, tokenizer, chat
# template, remote code, licences. Its model card is replaced by ours.
_CARRIED = re.compile(r"[^/]*\.(json|jinja|py|model|txt)|(LICENSE|NOTICE|THIRD).*")
_CARRIED_CODE = re.compile(r"[^/]*\.(jinja|py)|(LICENSE|NOTICE|THIRD).*")
_CARRIED_BYTES = 64 << 20  # of one file, at most
# How `save_pretrained` of transformers writes the MLP of a dense layer: as if it had experts.
_DENSE = re.compile(r"(model\.layers\.(\d+)\.)block_sparse_moe(\.(?:gate|up|down)_proj\.weight)")


class SavesItself(Protocol):
    """A tokenizer, as far as saving a checkpoint needs one."""

    def save(self, folder: Path) -> None: ...


# -------------------------------------------------------------------------------------------------- reading


class StoredFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint directory by official name, read one at a time.

    dense: that many first layers have no experts, so that their MLP is found under either of its spellings.
    has_weights: False for an index without any of its files, whose names can be listed but not read. total_size: what
    the index says of all bytes, None without an index.
    """

    def __init__(self, directory: Path, dense: int = 0) -> None:
        self._directory = directory
        found, self.total_size, self.has_weights = weight_map(directory)
        self._inside = {_official(name, dense): name for name in found}
        if len(self._inside) < len(found):
            twice = min(name for name in found if _official(name, dense) != name and _official(name, dense) in found)
            raise CheckpointError(f"{directory / found[twice]}: {twice} is stored under {_official(twice, dense)} too")
        self.shards = {official: found[name] for official, name in self._inside.items()}
        """The file of each tensor."""
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shard(name)
        try:
            return shard.get_tensor(self._inside[name])
        except SafetensorError as error:
            raise CheckpointError(f"{self._directory / self.shards[name]}: {name} cannot be read ({error})") from error

    def _shard(self, name: str) -> Any:
        file = self.shards[name]
        if file not in self._open:
            self._open[file] = open_shard(self._directory / file)
        return self._open[file]

    def place(self, name: str) -> Path:
        """The file that holds a tensor, or the one that would name it."""
        if name in self.shards:
            return self._directory / self.shards[name]
        return self._directory / (SINGLE if self.total_size is None and SINGLE in self.shards.values() else INDEX)

    def kind(self, name: str) -> str:
        """The dtype of a tensor in safetensors' words ("BF16", "F32", ...), without reading it."""
        return str(self._shard(name).get_slice(self._inside[name]).get_dtype())

    def stored_bytes(self, name: str) -> int:
        """Bytes of one tensor, without reading it."""
        piece = self._shard(name).get_slice(self._inside[name])
        return math.prod(piece.get_shape()) * ELEMENT_BYTES[piece.get_dtype()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inside)

    def __len__(self) -> int:
        return len(self._inside)


def _official(name: str, dense: int) -> str:
    found = _DENSE.fullmatch(name)
    return f"{found[1]}mlp{found[3]}" if found is not None and int(found[2]) < dense else name


def load_checkpoint(
    directory: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    mesh: Mesh | None = None,
    packed: bool | Literal["served"] = False,
    quantization: Mapping[str, str] | None = None,
) -> K3ForCausalLM:
    """The model of a checkpoint directory in its official layout; on a mesh with this rank's run of experts only.

    Whether experts are quantized is read off what is stored, not off the configuration. dtype: of the parameters that
    are stored as bf16 or MXFP4 (others are float32 or wider). packed: MXFP4 experts stay the stored bytes, frozen;
    "served": where a kernel multiplies with them, which is what an engine wants.
    quantization: keys of `QuantizationConfig` to compute with instead of what the checkpoint says: `activations`, what
    the inputs of routed experts are rounded to; `weights` "mxfp4" for experts that are stored plain, which become MXFP4
    as they are read, and the model's `quantization_loss` says what that took. Experts that are stored as MXFP4 stay.
    A directory with an adapter gives the model that it belongs to, with the adapter attached.
    Raises CheckpointError, also where images are to be prepared another way than k3rl does it, or ModelConfigError for
    a configuration of neither dialect.
    """
    path = Path(directory)
    if mesh is None or mesh.world.rank == 0:
        recover(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the directory that holds {CONFIG}")
    if is_adapter(path):
        return _load_adapted(path, dtype, device, mesh, packed, quantization)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} holds no {CONFIG}; it is no checkpoint")
    begun = path.stat()
    config = K3Config.from_json(path / CONFIG)
    _check_preprocessor(path / PREPROCESSOR, config)
    files = stored_files(path, config)
    experts = None if mesh is None else mesh.experts(config.num_experts)
    stored = as_stored(config, files)
    config = quantized(stored, quantization or {})
    packs = bool(packed) and config.quantization.weights == "mxfp4"
    if packed == "served":
        latent, width = config.expert_hidden_size, config.moe_intermediate_size
        packs = packs and serves_packed(latent, width, torch.device(device), dtype)
    model = K3ForCausalLM(config, dtype=dtype, device=device, experts=experts, packed=packs)
    try:
        fill(model, files, quantizes=config.quantization.weights != stored.quantization.weights)
    except CheckpointError as error:
        raise CheckpointError(f"{files.place(error.tensor)}: {error}") from error
    if config.flat:
        model.origin = Origin(carried_files(path), files.shards)
    elif code := carried_code(path):
        model.origin = Origin(code, {})
    if not (path.is_dir() and os.path.samestat(begun, path.stat())):
        raise CheckpointError(f"{path} was replaced while it was read, so what was read is of two; load it again")
    return model


def _load_adapted(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    mesh: Mesh | None,
    packed: bool | Literal["served"],
    quantization: Mapping[str, str] | None,
) -> K3ForCausalLM:
    _, base = read_adapter_config(path)
    if not (base / CONFIG).is_file():
        raise CheckpointError(
            f"the adapter {path} belongs to {base}, which holds no checkpoint; put that in place, or beside the adapter"
        )
    check_base(path, base)
    trained = trained_activations(path)
    chosen = ({} if trained is None else {"activations": trained}) | dict(quantization or {})
    model = load_checkpoint(base, dtype, device, mesh=mesh, packed=packed, quantization=chosen)
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


def stored_files(directory: Path, config: K3Config) -> StoredFiles:
    """The tensors of the checkpoint that has this configuration."""
    return StoredFiles(directory, config.first_k_dense_replace if config.flat else 0)


def carried_files(directory: Path) -> dict[str, bytes]:
    """What an export of a model of the flat dialect has from the checkpoint it came from, by name (`Origin.files`)."""
    found = sorted(p for p in directory.iterdir() if p.is_file() and _CARRIED.fullmatch(p.name) and p.name != INDEX)
    return {path.name: path.read_bytes() for path in found if path.stat().st_size <= _CARRIED_BYTES}


def carried_code(directory: Path) -> dict[str, bytes]:
    """What an export of K3 has from the checkpoint it came from: remote code, chat template, licences."""
    return {name: data for name, data in carried_files(directory).items() if _CARRIED_CODE.fullmatch(name)}


def as_stored(config: K3Config, files: StoredFiles) -> K3Config:
    """The configuration with the formats of what is stored. Raises CheckpointError.

    `quantization.weights` as the names of experts say; in the flat dialect also which tensors are float32.
    """
    expert = re.compile(r"\.experts\.\d+\.w[123]\.weight(_packed)?$")
    packed = {match.group(1) is not None for match in map(expert.search, files) if match}
    if len(packed) == 2:
        raise CheckpointError("some routed experts are packed and some are plain; store all of them one way")
    weights = "mxfp4" if packed == {True} else "none"
    old = config.quantization
    if old.weights != weights:
        config = config.replace(quantization=QuantizationConfig(weights, old.scale_rule, old.activations))
    if config.flat and files.has_weights:
        config = config.replace(stored_float32=_float32_names(files, weights))
    return config


def _float32_names(files: StoredFiles, weights: str) -> frozenset[str] | None:
    """Of the tensors that are stored in float32; None where they are those of the rule for fresh models."""
    kinds = {name: files.kind(name) for name in files}
    for name, kind in kinds.items():
        wanted = ("U8",) if name.endswith(("_packed", "_scale")) else ("BF16", "F32")
        if kind not in wanted:
            raise CheckpointError(f"{files.place(name)}: {name} is {kind}; wanted {' or '.join(wanted)}")
    found = frozenset(name for name, kind in kinds.items() if kind == "F32")
    return None if found == {name for name in kinds if stored_dtype(name, weights) == "fp32"} else found


def quantized(config: K3Config, wanted: Mapping[str, str]) -> K3Config:
    """The configuration of a checkpoint with these keys of `QuantizationConfig`; experts in MXFP4 stay so."""
    if config.quantization.weights == "mxfp4":
        wanted = {key: value for key, value in wanted.items() if key == "activations"}
    return config.replace(quantization=replace(config.quantization, **wanted)) if wanted else config


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
                _refuse_foreign_files(path, model.origin)
                stack.callback(
                    shutil.rmtree, scratch_beside(path), ignore_errors=True
                )  # a full disk has no room for it
        with mesh.world.together("writing a checkpoint"):
            Shards(model).write(model, mesh, scratch)
        with mesh.world.together("completing a checkpoint"):
            if first:
                _complete(model, scratch, path.name, tokenizer, card or {})
                put_in_place(scratch, path)


def _complete(
    model: K3ForCausalLM, scratch: Path, name: str, tokenizer: SavesItself | None, card: Mapping[str, Any]
) -> None:
    """Everything beside the shards; the index says what is on the disk."""
    shards = Shards(model)
    total, found = shards.written(scratch)
    config = model.config.replace(quantization=model.config.quantization.shipped(), stored_float32=None)
    if not shards.single:
        _write_json(scratch / INDEX, {"metadata": {"total_size": total}, "weight_map": found})
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
    _carry_over(scratch, config, model.origin)
    (scratch / CARD).write_text(card_text(name, config, model.parameter_count(), total, card), encoding="utf-8")
    for file in scratch.iterdir():
        flush(file)


def _carry_over(scratch: Path, config: K3Config, origin: Origin | None) -> None:
    """The configuration, and what the checkpoint that the model came from had beside it, byte for byte."""
    content = config.to_dict()
    files = {} if origin is None else dict(origin.files)
    was = files.pop(CONFIG, None)
    for name, data in files.items():
        (scratch / name).write_bytes(data)
    if (scratch / _TOKENIZER_CONFIG).is_file():
        found = json.loads((scratch / _TOKENIZER_CONFIG).read_bytes())
        if found != (kept := without_absent_code(found, scratch)):
            _write_json(scratch / _TOKENIZER_CONFIG, kept)
    content = without_absent_code(content, scratch)
    if was is not None and json.loads(was) == content:
        (scratch / CONFIG).write_bytes(was)
    else:
        _write_json(scratch / CONFIG, content)


def without_absent_code(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A configuration whose `auto_map` names code of this folder that is there; an empty map is left out.

    A name with `--` is of code in another repository, and stays.
    """

    def there(value: Any) -> bool:
        names = [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]
        return all("--" in name or (folder / f"{name.rpartition('.')[0]}.py").is_file() for name in names)

    named = content.get("auto_map")
    if not isinstance(named, dict) or not named or all(map(there, named.values())):
        return content
    kept = {name: value for name, value in named.items() if there(value)}
    rest = {key: value for key, value in content.items() if key != "auto_map"}
    return {**rest, "auto_map": kept} if kept else rest


def _refuse_foreign_files(path: Path, origin: Origin | None) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a directory for the checkpoint")
    own = _OURS if origin is None else _OURS | origin.files.keys() | set(origin.shards.values())
    foreign = sorted(p.name for p in path.iterdir() if p.name not in own and not SHARD.fullmatch(p.name))
    if foreign:
        raise CheckpointError(
            f"{path} holds {foreign[0]!r}, which is not part of a checkpoint; nothing is overwritten, "
            "choose an empty or new directory"
        )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
