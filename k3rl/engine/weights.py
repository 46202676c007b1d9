"""Weight versions, whole or absent: digests of stored tensors, and the staging of version v+1 beside v.

The learner publishes tensors exactly as a checkpoint stores them (`k3rl.checkpoint.hf.official_tensors`) with a
manifest of their digests. An update collects them, proves them complete and unaltered, and only then builds a
second model; the first one serves until that succeeded. Peak memory: both models and the stored tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from k3rl.checkpoint.hf import CheckpointError, assign_official_tensors, official_tensors
from k3rl.engine.protocol import WeightUpdateError
from k3rl.model import K3ForCausalLM


def digest(tensor: Tensor) -> str:
    """SHA-256, in hex, of dtype, shape and bytes."""
    header = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode()
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    sha = hashlib.sha256(header)
    sha.update(content.data)
    return sha.hexdigest()


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Official name -> digest, of stored tensors such as `official_tensors(model)` gives (buffers included)."""
    return {name: digest(tensor) for name, tensor in tensors}


class WeightUpdate:
    """One update being received. Every method raises WeightUpdateError and leaves the served model alone."""

    def __init__(self, version: int, manifest: Mapping[str, str]) -> None:
        self.version, self.manifest = version, dict(manifest)
        self.tensors: dict[str, Tensor] = {}

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes tensors in; a name outside the manifest or given twice is refused."""
        for name, tensor in named_tensors:
            if name not in self.manifest:
                raise self._error(f"{name} is not in the manifest")
            if name in self.tensors:
                raise self._error(f"{name} was sent twice")
            self.tensors[name] = tensor

    def build(self, model: K3ForCausalLM) -> K3ForCausalLM:
        """A second model like `model` that holds this version, once every tensor is there and every digest agrees."""
        missing = self.manifest.keys() - self.tensors.keys()
        if missing:
            raise self._error(f"{len(missing)} of {len(self.manifest)} tensors are missing, {min(missing)} among them")
        for name, tensor in self.tensors.items():
            found = digest(tensor)
            if found != self.manifest[name]:
                raise self._error(f"{name} has digest {found}, the manifest says {self.manifest[name]}")
        candidate = K3ForCausalLM(model.config, dtype=model.dtype, device=model.device)
        try:
            assign_official_tensors(candidate, self.tensors)
        except CheckpointError as error:
            raise self._error(f"the tensors do not fit this model: {error}") from error
        return candidate

    def _error(self, reason: str) -> WeightUpdateError:
        return WeightUpdateError(f"weight version {self.version} refused: {reason}; send the whole version again")


def check_names(model: K3ForCausalLM, names: Iterable[str]) -> None:
    """Raises WeightUpdateError unless `names` are exactly the tensors that this model stores."""
    sent, stored = set(names), {name for name, _ in official_tensors(model)}
    if sent != stored:
        raise WeightUpdateError(
            f"the learner sends {len(sent)} tensors and this engine's model stores {len(stored)}; "
            f"not sent: {sorted(stored - sent)[:3]}, unknown here: {sorted(sent - stored)[:3]}; "
            "start both from the same config.json"
        )
