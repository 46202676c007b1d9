"""Forward, loss and backward of a micro-batch as a step of fixed shapes, which a GPU replays as one CUDA graph.

A micro-batch of n tokens runs in one of a few shape buckets. Tokens that are not there fill a document of their own
behind the others: nobody attends to them, no target, count or maximum is theirs, and their experts are those of the
first token.
Where documents end, which rows are targets and what they weigh are inputs, so one captured graph serves every
micro-batch of its bucket; the host moves one buffer in and reads the loss and its metrics after the last micro-batch.
On a CPU the same step runs uncaptured.

Each number of tokens has one graph. A micro-batch that needs more documents, a longer one or more targets than it was
made for replaces it by a larger one. Graphs share one pool of memory, so the activations that stay allocated are those
of the largest of them. Gradients stay allocated too: a graph adds to the buffers that it was captured with.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from k3rl.config import K3Error
from k3rl.data import TrainBatch
from k3rl.kernels import CapturedStep, GraphPool, StagedInputs
from k3rl.kernels.cuda_graph import CaptureError
from k3rl.kernels.kda import sequence_tables
from k3rl.losses import LossInputs, LossOutput, Tallied, target_logprobs
from k3rl.model import MLP, ExpertBank, FixedLayout, K3ForCausalLM, KimiDeltaAttention, SiTU, SwiGLU
from k3rl.parallel.flat_gradients import FlatGradients
from k3rl.parallel.forward_backward import EagerForwardBackward, Failure, ForwardBackward, Loss, StepInputs, add_loss
from k3rl.parallel.model_on_mesh import ModelOnMesh
from k3rl.parallel.statistics import Statistics, fresh_tokens
from k3rl.run import Accumulator

GRAPHS = 8  # at most; the one that was not used for the longest time goes
_LEAST_TOKENS, _LEAST_LONGEST = 64, 256
_READS = "the loss reads numbers from the device, so its micro-batches are not captured"
_STREAMS = ("sampler_logprobs", "advantages", "weights", "teacher_logprobs")  # over targets


class _Refused(Exception):
    """The loss cannot be part of a captured step; the text says why."""


class LearnerOutOfMemory(K3Error):
    """A GPU has no room for a micro-batch."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        mine = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        super().__init__(
            f"a micro-batch of {tokens} tokens does not fit on {device}: of {total >> 20} MiB this rank has "
            f"{mine >> 20}, other processes {max(0, total - free - mine) >> 20}; use a smaller "
            "trainer.micro_batch_tokens, or, where an engine shares the GPU, a smaller cluster.engine.memory_mb"
        )


