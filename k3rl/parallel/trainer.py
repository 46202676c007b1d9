"""One optimizer step, on one process or on its rank of a mesh: packed tokens in, metrics out.

The model's parameters always hold the values that a checkpoint would store; a backend owns the fp32 masters and
projects them back after each step (`k3rl.numerics.project`). So what is trained here is what is published to engines
and what is exported, and the straight-through gradient needs no code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from k3rl.config import ConfigError
from k3rl.data import TrainBatch, TrainSequence
from k3rl.losses import LossInputs, LossOutput
from k3rl.model import K3ForCausalLM
from k3rl.optim import QuantileBalancer
from k3rl.parallel.agree import agree_on_step
from k3rl.parallel.backends.base import Backend, Update
from k3rl.parallel.backends.config import LearnerConfig, check_backend
from k3rl.parallel.backends.native import NativeBackend
from k3rl.parallel.context import ContextShare
from k3rl.parallel.forward_backward import Loss, StepInputs, add_loss
from k3rl.parallel.liveness import PeerFailed
from k3rl.parallel.mesh import Mesh
from k3rl.parallel.model_on_mesh import ModelOnMesh
from k3rl.parallel.nonfinite import NonFiniteStep
from k3rl.parallel.settings import TrainerConfig
from k3rl.parallel.side_stream import on_side_stream, record_event
from k3rl.parallel.statistics import Statistics, balance, balance_due
from k3rl.parallel.zero import gather_tensors
from k3rl.run import Accumulator

_BLANKS = 8  # sequences of a batch that warms up


class Trainer:
    """Trains a model: its step count, its balancing bias, and a backend for gradients and updates.

    on_mesh: the model on its ranks. statistics: what a model reports in training forwards; balancer: what of it moves
    router biases. steps: taken so far; skipped: steps in a row that were not finite. notes: what a person should read.
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        config: TrainerConfig,
        mesh: Mesh | None = None,
        make_backend: Callable[[ModelOnMesh, Statistics], Backend] = NativeBackend,
    ) -> None:
        """mesh: the ranks that train together, None for one process. Making a trainer is a collective of theirs.

        With expert parallelism the model holds the mesh's run of experts (`Mesh.experts`). Raises ConfigError and
        RanksDisagree as `ModelOnMesh` does.
        """
        config = config.settled(model.config.flat)
        self.model, self.config = model, config
        self.mesh = Mesh.alone(model.device) if mesh is None else mesh
        self.on_mesh = ModelOnMesh(model, config, self.mesh)
        experts, k, layers = model.config.num_experts, model.config.num_experts_per_token, len(model.config.moe_layers)
        # Where the model is: a rank that never observes takes part in the sum, and NCCL sums nothing on the host.
        self.balancer = QuantileBalancer(experts, k, layers, device=model.device)
        self.statistics = Statistics(model, self.balancer)
        self.steps = 0
        self.skipped = 0
        self._counted = 0  # steps whose counts wait for the end of their batch
        self.notes: list[str] = []
        self.backend = make_backend(self.on_mesh, self.statistics)

    @property
    def native(self) -> NativeBackend:
        """The native backend with its parts. Raises TypeError when another one trains."""
        if not isinstance(self.backend, NativeBackend):
            raise TypeError(f"this trainer's backend is {type(self.backend).__name__}")
        return self.backend

    # -- a step ---------------------------------------------------------------------------------------------------

    def train(
        self,
        batch: TrainBatch | None,
        loss: Loss,
        *,
        lr_scale: float = 1.0,
        temperature: float = 1.0,
        last_of_batch: bool = True,
    ) -> Accumulator:
        """One optimizer step. Raises NonFiniteStep, with the first bad layer and the data, before anything is updated.

        With `on_nonfinite` "skip" it is skipped: its metric is optim/nonfinite_steps, `notes` says why. What earlier
        steps of its batch counted moves the router biases all the same, with it where it is the last one.

        On a mesh, a failure of one rank fails the step on all of them (the others raise PeerFailed), and ranks whose
        batches or settings do not fit together all raise RanksDisagree.

        batch: this rank's share of the global batch, None when it has no sequence.
        lr_scale: the schedule's factor on both learning rates; temperature: the sampler's, so that logprobs compare.
        last_of_batch: whether the rollout batch ends with this step (for `balance` "batch" and "fresh").
        """
        try:
            metrics = self._step(batch, loss, lr_scale, temperature, last_of_batch)
        except NonFiniteStep as error:
            self._skip(error)
            metrics = Accumulator()
            if self.mesh.world.rank == 0:
                metrics.add("optim/nonfinite_steps", 1.0)
            if self._counted and balance_due(self.config, last_of_batch):  # by the steps that were taken
                with self._failing_together():
                    self.balancer.all_reduce(self.mesh.world.sum)
                    self._balance(metrics, due=True)
        else:
            self.skipped = 0
        return metrics

    def _step(
        self, batch: TrainBatch | None, loss: Loss, lr_scale: float, temperature: float, last_of_batch: bool
    ) -> Accumulator:
        started, sent = time.perf_counter(), self.on_mesh.sent_bytes
        settings = {"lr_scale": lr_scale, "last_of_batch": last_of_batch}
        step, metrics, max_logits = self._gradients(batch, loss, temperature, settings, clips=True)
        due = balance_due(self.config, last_of_batch)
        with self._failing_together():
            self.backend.clip_gradients(step)
            if due:
                self.balancer.all_reduce(self.mesh.world.sum)
            counted = record_event(self.model.device)
            update = self.backend.apply(max_logits, lr_scale)
            with on_side_stream(self.model.device, counted):  # the host reads counts, which are older than the update
                self._balance(metrics, due=due)
        self.steps += 1
        self._report(metrics, update, max_logits)
        metrics.add("perf/train_tokens", batch.tokens if batch is not None and self.mesh.first_of_context else 0)
        if self.on_mesh.experts is not None:
            metrics.add("perf/expert_bytes", self.on_mesh.sent_bytes - sent)
        metrics.add("time/train_step", time.perf_counter() - started)
        return metrics

    def warm_up(self, loss: Loss, *, temperature: float = 1.0, routes: bool = False, teacher: bool = False) -> None:
        """Compiles what the first step would wait for, on a GPU that captures steps; changes nothing.

        routes, teacher: whether batches record routes and a teacher's logprobs.
        """
        config = self.model.config
        shape = len(config.moe_layers), config.num_experts_per_token
        micro = _blank_batch(self.config.micro_batch_tokens, shape if routes else None, teacher=teacher)
        try:
            self.backend.warm_up(micro, loss, temperature)
        finally:
            self.statistics.begin()
            self.balancer.clear()

    def gradients(
        self, batch: TrainBatch | None, loss: Loss, *, temperature: float = 1.0
    ) -> tuple[Accumulator, dict[int, torch.Tensor]]:
        """The gradients of a step, summed over ranks, in `.grad` of the parameters that this rank owns.

        Returns metrics and the largest attention logits [H] of each MLA layer. What routers saw waits in `balancer`.
        Raises as `train` does.
        """
        _, metrics, max_logits = self._gradients(batch, loss, temperature, {}, clips=False)
        return metrics, max_logits

    def _gradients(
        self, batch: TrainBatch | None, loss: Loss, temperature: float, settings: Mapping[str, object], *, clips: bool
    ) -> tuple[StepInputs, Accumulator, dict[int, torch.Tensor]]:
        """settings: what else belongs to the step and must be equal on all ranks. clips: a clipping comes next."""
        self.statistics.begin()
        self.backend.begin()
        if self._counted:
            self.balancer.mark()
        try:
            step = self._inputs(batch, loss, temperature, settings, clips=clips)
            metrics = self.backend.accumulate(step)
        except Exception:
            self.balancer.back()  # what a failed step counted must not move the next update
            raise
        self.notes += self.backend.take_notes()
        self.backend.reduce_gradients()
        self.statistics.reduce_logits(self.mesh.world)
        return step, metrics, self.statistics.max_logits()  # on the host, read once: what follows looks at each

    def _inputs(
        self, batch: TrainBatch | None, loss: Loss, temperature: float, settings: Mapping[str, object], *, clips: bool
    ) -> StepInputs:
        """What this rank computes, once ranks have compared what they are given. Nothing has started when it raises."""
        failure, micros = None, []
        try:
            micros = self.on_mesh.cut(batch)
        except Exception as error:
            failure = error
        facts = {"number": self.steps, "loss": getattr(loss, "__qualname__", type(loss).__qualname__)}
        facts |= {"temperature": temperature, **settings}
        key = 0 if failure else self.backend.overlap_key(micros, loss, temperature)
        most, overlaps = agree_on_step(self.mesh, facts, batch, -1 if failure else len(micros), key)
        if failure is not None:
            raise failure
        if most < 0:
            raise PeerFailed(f"another rank cannot start step {self.steps}; nothing was updated")
        forwards = most if self.backend.lockstep else len(micros)
        return StepInputs(self.steps, micros, forwards, loss, temperature, overlaps, clips)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """The part of a step in which ranks wait for each other: an error of one ends all of them."""
        try:
            yield
        except (PeerFailed, NonFiniteStep):  # all ranks know
            self.balancer.back()
            raise
        except Exception as error:
            self.mesh.world.leave(f"{type(error).__name__}: {error}")
            raise

    def _skip(self, error: NonFiniteStep) -> None:
        """Counts a step that is not taken. Raises `error` where the run is to end instead."""
        self.backend.discard_gradients()
        self.skipped += 1
        if self.config.on_nonfinite == "stop":
            raise error
        if self.skipped > self.config.nonfinite_limit:
            raise type(error)(f"{self.skipped} steps in a row were not finite, the last one so: {error}") from error
        self.notes.append(f"a step was skipped: {error}")

    def _balance(self, metrics: Accumulator, *, due: bool) -> None:
        self.statistics.expert_load = self.balancer.loads.cpu().clone().numpy()
        balance(self.model, self.balancer, self.config, metrics, due=due)
        self._counted = self._counted + 1 if balance_due(self.config, True) and not due else 0

    def _report(self, metrics: Accumulator, update: Update, max_logits: Mapping[int, torch.Tensor]) -> None:
        metrics.add("optim/grad_norm", update.grad_norm)
        metrics.add("optim/lr", update.lr)
        metrics.add("optim/qk_clipped_heads", update.clipped_heads)
        for largest in max_logits.values():
            metrics.maximum("attention/logit/max", float(largest.max()))
        for part, held in self.memory().items():
            metrics.maximum(f"memory/{part}", held)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank's device by part, named as in `k3rl plan`, and on a GPU the `peak` since the last call."""
        found = self.backend.memory()
        if self.model.device.type == "cuda":
            found["peak"] = torch.cuda.max_memory_allocated(self.model.device) + self.backend.graph_bytes
            torch.cuda.reset_peak_memory_stats(self.model.device)
        return found

    # -- forward passes -------------------------------------------------------------------------------------------

    def target_inputs(
        self, batch: TrainBatch, temperature: float = 1.0, share: ContextShare | None = None
    ) -> LossInputs:
        """`ModelOnMesh.target_inputs`."""
        return self.on_mesh.target_inputs(batch, temperature, share)

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch | None, temperature: float = 1.0) -> np.ndarray:
        """float32 [N]: the logprob of each target token, 0 elsewhere. Forward only; moves no bias.

        Where ranks take micro-batches together a collective; batch: this rank's share, None when it has none. Raises
        BatchError or SequenceTooLong, and then PeerFailed on the ranks that it would meet.
        """
        out = np.zeros(0 if batch is None else batch.input_ids.size, np.float32)
        starts: dict[str, int] = {}
        if batch is not None:
            starts = {sid: int(start) for sid, start in zip(batch.sequence_ids, batch.cu_seqlens[:-1], strict=True)}
        for micro, counts in self.backend.forwards(batch):
            share = self.on_mesh.share(micro)

            def run(micro: TrainBatch = micro, share: ContextShare = share) -> torch.Tensor:
                return self.on_mesh.target_values(micro, temperature, share)

            values, positions = self._forward(run), share.targets
            if counts:
                owner = np.searchsorted(micro.cu_seqlens, positions, side="right") - 1
                origin = np.array([starts[sid] for sid in micro.sequence_ids], np.int64)
                out[origin[owner] + positions - micro.cu_seqlens[owner]] = values.float().cpu().numpy()
        if batch is None:
            return out
        every = torch.from_numpy(out).to(self.model.device)
        self.on_mesh.context.sum(every)
        return every.cpu().numpy()

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch | None, loss: Loss) -> Accumulator:
        """The loss's metrics on this rank's targets of a batch, without a step; a collective like `logprobs`."""
        metrics = Accumulator()
        for micro, counts in self.backend.forwards(batch):
            found: list[LossOutput] = []

            def run(micro: TrainBatch = micro, found: list[LossOutput] = found) -> torch.Tensor:
                found.append(loss(self.on_mesh.target_inputs(micro)))
                return found[0].loss

            self._forward(run)
            if counts:
                add_loss(metrics, found[0])
        return metrics

    def _forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A forward pass; where ranks meet in it, an error of one ends all of them."""
        try:
            return self.backend.forward(run)
        except Exception as error:
            if self.backend.lockstep and not isinstance(error, PeerFailed):
                self.mesh.world.leave(f"{type(error).__name__}: {error}")
            raise

    # -- parameters and state -------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[K3ForCausalLM]:
        """The model with its parameters in place, to save or publish it; a collective where they are cut over ranks."""
        with self.backend.whole():
            yield self.model

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """A and B as files and engines have them (`Adapter.stored_tensors`), those of all ranks. A collective."""
        adapter, shards = self.model.adapter, self.native.shards
        own = {} if adapter is None else dict(adapter.stored_tensors())
        counted = {name: tensor for name, tensor in own.items() if name in shards.counted}
        every = gather_tensors(self.mesh.world, counted)
        return {name: every[name] for name in shards.names if name in every}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a bit-equal continuation needs: optimizer state with masters, router biases, step count.

        A collective that gives every rank all of it, whatever the mesh; `owned_state` does without.
        """
        return gather_tensors(self.mesh.world, self.owned_state())

    def owned_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of `state_tensors`, new tensors: each is in one rank's, under its official name, whole."""
        state = self.backend.state_tensors()
        if self.mesh.world.rank == 0:
            state |= {f"router_bias.{layer}": bias.detach().clone() for layer, bias in self.model.router_biases()}
            state["steps"] = torch.tensor(self.steps, dtype=torch.int64)
        return state

    def wanted_state(self) -> None:
        """All of a saved state; `load_state_tensors` reads only what this rank owns."""

    def load_state_tensors(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes `state_tensors`, of this mesh or another, and sets the model's parameters from the masters.

        A collective. Only what this rank owns is read, so the mapping may be lazy. What fails on one rank fails on all.
        """
        with self.mesh.world.together("loading a training state"):
            self.backend.load_owned(state)
            with torch.no_grad():
                for layer, bias in self.model.router_biases():
                    bias.copy_(state[f"router_bias.{layer}"])
            self.steps = int(state["steps"])
        self.backend.load_shared(state)


def _blank_batch(tokens: int, routes: tuple[int, int] | None, *, teacher: bool) -> TrainBatch:
    """Sequences of token 0 whose second halves are targets of no weight, of so many tokens together.

    routes: (MoE layers, choices) of recorded ones.
    """
    length = max(2, tokens // _BLANKS)
    nothing, mask = np.zeros(length, np.float32), np.arange(length) >= length // 2
    chosen = None if routes is None else np.tile(np.arange(routes[1], dtype=np.int16), (length, routes[0], 1))
    return TrainBatch.pack(
        [
            TrainSequence(
                f"blank-{number}",
                np.zeros(length, np.int64),
                mask,
                nothing,
                nothing,
                routes=chosen,
                teacher_logprobs=nothing if teacher else None,
            )
            for number in range(max(1, tokens // length))
        ]
    )


def make_trainer(
    model: K3ForCausalLM, config: TrainerConfig, learner: LearnerConfig, mesh: Mesh | None = None
) -> Trainer:
    """The trainer of this rank on the chosen backend. Raises ConfigError for what that cannot train."""
    check_backend(learner, config)
    if learner.backend == "native":
        return Trainer(model, config, mesh)
    if model.config.vision_config is not None:
        raise ConfigError(
            "this model has a vision tower, whose projector some ranks use in a step and others do not; train it "
            "with learner.backend native",
            key="learner.backend",
        )
    from k3rl.parallel.backends.deepspeed import DeepSpeedBackend

    return Trainer(model, config, mesh, partial(DeepSpeedBackend, zero=learner.deepspeed))
