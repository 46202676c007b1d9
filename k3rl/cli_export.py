"""What `k3rl export` does once it knows from where to where."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3rl.checkpoint.adapter import load_adapter, save_adapter, weights_of
from k3rl.checkpoint.hf import load_checkpoint, official_tensors, read_card, save_checkpoint
from k3rl.config import K3Error
from k3rl.model import K3ForCausalLM
from k3rl.model.lora import merge
from k3rl.tokens import Tokenizer
from k3rl.tokens.vocab import RANKS_FILE, SMALL_FILE


def copy_checkpoint(source: Path, target: Path) -> tuple[int, int]:
    """Load, save, load again and compare every stored tensor. Returns (tensors, bytes of the folder).

    Raises K3Error, naming the tensor, when what was written does not read back as what was loaded.
    """
    model = load_checkpoint(source)
    return _save(model, source, target), _size(target)


def copy_adapter(source: Path, target: Path) -> tuple[int, int]:
    """The same for an adapter alone, checked against the weights that it belongs to."""
    base = weights_of(source)
    model = load_checkpoint(base)
    adapter = load_adapter(source, model)
    save_adapter(
        dict(adapter.stored_tensors()),
        adapter.config,
        target,
        base=base,
        tokenizer=_tokenizer(source),
        card=read_card(source),
    )
    written = dict(load_adapter(target, model).stored_tensors())
    for name, tensor in adapter.stored_tensors():
        if not written[name].equal(tensor):
            raise K3Error(f"{target}: {name} does not read back as it was written")
    return len(written), _size(target)


def merge_adapter(source: Path, target: Path) -> tuple[int, int, dict[str, dict[str, Any]]]:
    """One checkpoint of an adapter and its weights; also, by stored format, what rounding to it left of the change.

    Matrices that the adapter does not touch keep their bytes. The sums are rounded as a checkpoint stores them, so the
    result is another policy than the adapter beside its weights, above all where routed experts are adapted.
    """
    model = load_checkpoint(source)
    merged = {form: asdict(about) | {"error": about.error} for form, about in merge(model).items()}
    return _save(model, source, target), _size(target), merged


def _tokenizer(source: Path) -> Tokenizer | None:
    has_tokenizer = any((source / name).is_file() for name in (RANKS_FILE, SMALL_FILE))
    return Tokenizer.load(source) if has_tokenizer else None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _save(model: K3ForCausalLM, source: Path, target: Path) -> int:
    """Writes and compares; the number of tensors."""
    tokenizer = _tokenizer(source) or _tokenizer(weights_of(source))
    save_checkpoint(model, target, tokenizer=tokenizer, card=read_card(source))
    written = dict(official_tensors(load_checkpoint(target)))
    count = 0
    for name, tensor in official_tensors(model):
        count += 1
        if not (written[name].dtype == tensor.dtype and written[name].equal(tensor)):
            raise K3Error(f"{target}: {name} does not read back as it was written")
    return count
