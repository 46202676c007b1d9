"""Weight versions, whole or absent: the staging of version v+1 beside v.

A version comes whole, tensor by tensor as a checkpoint stores them (`k3rl.checkpoint.official_tensors`) with a manifest
of their digests; or from a checkpoint directory; or as a delta to the version that is served (`k3rl.checkpoint.delta`).
Each way it is proved complete and unaltered, and a second model is built that the first one, which serves until that
succeeded, knows nothing of. Peak memory: both models, and the stored tensors, one tensor of the directory, or the
delta as it came. Experts that are served as stored bytes (`as_served`) arrive as such: nothing is decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from k3rl.checkpoint import CheckpointError, fill, load_checkpoint, official_tensors
from k3rl.checkpoint.delta import DeltaDecoder, DeltaError, DeltaHeader
from k3rl.checkpoint.manifest import digest, manifest_digest, manifest_of
from k3rl.checkpoint.official import StoredView, copy_with, second_model
from k3rl.engine.memory import keep_experts_transposed
from k3rl.engine.protocol import WeightUpdateError
from k3rl.model import K3ForCausalLM
from k3rl.model.packed import serves_packed

__all__ = [
    "DeltaUpdate",
    "WeightReceiver",
    "WeightUpdate",
    "as_served",
    "check_names",
    "digest",
    "manifest_digest",
    "manifest_of",
]


def as_served(model: K3ForCausalLM, exact: bool) -> K3ForCausalLM:
    """What an engine serves in the place of `model`, which stays as it is.

    Where kernels multiply with packed experts, that is a second model that keeps them so; otherwise `model` itself.
    Not where experts are elsewhere or have an adapter beside them, and not in the exact mode.
    """
    config = model.config
    widths = config.expert_hidden_size, config.moe_intermediate_size
    whole = model.holds_all and model.slices is None and model.adapter is None
    if exact or model.packed or not whole or config.quantization.weights != "mxfp4" or not config.moe_layers:
        return model
    return second_model(model, packed=True) if serves_packed(*widths, model.device, model.dtype) else model


def _lay_out(model: K3ForCausalLM) -> None:
    """Makes a model ready to decode, so that no step needs to ask the device for anything."""
    keep_experts_transposed(model)
    if model.device.type == "cuda" and not all(bank.in_range for bank in model.packed_banks.values()):
        reason = "scales of packed experts are beyond those that kernels take; they are decoded at every step"
        warnings.warn(reason, stacklevel=2)


class Update(Protocol):
    """A version being received."""

    version: int

    def build(self, model: K3ForCausalLM) -> tuple[K3ForCausalLM, dict[str, str]]:
        """(a second model that holds this version, its manifest), once all of it is there and proved."""
        ...


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

    def build(self, model: K3ForCausalLM) -> tuple[K3ForCausalLM, dict[str, str]]:
        """A second model like `model` that holds this version, once every tensor is there and every digest agrees."""
        missing = self.manifest.keys() - self.tensors.keys()
        if missing:
            raise self._error(f"{len(missing)} of {len(self.manifest)} tensors are missing, {min(missing)} among them")
        for name, found in manifest_of(self.tensors.items()).items():
            if found != self.manifest[name]:
                raise self._error(f"{name} has digest {found}, the manifest says {self.manifest[name]}")
        candidate = K3ForCausalLM(model.config, dtype=model.dtype, device=model.device, packed=model.packed)
        try:
            fill(candidate, self.tensors)
        except CheckpointError as error:
            raise self._error(f"the tensors do not fit this model: {error}") from error
        return candidate, self.manifest

    def _error(self, reason: str) -> WeightUpdateError:
        return _refused(self.version, reason)


class DeltaUpdate:
    """An update of the served model, as a delta being received. Methods raise WeightUpdateError and change nothing."""

    def __init__(self, header: bytes, served: int, model: K3ForCausalLM, manifest: Mapping[str, str]) -> None:
        """served and manifest: of `model`, the base. Raises WeightUpdateError when the delta has another base."""
        try:
            self._header = DeltaHeader.from_bytes(header, manifest)
        except DeltaError as error:
            raise WeightUpdateError(f"a delta is refused while version {served} is served: {error}") from error
        self.version, self._manifest = self._header.version, manifest
        if self._header.base != served:
            raise _refused(self.version, f"it is a delta to version {self._header.base}, and {served} is served")
        # Trusted by digests: of what comes out, and in `_unchanged`.
        self._base = StoredView(model, trusted=True, expected=self._header.names)
        self._decoder = DeltaDecoder(self._header, self._base.__getitem__)

    def add(self, bucket: bytes) -> None:
        """Takes a bucket in."""
        try:
            self._decoder.add(bucket)
        except DeltaError as error:
            raise _refused(self.version, str(error)) from error

    def build(self, model: K3ForCausalLM) -> tuple[K3ForCausalLM, dict[str, str]]:
        """A second model: `model` with the changed tensors, each proved by its digest, the whole by its manifest."""
        try:
            candidate = copy_with(model, self._decoder.tensors(), self._unchanged)
            return candidate, self._decoder.check_result(self._manifest)
        except (DeltaError, CheckpointError) as error:
            raise _refused(self.version, str(error)) from error

    def _unchanged(self, name: str) -> Tensor:
        """A stored tensor of the base that the delta leaves alone, proved by the base's manifest."""
        tensor = self._base[name]
        if digest(tensor) != self._manifest[name]:
            raise DeltaError(f"{name} was written to since version {self._header.base} came")
        return tensor


