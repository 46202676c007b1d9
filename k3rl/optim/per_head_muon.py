"""Per-Head Muon with AdamW for everything that is no matrix (k3.md 8.1-8.4).

    M <- 0.95 M + G;  U = G + 0.95 M (Nesterov) or M;  per block: O = NS5(U) * 0.2 sqrt(max(rows, columns))
    W <- W - lr (O + weight_decay W)

`classify` says which rows form a block. The optimizer owns the master weights. A parameter's data is only ever what a
checkpoint would store of its master: it is overwritten by `project(name, master)` when the optimizer is built and
after every step, so learner, engine and exported file compute with the same numbers. The gradient of a parameter is
applied to its master (straight-through).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.cuda_graph import KeyedStep
from k3rl.optim.buckets import (
    AdamBucket,
    AdamRates,
    Banked,
    Due,
    MuonBucket,
    MuonPiece,
    MuonRates,
    Project,
    bank_edges,
    fill_buckets,
    master_dtype,
    storage_kind,
)
from k3rl.optim.classify import HeadLayout, ParamInfo, classify
from k3rl.optim.host_memory import lock
from k3rl.optim.joined import joined
from k3rl.optim.offload import Rest, Visit, take_turns

Variant = Literal["per_head_muon", "muon_whole", "adamw"]


class NonFiniteGradient(ArithmeticError):
    """A gradient holds an inf or a NaN; `name` is the first such parameter. Nothing was changed."""

    def __init__(self, name: str, bad: int, total: int) -> None:
        super().__init__(
            f"the gradient of {name} has {bad} non-finite values of {total}; no parameter was changed. "
            "Look at the loss of this batch, or pass nonfinite='skip' to leave such steps out"
        )
        self.name = name


class OptimizerStateError(ValueError):
    """Saved optimizer state does not belong to these parameters; the message names the first difference."""


def _as_variant(variant: Variant, info: ParamInfo, shape: torch.Size) -> ParamInfo:
    """What `variant` makes of a parameter's class."""
    if info.group != "muon" or variant == "per_head_muon":
        return info
    if variant == "muon_whole":
        return ParamInfo("muon", info.decay, heads=1, segments=(shape[0],))
    return ParamInfo("adamw", info.decay)


def trained(
    named_params: Iterable[tuple[str, Tensor]], config: HeadLayout, variant: Variant = "per_head_muon"
) -> dict[str, tuple[ParamInfo, Tensor]]:
    """name -> (how it is trained, parameter) of those that an optimizer moves.

    Raises ValueError for a name given twice.
    """
    found: dict[str, tuple[ParamInfo, Tensor]] = {}
    for name, param in named_params:
        if name in found:
            raise ValueError(f"the parameter {name} was given twice")
        info = _as_variant(variant, classify(name, param.shape, config), param.shape)
        if info.group != "balanced" and param.requires_grad:
            found[name] = info, param
    return found


