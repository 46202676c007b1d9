"""Adapters in PEFT's file format: `adapter_config.json` and `adapter_model.safetensors` beside each other.

A tensor is called `base_model.model.` + the official name of its module + `.lora_A.weight` or `.lora_B.weight`; the
configuration names rank, alpha, the last names of the adapted modules, and the checkpoint that the adapter belongs to.
The file's metadata hold a fingerprint of that checkpoint, which other programs pass over.
What k3rl cannot compute (DoRA, rank-stabilized scaling, other ranks for some modules, trained biases) is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3rl.checkpoint.card import CARD, adapter_card_text
from k3rl.checkpoint.fingerprint import weights_fingerprint
from k3rl.checkpoint.official import CheckpointError
from k3rl.checkpoint.replace import flush, locked, put_in_place, scratch_beside, scratch_name
from k3rl.model import Adapter, AdapterError, K3ForCausalLM, LoraConfig
from k3rl.tokens import TOKENIZER_FILES

if TYPE_CHECKING:
    from k3rl.checkpoint.hf import SavesItself

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "k3rl_base"  # of the metadata of the weights' file
_ACTIVATIONS = "k3rl_activations"
_PREFIX = "base_model.model."
_OURS = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, *TOKENIZER_FILES}
# What other values of these keys would change in the computation; an absent key has its value here.
_WANTED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
}


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter rather than a whole model."""
    return (Path(directory) / ADAPTER_CONFIG).is_file()


def weights_of(directory: str | Path) -> Path:
    """The checkpoint with the weights: of an adapter the one that it belongs to. Raises CheckpointError."""
    return read_adapter_config(directory)[1] if is_adapter(directory) else Path(directory)


def save_adapter(
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    directory: str | Path,
    *,
    base: str | Path,
    fingerprint: str | None = None,
    activations: str | None = None,
    tokenizer: SavesItself | None = None,
    card: Mapping[str, Any] | None = None,
) -> None:
    """Writes an adapter, whole or not at all; an older one in `directory` is replaced.

    tensors: by name, as `Adapter.stored_tensors` gives them, those of all ranks. base: the checkpoint directory that
    the adapter belongs to; fingerprint: of its weights, where they are not to be read from there; activations: what the
    inputs of routed experts were rounded to in its training. Raises
    CheckpointError when `directory` holds anything else, or when what was written does not read back equal, and
    BusyDirectory when another process writes there.
    """
    path, weights = Path(directory).absolute(), Path(base).absolute()
    known = fingerprint or (weights_fingerprint(str(weights), 0) if weights.is_dir() else "")
    with locked(path):
        try:
            about = {key: value for key, value in ((_BASE, known), (_ACTIVATIONS, activations)) if value}
            _write(path, tensors, config, weights, about, tokenizer, card or {})
        finally:
            shutil.rmtree(scratch_name(path), ignore_errors=True)  # a full disk has no room for it