class DirectoryUpdate:
    """A version in a checkpoint directory. manifest: what its tensors must be, or None to take them as they are."""

    def __init__(self, version: int, directory: Path, manifest: Mapping[str, str] | None) -> None:
        self.version, self._directory, self._manifest = version, directory, manifest

    def build(self, model: K3ForCausalLM) -> tuple[K3ForCausalLM, dict[str, str]]:
        """The model of the directory, which must have the configuration of `model`."""
        try:
            candidate = load_checkpoint(self._directory, model.dtype, model.device, packed=model.packed)
        except (CheckpointError, ValueError) as error:
            raise _refused(self.version, str(error)) from error
        if candidate.config != model.config:
            raise _refused(self.version, f"{self._directory} holds a model of another configuration")
        found = manifest_of(official_tensors(candidate))
        if self._manifest is not None and (wrong := sorted(found.items() ^ self._manifest.items())):
            raise _refused(self.version, f"{self._directory}: {wrong[0][0]} is not what the manifest says")
        return candidate, found


def _refused(version: int, reason: str) -> WeightUpdateError:
    return WeightUpdateError(f"weight version {version} refused: {reason}; send the whole version again")


class WeightReceiver:
    """An engine's side of a weight transfer: at most one update, open or prepared. Errors drop it.

    model: the first one to be served; each is laid out for decoding before it is.
    """

    def __init__(self, model: K3ForCausalLM) -> None:
        _lay_out(model)
        self._update: Update | None = None  # being received
        self._next: tuple[int, K3ForCausalLM, dict[str, str]] | None = None  # proved, not served yet
        self._manifest: tuple[K3ForCausalLM, dict[str, str]] | None = None  # of the model that is served

    def manifest(self, model: K3ForCausalLM) -> dict[str, str]:
        """The manifest of the served model; computed when it did not come with an update."""
        if self._manifest is None or self._manifest[0] is not model:
            self._manifest = model, manifest_of(official_tensors(model))
        return self._manifest[1]

    def open(self, update: Update, served: int) -> None:
        """Begins an update. Raises WeightUpdateError while another one is open, or when it is not a later version."""
        if self._update is not None or self._next is not None:
            raise WeightUpdateError("another weight update is open; finish or abort it first")
        if update.version <= served:
            raise WeightUpdateError(f"version {update.version} is not later than {served}, which is served now")
        self._update = update

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stored tensors of an open whole update."""
        update = self._take()
        if not isinstance(update, WeightUpdate):
            raise _refused(update.version, "it was opened as a delta, and whole tensors came")
        update.add(named_tensors)
        self._update = update

    def add_bucket(self, bucket: bytes) -> None:
        """A bucket of an open delta."""
        update = self._take()
        if not isinstance(update, DeltaUpdate):
            raise _refused(update.version, "it was opened for whole tensors, and a bucket of a delta came")
        update.add(bucket)
        self._update = update

    def verify(self, model: K3ForCausalLM) -> None:
        """Proves the open update and builds its model."""
        update = self._take()
        self._next = (update.version, *update.build(model))

    def take(self, version: int, model: K3ForCausalLM) -> K3ForCausalLM:
        """The proved model of `version`, to be served from now on."""
        if self._next is None:
            self.verify(model)
        prepared, self._next = self._next, None
        if prepared is None or prepared[0] != version:
            raise WeightUpdateError(f"version {version} is not the one that was prepared; send it again")
        self._manifest = prepared[1], prepared[2]
        _lay_out(prepared[1])
        return prepared[1]

    def abort(self) -> None:
        """Drops what is open or prepared."""
        self._update = self._next = None

    def _take(self) -> Update:
        """The update being received, closed: whoever goes on with it puts it back, and an error leaves it dropped."""
        update, self._update = self._update, None
        if update is None:
            raise WeightUpdateError(
                "no weight update is open (a refused one is dropped); call start_weight_update first"
            )
        return update


def check_names(model: K3ForCausalLM, names: Iterable[str]) -> None:
    """Raises WeightUpdateError unless `names` are exactly the tensors that this model stores."""
    sent, stored = set(names), {name for name, _ in official_tensors(model)}
    if sent != stored:
        raise WeightUpdateError(
            f"the learner sends {len(sent)} tensors and this engine's model stores {len(stored)}; "
            f"not sent: {sorted(stored - sent)[:3]}, unknown here: {sorted(sent - stored)[:3]}; "
            "start both from the same config.json"
        )
