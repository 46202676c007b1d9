"""The official checkpoint layout, read and written (k3.md 1.3).

A parameter holds the value its entry stores, so writing is exact: bf16 and float32 entries are casts that change
nothing, and an MXFP4 expert is packed again, or written back byte for byte where a block still equals what was
loaded. `official_tensors` is the one way out, for files and for weight updates alike; `assign_official_tensors` is
the one way in.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from k3rl.checkpoint.adapter import check_base, is_adapter, load_adapter, read_adapter_config
from k3rl.checkpoint.card import CARD, CheckpointError, add_to_card, card_text, read_card
from k3rl.checkpoint.replace import alone, flush, publish, recover, scratch_beside, scratch_name
from k3rl.checkpoint.sharded import bank_of, collected_tensors
from k3rl.data.images import ImageConfig
from k3rl.model import K3Config, K3ForCausalLM, ModelConfigError, QuantizationConfig, VisionConfig
from k3rl.model.packed import PACKED_RUN_BYTES, assign_parameter, fill_packed, serves_packed, stored_block
from k3rl.numerics import mx, stored_dtype
from k3rl.parallel.mesh import Mesh
from k3rl.tokens import TOKENIZER_FILES

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION, PREPROCESSOR = "generation_config.json", "preprocessor_config.json"
NAN_SCALE = 255
STACK_ELEMENTS = 2**22  # of experts packed or unpacked in one call
_ELEMENT_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}

_OURS = {CONFIG, INDEX, SINGLE, GENERATION, CARD, PREPROCESSOR, *TOKENIZER_FILES}
_SHARD = re.compile(r"model-\d{5}-of-\d{6}\.safetensors")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class SavesItself(Protocol):
    """A tokenizer, as far as saving a checkpoint needs one."""

    def save(self, folder: Path) -> None: ...


# -------------------------------------------------------------------------------------------- model -> tensors


def _packed_with_source(value: Tensor, source: tuple[Tensor, Tensor] | None, scale_rule: str) -> tuple[Tensor, Tensor]:
    """value [..., n] -> (packed, scale); blocks that equal what `source` decodes to keep the bytes of `source`."""
    if source is None:
        return mx.quantize_mxfp4(value, scale_rule)
    packed, scale = (part.to(value.device) for part in source)
    decoded = mx.dequantize_mxfp4(packed, scale, value.dtype)
    blocks = (*scale.shape, mx.BLOCK)
    same = (decoded.view(blocks) == value.reshape(blocks)).all(-1)
    if bool(same.all()):
        return packed.clone(), scale.clone()
    fresh_packed, fresh_scale = mx.quantize_mxfp4(value, scale_rule)
    bytes_shape = (*scale.shape, mx.BLOCK // 2)
    merged = torch.where(same.unsqueeze(-1), packed.view(bytes_shape), fresh_packed.view(bytes_shape))
    return merged.view(packed.shape), torch.where(same, scale, fresh_scale)


def official_tensors(model: K3ForCausalLM, *, shipped: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) exactly as stored: packed uint8, scale uint8, bf16, float32; A_log padded to head_dim.

    A model with a run of experts gives only those. Every tensor owns its memory, on the model's device.
    shipped: as an exported checkpoint stores them, which differs from what the model computes with only where weights
    are quantized after training (`QuantizationConfig.shipped`).
    """
    quantization = model.config.quantization
    weights = (quantization.shipped() if shipped else quantization).weights
    listed = model.official_parameters(decoded=False)
    for bank, members in itertools.groupby(listed, key=lambda item: bank_of(item[0])):
        if bank is not None and weights == "mxfp4":
            own = list(members)
            yield from _kept_bank(model, own) if model.packed else _packed_bank(model, own)
            continue
        for name, parameter in members:
            value = parameter.detach()
            kind = torch.float32 if stored_dtype(name, weights) == "fp32" else torch.bfloat16
            if name.endswith(".A_log"):
                value = nn.functional.pad(value, (0, _padding(model.config)))
            yield name, value.to(kind, copy=True)