def _write(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    base: Path,
    metadata: Mapping[str, str],
    tokenizer: SavesItself | None,
    card: Mapping[str, Any],
) -> None:
    foreign = sorted(p.name for p in path.iterdir() if p.name not in _OURS) if path.is_dir() else []
    if foreign or path.is_file():
        found = repr(foreign[0]) if foreign else "a file's bytes"
        raise CheckpointError(f"{path} holds {found}, which is not part of an adapter; choose another directory")
    scratch = scratch_beside(path)
    named = {f"{_PREFIX}{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, scratch / ADAPTER_WEIGHTS, metadata={"format": "pt", **metadata})
    _order_metadata(scratch / ADAPTER_WEIGHTS)
    with safe_open(scratch / ADAPTER_WEIGHTS, framework="pt") as written:
        for name, tensor in named.items():
            if not torch.equal(written.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8)):
                raise CheckpointError(f"{scratch}: {name} does not read back as it was written; check the disk")
    content = peft_config(config, str(base))
    (scratch / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(scratch)
    text = adapter_card_text(path.name, content, sum(t.numel() for t in named.values()), card)
    (scratch / CARD).write_text(text, encoding="utf-8")
    for file in scratch.iterdir():
        flush(file)
    put_in_place(scratch, path)


def _order_metadata(path: Path) -> None:
    """Sorts a file's metadata, which its writer puts down in any order: equal adapters are equal files."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) != size:
            raise CheckpointError(f"{path}: its header of {size} bytes became {len(text)}; the safetensors package "
                                  "writes it in another form")  # fmt: skip
        file.seek(8)
        file.write(text)


def peft_config(config: LoraConfig, base: str) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    alpha = int(config.alpha) if config.alpha.is_integer() else config.alpha
    return {
        **_WANTED,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.targets),
        "init_lora_weights": True,
        "inference_mode": True,
        "revision": None,
    }


def read_adapter_config(directory: str | Path) -> tuple[LoraConfig, Path]:
    """(what an adapter is, the checkpoint that it belongs to); seeds are not stored.

    The path of the base is taken as it is written, or else beside the adapter. Raises CheckpointError.
    """
    path = Path(directory)
    file = path / ADAPTER_CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, targets = content["r"], content["lora_alpha"], content["target_modules"]
        base = Path(content["base_model_name_or_path"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is no PEFT configuration of a LoRA adapter ({error!r})") from error
    for key, wanted in _WANTED.items():
        found = content.get(key, wanted)
        if found != wanted and (found or wanted):
            raise CheckpointError(f"{file}: {key} is {found!r}; k3rl computes adapters with {wanted!r} only")
    if isinstance(targets, str) or not targets:
        raise CheckpointError(f"{file}: target_modules is {targets!r}; it must list last names of modules")
    try:
        config = LoraConfig(rank=rank, alpha=float(alpha), targets=tuple(targets))
    except ValidationError as error:
        raise CheckpointError(f"{file}: {error}") from error
    beside = path.absolute().parent / base.name
    return config, base if base.is_dir() or not beside.is_dir() else beside


def trained_activations(directory: str | Path) -> str | None:
    """What the inputs of routed experts were rounded to when the adapter was trained; None where it does not say."""
    return _metadata(directory).get(_ACTIVATIONS)


def _metadata(directory: str | Path) -> dict[str, str]:
    """What an adapter's tensors are stored with. Raises CheckpointError."""
    file = Path(directory) / ADAPTER_WEIGHTS
    try:
        with safe_open(file, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"{file} is missing or no whole safetensors file ({error})") from error


def check_base(directory: str | Path, base: Path) -> None:
    """Raises CheckpointError where the weights in `base` are not those that the adapter was trained beside."""
    known = _metadata(directory).get(_BASE)
    if known and known != weights_fingerprint(str(base), 0):
        raise CheckpointError(
            f"the adapter {directory} was trained beside other weights than {base} holds now, so together they are no "
            f"policy that was trained; put those back, or name their folder in {ADAPTER_CONFIG}"
        )


def load_adapter(directory: str | Path, model: K3ForCausalLM) -> Adapter:
    """The adapter of a directory, made for `model` and not attached; of its run of experts, where it has one.

    Raises CheckpointError when it does not fit the model, naming the tensor.
    """
    config, _ = read_adapter_config(directory)
    file = Path(directory) / ADAPTER_WEIGHTS
    try:
        adapter = Adapter(model, config)
        own = {name for name, _ in adapter.parameters()}
        with safe_open(file, framework="pt") as stored:
            names = {name.removeprefix(_PREFIX): name for name in stored.keys()}  # noqa: SIM118 (no mapping)
            tensors = {short: stored.get_tensor(name) for short, name in names.items() if short in own}
            # The others are told apart by name: experts of other ranks, or a mistake.
            adapter.assign(tensors | {short: torch.empty(0) for short in names if short not in own})
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"{file} is missing or no whole safetensors file ({error})") from error
    except AdapterError as error:
        raise CheckpointError(f"{file} does not fit the model: {error}") from error
    return adapter
