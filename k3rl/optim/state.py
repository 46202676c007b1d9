"""Masters, momenta and moments of an optimizer's parameters, in buckets, and as one tensor for each parameter."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from k3rl.optim.buckets import (
    AdamBucket,
    FixedGradients,
    MuonBucket,
    MuonPiece,
    Project,
    bank_edges,
    fill_buckets,
    master_dtype,
    storage_kind,
)
from k3rl.optim.classify import ParamInfo, adamw_scale
from k3rl.optim.config import Scaling
from k3rl.optim.host_memory import lock
from k3rl.optim.offload import StateStorage


class OptimizerStateError(ValueError):
    """Saved optimizer state does not belong to these parameters; the message names the first difference."""


class OptimizerState:
    """The buckets of some parameters. Their data is `project` of the masters from construction on.

    params, infos: by official name. project: see `PerHeadMuon`; None for the masters themselves. fixed: gradients at
    fixed places, which buckets of these alone step as a whole. scaling: see `MuonConfig`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        infos: Mapping[str, ParamInfo],
        storage: StateStorage,
        project: Project | None,
        fixed: FixedGradients | None = None,
        scaling: Scaling = "rms",
    ) -> None:
        self._scaling = scaling
        self.params, self.infos, self.storage, self.project = dict(params), dict(infos), storage, project
        self.muon = list(self._build_muon(fixed))
        self.adam = list(self._build_adam())
        self._at: dict[str, list[tuple[MuonBucket | AdamBucket, int]]] = {name: [] for name in self.params}
        for muon in self.muon:
            for place, piece in enumerate(muon.pieces):
                self._at[piece.name].append((muon, place))
        for adam in self.adam:
            for place, name in enumerate(adam.names):
                self._at[name].append((adam, place))
        self._locking: Future[bool] | None = None  # of state on the host, in a thread
        self._fill()

    def _build_muon(self, fixed: FixedGradients | None) -> Iterable[MuonBucket]:
        groups: dict[tuple[object, ...], list[MuonPiece]] = {}
        for name, param in self.params.items():
            info = self.infos[name]
            for segment, rows in enumerate(info.segments):
                key = (rows, param.shape[1], param.dtype, param.device)
                groups.setdefault(key, []).append(MuonPiece(name, storage_kind(name), param, info, segment))
        for pieces in groups.values():
            pieces.sort(key=lambda piece: piece.kind)
            sizes = [piece.info.heads * piece.rows * piece.param.shape[1] for piece in pieces]
            edges = bank_edges([piece.param for piece in pieces])
            for first, last in itertools.pairwise(edges):
                for start, stop in fill_buckets(sizes[first:last]):
                    yield MuonBucket(pieces[first + start : first + stop], self.storage, fixed)

    def _build_adam(self) -> Iterable[AdamBucket]:
        groups: dict[tuple[bool, torch.dtype, torch.device, float], list[str]] = {}
        for name, param in self.params.items():
            if self.infos[name].group == "adamw":
                scale = adamw_scale(name, param.shape, self._scaling)
                groups.setdefault((self.infos[name].decay, param.dtype, param.device, scale), []).append(name)
        for (*_, scale), names in groups.items():
            names.sort(key=storage_kind)
            params = [self.params[name] for name in names]
            for start, stop in fill_buckets([param.numel() for param in params]):
                decay = self.infos[names[start]].decay
                yield AdamBucket(names[start:stop], params[start:stop], decay, self.storage, scale)

    @property
    def buckets(self) -> list[MuonBucket | AdamBucket]:
        return [*self.muon, *self.adam]

    @torch.no_grad()
    def _fill(self) -> None:
        """Masters from the parameters, and their stored values back into these."""
        buckets = self.buckets
        if self.storage.on_host and buckets:
            device = buckets[0].device
            lock([bucket.master for bucket in buckets], device)
            # The rest is zero and is needed by the first step alone, before which models are compiled.
            rest = [tensor for bucket in buckets for tensor in bucket.tensors if tensor is not bucket.master]
            pool = ThreadPoolExecutor(1, thread_name_prefix="optimizer-memory")
            self._locking = pool.submit(lock, rest, device)
            pool.shutdown(wait=False)
        for bucket in buckets:
            bucket.fill(self.project)

    def wait_until_locked(self) -> None:
        """Returns when state on the host is page-locked, as a step wants it."""
        if self._locking is not None:
            self._locking.result()
            self._locking = None

    @property
    def nbytes(self) -> int:
        """Bytes of masters and state, wherever they are stored."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is stored, bucket by bucket."""
        return (tensor for bucket in self.buckets for tensor in bucket.tensors)

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Overwrites every parameter with project(master)."""
        for bucket in self.buckets:
            bucket.write_parameters(self.project)

    # -- by parameter ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def masters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of the masters of these parameters, in the parameters' shapes. Raises KeyError for an unknown one."""
        wanted = {
            name: torch.empty_like(self.params[name], dtype=master_dtype(self.params[name].dtype)) for name in names
        }
        for name, whole in wanted.items():
            for bucket, place in self._at[name]:
                master, part = bucket.master_of(place, whole)
                part.copy_(master)
        return wanted

    @torch.no_grad()
    def set_masters(self, values: Mapping[str, Tensor]) -> None:
        """Replaces masters and projects them into the parameters. Momenta stay.

        Raises KeyError for an unknown parameter, OptimizerStateError for another shape.
        """
        for name, value in values.items():
            if value.shape != self.params[name].shape:
                raise OptimizerStateError(
                    f"{name}: the master has shape {tuple(self.params[name].shape)}, got {tuple(value.shape)}"
                )
        for name, whole in values.items():
            for bucket, place in self._at[name]:
                master, part = bucket.master_of(place, whole)
                master.copy_(part)
                bucket.write_parameters(self.project, place, place + 1)

    @torch.no_grad()
    def to_tensors(self, names: Container[str] | None = None) -> dict[str, Tensor]:
        """All state, or that of `names`, as new tensors: "<name>/master" and "<name>/momentum" of Muon matrices;
        "<name>/master", "/first", "/second" (parameter shapes) and "/steps" (int64 scalar) of AdamW tensors. They lie
        where the state is stored. Independent of how state is bucketed.
        """
        state: dict[str, Tensor] = {}
        for piece, parts in self._muon_pieces():
            if names is not None and piece.name not in names:
                continue
            for key, blocks in parts.items():
                whole = state.setdefault(
                    f"{piece.name}/{key}", torch.empty(piece.param.shape, dtype=blocks.dtype, device=blocks.device)
                )
                piece.cut(whole).copy_(blocks)
        for bucket in self.adam:
            for (name, parts), steps in zip(bucket.state(), bucket.steps, strict=True):
                if names is not None and name not in names:
                    continue
                state.update({f"{name}/{key}": value.clone() for key, value in parts.items()})
                state[f"{name}/steps"] = torch.tensor(steps)
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `to_tensors` gave and projects the masters into the parameters.

        Raises OptimizerStateError, before anything is changed, for a missing, extra or mis-shaped tensor.
        """
        self._check(state)
        for piece, parts in self._muon_pieces():
            for key, blocks in parts.items():
                blocks.copy_(piece.cut(state[f"{piece.name}/{key}"]))
        for bucket in self.adam:
            for i, (name, parts) in enumerate(bucket.state()):
                for key, value in parts.items():
                    value.copy_(state[f"{name}/{key}"])
                bucket.steps[i] = int(state[f"{name}/steps"])
        self.write_parameters()

    def _check(self, state: Mapping[str, Tensor]) -> None:
        wanted: dict[str, torch.Size] = {}
        for name, info in self.infos.items():
            keys = ("master", "momentum") if info.group == "muon" else ("master", "first", "second")
            wanted.update({f"{name}/{key}": self.params[name].shape for key in keys})
            if info.group == "adamw":
                wanted[f"{name}/steps"] = torch.Size([])
        for key in (*wanted, *state):
            if key not in state or key not in wanted:
                word = "is missing" if key in wanted else "belongs to no parameter of this optimizer"
                raise OptimizerStateError(f"optimizer state: {key} {word}")
            if state[key].shape != wanted[key]:
                raise OptimizerStateError(
                    f"optimizer state: {key} has shape {tuple(state[key].shape)}, wanted {tuple(wanted[key])}"
                )

    def _muon_pieces(self) -> Iterable[tuple[MuonPiece, dict[str, Tensor]]]:
        for bucket in self.muon:
            yield from bucket.state()
