"""What a checkpoint has beside its tensors, for an export that other programs open like the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Of the checkpoint that a model was loaded from.

    files: name -> content of its chat template, remote code and licence; in the flat dialect of its configuration and
    tokenizer, too. shards: official name of a tensor -> file that held it, of the flat dialect; else empty.
    """

    files: Mapping[str, bytes]
    shards: Mapping[str, str]


@dataclass(frozen=True)
class QuantizationLoss:
    """What quantizing experts while they were loaded took: root mean square of the change over that of the values.

    relative: of all matrices together; worst: of the one that lost most, called `name`.
    """

    matrices: int
    relative: float
    worst: float
    name: str

    def __str__(self) -> str:
        return (
            f"{self.matrices} matrices of experts became MXFP4: relative error {self.relative:.4f}, at most "
            f"{self.worst:.4f} ({self.name})"
        )
