"""One optimizer step, on one process or on its rank of a mesh: packed tokens in, metrics out.

The model's parameters always hold the values that a checkpoint would store; the optimizer owns the fp32 masters
and projects them back after each step (`k3rl.numerics.project`). So what is trained here is what is published to
engines and what is exported, and the straight-through gradient needs no code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from k3rl.data.batch import TrainBatch
from k3rl.losses import LossInputs, LossOutput
from k3rl.model import K3ForCausalLM
from k3rl.model.lora import prepare_adapter
from k3rl.model.packed import pack_experts
from k3rl.optim import AuxiliaryLoss, NonFiniteGradient, PerHeadMuon, QuantileBalancer, qk_clip_, trained
from k3rl.optim.shipped import shipped
from k3rl.parallel import side_stream
from k3rl.parallel.agree import agree_on_start, agree_on_step, check_layout
from k3rl.parallel.context import ContextParallel, ContextShare, pair_cost
from k3rl.parallel.exact import ValueOf, exact_target_logprobs
from k3rl.parallel.expert import ExpertParallel
from k3rl.parallel.forward_backward import Loss, Passes, passes_of
from k3rl.parallel.frozen import FrozenSlices, parameter_bytes
from k3rl.parallel.inputs import loss_inputs
from k3rl.parallel.mesh import Mesh
from k3rl.parallel.nonfinite import (
    NonFiniteGradients,
    NonFiniteLoss,
    NonFiniteStep,
    bad_loss,
    explain_gradient,
    explain_loss,
    listed,
)
from k3rl.parallel.settings import TrainerConfig
from k3rl.parallel.statistics import Statistics, balance, balance_due, fresh_tokens
from k3rl.parallel.world import PeerFailed
from k3rl.parallel.zero import Shards, gather_tensors
from k3rl.run.metrics import Accumulator

_OPTIMIZER = "optimizer."


class Trainer:
    """Owns a model, its optimizer, its balancing bias and its step count."""

    passes: Passes | None  # the programs that micro-batches run as

    def __init__(self, model: K3ForCausalLM, config: TrainerConfig, mesh: Mesh | None = None) -> None:
        """mesh: the ranks that train together, None for one process. Making a trainer is a collective of theirs.

        With expert parallelism the model holds the mesh's run of experts (`Mesh.experts`). A vision tower is frozen:
        its parameters no longer require a gradient. With `config.lora` everything but the adapter is: the one that is
        attached to the model, or a fresh one. Raises ConfigError when mesh, adapter and config do not fit,
        RanksDisagree when ranks have different configurations or weights.
        """
        self._begin(model, config, mesh)
        quantization = model.config.quantization
        if config.packs and quantization.weights == "mxfp4":
            pack_experts(model)

        def ship(name: str, master: torch.Tensor) -> torch.Tensor:
            return shipped(name, master, quantization.weights, quantization.scale_rule)

        infos = trained(model.trained_parameters(), model.config, config.optimizer)
        self.shards = Shards(
            model,
            {name: info for name, (info, _) in infos.items()},
            self.mesh,
            sharded=config.shard_optimizer,
            overlap=config.overlap == "on" or (config.overlap == "auto" and self.mesh.world.hosts > 1),
        )
        self.passes = passes_of(model, config, self.statistics, self.shards.owners, alone=not self._in_step)
        self.optimizer = PerHeadMuon(
            model.trained_parameters(),
            model.config,
            lr=config.muon_lr,
            adamw_lr=config.adamw_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            variant=config.optimizer,
            project=ship,
            owned=self.shards.owned,
            rest=config.rest,
            capture=config.capture != "off",
            banked=self.shards.banked,
        )
        self.shards.share_parameters()

    def _begin(self, model: K3ForCausalLM, config: TrainerConfig, mesh: Mesh | None) -> None:
        """All but the optimizer."""
        self.model, self.config = model, config
        self.mesh = Mesh.alone(model.device) if mesh is None else mesh
        prepare_adapter(model, config.lora)
        check_layout(self.mesh, model, config)
        agree_on_start(self.mesh, model, config)
        self.frozen = FrozenSlices(model, self.mesh, config.shard_frozen)
        self.experts: ExpertParallel | None = None
        if self.mesh.expert.size > 1:
            self.experts = ExpertParallel(self.mesh, model.config.num_experts)
            model.connect(self.experts)
        model.recompute(config.recompute)
        self.context = ContextParallel(self.mesh.context, self.mesh.world, pair=pair_cost(model.config))
        # Ranks that meet inside a forward take each micro-batch together.
        self._in_step = self.mesh.expert.size > 1 or self.mesh.context.size > 1 or config.shard_frozen > 1
        for name, parameter in model.named_parameters():
            if name.startswith("vision_tower."):
                parameter.requires_grad_(False)
        experts, k, layers = model.config.num_experts, model.config.num_experts_per_token, len(model.config.moe_layers)
        # Where the model is: a rank that never observes takes part in the sum, and NCCL sums nothing on the host.
        self.balancer = QuantileBalancer(experts, k, layers, device=model.device)
        self.auxiliary: AuxiliaryLoss | None = None
        if config.balance_by == "auxiliary_loss":
            self.auxiliary = AuxiliaryLoss(config.auxiliary_weight, model.config.num_experts_per_token)
        self.statistics = Statistics(model, self.balancer)
        self.passes = None
        self._promised = False  # whether gradients are summed behind the backward, before the host has seen anything
        self._clipping: Hashable = None  # what the device is at, of the clipping that comes next
        self.steps = 0
        self.skipped = 0  # steps in a row that were left out
        self.notes: list[str] = []  # what a person should read

    def share(self, batch: TrainBatch) -> ContextShare:
        """What this rank does of a packed micro-batch; all of it without context parallelism."""
        return self.context.split(batch, self.model.config.media_placeholder_token_id)

    def target_inputs(
        self, batch: TrainBatch, temperature: float = 1.0, share: ContextShare | None = None
    ) -> LossInputs:
        """Logprobs and entropies [P] of the P targets of this rank's share of a packed micro-batch, with gradients.

        share: where it is known already; by default `self.share(batch)`.
        """
        share = self.share(batch) if share is None else share
        with self.frozen.saving():
            inputs = loss_inputs(self.model, self.frozen, batch, share, temperature)
        if self.config.exact:
            value = exact_target_logprobs(self.model, batch, temperature).to(inputs.logprobs.device)
            inputs = replace(inputs, logprobs=ValueOf.apply(inputs.logprobs, value))
        return inputs

    @property
    def _budget(self) -> int:
        """Tokens of one micro-batch, on all the ranks that share it."""
        return self.config.micro_batch_tokens * self.context.size

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

        With `on_nonfinite` "skip" it is left out: its metrics are optim/nonfinite_steps alone, `notes` says why.

        On a mesh, a failure of one rank fails the step on all of them (the others raise PeerFailed), and ranks whose
        batches or settings do not fit together all raise RanksDisagree.

        batch: this rank's share of the global batch, None when it has no sequence.
        lr_scale: the schedule's factor on both learning rates; temperature: the sampler's, so that logprobs compare.
        last_of_batch: whether the rollout batch ends with this step (for `balance` "batch" and "fresh").
        """
        try:
            metrics = self._step(batch, loss, lr_scale, temperature, last_of_batch)
        except NonFiniteStep as error:
            self._left_out(error)
            metrics = Accumulator()
            if self.mesh.world.rank == 0:
                metrics.add("optim/nonfinite_steps", 1.0)
        else:
            self.skipped = 0
        return metrics

    def _left_out(self, error: NonFiniteStep) -> None:
        """Counts a step that is left out. Raises `error` where the run is to end instead."""
        self.balancer.clear()
        self._drop_gradients()
        self.skipped += 1
        if self.config.on_nonfinite == "stop":
            raise error
        if self.skipped > self.config.nonfinite_limit:
            raise type(error)(f"{self.skipped} steps in a row were not finite, the last one so: {error}") from error
        self.notes.append(f"a step was left out: {error}")

    def _drop_gradients(self) -> None:
        self.shards.zero_grad()

    def _step(
        self, batch: TrainBatch | None, loss: Loss, lr_scale: float, temperature: float, last_of_batch: bool
    ) -> Accumulator:
        started = time.perf_counter()
        sent = self.experts.sent_bytes if self.experts is not None else 0
        settings = {"lr_scale": lr_scale, "last_of_batch": last_of_batch}
        metrics, max_logits = self.gradients(batch, loss, temperature=temperature, settings=settings)
        try:
            try:
                norm = self.shards.clip_grad_norm_(self.optimizer, self.config.grad_clip, self._clipping)
            except NonFiniteGradient as error:
                raise self._bad_gradient(error, batch, loss, temperature) from error
            due = balance_due(self.config, last_of_batch)
            if due:
                self.balancer.all_reduce(self.mesh.world.sum)
            summed = side_stream.moment(self.model.device)
            self.optimizer.step(lr_scale, checked=True)
            clipped = 0
            if self.config.lora is None:
                clipped = qk_clip_(self.optimizer, max_logits, self.model.config, self.config.qk_clip)
            self.shards.share_parameters()
            with side_stream.aside(self.model.device, summed):  # the host reads counts, which are older than the step
                balance(self.model, self.balancer, self.config, metrics, due=due)
        except (PeerFailed, NonFiniteStep):  # all ranks know
            self.balancer.clear()
            raise
        except Exception as error:
            self.mesh.world.leave(f"{type(error).__name__}: {error}")
            raise
        self.steps += 1
        metrics.add("optim/grad_norm", norm)
        rate = self.config.muon_lr if self.config.lora is None else self.config.adamw_lr
        metrics.add("optim/lr", rate * lr_scale)
        metrics.add("optim/qk_clipped_heads", clipped)
        for largest in max_logits.values():
            metrics.maximum("attention/logit/max", float(largest.max()))
        metrics.add("perf/train_tokens", batch.tokens if batch is not None and self.mesh.first_of_context else 0)
        for part, held in self.memory().items():
            metrics.maximum(f"memory/{part}", held)
        if self.experts is not None:
            metrics.add("perf/expert_bytes", self.experts.sent_bytes - sent)
        metrics.add("time/train_step", time.perf_counter() - started)
        return metrics

    def memory(self) -> dict[str, int]:
        """Bytes on this rank's device by part, named as in `k3rl plan`, and on a GPU the `peak` since the last call."""
        found = self._parameter_bytes | {"optimizer": 0 if self.config.offload_optimizer else self.optimizer.nbytes}
        if self.model.device.type == "cuda":
            found["peak"] = torch.cuda.max_memory_allocated(self.model.device) + self.graph_bytes
            torch.cuda.reset_peak_memory_stats(self.model.device)
        return found

    @property
    def graph_bytes(self) -> int:
        """Bytes of memory of CUDA graphs, which stays theirs and which torch counts as used by nobody."""
        return (0 if self.passes is None else self.passes.held) + self.optimizer.held

    @cached_property
    def _parameter_bytes(self) -> dict[str, int]:
        return parameter_bytes(self.model, self.shards.params.values(), self.frozen)

    def _bad_gradient(
        self, error: NonFiniteGradient, batch: TrainBatch | None, loss: Loss, temperature: float
    ) -> NonFiniteGradients:
        """The same with the data that the gradient comes from, each sequence tried again alone; equal on all ranks."""
        message = f"step {self.steps}: {str(error).partition(';')[0]}"
        if self._in_step:  # a forward pass would need the other ranks
            return NonFiniteGradients(f"{message}. Its data are not known: ranks share experts or sequences")

        def gradients(micro: TrainBatch) -> dict[str, torch.Tensor]:
            self.shards.zero_grad()
            loss(self.target_inputs(micro, temperature)).loss.backward()
            self.shards.collect_gradients()
            return {name: p.grad for name, p in self.shards.params.items() if p.grad is not None}

        micros = [] if batch is None else batch.split(self._budget)
        data = explain_gradient(error.name, micros, gradients)
        found = [text for text in self.mesh.world.exchange(data or "") if text]
        return NonFiniteGradients(f"{message}. {'; '.join(found) or 'It overflows only in the sum over sequences'}")

    def gradients(
        self,
        batch: TrainBatch | None,
        loss: Loss,
        *,
        temperature: float = 1.0,
        settings: Mapping[str, object] | None = None,
    ) -> tuple[Accumulator, dict[int, torch.Tensor]]:
        """The gradients of a step, summed over ranks, in `.grad` of the parameters that this rank owns.

        Returns metrics and the largest attention logits [H] of each MLA layer. What routers saw waits in `balancer`.
        settings: what else belongs to the step and must be equal on all ranks. Raises as `train` does.
        """
        self.statistics.begin()
        if self.passes is not None:
            self.passes.begin()
        try:
            micros, most = self._shares(batch, loss, {"temperature": temperature, **(settings or {})})
            metrics = self._backward(micros, most, loss, temperature, clips=settings is not None)
        except Exception:
            self.balancer.clear()  # what a failed step counted must not move the next update
            raise
        self._reduce_gradients()
        max_logits = self._max_logits(summed=self._promised)
        self._promised = False
        return metrics, max_logits

    def _reduce_gradients(self) -> None:
        self.shards.reduce_gradients()

    def _cut(self, batch: TrainBatch | None) -> list[TrainBatch]:
        """This rank's micro-batches. Raises BatchError or SequenceTooLong for what model or budget cannot take."""
        if batch is None:
            return []
        batch.check_fits(self.model.config.vocab_size, self.model.config.num_experts)
        return batch.split(self._budget, self.context.pair if self._in_step else None)

    def _shares(
        self, batch: TrainBatch | None, loss: Loss, settings: Mapping[str, object]
    ) -> tuple[list[TrainBatch], int]:
        """This rank's micro-batches, and how many forwards it takes part in. Nothing has started when this raises."""
        failure, micros = None, []
        try:
            micros = self._cut(batch)
        except Exception as error:
            failure = error
        facts = {"number": self.steps, "loss": getattr(loss, "__qualname__", type(loss).__qualname__), **settings}
        promise = 0 if failure else self._promise(micros, loss, settings)
        most, self._promised = agree_on_step(self.mesh, facts, batch, -1 if failure else len(micros), promise)
        if failure is not None:
            raise failure
        if most < 0:
            raise PeerFailed(f"another rank cannot start step {self.steps}; nothing was updated")
        return micros, most if self._in_step else len(micros)

    def _promise(self, micros: list[TrainBatch], loss: Loss, settings: Mapping[str, object]) -> int:
        """What this rank will send behind its backward (`Shards.promise`); 0 when it may turn out otherwise."""
        if self.mesh.world.size == 1 or self.passes is None:
            return 0
        if not self.passes.sure(micros, loss, settings["temperature"]):
            return 0
        return self.shards.promise(self.passes.places)

    def _keep_promise(self) -> None:
        """Sums over ranks what the backwards that are under way will leave."""
        assert self.passes is not None
        self.passes.hold()  # a rank without micro-batches has zeros
        self.shards.begin_reduction()
        self._sum_logits()

    def _sum_logits(self) -> None:
        if self.mesh.world.size > 1 and self.statistics.layers:
            self.mesh.world.maximum(self.statistics.largest)

    def _max_logits(self, *, summed: bool) -> dict[int, torch.Tensor]:
        """The largest attention logit of each head [H] over all ranks, by MLA layer; layers that saw no row are out.

        They are on the host, read once: what follows looks at each of them. summed: over ranks, already.
        """
        if not summed:
            self._sum_logits()
        return self.statistics.max_logits()

    def _backward(
        self, micros: list[TrainBatch], most: int, loss: Loss, temperature: float, clips: bool
    ) -> Accumulator:  # fmt: skip
        """Gradients of this rank's share, micro-batch by micro-batch; all ranks leave it, or fail, together.

        clips: their norm is wanted next.
        """
        metrics, failure = Accumulator(), None
        self._clipping = None
        self.shards.zero_grad(leaves=self.passes is None)
        try:
            for number in range(most):
                micro = micros[number] if number < len(micros) else None
                if micro is not None and self._replayed(micro, loss, temperature, metrics):
                    continue
                fine, failure = self._pass(micro, loss, temperature, metrics)
                if not fine:
                    break
            if self._promised:
                self._keep_promise()
            if self.passes is not None and (self.passes.running or self._promised):
                self._clipping = self.shards.expect(self.optimizer if clips else None, self.config.grad_clip)
            failure = self._read_passes(temperature, metrics) or failure
        except PeerFailed:
            raise
        except Exception as error:
            if self._in_step or self._promised:  # the others wait inside an exchange; nothing but this can reach them
                self.mesh.world.leave(f"{type(error).__name__}: {error}")
                raise
            failure = error
        finally:
            self.model.observer = None
            self._watch_router(None)
            self.frozen.release()
        self._raise_together(failure)
        return metrics

    def _pass(
        self, micro: TrainBatch | None, loss: Loss, temperature: float, metrics: Accumulator
    ) -> tuple[bool, Exception | None]:
        """Forward and backward of a micro-batch by the ordinary path; whether it is fine on all ranks, and why not."""
        self.model.observer = self.statistics
        self._watch_router(self.auxiliary)
        total, failure = self._micro_loss(micro, loss, temperature, metrics)
        fine = self._fine(failure)
        if fine:
            total.backward()
        return fine, failure

    def _replayed(self, micro: TrainBatch, loss: Loss, temperature: float, metrics: Accumulator) -> bool:
        """Whether the micro-batch ran captured (`k3rl.parallel.forward_backward`); `_read_passes` knows how it went."""
        if self.passes is None:
            return False
        counted = fresh_tokens(micro, self.config.balance)
        ran = self.passes.run(micro, counted, loss, temperature)
        if ran and not self.passes.capture:  # the ordinary path may go on, by expert
            self.shards.collect_gradients()
        if ran and counted is not None:
            metrics.add("moe/fresh_tokens", float(counted.sum()), micro.tokens)
        return ran

    def _read_passes(self, temperature: float, metrics: Accumulator) -> Exception | None:
        """Keeps the metrics of the micro-batches that were replayed; what is wrong with the first bad one."""
        if self.passes is None:
            return None
        for micro, value, out in self.passes.read():
            if not math.isfinite(value):
                return self._bad_loss(value, micro, temperature)
            _keep(metrics, out)
        self.notes += self.passes.take_notes()
        return None

    def _raise_together(self, failure: Exception | None) -> None:
        """When a rank failed, raises its error there and PeerFailed elsewhere; a NonFiniteLoss is raised by all."""
        if self.mesh.world.first_failed(failure is None) is None:
            return
        failed = self.mesh.world.first_failed(failure is None or isinstance(failure, NonFiniteLoss))
        if failed is not None:
            if failure is not None:
                raise failure
            raise PeerFailed(f"rank {failed} failed in step {self.steps}; nothing was updated")
        texts = self.mesh.world.exchange("" if failure is None else str(failure))
        raise NonFiniteLoss(next(text for text in texts if text)) from failure

    def _fine(self, failure: Exception | None) -> bool:
        """Whether to go on into the backward: where ranks meet in it, all of them go or none."""
        return (self.mesh.world.first_failed(failure is None) if self._in_step else failure) is None

    def _micro_loss(
        self,
        micro: TrainBatch | None,
        loss: Loss,
        temperature: float,
        metrics: Accumulator,
    ) -> tuple[torch.Tensor, Exception | None]:
        """The loss to call backward on, and what is wrong with it. None: a micro-batch that only other ranks have."""
        if micro is None:
            return self.model.dummy_forward(), None
        share = self.share(micro)
        self.statistics.count(micro, share, self.config.balance, metrics)
        inputs = self.target_inputs(micro, temperature, share)
        try:
            out = loss(inputs)
        except Exception as error:
            return inputs.logprobs, error
        if not torch.isfinite(out.loss):
            return out.loss, self._bad_loss(out.loss.item(), micro, temperature)
        _keep(metrics, out)
        return out.loss if self.auxiliary is None else out.loss + self._auxiliary_loss(micro, share, metrics), None

    def _bad_loss(self, value: float, micro: TrainBatch, temperature: float) -> NonFiniteLoss:
        self.model.observer = None
        self._watch_router(None)
        if self._in_step:  # another forward pass would need the other ranks
            origin = f"It is that of the micro-batch of {listed(micro.sequence_ids)}"
        else:
            origin = explain_loss(self.model, micro, lambda batch: self.target_inputs(batch, temperature))
        return bad_loss(self.steps, value, origin)

    def _watch_router(self, auxiliary: AuxiliaryLoss | None) -> None:
        if self.auxiliary is not None:
            self.auxiliary.clear()
            for part in self.model.moe_parts():
                part.router_loss = auxiliary

    def _auxiliary_loss(self, micro: TrainBatch, share: ContextShare, metrics: Accumulator) -> torch.Tensor:
        """The loss on the router, weighted by this part's share of the global batch."""
        assert self.auxiliary is not None
        weights = micro.weights if share.communicator is None else micro.weights[share.targets]
        part, term = float(weights.sum()), self.auxiliary.take()
        metrics.add("moe/auxiliary_loss", float(term.detach()) * part, part)
        return term * part

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch | None, temperature: float = 1.0) -> np.ndarray:
        """float32 [N]: the logprob of each target token, 0 elsewhere. Forward only; moves no bias.

        With expert or context parallelism a collective; batch: this rank's share, None when it has none.
        """
        if batch is None:
            for _ in self._forwards(None):
                pass
            return np.zeros(0, np.float32)
        out = np.zeros(batch.input_ids.size, np.float32)
        starts = {sid: int(start) for sid, start in zip(batch.sequence_ids, batch.cu_seqlens[:-1], strict=True)}
        for micro in self._forwards(batch):
            share = self.share(micro)
            if self.config.exact:
                found = exact_target_logprobs(self.model, micro, temperature)
            else:
                found = self.target_inputs(micro, temperature, share).logprobs
            values, positions = found.float().cpu(), share.targets
            owner = np.searchsorted(micro.cu_seqlens, positions, side="right") - 1
            origin = np.array([starts[sid] for sid in micro.sequence_ids], np.int64)
            out[origin[owner] + positions - micro.cu_seqlens[owner]] = values
        every = torch.from_numpy(out).to(self.model.device)
        self.context.sum(every)
        return every.cpu().numpy()

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch | None, loss: Loss) -> Accumulator:
        """The loss's metrics on this rank's targets of a batch, without a step; a collective like `logprobs`."""
        metrics = Accumulator()
        for micro in self._forwards(batch):
            _keep(metrics, loss(self.target_inputs(micro)))
        return metrics

    def _forwards(self, batch: TrainBatch | None) -> Iterator[TrainBatch]:
        """The micro-batches of a forward-only pass; then this rank assists those of the others."""
        micros = self._cut(batch)
        most = torch.tensor([len(micros)], device=self.model.device)
        if self._in_step:
            self.mesh.world.maximum(most)
        yield from micros
        for _ in range(int(most) - len(micros)):
            self.model.dummy_forward()
        self.frozen.release()

    @contextmanager
    def whole(self) -> Iterator[K3ForCausalLM]:
        """The model with its parameters in place, to save or publish it; a collective where they are cut over ranks."""
        with self.frozen.whole():
            yield self.model

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a bit-equal continuation needs: optimizer state with masters, router biases, step count.

        A collective that gives every rank all of it, whatever the mesh; `owned_state` does without.
        """
        return gather_tensors(self.mesh.world, self.owned_state())

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """A and B as files and engines have them (`Adapter.stored_tensors`), those of all ranks. A collective."""
        adapter = self.model.adapter
        own = {} if adapter is None else dict(adapter.stored_tensors())
        counted = {name: tensor for name, tensor in own.items() if name in self.shards.counted}
        every = gather_tensors(self.mesh.world, counted)
        return {name: every[name] for name in self.shards.names if name in every}

    def owned_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of `state_tensors`: each tensor is in one rank's, under its official name, whole."""
        state = {f"optimizer.{n}": value for n, value in self.optimizer.state_tensors(self.shards.counted).items()}
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
            wanted = [name for name in state if name.startswith(_OPTIMIZER) and self._loads(name)]
            self.optimizer.load_state_tensors({name[len(_OPTIMIZER) :]: state[name] for name in wanted})
            with torch.no_grad():
                for layer, bias in self.model.router_biases():
                    bias.copy_(state[f"router_bias.{layer}"])
            self.steps = int(state["steps"])
        self.shards.share_parameters()

    def _loads(self, key: str) -> bool:
        """Whether a key of the optimizer's state is for this rank, or for nobody, which the optimizer refuses."""
        name = key[len(_OPTIMIZER) :].rpartition("/")[0]
        return name in self.shards.owned or name not in self.shards.owners


def _keep(metrics: Accumulator, out: LossOutput) -> None:
    metrics.update(out.metrics)
    for name, value in out.maxima.items():
        metrics.maximum(name, value)
