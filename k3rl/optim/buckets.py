"""Where optimizer state lives: equal-shaped Muon blocks stacked, AdamW tensors laid end to end.

Both kinds of bucket own float32 masters (or the parameter's dtype where that is wider), take a step on all their
parameters in a handful of tensor operations, and can cut their state back into one tensor per parameter. Parameters
without a gradient are left out by stepping over runs of neighbours that have one.

State may be stored elsewhere than where it is updated (`StateStorage`): it is then brought to the parameters' device
for a step, one bucket at a time (`run_updates`). State on the host is there once it was `fill`ed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.optim import muon
from k3rl.optim.classify import ParamInfo
from k3rl.optim.config import ADAMW_BETAS, ADAMW_EPS, Scaling
from k3rl.optim.joined import as_one, joined, runs
from k3rl.optim.newton_schulz import iterated, newton_schulz, update_scale
from k3rl.optim.offload import StateStorage, StateUpdate

Project = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class FixedGradients:
    """Gradients of parameters that lie at fixed places, whoever has one: those that banks of experts sum themselves.

    places: name -> (the gradient, zero where there is none, and its number in `rows`); a parameter's `.grad` is that
    tensor or None. rows int32 [m] on the device: above 0 for those that have a gradient, so that a captured step need
    not know them.
    """

    rows: Tensor
    places: Mapping[str, tuple[Tensor, int]]


BUCKET_ELEMENTS = 1 << 25  # bounds the temporaries of one step: 128 MiB each in float32
_BANK_ELEMENTS = 1 << 22  # parameters that lie end to end and are at least so many are in no bucket with others


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 parameters, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(master: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The dtype of Newton-Schulz products where masters of this dtype are stepped on `device`; None: the master's."""
    return None if master == torch.float64 or device.type == "cpu" else torch.bfloat16


def storage_kind(name: str) -> str:
    """The name without layer and expert numbers: tensors of one kind are stored in one format.

    w1 and w3 of experts are one kind: a bank has them side by side, and what lies side by side is stepped as it lies.
    """
    return re.sub(r"\.w[13]\.", ".w1w3.", re.sub(r"\.\d+\.", ".#.", name))


def _runs(keys: Sequence[object]) -> Iterator[tuple[int, int, object]]:
    """(start, stop, key) of every run of equal neighbours."""
    start = 0
    for key, run in itertools.groupby(keys):
        stop = start + len(list(run))
        yield start, stop, key
        start = stop


@dataclass(frozen=True)
class MuonRates:
    """The scalars of one Muon step; `lr` includes the schedule."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    dtype: torch.dtype | None  # of the Newton-Schulz products
    lr_at: Tensor | None = None  # `lr` on the device, float32 scalar, where a step is captured
    factor: Tensor | None = None  # a scalar on the device that gradients are multiplied with
    scaling: Scaling = "rms"
    fixed: bool = False  # whether gradients are taken from where `FixedGradients` has them


@dataclass(frozen=True)
class AdamRates:
    """The scalars of one AdamW step; `lr` includes the schedule."""

    lr: float
    weight_decay: float
    factor: Tensor | None = None  # as in `MuonRates`


@dataclass(frozen=True)
class MuonPiece:
    """The blocks that one segment of one matrix gives: rows [offset, offset + rows) of each of its heads."""

    name: str
    kind: str  # storage_kind(name)
    param: Tensor
    info: ParamInfo
    segment: int

    @property
    def rows(self) -> int:
        return self.info.segments[self.segment]

    @property
    def is_whole(self) -> bool:
        """Whether these are all blocks of the matrix."""
        return len(self.info.segments) == 1

    def cut(self, matrix: Tensor) -> Tensor:
        """A matrix [R, C] -> view [heads, rows, C] of this segment's blocks."""
        if self.info.heads == len(self.info.segments) == 1:
            return matrix.unsqueeze(0)
        by_head = matrix.unflatten(0, (self.info.heads, sum(self.info.segments)))
        return by_head.narrow(1, sum(self.info.segments[: self.segment]), self.rows)


def _blocks(pieces: Sequence[MuonPiece], matrices: Sequence[Tensor]) -> list[Tensor]:
    """The blocks [n, r, C] that the pieces cut of their matrices, as views; those that lie end to end as one."""
    if len(pieces) == 1:
        return [pieces[0].cut(matrices[0])]
    found: list[Tensor] = []
    for start, stop, whole in _runs([piece.is_whole for piece in pieces]):
        if whole:
            shape = (-1, pieces[start].rows, pieces[start].param.shape[1])
            found += [matrix.unflatten(0, shape[:2]) if matrix.dim() == 2 else matrix.view(shape)
                      for matrix in joined(matrices[start:stop])]  # fmt: skip
        else:
            found += [piece.cut(matrix) for piece, matrix in zip(pieces[start:stop], matrices[start:stop], strict=True)]
    return found


