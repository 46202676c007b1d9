"""The gradients of an optimizer's parameters: their norm, and how they are clipped to it.

On a GPU norm and clipping are replayed as a CUDA graph while gradients stay where they are. The norm may then be
launched before the host has seen the end of a backward, and a clipping may be left to the step that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from k3rl.kernels import KeyedStep
from k3rl.optim.buckets import FixedGradients, storage_kind
from k3rl.optim.joined import joined


class NonFiniteGradient(ArithmeticError):
    """A gradient holds an inf or a NaN; `name` is the first such parameter. Nothing was changed."""

    def __init__(self, name: str, bad: int, total: int) -> None:
        super().__init__(
            f"the gradient of {name} has {bad} non-finite values of {total}; no parameter was changed. "
            "Look at the loss of this batch"
        )
        self.name = name


def _norms_by_type(tensors: Iterable[Tensor]) -> Iterable[Sequence[Tensor]]:
    """The 2-norms of the tensors, those of one dtype and device together."""
    groups: dict[tuple[object, object], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return (torch._foreach_norm(group) for group in groups.values())


class _NormKey(NamedTuple):
    """What a captured norm depends on: where gradients are, what they are clipped to, and whether a step does it."""

    addresses: tuple[int, ...]
    maximum: float
    in_step: bool


class Gradients:
    """The gradients of some parameters, by name.

    fixed: names whose gradients a captured step takes from their fixed places, whoever has one (`FixedGradients`).
    bucket_starts: the first parameter of each bucket, whose address belongs to what a captured step depends on.
    captured: the captured norm; None where nothing is captured.
    norm: float64 scalar on the device, what a captured norm leaves; factor: float32 scalar, what a captured step
    multiplies the gradients with.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        device: torch.device,
        *,
        fixed: tuple[FixedGradients, Sequence[str]] | None = None,
        bucket_starts: Sequence[Tensor] = (),
    ) -> None:
        self.params = params
        self.captured: KeyedStep | None = None
        self.norm = torch.zeros((), dtype=torch.float64, device=device)
        self.factor = torch.ones((), device=device)
        self._clipped_at: tuple[int, ...] | None = None  # `addresses` of a clipping that the next step completes
        self._by_kind = sorted(params, key=storage_kind)
        self._bucket_starts = list(bucket_starts)
        places, names = ({}, ()) if fixed is None else (fixed[0].places, fixed[1])
        self._fixed = [(params[name], places[name][0]) for name in names]
        at_places = set(names)
        self._free = [param for name, param in params.items() if name not in at_places]

    def clear(self) -> None:
        """Forgets every gradient (grad = None)."""
        for param in self.params.values():
            param.grad = None

    def first_non_finite(self) -> tuple[str, int, int] | None:
        """(name, non-finite values, values) of the first gradient that is not finite; None when all are."""
        for name, gradient in self._present().items():
            bad = int(gradient.numel() - gradient.isfinite().sum())
            if bad:
                return name, bad, gradient.numel()
        return None

    def require_finite(self) -> None:
        """Raises NonFiniteGradient for the first gradient that is not finite."""
        if (found := self.first_non_finite()) is not None:
            raise NonFiniteGradient(*found)

    # -- the norm -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def total_norm(self, names: Container[str] | None = None) -> float:
        """The 2-norm of all gradients together, or of those `names`; inf or NaN when one of them is not finite."""
        if self.captured is not None and (names is None or all(name in names for name in self.params)):
            self._run(self.captured, self._key(math.inf, in_step=True))
            norm = float(self.norm)
            if math.isfinite(norm):
                return norm
        gradients = [g for name, g in self._present().items() if names is None or name in names]
        if gradients and gradients[0].device.type != "cpu":  # a CPU keeps the order of sums, and gains nothing
            gradients = self._joined(names)
        if not gradients:
            return 0.0
        total = math.hypot(*(torch.stack(list(norms)).double().norm().item() for norms in _norms_by_type(gradients)))
        if math.isfinite(total):
            return total
        # A float32 norm overflows from 1.8e19 on, though every value may be finite.
        return math.hypot(*(torch.linalg.vector_norm(gradient, dtype=torch.float64).item() for gradient in gradients))

    @torch.no_grad()
    def captured_norm(self, launched: Hashable = None) -> Tensor:
        """The 2-norm of all gradients, `norm`, on the device; the host does not wait. Needs `captured`.

        The next step, which must come before anybody replaces the gradients, scales them as `scale_in_step` says.
        launched: what `launch(math.inf)` gave for these gradients.
        """
        assert self.captured is not None
        self._complete(self.captured, self._key(math.inf, in_step=True), launched)
        return self.norm

    def launch(self, maximum: float) -> Hashable:
        """Starts the clipping to `maximum` that the next step is to complete, where it is a replay; no host waits.

        math.inf: the norm alone. What it gives is for `clip_in_step` or `captured_norm`, with no gradient written in
        between; None where nothing was started.
        """
        if self.captured is None:
            return None
        key = self._key(maximum, in_step=True)
        if not self.captured.has(key):
            return None
        self._run(self.captured, key)
        return key

    # -- clipping -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_(self, maximum: float) -> float:
        """Scales all gradients in place so that their norm is at most `maximum`; returns the norm before.

        Raises NonFiniteGradient when the norm is not finite.
        """
        return self._clip(maximum, None, in_step=False)

    @torch.no_grad()
    def clip_in_step(self, maximum: float, launched: Hashable = None) -> float:
        """As `clip_`, but where steps are captured gradients stay as they are: the next one scales them.

        That step must come before anybody replaces the gradients. launched: what `launch` gave for them.
        """
        return self._clip(maximum, launched, in_step=True)

    def _clip(self, maximum: float, launched: Hashable, *, in_step: bool) -> float:
        if self.captured is not None:
            self._complete(self.captured, self._key(maximum, in_step=in_step), launched)
            norm = float(self.norm)
            if math.isfinite(norm):
                return norm
        norm = self.total_norm()
        if not math.isfinite(norm):
            self.require_finite()
        self.scale_(norm, maximum)
        return norm

    @torch.no_grad()
    def scale_(self, norm: float, maximum: float) -> None:
        """Scales all gradients by maximum / norm where their `norm`, however it was summed, exceeds it."""
        if norm > maximum:
            torch._foreach_mul_(self._joined(), maximum / norm)

    @torch.no_grad()
    def scale_in_step(self, norm: float, maximum: float) -> None:
        """As `scale_`; where steps are captured the next one does it, as with `clip_in_step`."""
        if norm > maximum and self.captured is not None:
            self.factor.fill_(maximum / norm)
        else:
            self.scale_(norm, maximum)

    # -- what is captured -----------------------------------------------------------------------------------------

    def addresses(self) -> tuple[int, ...]:
        """Where each bucket's parameters begin, and where the gradients are, 0 for none.

        Those at fixed places are left out, whoever has one.
        """
        params = self._free if self.in_places() else list(self.params.values())
        gradients = [param.grad for param in params]
        starts = [param.data_ptr() for param in self._bucket_starts]
        return (*starts, *(0 if gradient is None else gradient.data_ptr() for gradient in gradients))

    def in_places(self) -> bool:
        """Whether gradients that have a fixed place are there, or are not there at all."""
        return all(param.grad is None or param.grad is place for param, place in self._fixed)

    def take_clipped_addresses(self) -> tuple[int, ...] | None:
        """`addresses` as the clipping for this step has found them, once; None where there was none."""
        found, self._clipped_at = self._clipped_at, None
        return found

    def _key(self, maximum: float, *, in_step: bool) -> _NormKey:
        return _NormKey(self.addresses(), maximum, in_step)

    def _complete(self, captured: KeyedStep, key: _NormKey, launched: Hashable) -> None:
        """Runs what was not `launched`; the step that follows finds the gradients where they are now."""
        if launched is None or key != launched:
            self._run(captured, key)
        self._clipped_at = key.addresses if key.in_step else None

    def _run(self, captured: KeyedStep, key: _NormKey) -> None:
        captured(key, lambda: self._norm_and_factor(key.maximum, key.in_step))

    def _norm_and_factor(self, maximum: float, in_step: bool) -> None:
        """Leaves the norm in `norm` and clips, in place or by `factor`; a norm that is not finite scales nothing."""
        gradients = self._for_norm()
        if not gradients:
            self.norm.zero_()
            return
        norms = [torch.stack(list(norms)).double() for norms in _norms_by_type(gradients)]
        self.norm.copy_(torch.cat(norms).norm())
        if math.isinf(maximum):
            return
        over = (self.norm > maximum) & self.norm.isfinite()
        # A number in `where` would be a copy from the host, which no capture takes.
        factor = torch.where(over, maximum / self.norm, torch.ones_like(self.norm))
        if in_step:
            self.factor.copy_(factor)
        else:
            torch._foreach_mul_(gradients, factor.float())

    def _present(self) -> dict[str, Tensor]:
        return {name: param.grad for name, param in self.params.items() if param.grad is not None}

    def _joined(self, names: Container[str] | None = None) -> list[Tensor]:
        """All gradients, or those of `names`, in few tensors; in an order that does not depend on where they lie."""
        params = (self.params[name] for name in self._by_kind if names is None or name in names)
        return joined([param.grad for param in params if param.grad is not None])

    def _for_norm(self) -> list[Tensor]:
        """`_joined` of a captured norm: what is at a fixed place counts whether there is a gradient or zeros."""
        if not self.in_places():
            return self._joined()
        placed = {param for param, _ in self._fixed}
        rest = (self.params[name].grad for name in self._by_kind if self.params[name] not in placed)
        return joined([place for _, place in self._fixed]) + joined([grad for grad in rest if grad is not None])
