"""An exported folder opened the way that other programs open it: what they trip over, and what they do not know."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3rl.checkpoint.hf import CONFIG, without_absent_code
from k3rl.checkpoint.official import CheckpointError
from k3rl.checkpoint.shards import INDEX, SINGLE, open_shard, stored_bytes_of, stored_names, weight_map
from k3rl.model import K3Config, ModelConfigError, tensor_table
from k3rl.tokens import Tokenizer, TokenizerError


@dataclass
class ExportCheck:
    """problems: what keeps others from opening the folder as a checkpoint of its architecture; notes: what they do not
    know of, which is no fault of the folder."""

    tensors: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_export(folder: Path) -> ExportCheck:
    """Looks at configurations, index, every shard's header, the tokenizer, and what transformers makes of them."""
    found = ExportCheck()
    if not (folder / CONFIG).is_file():
        found.problems.append(f"{folder} has no {CONFIG}")
        return found
    found.problems += _configurations(folder)
    found.problems += _shards(folder, found)
    found.problems += _modes(folder)
    if any((folder / name).is_file() for name in ("tiktoken.model", "k3rl_tokenizer.json")):
        try:
            Tokenizer.load(folder)
        except TokenizerError as error:
            found.problems.append(str(error))
    else:
        found.notes.append("there are no tokenizer files; whoever opens the folder needs them from elsewhere")
    _transformers(folder, found)
    return found


def _configurations(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            yield f"{file} is no JSON that can be read ({error})"
            continue
        if isinstance(content, dict) and without_absent_code(content, folder) != content:
            yield f"{file}: auto_map names code that is not in the folder; leave it out, or put the code there"


def _shards(folder: Path, found: ExportCheck) -> Iterator[str]:
    try:
        files, total, has_weights = weight_map(folder)
        if not has_weights:
            yield f"{folder / INDEX} names files of which none is there"
            return
        for file in sorted(set(files.values())):
            found.bytes += stored_bytes_of(open_shard(folder / file))
        found.tensors = len(files)
    except CheckpointError as error:
        yield str(error)
        return
    if total is not None and total != found.bytes:
        yield f"{folder / INDEX} says {total:,} bytes, and the tensors have {found.bytes:,}"
    extra = {path.name for path in folder.glob("*.safetensors")} - set(files.values())
    if extra:
        yield f"{folder / min(extra)} is named by no index"
    if INDEX not in {path.name for path in folder.iterdir()} and set(files.values()) != {SINGLE}:
        yield f"{folder} has no {INDEX}"
    try:
        config = K3Config.from_json(folder / CONFIG)
    except (ModelConfigError, ValueError, KeyError, TypeError) as error:
        yield f"{folder / CONFIG}: {error}"
        return
    expert = any(name.endswith("_packed") for name in files)
    weights = "mxfp4" if expert else "none"
    quantization = type(config.quantization)(weights, config.quantization.scale_rule, config.quantization.activations)
    wanted = {
        name for entry in tensor_table(config.replace(quantization=quantization)) for name, _ in stored_names(entry)
    }
    if not config.flat and (missing := wanted - files.keys()):
        yield f"{folder}: {len(missing)} tensors are missing, such as {min(missing)}"


def _modes(folder: Path) -> Iterator[str]:
    """Files that are less open than the folder's configuration: whoever reads that one expects to read all."""
    others = (folder / CONFIG).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    for file in sorted(folder.glob("*.safetensors")):
        if file.stat().st_mode & others != others:
            yield f"{file} may not be read by all who may read {CONFIG}; chmod it like that"


def _transformers(folder: Path, found: ExportCheck) -> None:
    """Its own classes alone: no code of the folder is run."""
    try:
        import transformers
    except ImportError:
        found.notes.append("transformers is not installed, so nothing was opened with it")
        return

    def opened(what: str, load: Callable[..., Any]) -> None:
        try:
            load(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever its classes raise for a folder
            said = " ".join(str(error).split())
            unknown = "trust_remote_code" in said or "does not recognize" in said or "model type" in said
            if unknown or what == "AutoTokenizer":
                found.notes.append(f"transformers {transformers.__version__}, {what}: {said:.200}")
            else:
                found.problems.append(f"transformers {transformers.__version__}, {what}: {said:.200}")

    opened("AutoConfig", transformers.AutoConfig.from_pretrained)
    opened("AutoTokenizer", transformers.AutoTokenizer.from_pretrained)