@dataclass
class MuonBucket:
    """Blocks [n, r, c] of equal shape from many matrices, with their masters and momenta."""

    pieces: list[MuonPiece]
    storage: StateStorage
    fixed: FixedGradients | None = None  # where all pieces are in it
    starts: list[int] = field(init=False)  # piece i owns blocks starts[i] .. starts[i + 1]
    master: Tensor = field(init=False)
    momentum: Tensor = field(init=False)
    places: list[Tensor] = field(init=False)  # of gradients that are at fixed places
    numbers: Tensor = field(init=False)  # int64 [n]: of each block in `FixedGradients.rows`

    def __post_init__(self) -> None:
        known = {} if self.fixed is None else self.fixed.places
        if not all(piece.name in known for piece in self.pieces):
            self.fixed, known = None, {}
        found = [(*known[piece.name], piece.info.heads) for piece in self.pieces] if known else []
        self.places = [place for place, _, _ in found]
        self.numbers = torch.tensor([n for _, n, heads in found for _ in range(heads)], device=self.device)
        self.starts = [0, *itertools.accumulate(piece.info.heads for piece in self.pieces)]
        shape = (self.starts[-1], self.pieces[0].rows, self.pieces[0].param.shape[1])
        kind = master_dtype(self.pieces[0].param.dtype)
        self.momentum = self.storage.zeros(shape, self.storage.momentum_dtype or kind, self.device)
        self.master = self.storage.zeros(shape, kind, self.device) if self.storage.on_host else self._from_parameters()

    def _from_parameters(self) -> Tensor:
        master = torch.cat([piece.cut(piece.param.detach()) for piece in self.pieces])
        return master.to(master_dtype(master.dtype))

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self.pieces[0].param.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its state where it is stored."""
        return self.master, self.momentum

    def fill(self, project: Project | None) -> None:
        """Takes masters on the host from the parameters, and writes their stored values into these."""
        if not self.storage.on_host:
            self.write_parameters(project)
            return
        master = self._from_parameters()
        self.master.copy_(master)
        self._write(project, 0, len(self.pieces), master)

    def updates(self, rates: MuonRates, project: Project | None) -> Iterator[StateUpdate]:
        """One Muon step on every matrix that has a gradient, and its stored value written into the parameter.

        A step for a capture (`rates.fixed`) does not depend on who of a bank has one.
        """
        if rates.fixed and self.fixed is not None:
            fixed = self.fixed

            def update_all(here: list[Tensor]) -> None:
                live = fixed.rows.index_select(0, self.numbers)
                self._step(self.places, rates, *here, live=live)
                self._write(project, 0, len(self.pieces), here[0])

            yield StateUpdate(self.tensors, self.device, self.master.dtype, update_all)
            return
        for start, stop, live in _runs([piece.param.grad is not None for piece in self.pieces]):
            if live:
                rows = slice(self.starts[start], self.starts[stop])

                def update(here: list[Tensor], start: int = start, stop: int = stop) -> None:
                    grads = [piece.param.grad for piece in self.pieces[start:stop] if piece.param.grad is not None]
                    self._step(grads, rates, *here, start=start)
                    self._write(project, start, stop, here[0])

                yield StateUpdate((self.master[rows], self.momentum[rows]), self.device, self.master.dtype, update)

    def _step(
        self,
        gradients: Sequence[Tensor],
        rates: MuonRates,
        master: Tensor,
        momentum: Tensor,
        *,
        live: Tensor | None = None,
        start: int = 0,
    ) -> None:
        """gradients: of the pieces from `start` on, whose master and momentum these are."""
        parts = _blocks(self.pieces[start : start + len(gradients)], gradients)
        gradient = as_one(parts).to(master.dtype)
        scale = update_scale(master.shape[-2], master.shape[-1], rates.scaling)
        if rates.dtype == torch.bfloat16 and limits.MUON.takes(master):
            lr, factor = (
                torch.full((), value, dtype=torch.float32, device=self.device) if at is None else at
                for at, value in ((rates.lr_at, rates.lr), (rates.factor, 1.0))
            )
            x = muon.start(gradient.contiguous(), momentum, factor, rates.momentum, rates.nesterov, live)
            muon.finish(master, iterated(x), lr, rates.weight_decay, scale, live)
            return
        before = None if live is None else (master.clone(), momentum.clone())
        if rates.factor is not None:
            gradient = gradient * rates.factor
        momentum.mul_(rates.momentum).add_(gradient)
        direction = momentum
        if rates.nesterov:
            out = None if gradient is parts[0] else gradient  # what is not ours stays as it is
            direction = torch.add(gradient, momentum, alpha=rates.momentum, out=out)
        update = newton_schulz(direction, dtype=rates.dtype)
        if rates.lr_at is None:
            master.mul_(1 - rates.lr * rates.weight_decay).add_(update, alpha=-rates.lr * scale)
        else:
            muon.finish_reference(master, update, rates.lr_at, rates.weight_decay, scale)
        if live is not None and before is not None:
            for now, old in zip((master, momentum), before, strict=True):
                now.copy_(torch.where((live > 0).view(-1, 1, 1), now, old))

    def write_parameters(self, project: Project | None, start: int = 0, stop: int | None = None) -> None:
        """Write project(master) of the pieces [start, stop) into their parameters."""
        stop = len(self.pieces) if stop is None else stop
        self._write(project, start, stop, self.master[self.starts[start] : self.starts[stop]].to(self.device))

    def _write(self, project: Project | None, start: int, stop: int, master: Tensor) -> None:
        """master: the blocks of the pieces [start, stop), where the parameters are."""
        pieces, begin = self.pieces[start:stop], self.starts[start]
        for first, last, _ in _runs([piece.kind for piece in pieces]):
            blocks = master[self.starts[start + first] - begin : self.starts[start + last] - begin]
            projected = blocks if project is None else project(pieces[first].name, blocks)
            targets = _blocks(pieces[first:last], [piece.param for piece in pieces[first:last]])
            torch._foreach_copy_(targets, list(projected.split([len(target) for target in targets])))

    def state(self) -> Iterator[tuple[MuonPiece, dict[str, Tensor]]]:
        """Each piece with views [heads, rows, C] of its state."""
        for piece, start, stop in zip(self.pieces, self.starts, self.starts[1:], strict=False):
            yield piece, {"master": self.master[start:stop], "momentum": self.momentum[start:stop]}

    def master_of(self, place: int, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Views of piece `place`'s master and of its part of `whole`, a matrix of the parameter's shape."""
        return self.master[self.starts[place] : self.starts[place + 1]], self.pieces[place].cut(whole)


