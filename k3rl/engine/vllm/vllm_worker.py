"""The weight transfer backend `k3rl` for vLLM: stored tensors checked whole on every worker before any is loaded.

This file runs inside vLLM's own environment and imports nothing of k3rl, so that it can be copied there alone:

    PYTHONPATH=folder/of/this/file vllm serve ... --worker-extension-cls vllm_worker.Worker \
        --weight-transfer-config '{"backend": "k3rl"}'

vLLM imports the extension class in every worker before it makes the transfer engine, and that import registers the
backend. vLLM's own backends load a tensor when it arrives, so that a transfer that breaks off leaves a model of two
versions. This one keeps what arrives (in memory, or as the name of a file in a folder that both sides see) and loads
at `finish_weight_update`, after a message that proves the update whole. Written for vLLM 0.31 to 0.33.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load

BACKEND = "k3rl"


def digest(tensor: torch.Tensor) -> str:
    """SHA-256, in hex, of dtype, shape and bytes: what a manifest holds (`k3rl.checkpoint.digest`)."""
    header = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode()
    sha = hashlib.sha256(header)
    sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


@dataclass
class InitInfo:
    """Sent once. names: of all tensors that every update will hold."""

    names: list[str]


@dataclass
class UpdateInfo:
    """One message of an update; exactly one of the first three is set.

    data: base64 of a safetensors message; file: path of a safetensors file; manifest: name -> digest of everything
    that was sent, which ends the update; cancel drops the update.
    """

    data: str | None = None
    file: str | None = None
    manifest: dict[str, str] | None = None
    cancel: bool = False


class StagedUpdate:
    """What arrived of one update: name -> digest as computed here, and where the bytes are."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.whole = False
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}

    def receive(self, info: UpdateInfo) -> None:
        """Takes one message in. Raises ValueError, which ends the update, and loads nothing."""
        if info.cancel:
            raise ValueError("the weight update was cancelled by the trainer")
        if info.data is not None:
            for name, tensor in load(base64.b64decode(info.data, validate=True)).items():
                self._add(name, tensor)
                self._tensors[name] = tensor
        elif info.file is not None:
            with safe_open(info.file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118, a safetensors file is no mapping
                    self._add(name, stored.get_tensor(name))
                    self._files[name] = info.file
        elif info.manifest is not None:
            self._verify(info.manifest)
        else:
            raise ValueError("an update message holds neither data, nor a file, nor a manifest")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors in the order of their arrival, files read again one tensor at a time."""
        if not self.whole:
            raise ValueError("the update was not proved whole; send its manifest before finish_weight_update")
        for name in self.digests:
            if name in self._tensors:
                yield name, self._tensors[name]
                continue
            with safe_open(self._files[name], framework="pt") as stored:
                yield name, stored.get_tensor(name)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.digests:
            raise ValueError(f"{name} was sent twice")
        self.whole = False
        self.digests[name] = digest(tensor)

    def _verify(self, manifest: Mapping[str, str]) -> None:
        if missing := manifest.keys() - self.digests.keys():
            raise ValueError(f"{len(missing)} of {len(manifest)} tensors are missing, {min(missing)} among them")
        if unknown := self.digests.keys() - manifest.keys():
            raise ValueError(f"{min(unknown)} is not in the manifest")
        for name, wanted in manifest.items():
            if self.digests[name] != wanted:
                raise ValueError(f"{name} has digest {self.digests[name]}, the manifest says {wanted}")
        self.whole = True


def check_names(model_path: str, names: list[str]) -> None:
    """Raises ValueError unless `names` are the tensors of the checkpoint that vLLM was started with."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_path} is no local folder with safetensors files, so names cannot be compared")
    stored: set[str] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as header:
            stored.update(header.keys())
    if stored != set(names):
        raise ValueError(
            f"the trainer sends {len(names)} tensors and the checkpoint holds {len(stored)}; not sent: "
            f"{sorted(stored - set(names))[:3]}, not in the checkpoint: {sorted(set(names) - stored)[:3]}"
        )


@dataclass
class _Registered:
    """Whether this process has registered the backend: an extension class may be imported more than once."""

    done: bool = field(default=False)


_registered = _Registered()


def register() -> None:
    """Registers the backend with vLLM in this process. Needs vLLM."""
    if _registered.done:
        return
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    class K3WeightTransferEngine(WeightTransferEngine[Any, Any]):
        """Stages until `finish_weight_update`, then loads as any backend does that sends checkpoint tensors."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        supports_draft_weight_update = False

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            check_names(self.model_config.model, init_info.names)

        def start_weight_update(self) -> None:
            self._staged = StagedUpdate()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self._staged.receive(update_info)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            tensors = self._staged.tensors()
            with torch.device(self.device):
                initialize_layerwise_reload(self.model)
                self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
                finalize_layerwise_reload(self.model, self.model_config)
            self._staged = StagedUpdate()

        def shutdown(self) -> None:
            self._staged = StagedUpdate()

    WeightTransferEngineFactory.register_engine(BACKEND, K3WeightTransferEngine)
    _registered.done = True


class Worker:
    """vLLM's worker extension: adds nothing to a worker."""


if importlib.util.find_spec("vllm") is not None:  # elsewhere it is read for its staging alone
    register()
