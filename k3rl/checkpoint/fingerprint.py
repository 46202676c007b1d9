"""Which weights a model had, told without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PIECE, _PIECES = 2**16, 64  # of a file: all of a small one, samples of a large one


def weights_fingerprint(start: str | None, seed: int) -> str:
    """What a model's first weights were: fresh ones of a seed, or those of a checkpoint directory, wherever it lies.

    Of a file it takes the size and up to 64 pieces of 64 KiB at equal distances, so weights that were trained on, or
    replaced, are noticed at any size without reading all of them.
    """
    if start is None:
        return f"fresh weights of seed {seed}"
    digest = hashlib.sha256()
    for file in sorted(Path(start).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as content:
            for place in range(0, size, max(_PIECE, size // _PIECES)):
                content.seek(place)
                digest.update(content.read(_PIECE))
    return digest.hexdigest()