@dataclass(frozen=True)
class Due:
    """Tensors [start, stop) of an AdamW bucket and the number of the step that they all take."""

    start: int
    stop: int
    count: int

    def numbers(self, rates: AdamRates, decay: bool, scale: float) -> tuple[float, float, float]:
        """What the master keeps of itself, what the root of the second moment is divided by, and the rate."""
        beta1, beta2 = ADAMW_BETAS
        keep = 1 - rates.lr * rates.weight_decay if decay else 1.0
        return keep, (1 - beta2**self.count) ** 0.5, rates.lr * scale / (1 - beta1**self.count)


@dataclass
class AdamBucket:
    """Tensors of one dtype, decay and scale laid end to end, with their masters, both moments and step counts.

    Neighbours of one storage kind and shape are projected together. scale: of their rate (`adamw_scale`).
    """

    names: list[str]
    params: list[Tensor]
    decay: bool
    storage: StateStorage
    scale: float = 1.0
    starts: list[int] = field(init=False)
    steps: list[int] = field(init=False)
    master: Tensor = field(init=False)
    first: Tensor = field(init=False)
    second: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [0, *itertools.accumulate(param.numel() for param in self.params)]
        self.steps = [0] * len(self.params)
        kind = master_dtype(self.params[0].dtype)
        self.first, self.second = (self.storage.zeros([self.starts[-1]], kind, self.device) for _ in range(2))
        self.master = (
            self.storage.zeros([self.starts[-1]], kind, self.device)
            if self.storage.on_host
            else self._from_parameters()
        )

    def _from_parameters(self) -> Tensor:
        master = torch.cat([param.detach().reshape(-1) for param in self.params])
        return master.to(master_dtype(master.dtype))

    def fill(self, project: Project | None) -> None:
        """As `MuonBucket.fill`."""
        if not self.storage.on_host:
            self.write_parameters(project)
            return
        master = self._from_parameters()
        self.master.copy_(master)
        self._write(project, 0, len(self.params), master)

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self.params[0].device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its state where it is stored."""
        return self.master, self.first, self.second

    def due(self) -> list[Due]:
        """The tensors that have a gradient, and the number of the step that they are to take; see `count`."""
        keys = [None if param.grad is None else done for param, done in zip(self.params, self.steps, strict=True)]
        return [Due(start, stop, done + 1) for start, stop, done in _runs(keys) if isinstance(done, int)]

    def count(self, due: Sequence[Due]) -> None:
        """Takes note that steps were taken."""
        for run in due:
            self.steps[run.start : run.stop] = [run.count] * (run.stop - run.start)

    def updates(
        self, rates: AdamRates, project: Project | None, due: Sequence[Due], numbers: Tensor | None = None
    ) -> Iterator[StateUpdate]:
        """One AdamW step on the tensors that are due, and their stored values written into the parameters.

        numbers: `Due.numbers` of each, float32 [len(due), 3] on the device, where the step is captured.
        """
        for i, run in enumerate(due):
            part = slice(self.starts[run.start], self.starts[run.stop])

            def update(here: list[Tensor], i: int = i, run: Due = run) -> None:
                master, first, second = here
                self._moments(run, rates, first, second)
                if numbers is None:
                    self._move(run, rates, master, first, second)
                else:
                    keep, root, rate = numbers[i].unbind()
                    moved = second.sqrt().div_(root).add_(ADAMW_EPS)
                    master.mul_(keep).sub_(torch.div(first, moved, out=moved).mul_(rate))
                self._write(project, run.start, run.stop, master)

            stored = (self.master[part], self.first[part], self.second[part])
            yield StateUpdate(stored, self.device, self.master.dtype, update)

    def _moments(self, run: Due, rates: AdamRates, first: Tensor, second: Tensor) -> None:
        gradients = [param.grad for param in self.params[run.start : run.stop] if param.grad is not None]
        gradient = as_one([part.reshape(-1) for part in joined(gradients)]).to(first.dtype)
        if rates.factor is not None:
            gradient = gradient * rates.factor
        beta1, beta2 = ADAMW_BETAS
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _move(self, run: Due, rates: AdamRates, master: Tensor, first: Tensor, second: Tensor) -> None:
        keep, root_of_correction, rate = run.numbers(rates, self.decay, self.scale)
        if self.decay:
            master.mul_(keep)
        root = second.sqrt().div_(root_of_correction).add_(ADAMW_EPS)
        master.addcdiv_(first, root, value=-rate)

    def write_parameters(self, project: Project | None, start: int = 0, stop: int | None = None) -> None:
        """Write project(master) of the tensors [start, stop) into their parameters."""
        stop = len(self.params) if stop is None else stop
        self._write(project, start, stop, self.master[self.starts[start] : self.starts[stop]].to(self.device))

    def _write(self, project: Project | None, start: int, stop: int, master: Tensor) -> None:
        """master: that of the tensors [start, stop), where the parameters are."""
        keys = [(storage_kind(name), tuple(self.params[i].shape)) for i, name in enumerate(self.names[:stop])][start:]
        for first, last, _ in _runs(keys):
            first, last = start + first, start + last
            values = master[self.starts[first] - self.starts[start] : self.starts[last] - self.starts[start]]
            values = values.view(last - first, *self.params[first].shape)
            projected = values if project is None else project(self.names[first], values)
            targets = [part.view(-1) for part in joined(self.params[first:last])]
            torch._foreach_copy_(targets, list(projected.reshape(-1).split([len(target) for target in targets])))

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Each name with views of its state in the parameter's shape; step counts are kept apart."""
        parts = {"master": self.master, "first": self.first, "second": self.second}
        for i, (name, param) in enumerate(zip(self.names, self.params, strict=True)):
            where = slice(self.starts[i], self.starts[i + 1])
            yield name, {key: flat[where].view(param.shape) for key, flat in parts.items()}

    def master_of(self, place: int, whole: Tensor) -> tuple[Tensor, Tensor]:
        """As `MuonBucket.master_of`, of tensor `place`."""
        return self.master[self.starts[place] : self.starts[place + 1]].view(whole.shape), whole


def fill_buckets(sizes: Sequence[int], limit: int = BUCKET_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Cut a row of sizes into runs [start, stop) of at most `limit` in sum; a larger single one is its own run."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            yield start, i
            start, total = i, 0
        total += size
    if len(sizes) > start:
        yield start, len(sizes)


def bank_edges(params: Sequence[Tensor]) -> list[int]:
    """Where a row of parameters is cut so that a large bank's gradients need no copy: 0, ..., len(params)."""
    edges = {0, len(params)}
    for start, stop in runs(params):
        if stop - start > 1 and sum(param.numel() for param in params[start:stop]) >= _BANK_ELEMENTS:
            edges |= {start, stop}
    return sorted(edges)
