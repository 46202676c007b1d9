"""k3rl's own backend: Per-Head Muon or AdamW on masters that are sharded over ranks by whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property

from torch import Tensor

from k3rl.data import TrainBatch
from k3rl.model import pack_experts
from k3rl.optim import NonFiniteGradient, PerHeadMuon, qk_clip_, stored_values, trained
from k3rl.parallel.agree import raise_together
from k3rl.parallel.backends.base import OPTIMIZER, Update
from k3rl.parallel.captured import CapturedForwardBackward, forward_backward_of
from k3rl.parallel.clipping import GradientClipping
from k3rl.parallel.forward_backward import ForwardBackward, Loss, StepInputs
from k3rl.parallel.frozen import parameter_bytes
from k3rl.parallel.gradient_reduction import GradientReduction
from k3rl.parallel.liveness import PeerFailed
from k3rl.parallel.model_on_mesh import ModelOnMesh
from k3rl.parallel.nonfinite import NonFiniteGradients, explain_gradient
from k3rl.parallel.statistics import Statistics
from k3rl.parallel.zero import Shards
from k3rl.run import Accumulator


class NativeBackend:
    """Forward-backward, gradient reduction, clipping and optimizer of a model (a `Backend`).

    Making one is a collective. forward_backward: eager, or captured (`TrainerConfig.capture`).
    """

    forward_backward: ForwardBackward

    def __init__(self, on_mesh: ModelOnMesh, statistics: Statistics) -> None:
        model, config, mesh = on_mesh.model, on_mesh.config, on_mesh.mesh
        self._on_mesh, self._statistics, self._config, self._world = on_mesh, statistics, config, mesh.world
        self._norm = 0.0
        quantization = model.config.quantization
        if config.packs and quantization.weights == "mxfp4":
            pack_experts(model)

        def stored(name: str, master: Tensor) -> Tensor:
            return stored_values(model.config.stored(name), master, quantization.scale_rule)

        found = trained(model.trained_parameters(), model.config, config.optimizer)
        infos = {name: info for name, (info, _) in found.items()}
        self.shards = Shards(model, infos, mesh, sharded=config.shard_optimizer)
        overlap = config.overlap == "on" or (config.overlap == "auto" and mesh.world.hosts > 1)
        self.reduction = GradientReduction(self.shards, overlap=overlap)
        self.forward_backward = forward_backward_of(on_mesh, statistics, self.shards.owners, self.reduction.collect)
        self.optimizer = PerHeadMuon(
            model.trained_parameters(),
            model.config,
            config.muon,
            project=stored,
            owned=self.shards.owned,
            capture=config.capture != "off",
            fixed=self.shards.experts.fixed,
        )
        self.clipping = GradientClipping(self.shards, self.optimizer, config.grad_clip)
        self.shards.share_parameters()

    @property
    def lockstep(self) -> bool:
        return self._on_mesh.meets

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.forward_backward.begin()

    def warm_up(self, micro: TrainBatch, loss: Loss, temperature: float) -> None:
        if isinstance(self.forward_backward, CapturedForwardBackward):
            self.forward_backward.warm_up(micro, loss, temperature)
            self.reduction.zero_grad()

    def overlap_key(self, micros: list[TrainBatch], loss: Loss, temperature: float) -> int:
        fb = self.forward_backward
        if self._world.size == 1 or not isinstance(fb, CapturedForwardBackward):
            return 0
        return self.reduction.plan(fb.places) if fb.will_replay(micros, loss, temperature) else 0

    def accumulate(self, step: StepInputs) -> Accumulator:
        metrics, error = Accumulator(), None
        self.clipping.forget()
        self.reduction.zero_grad(leaves=self.forward_backward.is_eager)
        try:
            error = self._run(step, metrics)
            if step.overlaps:
                self._launch_reduction()
            if step.overlaps or self.forward_backward.running:
                self._launch_norm(step)
            error = self.forward_backward.finish(step, metrics) or error
        except PeerFailed:
            raise
        except Exception as caught:
            if self._on_mesh.meets or step.overlaps:  # the others wait in an exchange; nothing else can reach them
                self._world.leave(f"{type(caught).__name__}: {caught}")
                raise
            error = caught
        finally:
            self.forward_backward.end()
            self._on_mesh.frozen.release()
        raise_together(self._world, error, step.number)
        return metrics

    def _run(self, step: StepInputs, metrics: Accumulator) -> Exception | None:
        """Every micro-batch, up to the first that cannot be computed; what is wrong with it on this rank."""
        for number in range(step.forwards):
            micro = step.micros[number] if number < len(step.micros) else None
            failure = self.forward_backward.run(micro, step, metrics)
            if failure is not None:
                return failure.error
        return None

    def _launch_reduction(self) -> None:
        """Starts to sum over ranks what the backwards that are under way will leave."""
        assert isinstance(self.forward_backward, CapturedForwardBackward)
        self.forward_backward.hold_gradients()  # a rank without micro-batches has zeros
        self.reduction.launch()
        self._statistics.reduce_logits(self._world)

    def _launch_norm(self, step: StepInputs) -> None:
        """What the host would do next, as far as it goes while the device is at the backward."""
        self.shards.experts.assume_unchanged()
        if step.clips:
            self.clipping.launch(reduced=self.reduction.launched)

    def reduce_gradients(self) -> None:
        self.reduction.finish()

    def clip_gradients(self, step: StepInputs) -> None:
        try:
            self._norm = self.clipping.clip()
        except NonFiniteGradient as error:
            raise self._explained(error, step) from error

    def _explained(self, error: NonFiniteGradient, step: StepInputs) -> NonFiniteGradients:
        """The same with the data that the gradient comes from, each sequence tried again alone; equal on all ranks."""
        message = f"step {step.number}: {str(error).partition(';')[0]}"
        if self._on_mesh.meets:  # a forward pass would need the other ranks
            return NonFiniteGradients(f"{message}. Its data are not known: ranks share experts or sequences")

        def gradients(micro: TrainBatch) -> dict[str, Tensor]:
            self.reduction.zero_grad()
            step.loss(self._on_mesh.target_inputs(micro, step.temperature)).loss.backward()
            self.reduction.collect()
            return {name: p.grad for name, p in self.shards.params.items() if p.grad is not None}

        data = explain_gradient(error.name, step.micros, gradients)
        found = [text for text in self._world.exchange(data or "") if text]
        return NonFiniteGradients(f"{message}. {'; '.join(found) or 'It overflows only in the sum over sequences'}")

    def apply(self, max_logits: dict[int, Tensor], lr_scale: float) -> Update:
        config, adapts = self._config, self._config.lora is not None
        self.optimizer.step_clipped(lr_scale)
        clipped = 0 if adapts else qk_clip_(self.optimizer, max_logits, self._on_mesh.model.config, config.qk_clip)
        self.shards.share_parameters()
        return Update(self._norm, (config.adamw_lr if adapts else config.muon_lr) * lr_scale, clipped)

    def discard_gradients(self) -> None:
        self.reduction.zero_grad()

    # -- forward passes -------------------------------------------------------------------------------------------

    def forwards(self, batch: TrainBatch | None) -> Iterator[tuple[TrainBatch, bool]]:
        return ((micro, True) for micro in self._on_mesh.forwards(batch))

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()

    # -- parameters and state -------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        return self._on_mesh.frozen.whole()

    def memory(self) -> dict[str, int]:
        return self._parameter_bytes | {"optimizer": 0 if self._config.offload_optimizer else self.optimizer.nbytes}

    @cached_property
    def _parameter_bytes(self) -> dict[str, int]:
        return parameter_bytes(self._on_mesh.model, self.shards.params.values(), self._on_mesh.frozen)

    @property
    def graph_bytes(self) -> int:
        return self.forward_backward.graph_bytes + self.optimizer.graph_bytes

    def take_notes(self) -> list[str]:
        return self.forward_backward.take_notes()

    def state_tensors(self) -> dict[str, Tensor]:
        own = self.optimizer.state_tensors(self.shards.counted)
        return {f"{OPTIMIZER}{key}": value for key, value in own.items()}

    def load_owned(self, state: Mapping[str, Tensor]) -> None:
        """Only what this rank owns is read, and what nobody owns, which the optimizer refuses."""
        keys = (key.removeprefix(OPTIMIZER) for key in state if key.startswith(OPTIMIZER))
        self.optimizer.load_state_tensors({key: state[OPTIMIZER + key] for key in keys if self._loads(key)})

    def _loads(self, key: str) -> bool:
        name = key.rpartition("/")[0]
        return name in self.shards.owned or name not in self.shards.owners

    def load_shared(self, state: Mapping[str, Tensor]) -> None:
        self.shards.share_parameters()
