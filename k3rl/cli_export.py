"""What `k3rl export` does once it knows from where to where."""

from __future__ import annotations

from pathlib import Path

from k3rl.checkpoint.hf import load_checkpoint, official_tensors, read_card, save_checkpoint
from k3rl.config import K3Error
from k3rl.tokens import Tokenizer
from k3rl.tokens.vocab import RANKS_FILE, SMALL_FILE


def copy_checkpoint(source: Path, target: Path) -> tuple[int, int]:
    """Load, save, load again and compare every stored tensor. Returns (tensors, bytes of the folder).

    Raises K3Error, naming the tensor, when what was written does not read back as what was loaded.
    """
    model = load_checkpoint(source)
    has_tokenizer = any((source / name).is_file() for name in (RANKS_FILE, SMALL_FILE))
    tokenizer = Tokenizer.load(source) if has_tokenizer else None
    save_checkpoint(model, target, tokenizer=tokenizer, card=read_card(source))
    written = dict(official_tensors(load_checkpoint(target)))
    count = 0
    for name, tensor in official_tensors(model):
        count += 1
        if not (written[name].dtype == tensor.dtype and written[name].equal(tensor)):
            raise K3Error(f"{target}: {name} does not read back as it was written")
    return count, sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
