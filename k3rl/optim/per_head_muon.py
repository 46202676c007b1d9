"""Per-Head Muon with AdamW for everything that is no matrix (k3.md 8.1-8.4).

    M <- 0.95 M + G;  U = G + 0.95 M (Nesterov) or M;  per block: O = NS5(U) * 0.2 sqrt(max(rows, columns))
    W <- W - lr (O + weight_decay W)

`classify` says which rows form a block. The optimizer owns the master weights. A parameter's data is only ever what a
checkpoint would store of its master: it is overwritten by `project(name, master)` when the optimizer is built and
after every step, so learner, engine and exported file compute with the same numbers. The gradient of a parameter is
applied to its master (straight-through).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from k3rl.kernels import KeyedStep, limits
from k3rl.kernels.cuda_graph import Replay, Run, record
from k3rl.optim.buckets import AdamRates, Due, FixedGradients, MuonRates, Project, product_dtype
from k3rl.optim.classify import HeadLayout, ParamInfo, trained
from k3rl.optim.config import MuonConfig
from k3rl.optim.gradients import Gradients
from k3rl.optim.offload import StateUpdate, run_updates
from k3rl.optim.state import OptimizerState


class PerHeadMuon:
    """Optimizer of a K3 model, over its `state` (masters, momenta, moments) and the `gradients` of its parameters.

    named_params: (official name, leaf parameter); those with requires_grad False and e_score_correction_bias are not
    trained here. heads: a K3Config, for its head sizes. config: rates, variant, and where state is stored.
    project(name, master): the stored values of a master, same shape, in any dtype that holds them; it is called
    on stacks [n, ...] of equal tensors or row blocks whose names differ only in layer and expert number, or as w1 and
    w3 of experts do, so it must work along the last axis and treat those alike. None stores the masters themselves.

    Gradients and parameters that lie end to end in storage (a bank of experts) are read and written as one tensor.

    owned: names whose masters are kept and moved here; the others belong to other ranks. None: all.
    capture: replay norm, clipping and step as CUDA graphs on a GPU while gradients stay where they are (`captures`).
    fixed: gradients that are at fixed places, so that it is no other graph when another of these parameters has one.

    A parameter whose grad is None is left exactly as it is: no decay, no momentum change, no step count. A zero
    gradient is a gradient. Masters and state are float32, float64 for float64 parameters.

    Raises ClassifyError for unknown names, ValueError for a name given twice or nothing to train.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, Tensor]],
        heads: HeadLayout,
        config: MuonConfig,
        *,
        project: Project | None = None,
        owned: Container[str] | None = None,
        capture: bool = True,
        fixed: FixedGradients | None = None,
    ) -> None:
        self.config = config
        every = trained(named_params, heads, config.variant)
        if not every:
            raise ValueError("no parameter to train: every one is frozen or moved by QuantileBalancer")
        self.names = tuple(every)
        kept = {name: found for name, found in every.items() if owned is None or name in owned}
        self.infos: dict[str, ParamInfo] = {name: info for name, (info, _) in kept.items()}
        self.params: dict[str, Tensor] = {name: param for name, (_, param) in kept.items()}
        self.state = OptimizerState(self.params, self.infos, config.storage, project, fixed, config.scaling)
        device = next(iter(every.values()))[1].device
        muon, adam = self.state.muon, self.state.adam
        at_places = [piece.name for bucket in muon if bucket.fixed is not None for piece in bucket.pieces]
        self.gradients = Gradients(
            self.params,
            device,
            fixed=None if fixed is None else (fixed, at_places),
            bucket_starts=[*(bucket.pieces[0].param for bucket in muon), *(bucket.params[0] for bucket in adam)],
        )
        # What changes from step to step of a captured step: Muon's learning rate, then the numbers of AdamW's runs.
        self._numbers = torch.zeros(1 + 3 * sum(len(bucket.params) for bucket in adam), device=device)
        self.captured_step: KeyedStep | None = None
        if capture and self._can_capture():
            self.capture_with(record)

    def capture_with(self, recorder: Callable[[Run], Replay]) -> None:
        """Captures norm, clipping and step from here on; recorder: makes a replay of a run, as `record` does."""
        self.gradients.captured = KeyedStep("the gradient norm", recorder)
        self.captured_step = KeyedStep("the optimizer step", recorder)

    @property
    def captures(self) -> bool:
        """Whether norm, clipping and step are captured and replayed."""
        return self.captured_step is not None

    def _can_capture(self) -> bool:
        """Whether all is on one GPU, in float32, in blocks that the kernels take."""
        masters = [bucket.master for bucket in self.state.buckets]
        return (
            not self.config.storage.on_host
            and len({master.device for master in masters}) == 1
            and masters[0].device.type == "cuda"
            and all(master.dtype == torch.float32 for master in masters)
            and all(limits.MUON.takes(bucket.master) for bucket in self.state.muon)
        )

    # -- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forgets every gradient (grad = None)."""
        self.gradients.clear()

    def grad_norm(self, names: Container[str] | None = None) -> float:
        """The 2-norm of all gradients together, or of those `names`; inf or NaN when one of them is not finite."""
        return self.gradients.total_norm(names)

    def clip_grad_norm_(self, maximum: float) -> float:
        """Scales all gradients in place so that their norm is at most `maximum`; returns the norm before.

        Raises NonFiniteGradient when the norm is not finite.
        """
        return self.gradients.clip_(maximum)

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self, lr_scale: float = 1.0) -> None:
        """One step at lr_scale times both learning rates.

        Raises NonFiniteGradient, and changes nothing, when a gradient is not finite.
        """
        if not math.isfinite(self.grad_norm()):
            self.gradients.require_finite()
        self._step(lr_scale, clipped=False)

    def step_clipped(self, lr_scale: float = 1.0) -> None:
        """`step` right after a clipping, which has seen that gradients are finite: they are not read for that again."""
        self._step(lr_scale, clipped=True)

    @torch.no_grad()
    def _step(self, lr_scale: float, *, clipped: bool) -> None:
        adam = self.state.adam
        due = [bucket.due() for bucket in adam]
        if self.captured_step is None:
            self._move(due, lr_scale, None)
        else:
            self._numbers.copy_(torch.tensor(self._changing(due, lr_scale)))
            places = [(run.start, run.stop) for runs in due for run in runs]
            known = self.gradients.take_clipped_addresses()
            addresses = known if clipped and known is not None else self.gradients.addresses()
            self.captured_step((addresses, *places), lambda: self._move(due, lr_scale, self._numbers))
            self.gradients.factor.fill_(1.0)
        for bucket, runs in zip(adam, due, strict=True):
            bucket.count(runs)
        if self.config.storage.on_host and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies to page-locked memory are queued; the host may read it from here on

    def _move(self, due: Sequence[Sequence[Due]], lr_scale: float, numbers: Tensor | None) -> None:
        """Every bucket's step. numbers: `_changing` on the device, for a step that is captured."""
        config, state = self.config, self.state
        lr_at, factor = (None, None) if numbers is None else (numbers[0], self.gradients.factor)
        updates: list[StateUpdate] = []
        state.wait_until_locked()
        for muon in state.muon:
            kind = product_dtype(muon.master.dtype, muon.device)
            fixed = numbers is not None and self.gradients.in_places()
            rates = MuonRates(
                config.lr * lr_scale,
                config.momentum,
                config.nesterov,
                config.weight_decay,
                kind,
                lr_at,
                factor,
                config.scaling,
                fixed,
            )
            updates += muon.updates(rates, state.project)
        first = 1
        for adam, runs in zip(state.adam, due, strict=True):
            own = None if numbers is None else numbers[first : first + 3 * len(runs)].view(-1, 3)
            updates += adam.updates(self._adam_rates(lr_scale, factor), state.project, runs, own)
            first += 3 * len(runs)
        run_updates(updates, config.storage)

    def _adam_rates(self, lr_scale: float, factor: Tensor | None = None) -> AdamRates:
        return AdamRates(self.config.adamw_lr * lr_scale, self.config.weight_decay, factor)

    def _changing(self, due: Sequence[Sequence[Due]], lr_scale: float) -> list[float]:
        """What differs from step to step: Muon's learning rate and the `Due.numbers`; filled up to one length."""
        rates = self._adam_rates(lr_scale)
        found = [self.config.lr * lr_scale]
        for adam, runs in zip(self.state.adam, due, strict=True):
            found += [number for run in runs for number in run.numbers(rates, adam.decay, adam.scale)]
        return found + [0.0] * (len(self._numbers) - len(found))

    # -- masters and state ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of masters and state, wherever they are stored."""
        return self.state.nbytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of memory of its CUDA graphs, which stays theirs between steps."""
        return sum(step.held for step in (self.gradients.captured, self.captured_step) if step is not None)

    def masters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """`OptimizerState.masters`."""
        return self.state.masters(names)

    def set_masters(self, values: Mapping[str, Tensor]) -> None:
        """`OptimizerState.set_masters`."""
        self.state.set_masters(values)

    def state_tensors(self, names: Container[str] | None = None) -> dict[str, Tensor]:
        """`OptimizerState.to_tensors`."""
        return self.state.to_tensors(names)

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """`OptimizerState.load`."""
        self.state.load(state)
