"""Weight versions, whole or absent: the staging of version v+1 beside v.

A version comes whole, tensor by tensor as a checkpoint stores them (`k3rl.checkpoint.official_tensors`) with a manifest
of their digests; in flat buffers, whose digests are made where they lie (`flat_update.py`); or as a delta to the
version that is served (`k3rl.checkpoint.delta`). Either way it is proved complete and unaltered, and a second model is
built that the first one, which serves until that succeeded, knows nothing of. Peak memory: both models, and the stored
tensors or the delta as it came. Experts that are served as stored bytes (`as_served`) arrive as such: nothing is
decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from k3rl.checkpoint import (
    CheckpointError,
    DeltaDecoder,
    DeltaError,
    DeltaHeader,
    FlatShard,
    StoredView,
    copy_with,
    digest,
    fill,
    manifest_of,
    official_tensors,
    second_model,
)
from k3rl.engine.adapters import AdapterStore
from k3rl.engine.flat_update import FlatUpdate, ValuesCopy
from k3rl.engine.memory import keep_experts_transposed
from k3rl.engine.protocol import WeightUpdateError
from k3rl.model import K3ForCausalLM, serves_packed
from k3rl.types import SamplingParams


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

    def build(self, model: K3ForCausalLM) -> tuple[K3ForCausalLM, dict[str, str] | None]:
        """(a second model that holds this version, its manifest if it came with one), once all is there and proved."""
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


def _refused(version: int, reason: str) -> WeightUpdateError:
    return WeightUpdateError(f"weight version {version} refused: {reason}; send the whole version again")


class ServedWeights:
    """The model that an engine serves, its version, the adapters beside it, and at most one update of either.

    An update is open, then prepared, then served; an error drops it. Each model is laid out for decoding before it is
    served. With versions in flat buffers there are two models in turn. On a GPU the second one's values are then copied
    into the first, whose addresses captured steps have; elsewhere the two change places.
    """

    def __init__(self, model: K3ForCausalLM, version: int) -> None:
        _lay_out(model)
        self.model, self.version, self.adapters = model, version, AdapterStore()
        self._update: Update | None = None  # being received
        self._next: tuple[int, K3ForCausalLM, dict[str, str] | None] | None = None  # proved, not served yet
        self._owned = False  # the first model is the caller's, and never written to
        self._spare: K3ForCausalLM | None = None  # ours too, and not served
        self._copy: ValuesCopy | None = None  # from the second model into the one that is served
        self._manifest: dict[str, str] | None = None  # of the model that is served

    @property
    def manifest(self) -> dict[str, str]:
        """Official name -> digest of the served model; computed when it did not come with an update."""
        if self._manifest is None:
            self._manifest = manifest_of(official_tensors(self.model))
        return self._manifest

    def version_for(self, params: SamplingParams) -> int:
        """The version that a request with these parameters samples from: its adapter's, or the model's."""
        return self.adapters.version(params.adapter, self.version)

    def versions_in(self, rows: np.ndarray, running: np.ndarray) -> np.ndarray:
        """`version_for` the request in each of these rows, int64 [R]; running: the `Running` of every row."""
        if not self.adapters.names:
            return np.full(len(rows), self.version)
        return np.array([self.version_for(one.params) for one in running[rows]], np.int64)

    def open(self, update: Update) -> None:
        """Begins an update. Raises WeightUpdateError while another one is open, where adapters are served, or when it
        is not a later version."""
        self.adapters.refuse_new_weights()
        if self._update is not None or self._next is not None:
            raise WeightUpdateError("another weight update is open; finish or abort it first")
        if update.version <= self.version:
            raise WeightUpdateError(f"version {update.version} is not later than {self.version}, which is served now")
        self._update = update

    def open_delta(self, header: bytes) -> None:
        """Begins an update that is a delta to the served version. Raises WeightUpdateError for one to another."""
        self.open(DeltaUpdate(header, self.version, self.model, self.manifest))

    def open_flat(self, version: int, shards: Sequence[FlatShard]) -> None:
        """Begins an update in flat buffers. Raises WeightUpdateError for shards that are no whole version."""
        self.open(FlatUpdate(version, shards, self.model, self._spare))

    def add_shard(self, number: int, buffer: Tensor) -> None:
        """A shard of an open update in flat buffers. Another thread than the engine's may call this, and `verify`."""
        update = self._take()
        if not isinstance(update, FlatUpdate):
            raise _refused(update.version, "it was not opened for flat buffers, and one came")
        update.add(number, buffer)
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

    def verify(self) -> None:
        """Proves the open update, of an adapter or of the model, and builds it beside what is served."""
        if not self.adapters.verify(self.model):
            update = self._take()
            built, manifest = update.build(self.model)
            _lay_out(built)
            if isinstance(update, FlatUpdate):
                self._spare = built
                self._copy = self._copy_into_served(built)
            self._next = update.version, built, manifest

    def _copy_into_served(self, built: K3ForCausalLM) -> ValuesCopy | None:
        """What the switch copies; None where models change places."""
        served, known = self.model, self._copy
        if not self._owned or served.device.type != "cuda" or not _alike(served, built):
            return None
        return (
            known if known is not None and known.into is served and known.source is built else ValuesCopy(served, built)
        )

    def finish(self, version: int) -> str | None:
        """Serves `version` from now on, verified first when that is not done -> the adapter whose version that is;
        None when the model itself was exchanged."""
        name = self.adapters.finish(version, self.model)
        if name is not None:
            return name
        self.adapters.refuse_new_weights(self.abort)  # some may have come since the update was opened
        if self._next is None:
            self.verify()
        prepared, self._next = self._next, None
        if prepared is None or prepared[0] != version:
            raise WeightUpdateError(f"version {version} is not the one that was prepared; send it again")
        self._serve(*prepared)
        return None

    def _serve(self, version: int, built: K3ForCausalLM, manifest: dict[str, str] | None) -> None:
        """The switch itself."""
        self.version, self._manifest = version, manifest
        if built is not self._spare:  # of an update that built a model of its own
            self.model, self._spare, self._owned = built, None, True
        elif self._copy is not None:
            self._copy.run()
        else:
            self.model, self._spare, self._owned = built, self.model if self._owned else None, True

    def abort(self) -> None:
        """Drops what is open or prepared."""
        self._update = self._next = None
        self.adapters.abort()

    def _take(self) -> Update:
        """The update being received, closed: whoever goes on with it puts it back, and an error leaves it dropped."""
        update, self._update = self._update, None
        if update is None:
            raise WeightUpdateError(
                "no weight update is open (a refused one is dropped); call start_weight_update first"
            )
        return update


def _alike(one: K3ForCausalLM, other: K3ForCausalLM) -> bool:
    """Whether captured steps of one are right for the values of the other."""
    pairs = zip(one.packed_banks.values(), other.packed_banks.values(), strict=True)
    return all(bank.in_range == twin.in_range for bank, twin in pairs)


def check_names(model: K3ForCausalLM, names: Iterable[str]) -> None:
    """Raises WeightUpdateError unless `names` are exactly the tensors that this model stores."""
    sent, stored = set(names), {name for name, _ in official_tensors(model)}
    if sent != stored:
        raise WeightUpdateError(
            f"the learner sends {len(sent)} tensors and this engine's model stores {len(stored)}; "
            f"not sent: {sorted(stored - sent)[:3]}, unknown here: {sorted(sent - stored)[:3]}; "
            "start both from the same config.json"
        )
