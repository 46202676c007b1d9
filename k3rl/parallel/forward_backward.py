"""Forward, loss and backward of a micro-batch as a program of fixed shapes, which a GPU replays as one CUDA graph.

A micro-batch of n tokens runs as one of a few sizes. Tokens that are not there fill a document of their own behind the
others: nobody attends to them, no target, count or maximum is theirs, and their experts are those of the first token.
Where documents end, which rows are targets and what they weigh are inputs, so one captured graph serves every
micro-batch of its size; the host moves one buffer in and reads the loss and its metrics after the last micro-batch.
On a CPU the same program runs uncaptured.

Each number of tokens has one graph. A micro-batch that needs more documents, a longer one or more targets than it was
made for replaces it by a larger one. Graphs share one pool of memory, so the activations that stay allocated are those
of the largest of them. Gradients stay allocated too: a graph adds to the buffers that it was captured with.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from k3rl.data.batch import TrainBatch
from k3rl.kernels.kda import sequence_tables
from k3rl.losses import LossInputs, LossOutput, target_logprobs
from k3rl.losses.base import Tallied
from k3rl.model import K3ForCausalLM
from k3rl.model.gated import SiTU, SwiGLU
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import FixedLayout
from k3rl.model.moe import MLP, ExpertBank
from k3rl.parallel.flat_gradients import FlatGradients
from k3rl.parallel.settings import TrainerConfig
from k3rl.parallel.statistics import Statistics

Loss = Callable[[LossInputs], LossOutput]

GRAPHS = 8  # at most; the one that was not used for the longest time goes
_WARM_UPS = 2  # of a size before its capture: kernels are compiled and workspaces made then
_LEAST_TOKENS, _LEAST_LONGEST = 64, 256
_READS = "the loss reads numbers from the device, so its micro-batches are not captured"
_STREAMS = ("sampler_logprobs", "advantages", "weights", "teacher_logprobs")  # over targets


class _Refused(Exception):
    """The loss cannot be part of a program; the text says why."""


def _power(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _step(number: int, budget: int) -> int:
    """`number` rounded up to a 16th of the budget, itself in whole `_LEAST_TOKENS`."""
    step = -(-budget // (16 * _LEAST_TOKENS)) * _LEAST_TOKENS
    return -(-number // step) * step


@dataclass(frozen=True)
class Size:
    """The shapes of one program: rows, and bounds of documents (padding's included), of their rows, and of targets."""

    tokens: int
    documents: int
    longest: int
    targets: int
    routes: bool
    teacher: bool

    @classmethod
    def of(cls, micro: TrainBatch, budget: int) -> Size:
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
        """What has one program at a time."""
        return self.tokens, self.routes, self.teacher

    def holds(self, other: Size) -> bool:
        """Whether a micro-batch of the other size, of the same key, fits in."""
        mine, its = (self.documents, self.longest, self.targets), (other.documents, other.longest, other.targets)
        return all(a >= b for a, b in zip(mine, its, strict=True))

    def with_room_for(self, other: Size) -> Size:
        """The smallest size that holds both."""
        return replace(
            self,
            documents=max(self.documents, other.documents),
            longest=max(self.longest, other.longest),
            targets=max(self.targets, other.targets),
        )


class _Program:
    """The buffers of one size, all inputs but routes in one run of 8-byte numbers, and the graph captured with them."""

    def __init__(self, size: Size, routes: tuple[int, int], device: torch.device) -> None:
        self.size = size
        n, p = size.tokens, size.targets
        names = ["sampler_logprobs", "advantages", "weights", *(["teacher_logprobs"] if size.teacher else [])]
        widths = {"ids": n, "counted": n, "ends": size.documents + 1, "real": 1, "before": p, "targets": p}
        widths |= dict.fromkeys(names, p)
        gpu = device.type == "cuda"
        self._pinned = torch.zeros(sum(widths.values()), dtype=torch.int64, pin_memory=gpu)
        self._device = torch.zeros_like(self._pinned, device=device)
        self._copied = torch.cuda.Event() if gpu else None
        self.given: dict[str, np.ndarray] = {}
        self.inputs: dict[str, Tensor] = {}
        start = 0
        for name, width in widths.items():
            here = slice(start, start + width)
            kind = torch.float64 if name in names else torch.int64
            self.given[name] = self._pinned[here].view(kind).numpy()
            self.inputs[name] = self._device[here].view(kind)
            start += width
        self._pinned_routes: Tensor | None = None
        self.routes: Tensor | None = None
        if size.routes:
            self._pinned_routes = torch.zeros(n, *routes, dtype=torch.int16, pin_memory=gpu)
            self.routes = torch.zeros_like(self._pinned_routes, device=device)
        self.ready = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None  # of the captured graph
        self.tallied: Tallied | None = None

    def fill(self, micro: TrainBatch, counted: np.ndarray | None, padding: int, *, weighs: bool = True) -> None:
        """Sets the inputs. counted bool [N]: tokens that count in the load, None for all. padding: its token id.

        weighs False: nothing has a weight and nothing counts, so that a run adds zeros. The host writes only after the
        copy of the micro-batch before has left.
        """
        if self._copied is not None:
            self._copied.synchronize()
        n, given = micro.tokens, self.given
        given["ids"][:n], given["ids"][n:] = micro.input_ids, padding
        given["counted"][:n] = weighs if counted is None else counted & weighs
        given["counted"][n:] = 0
        ends = given["ends"]
        ends[: len(micro.cu_seqlens)], ends[len(micro.cu_seqlens) :] = micro.cu_seqlens, self.size.tokens
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
        self._device.copy_(self._pinned, non_blocking=True)
        if self.routes is not None and self._pinned_routes is not None:
            self._pinned_routes[:n].numpy()[...] = micro.routes
            self.routes.copy_(self._pinned_routes, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Passes:
    """The programs of a trainer: `run` adds a micro-batch's gradients to `.grad`, `read` gives what the losses were.

    capture: replay CUDA graphs; otherwise programs run uncaptured. owners: as `FlatGradients` has them.
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        statistics: Statistics,
        budget: int,
        *,
        capture: bool,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self._model, self._statistics, self._budget = model, statistics, budget
        self.capture = capture
        self._programs: OrderedDict[tuple[int, bool, bool], _Program] = OrderedDict()
        self._made_for: tuple[Loss, float] | None = None
        self._memory: Any = None  # which all graphs share
        self.held = 0  # bytes of it: they stay, and torch counts them as used by nobody
        self._gradients = FlatGradients(model, owners)  # what graphs add to
        self._ran: list[tuple[TrainBatch, Tallied, Tensor]] = []
        # Kept: a walk over thousands of modules takes milliseconds. Experts are views of their bank's matrices.
        experts = {parameter for part in model.moe_parts() for parameter in part.experts.parameters()}
        self._parameters = [parameter for parameter in model.parameters() if parameter not in experts]
        self._banks = [part.bank for part in model.moe_parts()]
        self._units: list[MLP | ExpertBank] = [
            *self._banks,
            *(module for module in model.modules() if isinstance(module, MLP)),
        ]
        self._refused: list[tuple[Loss, str]] = []  # and why
        self._places: list[int] = []  # where what the graphs read and write is
        self._told: list[str] = []
        self.notes: list[str] = []  # why something runs by the ordinary path

    @property
    def captured(self) -> int:
        """Sizes that have a graph now."""
        return sum(program.graph is not None for program in self._programs.values())

    def run(self, micro: TrainBatch, counted: np.ndarray | None, loss: Loss, temperature: float) -> bool:
        """Forward, loss and backward of a micro-batch; False, and nothing happened, where the ordinary path has to.

        counted bool [N]: tokens that count in the routers' load; None for all.
        """
        reason = self._why_not(micro, loss)
        if reason is not None:
            self._tell(reason)
            return False
        if self._made_for != (loss, temperature):
            self.forget()
            self._made_for = loss, temperature
        program = self._program(Size.of(micro, self._budget))
        padding = self._model.config.pad_token_id
        if not program.ready:
            program.fill(micro, counted, padding, weighs=False)
            try:
                self._prepare(program)
            except _Refused as error:
                self._refused.append((loss, str(error)))
                self._tell(str(error))
                self.forget()
                return False
        program.fill(micro, counted, padding)
        self._gradients.hold()
        if program.graph is None:
            output = self._compute(program)
        else:
            program.graph.replay()
            assert program.output is not None
            output = program.output.clone()  # the next replay overwrites it
        assert program.tallied is not None
        self._ran.append((micro, program.tallied, output))
        return True

    def sure(self, micros: Sequence[TrainBatch], loss: Loss, temperature: object) -> bool:
        """Whether `run` will take all of these: their programs are there, and nothing on the way can be refused.

        After `begin`.
        """
        if self._made_for != (loss, temperature):
            return False
        for micro in micros:
            size = Size.of(micro, self._budget)
            program = self._programs.get(size.key)
            there = program is not None and program.ready and program.size.holds(size)
            if not there or self._why_not(micro, loss) is not None:
                return False
        return True

    @property
    def places(self) -> dict[nn.Parameter, Tensor]:
        """Where gradients add up, but those of routed experts."""
        return self._gradients.places

    def hold(self) -> None:
        """Gives parameters their place in `places` as `.grad`, as every `run` does."""
        self._gradients.hold()

    @property
    def running(self) -> bool:
        """Whether the device has replays to do or has done them, which `read` waits for."""
        return self.capture and bool(self._ran)

    def read(self) -> list[tuple[TrainBatch, float, LossOutput]]:
        """(micro-batch, its loss, its metrics) of every `run` since the last call; the host waits for them here."""
        ran, self._ran = self._ran, []
        if not ran:
            return []
        found = []
        for (micro, tallied, output), numbers in zip(
            ran, torch.stack([out for _, _, out in ran]).tolist(), strict=True
        ):
            metrics, maxima = tallied.read(numbers[1:])
            found.append((micro, numbers[0], LossOutput(output[0], metrics, maxima)))
        return found

    def begin(self) -> None:
        """Before the micro-batches of a step: forgets what was not read, and graphs whose tensors were replaced."""
        self._ran.clear()
        places = [parameter.data_ptr() for parameter in self._parameters]
        pairs = [bank.matrices() for bank in self._banks]
        pairs += [bank.gradients() for bank in self._banks if bank.sums is not None]
        places += [tensor.data_ptr() for pair in pairs for tensor in pair]
        places += [tensor.data_ptr() for tensor in self._statistics.tensors()]
        if places != self._places:
            self.forget()
            self._places = places

    def forget(self) -> None:
        """Drops every graph, as when something that they read is replaced."""
        self._programs.clear()
        self._memory, self.held = None, 0  # a pool whose graphs are all gone must not be used again

    def take_notes(self) -> list[str]:
        """Why something ran by the ordinary path, each reason once ever."""
        notes, self.notes = self.notes, []
        return notes

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.append(reason)
            self.notes.append(reason)

    def _why_not(self, micro: TrainBatch, loss: Loss) -> str | None:
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

    def _program(self, wanted: Size) -> _Program:
        """One that holds this size, made larger where it has to be; it is now the last one to be dropped."""
        found = self._programs.pop(wanted.key, None)
        if found is None or not found.size.holds(wanted):
            size = wanted if found is None else found.size.with_room_for(wanted)
            config = self._model.config
            found = _Program(size, (len(config.moe_layers), config.num_experts_per_token), self._model.device)
        self._programs[wanted.key] = found
        while len(self._programs) > GRAPHS:
            self._programs.popitem(last=False)
        if not any(program.graph is not None for program in self._programs.values()):
            self._memory, self.held = None, 0
        return found

    def _compute(self, program: _Program) -> Tensor:
        """The program itself: adds gradients and statistics -> float64 [1 + tallied numbers], the loss first."""
        out = self._forward(program)
        self._gradients.add(self._gradients.of(out.loss))
        assert out.tallied is not None
        program.tallied = replace(out.tallied, numbers=torch.empty(0))  # no memory of a graph
        return torch.cat([out.loss.detach().double().view(1), out.tallied.numbers])

    def _forward(self, program: _Program) -> LossOutput:
        size, given, model = program.size, program.inputs, self._model
        assert self._made_for is not None
        loss, temperature = self._made_for
        row = torch.arange(size.tokens, device=model.device)
        ends = sequence_tables.covering(given["ends"].to(torch.int32))
        layout = FixedLayout(ends, size.tokens, size.longest, row >= given["real"])
        self._statistics.counted = given["counted"] != 0
        model.observer = self._statistics
        try:
            hidden = model.rows(given["ids"], layout, program.routes)
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

    def _prepare(self, program: _Program) -> None:
        """Makes a program ready for `run`: warmed up, and captured, with inputs that have no weight."""
        if not self.capture:
            self._compute(program)  # adds zeros, and shows which parameters get a gradient
            program.ready = True
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._compute(program)
        torch.cuda.current_stream().wait_stream(side)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        try:
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                program.output = self._compute(program)
        except RuntimeError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place, said = f"{Path(last.filename).name} line {last.lineno}", str(error).partition("\n")[0]
            raise _Refused(f"the passes could not be captured ({place}): {type(error).__name__}: {said}") from error
        self.held += torch.cuda.memory_reserved() - before
        program.graph, program.ready = graph, True


def captures(model: K3ForCausalLM) -> bool:
    """Whether passes of this model can be captured: on a GPU, in bf16, where the kernels take its KDA layers."""
    if model.device.type != "cuda" or model.dtype != torch.bfloat16:
        return False
    probe = torch.empty(0, dtype=model.dtype, device=model.device)
    found = [module for module in model.modules() if isinstance(module, KimiDeltaAttention)]
    return all(layer.takes_kernels(probe) for layer in found)


def passes_of(
    model: K3ForCausalLM, config: TrainerConfig, statistics: Statistics, owners: Mapping[str, int], *, alone: bool
) -> Passes | None:
    """The programs that a configuration asks for; None where every micro-batch takes the ordinary path.

    alone: ranks do not meet inside a forward.
    """
    ordinary = not alone or config.exact or config.lora is not None or config.balance_by == "auxiliary_loss"
    if config.capture == "off" or ordinary or (config.capture == "auto" and not captures(model)):
        return None
    return Passes(model, statistics, config.micro_batch_tokens, capture=captures(model), owners=owners)