def _power(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _step(number: int, budget: int) -> int:
    """`number` rounded up to a 16th of the budget, itself in whole `_LEAST_TOKENS`."""
    step = -(-budget // (16 * _LEAST_TOKENS)) * _LEAST_TOKENS
    return -(-number // step) * step


@dataclass(frozen=True)
class ShapeBucket:
    """The shapes of one step: rows, and bounds of documents (padding's included), of their rows, and of targets."""

    tokens: int
    documents: int
    longest: int
    targets: int
    routes: bool
    teacher: bool

    @classmethod
    def of(cls, micro: TrainBatch, budget: int) -> ShapeBucket:
        """The smallest one for a micro-batch."""
        tokens = _step(micro.tokens, budget)
        longest = max(int(micro.lengths.max()), tokens - micro.tokens)
        return cls(
            tokens,
            _power(len(micro.lengths) + (tokens > micro.tokens)),
            min(tokens, max(_LEAST_LONGEST, _power(longest))),
            _step(max(1, micro.target_tokens), budget),
            micro.routes is not None,
            micro.teacher_logprobs is not None,
        )

    @property
    def key(self) -> tuple[int, bool, bool]:
        """What has one step at a time."""
        return self.tokens, self.routes, self.teacher

    def holds(self, other: ShapeBucket) -> bool:
        """Whether a micro-batch of the other bucket, of the same key, fits in."""
        mine, its = (self.documents, self.longest, self.targets), (other.documents, other.longest, other.targets)
        return all(a >= b for a, b in zip(mine, its, strict=True))

    def with_room_for(self, other: ShapeBucket) -> ShapeBucket:
        """The smallest bucket that holds both."""
        return replace(
            self,
            documents=max(self.documents, other.documents),
            longest=max(self.longest, other.longest),
            targets=max(self.targets, other.targets),
        )


class MicroBatchInputs:
    """The inputs of one shape bucket at fixed addresses, all but routes as 8-byte numbers that one copy moves.

    tallied: the names of the numbers that the step which reads them gives, once it ran.
    """

    def __init__(self, bucket: ShapeBucket, routes: tuple[int, int], device: torch.device) -> None:
        self.bucket = bucket
        n, p = bucket.tokens, bucket.targets
        names = ["sampler_logprobs", "advantages", "weights", *(["teacher_logprobs"] if bucket.teacher else [])]
        widths = {"ids": n, "counted": n, "ends": bucket.documents + 1, "real": 1, "before": p, "targets": p}
        self.staged = StagedInputs(widths | dict.fromkeys(names, p), device, reals=names)
        self._staged_routes: Tensor | None = None
        self.routes: Tensor | None = None
        if bucket.routes:
            on_gpu = device.type == "cuda"
            self._staged_routes = torch.zeros(n, *routes, dtype=torch.int16, pin_memory=on_gpu)
            self.routes = torch.zeros_like(self._staged_routes, device=device)
        self.tallied: Tallied | None = None

    def fill(self, micro: TrainBatch, counted: np.ndarray | None, padding: int, *, weighs: bool = True) -> None:
        """Sets the inputs. counted bool [N]: tokens that count in the load, None for all. padding: its token id.

        weighs False: nothing has a weight and nothing counts, so that a run adds zeros. The host writes only after the
        copy of the micro-batch before has left.
        """
        self.staged.wait()
        n, given = micro.tokens, self.staged.host
        given["ids"][:n], given["ids"][n:] = micro.input_ids, padding
        given["counted"][:n] = weighs if counted is None else counted & weighs
        given["counted"][n:] = 0
        ends = given["ends"]
        ends[: len(micro.cu_seqlens)], ends[len(micro.cu_seqlens) :] = micro.cu_seqlens, self.bucket.tokens
        given["real"][0] = n
        targets = np.flatnonzero(micro.loss_mask)
        p = len(targets)
        given["before"][:p], given["before"][p:] = targets - 1, 0
        given["targets"][:p], given["targets"][p:] = micro.input_ids[targets], 0
        for name in _STREAMS:
            if name in given:
                given[name][:p], given[name][p:] = getattr(micro, name)[targets], 0
        if not weighs:
            given["weights"][:] = 0
        if self.routes is not None and self._staged_routes is not None:
            self._staged_routes[:n].numpy()[...] = micro.routes
            self.routes.copy_(self._staged_routes, non_blocking=True)
        self.staged.send()  # behind the routes, whose copy `wait` covers so too


@dataclass
class MicroBatchStep:
    """What computes the micro-batches of one shape bucket: captured, or run as it is, once it is ready."""

    inputs: MicroBatchInputs
    step: CapturedStep[Tensor]
    ready: bool = False

    @property
    def bucket(self) -> ShapeBucket:
        return self.inputs.bucket

    def run(self) -> Tensor:
        """float64 [1 + tallied numbers], the loss first, which no later run overwrites."""
        output = self.step()
        return output.clone() if self.step.is_captured else output


class CapturedForwardBackward:
    """Replays each micro-batch as a captured step, or leaves it to the eager path (a `ForwardBackward`).

    capture: replay CUDA graphs; otherwise steps run uncaptured. owners: as `FlatGradients` has them. collect: gives
    experts their `.grad` after a run, where the eager path may go on, by expert. steps: by `ShapeBucket.key`.
    """

    is_eager = False

    def __init__(
        self,
        eager: EagerForwardBackward,
        on_mesh: ModelOnMesh,
        statistics: Statistics,
        *,
        capture: bool,
        owners: Mapping[str, int],
        collect: Callable[[], None],
    ) -> None:
        self.eager, self._model, self._config, self._statistics = eager, on_mesh.model, on_mesh.config, statistics
        self.capture, self._collect = capture, collect
        self.steps: OrderedDict[tuple[int, bool, bool], MicroBatchStep] = OrderedDict()
        self._made_for: tuple[Loss, float] | None = None
        self._pool = GraphPool()  # which all graphs share
        self._gradients = FlatGradients(self._model, owners)  # what graphs add to
        self._ran: list[tuple[TrainBatch, Tallied, Tensor]] = []
        # Kept: a walk over thousands of modules takes milliseconds. Experts are views of their bank's matrices.
        experts = {parameter for part in self._model.moe_parts() for parameter in part.experts.parameters()}
        self._parameters = [parameter for parameter in self._model.parameters() if parameter not in experts]
        self._banks = [part.bank for part in self._model.moe_parts()]
        self._units: list[MLP | ExpertBank] = [
            *self._banks,
            *(module for module in self._model.modules() if isinstance(module, MLP)),
        ]
        self._refused: list[tuple[Loss, str]] = []  # and why
        self._addresses: list[int] = []  # of what the graphs read and write
        self._told: list[str] = []
        self._notes: list[str] = []  # why something ran eagerly

    @property
    def captured(self) -> int:
        """Shape buckets that have a graph now."""
        return sum(one.step.is_captured for one in self.steps.values())

    @property
    def graph_bytes(self) -> int:
        return self._pool.held

    @property
    def running(self) -> bool:
        return self.capture and bool(self._ran)

    def begin(self) -> None:
        """Forgets what was not read, and graphs whose tensors were replaced."""
        self._ran.clear()
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        pairs = [bank.matrices() for bank in self._banks]
        pairs += [bank.gradients() for bank in self._banks if bank.sums is not None]
        addresses += [tensor.data_ptr() for pair in pairs for tensor in pair]
        addresses += [tensor.data_ptr() for tensor in self._statistics.tensors()]
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses

    def forget(self) -> None:
        """Drops every graph, as when something that they read is replaced."""
        self.steps.clear()
        self._pool.renew()

    def will_replay(self, micros: Sequence[TrainBatch], loss: Loss, temperature: float) -> bool:
        if self._made_for != (loss, temperature):
            return False
        for micro in micros:
            bucket = ShapeBucket.of(micro, self._config.micro_batch_tokens)
            found = self.steps.get(bucket.key)
            there = found is not None and found.ready and found.bucket.holds(bucket)
            if not there or self.refusal(micro, loss) is not None:
                return False
        return True

    @property
    def places(self) -> dict[nn.Parameter, Tensor]:
        """Where gradients add up, but those of routed experts."""
        return self._gradients.places

    def hold_gradients(self) -> None:
        """Gives parameters their place in `places` as `.grad`, as every replay does."""
        self._gradients.hold()

    def warm_up(self, micro: TrainBatch, loss: Loss, temperature: float) -> None:
        """Has what a micro-batch like this launches compiled: it runs once without weights, and nothing is kept.

        Adds zeros to gradients. Nothing is captured, as shapes of real batches are not known yet.
        """
        if self.refusal(micro, loss) is not None:
            return
        self.begin()
        self._made_for = loss, temperature
        found = self._step_for(ShapeBucket.of(micro, self._config.micro_batch_tokens))
        found.inputs.fill(micro, None, self._model.config.pad_token_id, weighs=False)
        try:
            found.step()
        except _Refused as error:
            self._refused.append((loss, str(error)))
            self._tell(str(error))
        except torch.OutOfMemoryError:
            self._tell("there was no room to compile kernels ahead of the first step, which does it")
        finally:
            self.forget()
            if self.capture:
                torch.cuda.empty_cache()  # an engine may be about to measure what is free

    def run(self, micro: TrainBatch | None, step: StepInputs, metrics: Accumulator) -> Failure | None:
        if micro is None or not self._replay(micro, step, metrics):
            return self.eager.run(micro, step, metrics)
        return None

    def _replay(self, micro: TrainBatch, step: StepInputs, metrics: Accumulator) -> bool:
        """Runs a micro-batch as a captured step; False, and nothing happened, where the eager path has to."""
        loss, made_for = step.loss, (step.loss, step.temperature)
        reason = self.refusal(micro, loss)
        if reason is not None:
            self._tell(reason)
            return False
        if self._made_for != made_for:
            self.forget()
            self._made_for = made_for
        counted = fresh_tokens(micro, self._config.balance)
        found = self._step_for(ShapeBucket.of(micro, self._config.micro_batch_tokens))
        padding = self._model.config.pad_token_id
        if not found.ready:
            found.inputs.fill(micro, counted, padding, weighs=False)
            try:
                self._prepare(found)
            except _Refused as error:
                self._refused.append((loss, str(error)))
                self._tell(str(error))
                self.forget()
                return False
        found.inputs.fill(micro, counted, padding)
        self._gradients.hold()
        output = found.run()
        tallied = found.inputs.tallied
        assert tallied is not None
        self._ran.append((micro, tallied, output))
        if not self.capture:
            self._collect()
        if counted is not None:
            metrics.add("moe/fresh_tokens", float(counted.sum()), micro.tokens)
        return True

    def finish(self, step: StepInputs, metrics: Accumulator) -> Exception | None:
        """The host waits here for every replay since `begin`."""
        ran, self._ran = self._ran, []
        if not ran:
            return None
        read = torch.stack([output for _, _, output in ran]).tolist()
        for (micro, tallied, output), (value, *numbers) in zip(ran, read, strict=True):
            if not math.isfinite(value):
                return self.eager.explain(value, micro, step)
            add_loss(metrics, LossOutput(output[0], *tallied.read(numbers)))
        return None

    def end(self) -> None:
        self.eager.end()

    def take_notes(self) -> list[str]:
        """Why something ran eagerly, each reason once ever."""
        notes, self._notes = self._notes, []
        return notes

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.append(reason)
            self._notes.append(reason)

    def refusal(self, micro: TrainBatch, loss: Loss) -> str | None:
        """Why a micro-batch cannot run as a captured step; None when it can."""
        for refused, reason in self._refused:
            if refused == loss:
                return reason
        if micro.images is not None:
            return "micro-batches with images are not captured"
        if micro.sampling_mask is not None:
            return "micro-batches whose targets were drawn from cut sets (top-p, top-k, min-p) are not captured"
        if not all(isinstance(holder.unit, SiTU | SwiGLU) for holder in self._units):
            return "micro-batches whose activations are watched are not captured"
        if any(bank.sums is None and any(leaf.requires_grad for leaf in bank.seen) for bank in self._banks):
            return "micro-batches whose experts leave their gradients to autograd are not captured"
        live = micro.loss_mask & (micro.weights != 0)
        for name in _STREAMS:
            stream = getattr(micro, name)
            if stream is not None and not np.isfinite(stream[live]).all():
                return f"micro-batches with values of {name} that are not finite are not captured"
        return None

    def _step_for(self, wanted: ShapeBucket) -> MicroBatchStep:
        """One that holds this bucket, made larger where it has to be; it is now the last one to be dropped."""
        found = self.steps.pop(wanted.key, None)
        if found is None or not found.bucket.holds(wanted):
            bucket = wanted if found is None else found.bucket.with_room_for(wanted)
            config = self._model.config
            routes = len(config.moe_layers), config.num_experts_per_token
            inputs = MicroBatchInputs(bucket, routes, self._model.device)
            # It refers to no step, so that a step which is dropped frees its graph at once.
            found = MicroBatchStep(inputs, CapturedStep(partial(self.compute, inputs)))
        self.steps[wanted.key] = found
        while len(self.steps) > GRAPHS:
            self.steps.popitem(last=False)
        if not self.captured:
            self._pool.renew()
        return found

    def _prepare(self, found: MicroBatchStep) -> None:
        """Makes a step ready to run: warmed up, and captured, with inputs that have no weight."""
        if not self.capture:
            found.step()  # adds zeros, and shows which parameters get a gradient
            found.ready = True
            return
        if not self._captured(found):
            # A warm-up needs as much memory as all graphs hold. What others have of the GPU is theirs to keep.
            self.forget()
            torch.cuda.empty_cache()
            self.steps[found.bucket.key] = found
            if not self._captured(found):
                raise LearnerOutOfMemory(self._model.device, found.bucket.tokens)
        found.ready = True

    def _captured(self, found: MicroBatchStep) -> bool:
        """Captures a step; False where memory did not suffice. Raises _Refused."""
        try:
            found.step.capture(self._pool)
        except CaptureError as error:
            raise _Refused(f"the micro-batch could not be captured: {error}") from error
        except torch.OutOfMemoryError:
            return False
        return True

    def compute(self, inputs: MicroBatchInputs) -> Tensor:
        """What a step does: adds gradients and statistics -> float64 [1 + tallied numbers], the loss first."""
        out = self._forward(inputs)
        self._gradients.add(self._gradients.of(out.loss))
        assert out.tallied is not None
        inputs.tallied = replace(out.tallied, numbers=torch.empty(0))  # no memory of a graph
        return torch.cat([out.loss.detach().double().view(1), out.tallied.numbers])

    def _forward(self, inputs: MicroBatchInputs) -> LossOutput:
        bucket, given, model = inputs.bucket, inputs.staged.device, self._model
        assert self._made_for is not None
        loss, temperature = self._made_for
        row = torch.arange(bucket.tokens, device=model.device)
        ends = sequence_tables.covering(given["ends"].to(torch.int32))
        layout = FixedLayout(ends, bucket.tokens, bucket.longest, row >= given["real"])
        self._statistics.counted = given["counted"] != 0
        model.observer = self._statistics
        try:
            hidden = model.rows(given["ids"], layout, inputs.routes)
        finally:
            model.observer = None
        head = model.language_model.lm_head.weight
        before = hidden.index_select(0, given["before"])
        logprobs, entropy = target_logprobs(before, head, given["targets"], temperature)
        streams = {name: given[name].to(logprobs.dtype) for name in _STREAMS if name in given}
        out = loss(
            LossInputs(
                logprobs=logprobs,
                sampler_logprobs=streams["sampler_logprobs"],
                advantages=streams["advantages"],
                weights=streams["weights"],
                teacher_logprobs=streams.get("teacher_logprobs"),
                entropy=entropy,
                checked=True,
            )
        )
        if out.tallied is None:
            raise _Refused(_READS)
        return out


def can_capture(model: K3ForCausalLM) -> bool:
    """Whether micro-batches of this model can be captured: on a GPU, in bf16, where the kernels take its KDA layers."""
    if model.device.type != "cuda" or model.dtype != torch.bfloat16:
        return False
    probe = torch.empty(0, dtype=model.dtype, device=model.device)
    found = [module for module in model.modules() if isinstance(module, KimiDeltaAttention)]
    return all(layer.takes_kernels(probe) for layer in found)


def forward_backward_of(
    on_mesh: ModelOnMesh, statistics: Statistics, owners: Mapping[str, int], collect: Callable[[], None]
) -> ForwardBackward:
    """The implementation that a configuration asks for."""
    config, eager = on_mesh.config, EagerForwardBackward(on_mesh, statistics)
    never = on_mesh.meets or config.exact or config.lora is not None or config.balance_by == "auxiliary_loss"
    able = can_capture(on_mesh.model)
    if config.capture == "off" or never or (config.capture == "auto" and not able):
        return eager
    return CapturedForwardBackward(eager, on_mesh, statistics, capture=able, owners=owners, collect=collect)
