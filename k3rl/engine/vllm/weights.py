"""A weight update to a vLLM server, two-phase: everything is sent and proved before anything is loaded.

vLLM's protocol is init once, then start, update any number of times, finish with the version. With its own transfer
backends the first update message overwrites the model. With the backend of `vllm_worker.py` the messages are staged,
one more proves them whole against the manifest, and `finish` alone loads. A session is cancelled by a message that
makes every worker raise, which is how vLLM's workers end one.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import save, save_file
from torch import Tensor

from k3rl.engine.protocol import EngineError, WeightUpdateError
from k3rl.engine.vllm.client import Client, Unreachable

BACKEND = "k3rl"  # the name under which `vllm_worker.py` registers


@dataclass(slots=True)
class _SentUpdate:
    """What the manifest lists, what was sent, and where files of it lie."""

    version: int
    manifest: dict[str, str]
    sent: set[str] = field(default_factory=set)
    files: list[Path] = field(default_factory=list)
    verified: bool = False


class WeightTransfer:
    """The updates of one server.

    folder: where both sides see files; None sends tensors inside the HTTP messages, at most `chunk_bytes` in each (a
    larger tensor goes alone). lose: called, and raising, when the server turns out to be gone.
    """

    def __init__(
        self,
        client: Client,
        folder: str | os.PathLike[str] | None,
        chunk_bytes: int,
        lose: Callable[[str], NoReturn],
    ) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be at least 1")
        self._client, self._chunk_bytes, self._lose = client, chunk_bytes, lose
        self._folder = None if folder is None else Path(folder).resolve()
        self._update: _SentUpdate | None = None

    def init(self, names: Iterable[str]) -> None:
        """Raises WeightUpdateError unless `names` are the tensors of the checkpoint that the server started with."""
        self._message("/init_weight_transfer_engine", {"init_info": {"names": sorted(names)}})

    def start(self, version: int, manifest: Mapping[str, str]) -> None:
        """Opens an update. Raises WeightUpdateError when one is open."""
        if self._update is not None:
            raise WeightUpdateError("another weight update is open; finish or abort it first")
        self._message("/start_weight_update", None)
        self._update = _SentUpdate(version, dict(manifest))

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sends stored tensors. Raises WeightUpdateError and drops the update at the first that does not fit."""
        update = self._opened()
        part: dict[str, Tensor] = {}
        size = 0
        try:
            for name, tensor in named_tensors:
                if name not in update.manifest:
                    raise _refused(update, f"{name} is not in the manifest")
                if name in update.sent:
                    raise _refused(update, f"{name} was sent twice")
                update.sent.add(name)
                if part and size + tensor.nbytes > self._chunk_bytes:
                    self._send_part(update, part)
                    part, size = {}, 0
                part[name], size = tensor.detach().cpu().contiguous(), size + tensor.nbytes
            if part:
                self._send_part(update, part)
        except BaseException:  # a broken iterator too: half an update must not stay open
            self.abort()
            raise

    def verify(self) -> None:
        """The server proves the update whole and unaltered. Raises WeightUpdateError and drops it otherwise."""
        update = self._opened()
        try:
            if missing := update.manifest.keys() - update.sent:
                reason = f"{len(missing)} of {len(update.manifest)} tensors are missing, {min(missing)} among them"
                raise _refused(update, reason)
            self._message("/update_weights", {"update_info": {"manifest": update.manifest}})
        except EngineError:
            self.abort()
            raise
        update.verified = True

    def prepare(self, version: int) -> None:
        """Makes sure that the open update is `version` and whole. Raises WeightUpdateError and drops it otherwise."""
        update = self._opened()
        if not update.verified:
            self.verify()
        if update.version != version:
            self.abort()
            raise WeightUpdateError(f"version {version} is not the one that was prepared; send it again")

    def finish(self, label: str, *, drop_caches: bool) -> None:
        """The server loads the verified update and takes `label` for its version. An EngineError leaves it unknown.

        drop_caches: running requests are preempted, and their tokens are read again when they go on.
        """
        try:
            limit = self._client.deadlines.update
            self._client.call("POST", "/finish_weight_update", body={"weight_version": label}, deadline_s=limit)
            found = self._client.call("GET", "/weight_info").get("weight_version")
            if found != label:
                raise EngineError(f"the server says its weight version is {found!r}, not {label!r}")
            if drop_caches:
                query = {"reset_running_requests": "true"}
                answer = self._client.call("POST", "/reset_prefix_cache", query=query)
                if not (isinstance(answer, Mapping) and answer.get("success")):
                    raise EngineError(f"the caches of the version before could not be dropped: {answer}")
        finally:
            self.forget()

    def abort(self) -> None:
        """Drops an open update, if any."""
        if self._update is not None:
            self.forget()
            self.cancel()

    def cancel(self) -> None:
        """Ends the server's session, if one is open: of this client, or left by one that died."""
        try:
            self._client.call("POST", "/update_weights", body={"update_info": {"cancel": True}})
        except Unreachable as error:
            self._lose(f"it went away during a weight update: {error}")
        except EngineError:  # the answer of a worker that dropped its session, or had dropped it before
            self._refuse_if_dead()

    def forget(self) -> None:
        """Drops an open update here alone."""
        update, self._update = self._update, None
        for place in update.files if update is not None else ():
            place.unlink(missing_ok=True)

    def _send_part(self, update: _SentUpdate, part: dict[str, Tensor]) -> None:
        info: dict[str, Any]
        if self._folder is None:
            info = {"data": base64.b64encode(save(part)).decode()}
        else:
            place = self._folder / f"update-{os.getpid()}-{update.version}-{len(update.files):05d}.safetensors"
            save_file(part, place)
            update.files.append(place)
            info = {"file": str(place)}
        self._message("/update_weights", {"update_info": info})

    def _message(self, path: str, body: Any) -> None:
        """Raises WeightUpdateError when the server refuses it, EngineLost when the server is gone."""
        try:
            self._client.call("POST", path, body=body, deadline_s=self._client.deadlines.update)
        except Unreachable as error:
            self._lose(f"it went away during a weight update: {error}")
        except EngineError as error:
            self._refuse_if_dead()
            raise WeightUpdateError(f"{error}; the version before it is still served") from error

    def _refuse_if_dead(self) -> None:
        """After a failed call: whether the server is still there to go on with its version."""
        try:
            self._client.call("GET", "/health")
        except EngineError as error:
            self._lose(f"it does not answer any more: {error}")

    def _opened(self) -> _SentUpdate:
        if self._update is None:
            raise WeightUpdateError(
                "no weight update is open (a refused one is dropped); call start_weight_update first"
            )
        return self._update


def _refused(update: _SentUpdate, reason: str) -> WeightUpdateError:
    return WeightUpdateError(f"weight version {update.version} refused: {reason}; send the whole version again")