def _kept_bank(model: K3ForCausalLM, members: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of routed experts that are kept packed."""
    for name, _ in members:
        kept = stored_block(model, name)
        assert kept is not None
        yield f"{name}_packed", kept[0].clone()
        yield f"{name}_scale", kept[1].clone()


def _packed_bank(model: K3ForCausalLM, members: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of one layer's routed experts, packed a stack of equal matrices at a time."""
    stored: dict[str, tuple[Tensor, Tensor]] = {}
    blocks = model.stored_blocks
    for names in _stacks([(name, (tuple(value.shape), name in blocks)) for name, value in members]):
        values = torch.stack([value.detach() for name, value in members if name in names])
        source = None
        if names[0] in blocks:
            source = torch.stack([blocks[n][0] for n in names]), torch.stack([blocks[n][1] for n in names])
        packed, scale = _packed_with_source(values, source, model.config.quantization.scale_rule)
        stored |= {name: (packed[i].clone(), scale[i].clone()) for i, name in enumerate(names)}
    for name, _ in members:
        yield f"{name}_packed", stored[name][0]
        yield f"{name}_scale", stored[name][1]


def _stacks(items: list[tuple[str, Any]]) -> Iterator[list[str]]:
    """Names of equal kind together, in order, in stacks small enough to copy: one call serves many small matrices."""
    kinds: dict[Any, list[str]] = {}
    for name, kind in items:
        kinds.setdefault(kind, []).append(name)
    for (shape, _), names in kinds.items():
        size = max(1, STACK_ELEMENTS // math.prod(shape))
        yield from (names[start : start + size] for start in range(0, len(names), size))


def _padding(config: K3Config) -> int:
    """Zeros behind the per-head values of A_log: the official tensor has head_dim entries (k3.md 2.4)."""
    linear = config.linear_attn_config
    return max(0, linear.head_dim - linear.num_heads)


# -------------------------------------------------------------------------------------------- tensors -> model


def assign_official_tensors(model: K3ForCausalLM, mapping: Mapping[str, Tensor]) -> None:
    """Puts stored tensors into the model in place, all of them or none. Experts that other ranks hold are left alone.

    Raises CheckpointError, with the name, for a tensor that is missing, unknown, mis-shaped, of a dtype that is not
    its own kind, not finite, or with a scale byte 255; the model is then unchanged.
    """
    values = list(_decode(model, mapping))
    _commit(model, values)


def fill(model: K3ForCausalLM, mapping: Mapping[str, Tensor]) -> None:
    """`assign_official_tensors` for a model that nobody uses yet: a stack of tensors at a time, so that no third copy
    is made; after an error the model is of no use."""
    waiting: dict[str, tuple[Tensor, Tensor]] = {}
    size = 0
    for item in _decode(model, mapping):
        if item.source is None or not model.packed:
            _commit(model, [item])
            continue
        waiting[item.name] = item.source
        size += sum(part.nbytes for part in item.source)
        if size >= PACKED_RUN_BYTES:
            fill_packed(model, waiting)
            waiting, size = {}, 0
    fill_packed(model, waiting)


class _Value(NamedTuple):
    """One parameter's new value [its shape], and the packed bytes it came from, if any."""

    name: str
    value: Tensor
    source: tuple[Tensor, Tensor] | None


@torch.no_grad()
def _commit(model: K3ForCausalLM, values: list[_Value]) -> None:
    for item in values:
        assign_parameter(model, item.name, item.value, item.source)


def _decode(model: K3ForCausalLM, mapping: Mapping[str, Tensor]) -> Iterator[_Value]:
    """Checks names, then yields every parameter's value in the model's dtypes."""
    parameters = dict(model.named_parameters())  # of which shapes are read
    known: set[str] = set()
    missing = []
    for name in parameters:
        forms = ({name}, {f"{name}_packed", f"{name}_scale"})
        found = [form for form in forms if form <= mapping.keys()]
        if len(found) == 1:
            known |= found[0]
        else:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing or stored twice, {missing[0]} among them; "
            "a checkpoint holds every parameter once, plain or as _packed and _scale"
        )
    extra = sorted(name for name in mapping.keys() - known if not model.elsewhere(name))
    if extra:
        raise CheckpointError(f"{len(extra)} tensors belong to no parameter of this model, {extra[0]} among them")
    packed_names = []
    for name, parameter in parameters.items():
        if name in known:
            yield _Value(name, _plain_value(name, parameter, mapping[name]), None)
        else:
            _check_packed(name, parameter, mapping[f"{name}_packed"], mapping[f"{name}_scale"])
            packed_names.append((name, (tuple(parameter.shape), parameter.dtype)))
    for name, _ in packed_names if model.packed else ():
        source = mapping[f"{name}_packed"], mapping[f"{name}_scale"]
        yield _Value(name, parameters[name], source)
    for names in _stacks([] if model.packed else packed_names):
        sources = [(mapping[f"{name}_packed"], mapping[f"{name}_scale"]) for name in names]
        values = mx.dequantize_mxfp4(
            torch.stack([packed for packed, _ in sources]),
            torch.stack([scale for _, scale in sources]),
            parameters[names[0]].dtype,
        )
        for name, value, source in zip(names, values, sources, strict=True):
            yield _Value(name, value, source)


def _plain_value(name: str, parameter: nn.Parameter, stored: Tensor) -> Tensor:
    wanted = tuple(parameter.shape)
    if not stored.is_floating_point():
        raise CheckpointError(f"{name} is {stored.dtype}; it must be a floating-point tensor")
    if name.endswith(".A_log"):
        stored = _unpadded(name, stored, wanted[0])
    elif name.endswith("_conv1d.weight") and tuple(stored.shape) == (wanted[0], wanted[2]):
        stored = stored.unsqueeze(1)
    if tuple(stored.shape) != wanted:
        raise CheckpointError(f"{name} has shape {tuple(stored.shape)}; this model needs {wanted}")
    if not bool(stored.isfinite().all()):
        raise CheckpointError(f"{name} holds NaN or infinite values; the file is damaged or the training diverged")
    return stored


def _unpadded(name: str, stored: Tensor, heads: int) -> Tensor:
    """The per-head values of A_log; the rest, if there, must be zero padding."""
    if stored.dim() != 1 or stored.shape[0] < heads:
        raise CheckpointError(f"{name} has shape {tuple(stored.shape)}; it needs one value for each of {heads} heads")
    if bool(stored[heads:].any()):
        raise CheckpointError(f"{name} has values behind its {heads} heads; they must be zero padding")
    return stored[:heads]


def _check_packed(name: str, parameter: nn.Parameter, packed: Tensor, scale: Tensor) -> None:
    rows, columns = parameter.shape[0], parameter.shape[-1]
    for key, tensor, wanted in (
        (f"{name}_packed", packed, (rows, columns // 2)),
        (f"{name}_scale", scale, (rows, columns // mx.BLOCK)),
    ):
        if tensor.dtype != torch.uint8:
            raise CheckpointError(f"{key} is {tensor.dtype}; it must be uint8")
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(f"{key} has shape {tuple(tensor.shape)}; this model needs {wanted}")
    if bool((scale == NAN_SCALE).any()):
        raise CheckpointError(f"{name}_scale holds the byte 255, which is NaN; the file is damaged")


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
) -> K3ForCausalLM:
    """The model of a checkpoint directory in the official layout; on a mesh with this rank's run of experts only.

    Whether experts are quantized is read off what is stored, not off the configuration. dtype: of the parameters that
    are stored as bf16 or MXFP4 (others are float32 or wider). packed: MXFP4 experts stay the stored bytes, frozen;
    "served": where a kernel multiplies with them, which is what an engine wants.
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
        return _load_adapted(path, dtype, device, mesh, packed)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} holds no {CONFIG}; it is no checkpoint")
    begun = path.stat()
    config = K3Config.from_json(path / CONFIG)
    _check_preprocessor(path / PREPROCESSOR, config)
    files = StoredFiles(path)
    experts = None if mesh is None else mesh.experts(config.num_experts)
    config = as_stored(config, files.keys())
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
    path: Path, dtype: torch.dtype, device: torch.device | str, mesh: Mesh | None, packed: bool | Literal["served"]
) -> K3ForCausalLM:
    _, base = read_adapter_config(path)
    if not (base / CONFIG).is_file():
        raise CheckpointError(
            f"the adapter {path} belongs to {base}, which holds no checkpoint; put that in place, or beside the adapter"
        )
    check_base(path, base)
    model = load_checkpoint(base, dtype, device, mesh=mesh, packed=packed)
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
                stack.enter_context(alone(path))
                _refuse_foreign_files(path)
                stack.callback(
                    shutil.rmtree, scratch_beside(path), ignore_errors=True
                )  # a full disk has no room for it
        with mesh.world.together("writing a checkpoint"):
            _write_shards(model, mesh, scratch)
        with mesh.world.together("completing a checkpoint"):
            if first:
                _complete(model, scratch, path.name, tokenizer, card or {})
                publish(scratch, path)


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


__all__ = [
    "CheckpointError",
    "ModelConfigError",
    "add_to_card",
    "assign_official_tensors",
    "load_checkpoint",
    "official_tensors",
    "read_card",
    "save_checkpoint",
    "stored_dtype",
]