def _norms_by_type(tensors: Iterable[Tensor]) -> Iterable[Sequence[Tensor]]:
    """The 2-norms of the tensors, those of one dtype and device together."""
    groups: dict[tuple[object, object], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return (torch._foreach_norm(group) for group in groups.values())


class PerHeadMuon:
    """Optimizer of a K3 model.

    named_params: (official name, leaf parameter); those with requires_grad False and e_score_correction_bias are left
    out. config: a K3Config, for its head sizes. lr drives Muon, adamw_lr AdamW. Decay is decoupled and leaves vectors
    alone. project(name, master): the stored values of a master, same shape, in any dtype that holds them; it is called
    on stacks [n, ...] of equal tensors or row blocks whose names differ only in layer and expert number, or as w1 and
    w3 of experts do, so it must work along the last axis and treat those alike. None ships the masters themselves.

    Gradients and parameters that lie end to end in storage (a bank of experts) are read and written as one tensor.

    variant: "per_head_muon", "muon_whole" (no cut along heads) or "adamw" (AdamW for all, at adamw_lr), for comparison.
    owned: names whose masters are kept and moved here; the others belong to other ranks. None: all.
    newton_schulz_dtype: None means the master's on CPU and bfloat16 on an accelerator; float64 is never narrowed.
    rest: where state lies between steps, and in which dtype Muon's momentum.
    capture: replay norm, clipping and step as CUDA graphs on a GPU while gradients stay where they are (`captures`).
    banked: gradients that are at fixed places, so that it is no other graph when another of these parameters has one.

    A parameter whose grad is None is left exactly as it is: no decay, no momentum change, no step count. A zero
    gradient is a gradient. Masters and state are float32, float64 for float64 parameters.

    Raises ClassifyError for unknown names, ValueError for a name given twice or nothing to train.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, Tensor]],
        config: HeadLayout,
        *,
        lr: float,
        adamw_lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        project: Project | None = None,
        variant: Variant = "per_head_muon",
        newton_schulz_dtype: torch.dtype | None = None,
        owned: Container[str] | None = None,
        rest: Rest | None = None,
        capture: bool = True,
        banked: Banked | None = None,
    ) -> None:
        self.lr = lr
        self.adamw_lr = adamw_lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.betas = betas
        self.eps = eps
        self.project = project
        self.newton_schulz_dtype = newton_schulz_dtype
        self.rest = Rest() if rest is None else rest
        every = trained(named_params, config, variant)
        if not every:
            raise ValueError("no parameter to train: every one is frozen or moved by QuantileBalancer")
        self.names = tuple(every)
        kept = {name: found for name, found in every.items() if owned is None or name in owned}
        self.infos: dict[str, ParamInfo] = {name: info for name, (info, _) in kept.items()}
        self.params: dict[str, Tensor] = {name: param for name, (_, param) in kept.items()}
        self._by_kind = sorted(self.params, key=storage_kind)
        self._banked = banked
        self._muon = list(self._build_muon())
        self._adam = list(self._build_adam())
        self._at: dict[str, list[tuple[MuonBucket | AdamBucket, int]]] = {name: [] for name in self.params}
        for muon in self._muon:
            for place, piece in enumerate(muon.pieces):
                self._at[piece.name].append((muon, place))
        for adam in self._adam:
            for place, name in enumerate(adam.names):
                self._at[name].append((adam, place))
        self.captures = capture and self._can_capture()
        known = {} if banked is None else banked.places
        placed = [piece.name for bucket in self._muon if bucket.banked is not None for piece in bucket.pieces]
        # Parameters whose gradients a captured step takes from their places, and all others.
        self._placed = [(self.params[name], known[name][0]) for name in placed]
        at_places = set(placed)
        self._free = [param for name, param in self.params.items() if name not in at_places]
        device = next(iter(every.values()))[1].device
        # What a captured step reads and leaves.
        self._numbers = torch.zeros(1 + 3 * sum(len(adam.params) for adam in self._adam), device=device)
        self._factor = torch.ones((), device=device)
        self._norm = torch.zeros((), dtype=torch.float64, device=device)
        self._step_at: tuple[int, ...] | None = None  # `_addresses` of a clipping that the next step completes
        self._captured_clip = KeyedStep("the gradient norm")
        self._captured_step = KeyedStep("the optimizer step")
        self._locking: Future[bool] | None = None  # of state on the host, in a thread
        self._fill()

    # -- building -----------------------------------------------------------------------------------------------

    def _build_muon(self) -> Iterable[MuonBucket]:
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
                    yield MuonBucket(pieces[first + start : first + stop], self.rest, self._banked)

    def _build_adam(self) -> Iterable[AdamBucket]:
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, param in self.params.items():
            if self.infos[name].group == "adamw":
                groups.setdefault((self.infos[name].decay, param.dtype, param.device), []).append(name)
        for names in groups.values():
            names.sort(key=storage_kind)
            params = [self.params[name] for name in names]
            for start, stop in fill_buckets([param.numel() for param in params]):
                yield AdamBucket(names[start:stop], params[start:stop], self.infos[names[start]].decay, self.rest)

    @property
    def _buckets(self) -> list[MuonBucket | AdamBucket]:
        return [*self._muon, *self._adam]

    @torch.no_grad()
    def _fill(self) -> None:
        """Masters from the parameters, and what they ship back into them."""
        buckets = self._buckets
        if self.rest.host and buckets:
            device = buckets[0].device
            lock([bucket.master for bucket in buckets], device)
            # The rest is zero and is needed by the first step alone, before which models are compiled.
            rest = [home for bucket in buckets for home in bucket.homes if home is not bucket.master]
            pool = ThreadPoolExecutor(1, thread_name_prefix="optimizer-memory")
            self._locking = pool.submit(lock, rest, device)
            pool.shutdown(wait=False)
        for bucket in buckets:
            bucket.fill(self.project)

    # -- gradients ----------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget every gradient (grad = None)."""
        for param in self.params.values():
            param.grad = None

    def _gradients(self) -> dict[str, Tensor]:
        return {name: param.grad for name, param in self.params.items() if param.grad is not None}

    def _joined(self, names: Container[str] | None = None) -> list[Tensor]:
        """All gradients, or those of `names`, in few tensors; in an order that does not depend on where they lie."""
        params = (self.params[name] for name in self._by_kind if names is None or name in names)
        return joined([param.grad for param in params if param.grad is not None])

    def _for_norm(self) -> list[Tensor]:
        """`_joined` of a captured norm: what is at a fixed place counts whether there is a gradient or zeros."""
        if not self._in_places():
            return self._joined()
        placed = {param for param, _ in self._placed}
        rest = (self.params[name].grad for name in self._by_kind if self.params[name] not in placed)
        return joined([place for _, place in self._placed]) + joined([grad for grad in rest if grad is not None])

    def _in_places(self) -> bool:
        """Whether gradients that have a fixed place are there, or are not there at all."""
        return all(param.grad is None or param.grad is place for param, place in self._placed)

    @torch.no_grad()
    def grad_norm(self, names: Container[str] | None = None) -> float:
        """The 2-norm of all gradients together, or of those `names`; inf or NaN when one of them is not finite."""
        if self.captures and (names is None or all(name in names for name in self.params)):
            norm = self._captured_norm(math.inf, True)
            if math.isfinite(norm):
                return norm
        gradients = [g for name, g in self._gradients().items() if names is None or name in names]
        if gradients and gradients[0].device.type != "cpu":  # a CPU keeps the order of sums, and gains nothing
            gradients = self._joined(names)
        if not gradients:
            return 0.0
        total = math.hypot(*(torch.stack(list(norms)).double().norm().item() for norms in _norms_by_type(gradients)))
        if math.isfinite(total):
            return total
        # A float32 norm overflows from 1.8e19 on, though every value may be finite.
        return math.hypot(*(torch.linalg.vector_norm(gradient, dtype=torch.float64).item() for gradient in gradients))

    def first_non_finite(self) -> tuple[str, int, int] | None:
        """(name, non-finite values, values) of the first gradient that is not finite; None when all are."""
        for name, gradient in self._gradients().items():
            bad = int(gradient.numel() - gradient.isfinite().sum())
            if bad:
                return name, bad, gradient.numel()
        return None

    def _refuse_non_finite(self) -> None:
        if (found := self.first_non_finite()) is not None:
            raise NonFiniteGradient(*found)

    @torch.no_grad()
    def scale_gradients(self, norm: float, maximum: float, *, in_step: bool = False) -> None:
        """Scale all gradients by maximum / norm where their `norm`, however it was summed, exceeds it.

        in_step: as in `clip_grad_norm_`.
        """
        if norm > maximum and in_step and self.captures:
            self._factor.fill_(maximum / norm)
        elif norm > maximum:
            torch._foreach_mul_(self._joined(), maximum / norm)

    @torch.no_grad()
    def clip_grad_norm_(self, maximum: float, *, in_step: bool = False, expected: Hashable = None) -> float:
        """Scale all gradients in place so that their norm is at most `maximum`; returns the norm before.

        in_step: where steps are captured gradients stay as they are, and the next step, which must come before anybody
        replaces them, scales them as it reads them. expected: what `expect_clip` gave for these gradients.
        Raises NonFiniteGradient when the norm is not finite.
        """
        if self.captures:
            addresses = self._addresses()
            key = addresses, maximum, in_step
            if expected is None or key != expected:
                self._captured_clip(key, lambda: self._clip(maximum, in_step))
            self._step_at = addresses if in_step else None
            norm = float(self._norm)
            if math.isfinite(norm):
                return norm
        norm = self.grad_norm()
        if not math.isfinite(norm):
            self._refuse_non_finite()
        self.scale_gradients(norm, maximum)
        return norm

    def expect_clip(self, maximum: float) -> Hashable:
        """Starts what `clip_grad_norm_(maximum, in_step=True)` will want, where it is a replay; the host does not wait.

        To be given to that call as `expected`, with no gradient written in between; None where nothing was started.
        """
        key = (self._addresses(), maximum, True) if self.captures else None
        if key is None or not self._captured_clip.has(key):
            return None
        self._captured_clip(key, lambda: self._clip(maximum, True))
        return key

    def expect_norm(self) -> Hashable:
        """Starts what `norm_on_device` will want, where it is a replay, as `expect_clip` does."""
        key = (self._addresses(), math.inf, True) if self.captures else None
        if key is None or not self._captured_clip.has(key):
            return None
        self._captured_clip(key, lambda: self._clip(math.inf, True))
        return key

    @torch.no_grad()
    def norm_on_device(self, expected: Hashable = None) -> Tensor:
        """The 2-norm of all gradients, a float64 scalar where they are; for optimizers with `captures`.

        The next step, which must come before anybody replaces the gradients, scales them as `scale_gradients` says.
        expected: what `expect_norm` gave for these gradients. The host does not wait.
        """
        addresses = self._addresses()
        key = addresses, math.inf, True
        if expected is None or key != expected:
            self._captured_clip(key, lambda: self._clip(math.inf, True))
        self._step_at = addresses
        return self._norm

    def _captured_norm(self, maximum: float, in_step: bool) -> float:
        """`_clip` as a program; the norm."""
        self._captured_clip((self._addresses(), maximum, in_step), lambda: self._clip(maximum, in_step))
        return float(self._norm)

    def _clip(self, maximum: float, in_step: bool) -> None:
        """`clip_grad_norm_` with the norm left in `_norm`; one that is not finite scales nothing."""
        gradients = self._for_norm()
        if not gradients:
            self._norm.zero_()
            return
        norms = [torch.stack(list(norms)).double() for norms in _norms_by_type(gradients)]
        self._norm.copy_(torch.cat(norms).norm())
        if math.isinf(maximum):
            return
        over = (self._norm > maximum) & self._norm.isfinite()
        # A number in `where` would be a copy from the host, which no capture takes.
        factor = torch.where(over, maximum / self._norm, torch.ones_like(self._norm))
        if in_step:
            self._factor.copy_(factor)
        else:
            torch._foreach_mul_(gradients, factor.float())

    # -- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, lr_scale: float = 1.0, *, nonfinite: Literal["raise", "skip"] = "raise", checked: bool = False
    ) -> bool:
        """One step at lr_scale times both learning rates; True when it was taken.

        When a gradient is not finite nothing changes: NonFiniteGradient names it, or nonfinite="skip" returns False.
        checked: the caller has seen that all are finite, as `clip_grad_norm_` has; they are not read again.
        """
        if not checked and not math.isfinite(self.grad_norm()):
            if nonfinite == "skip":
                return False
            self._refuse_non_finite()
        due = [adam.due() for adam in self._adam]
        if self.captures:
            self._numbers.copy_(torch.tensor(self._changing(due, lr_scale)))
            places = [(run.start, run.stop) for runs in due for run in runs]
            addresses = self._step_at if checked and self._step_at is not None else self._addresses()
            self._step_at = None
            key = addresses, *places, self.momentum, self.nesterov, self.weight_decay, self.betas, self.eps
            self._captured_step(key, lambda: self._move(due, lr_scale, self._numbers))
            self._factor.fill_(1.0)
        else:
            self._move(due, lr_scale, None)
        for adam, runs in zip(self._adam, due, strict=True):
            adam.count(runs)
        if self.rest.host and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies to page-locked memory are queued; the host may read it from here on
        return True

    def _move(self, due: Sequence[Sequence[Due]], lr_scale: float, numbers: Tensor | None) -> None:
        """Every bucket's step. numbers: `_changing` on the device, for a step that is captured."""
        lr_at, factor = (None, None) if numbers is None else (numbers[0], self._factor)
        visits: list[Visit] = []
        if self._locking is not None:
            self._locking.result()
            self._locking = None
        for muon in self._muon:
            kind = self._product_dtype(muon)
            lr = self.lr * lr_scale
            banked = numbers is not None and self._in_places()
            rates = MuonRates(lr, self.momentum, self.nesterov, self.weight_decay, kind, lr_at, factor, banked)
            visits += muon.visits(rates, self.project)
        first = 1
        for adam, runs in zip(self._adam, due, strict=True):
            own = None if numbers is None else numbers[first : first + 3 * len(runs)].view(-1, 3)
            visits += adam.visits(self._adam_rates(lr_scale, factor), self.project, runs, own)
            first += 3 * len(runs)
        take_turns(visits, self.rest)

    def _adam_rates(self, lr_scale: float, factor: Tensor | None = None) -> AdamRates:
        return AdamRates(self.adamw_lr * lr_scale, self.betas, self.eps, self.weight_decay, factor)

    def _changing(self, due: Sequence[Sequence[Due]], lr_scale: float) -> list[float]:
        """What differs from step to step: Muon's learning rate and the `Due.numbers`; filled up to one length."""
        rates = self._adam_rates(lr_scale)
        found = [self.lr * lr_scale]
        for adam, runs in zip(self._adam, due, strict=True):
            found += [number for run in runs for number in run.numbers(rates, adam.decay)]
        return found + [0.0] * (len(self._numbers) - len(found))

    def _addresses(self) -> tuple[int, ...]:
        """Where the gradients are, 0 for none, and where each bucket's parameters begin.

        Those at fixed places are left out, whoever has one.
        """
        params = self._free if self._in_places() else list(self.params.values())
        gradients = [param.grad for param in params]
        starts = [bucket.pieces[0].param.data_ptr() for bucket in self._muon]
        starts += [bucket.params[0].data_ptr() for bucket in self._adam]
        return (*starts, *(0 if gradient is None else gradient.data_ptr() for gradient in gradients))

    def _can_capture(self) -> bool:
        """Whether all is on one GPU, in float32, in blocks that the kernels take."""
        masters = [bucket.master for bucket in self._muon] + [bucket.master for bucket in self._adam]
        return (
            not self.rest.host
            and len({master.device for master in masters}) == 1
            and masters[0].device.type == "cuda"
            and all(master.dtype == torch.float32 for master in masters)
            and all(
                self._product_dtype(bucket) == torch.bfloat16 and limits.MUON.takes(bucket.master)
                for bucket in self._muon
            )
        )

    def _product_dtype(self, bucket: MuonBucket) -> torch.dtype | None:
        """By where a step is computed, which is not where its state may rest."""
        if bucket.master.dtype == torch.float64:
            return None
        if self.newton_schulz_dtype is None and bucket.device.type != "cpu":
            return torch.bfloat16
        return self.newton_schulz_dtype

    @torch.no_grad()
    def ship(self) -> None:
        """Overwrite every parameter with project(master)."""
        for muon in self._muon:
            muon.ship(self.project)
        for adam in self._adam:
            adam.ship(self.project)

    @property
    def nbytes(self) -> int:
        """Bytes of masters and state, wherever they rest."""
        return sum(home.nbytes for bucket in self._buckets for home in bucket.homes)

    @property
    def held(self) -> int:
        """Bytes of memory of its CUDA graphs, which stays theirs between steps."""
        return self._captured_clip.held + self._captured_step.held

    # -- masters and state --------------------------------------------------------------------------------------

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
        """Replace the masters of these parameters and ship them. Momenta stay. Raises KeyError, OptimizerStateError."""
        for name, value in values.items():
            if value.shape != self.params[name].shape:
                raise OptimizerStateError(
                    f"{name}: the master has shape {tuple(self.params[name].shape)}, got {tuple(value.shape)}"
                )
        for name, whole in values.items():
            for bucket, place in self._at[name]:
                master, part = bucket.master_of(place, whole)
                master.copy_(part)
                bucket.ship(self.project, place, place + 1)

    def _muon_pieces(self) -> Iterable[tuple[MuonPiece, dict[str, Tensor]]]:
        for bucket in self._muon:
            yield from bucket.state()

    def _adam_tensors(self) -> Iterable[tuple[str, dict[str, Tensor]]]:
        for bucket in self._adam:
            yield from bucket.state()

    @torch.no_grad()
    def state_tensors(self, names: Container[str] | None = None) -> dict[str, Tensor]:
        """All state, or that of `names`, as new tensors: "<name>/master" and "<name>/momentum" of Muon matrices;
        "<name>/master", "/first", "/second" (parameter shapes) and "/steps" (int64 scalar) of AdamW tensors. They lie
        where the state rests. Independent of how state is bucketed.
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
        for bucket in self._adam:
            for (name, parts), steps in zip(bucket.state(), bucket.steps, strict=True):
                if names is not None and name not in names:
                    continue
                state.update({f"{name}/{key}": value.clone() for key, value in parts.items()})
                state[f"{name}/steps"] = torch.tensor(steps)
        return state

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave and ship the masters.

        Raises OptimizerStateError, before anything is changed, for a missing, extra or mis-shaped tensor.
        """
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
        for piece, parts in self._muon_pieces():
            for key, blocks in parts.items():
                blocks.copy_(piece.cut(state[f"{piece.name}/{key}"]))
        for bucket in self._adam:
            for i, (name, parts) in enumerate(bucket.state()):
                for key, value in parts.items():
                    value.copy_(state[f"{name}/{key}"])
                bucket.steps[i] = int(state[f"{name}/steps"])
        self.ship()
