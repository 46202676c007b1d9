"""The learner actor: one rank of the learner; takes optimizer steps, gives out weights and checkpoints."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from k3rl.actors.teachers import Teachers
from k3rl.actors.weight_sync import BaseVersion, Export, Link, Location, Publication, Transport, WeightSource
from k3rl.checkpoint import (
    StateWriter,
    TrainState,
    TrainStateError,
    load_checkpoint,
    refuse_foreign,
    restore,
    save_adapter,
    save_checkpoint,
    weights_fingerprint,
    weights_of,
)
from k3rl.data import SequenceScores, TrainBatch
from k3rl.kernels import compile_cache, slow_paths
from k3rl.model import DeviceName, K3Config, K3ForCausalLM, adapted, place_of
from k3rl.parallel import (
    LearnerConfig,
    Loss,
    Mesh,
    ScorerConfig,
    Trainer,
    TrainerConfig,
    World,
    make_trainer,
    pair_cost,
)
from k3rl.run import Accumulator
from k3rl.tokens import Tokenizer

_NATIVE = LearnerConfig()


class LearnerActor:
    """A synchronous Ray actor around one `Trainer`: one rank of the learner's mesh.

    Whatever creates, trains, saves or publishes is a collective: it is called on all ranks, which give equal arguments
    unless a method says otherwise. It may hold a whole teacher per domain for distillation.
    """

    def __init__(self, threads: int, device: DeviceName = "cpu") -> None:
        """device: where models are, in float32 on the CPU and in bf16 on a GPU, masters in float32 either way."""
        if device == "cuda":
            compile_cache.use()
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)
        torch.manual_seed(0)  # draws of k3rl have seeds of their own; this is for libraries, and part of a state
        self._device_name, self._device = device, torch.device(device)
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._world = World.alone(self._device)
        self._meshes: dict[tuple[int, int], Mesh] = {}
        self._writer = StateWriter()
        self._trainer: Trainer | None = None
        self._teachers = Teachers(self._dtype, self._device)
        self.weights = WeightSource(self._device)
        self._tokenizer: Tokenizer | None = None
        self._start: str | None = None  # the checkpoint that the weights came from
        self._told: list[str] = []  # of slow paths
        self._seed = 0  # what fresh weights came from
        self._frozen: str | None = None  # on rank 0: fingerprint of weights that stay
        self._computes = "float32"  # in what steps are computed, which masters are rounded to

    def address(self) -> str:
        """host:port on this node where the ranks may meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str, rank: int, size: int, timeout_s: float) -> None:
        """Becomes rank `rank` of `size`; returns when all are there. Raises MissingResource without its device."""
        place_of(self._device_name)
        self._world = World(rank, size, address, timeout_s=timeout_s, device=self._device)
        self._writer = StateWriter(rank, size, timeout_s=timeout_s)
        self._meshes.clear()

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("this learner has no model yet; call create(...) or load(...) first")
        return self._trainer

    def create(
        self, config: Mapping[str, Any], trainer: TrainerConfig, seed: int, learner: LearnerConfig = _NATIVE
    ) -> int:
        """A freshly initialised model from an official-layout config; returns its number of parameters."""
        self._tokenizer, self._start, self._seed = Tokenizer.builtin(), None, seed
        built, mesh = K3Config.from_dict(dict(config)), _mesh_of(self._meshes, self._world, trainer)
        packed = _packs(trainer, learner) and built.quantization.weights == "mxfp4"
        held = mesh.experts(built.num_experts)
        with self._world.together("making a model"):
            model = K3ForCausalLM(
                built, dtype=self._dtype, device=_model_device(self._device_name, trainer), experts=held, packed=packed
            )
            model.init_weights(seed)
        return self._adopt(model, trainer, mesh, learner)

    def load(
        self,
        checkpoint: str,
        trainer: TrainerConfig,
        learner: LearnerConfig = _NATIVE,
        quantization: Mapping[str, str] | None = None,
    ) -> int:
        """A checkpoint's model, with fresh optimizer state; quantization as in `load_checkpoint`."""
        self._tokenizer, self._start = Tokenizer.load(checkpoint), str(weights_of(checkpoint))
        mesh = _mesh_of(self._meshes, self._world, trainer)
        packed = _packs(trainer, learner)
        device = _model_device(self._device_name, trainer)
        with self._world.together("loading a checkpoint"):
            model = load_checkpoint(
                checkpoint, self._dtype, device, mesh=mesh, packed=packed, quantization=quantization
            )
        if model.quantization_loss is not None:
            print(f"{checkpoint}: {model.quantization_loss}", flush=True)
        return self._adopt(model, trainer, mesh, learner)

    def _adopt(self, model: K3ForCausalLM, config: TrainerConfig, mesh: Mesh, learner: LearnerConfig) -> int:
        size = model.parameter_count()  # before a backend may cut parameters over the ranks
        self._trainer = make_trainer(model, config, learner, mesh)  # which also ships every parameter
        self.weights.attach(self._trainer)
        self._teachers.clear()
        self._frozen = None
        half = learner.backend == "deepspeed" and learner.deepspeed.dtype == "bf16"
        self._computes = "bfloat16" if half else "float32"
        stays = config.lora is not None or model.config.vision_config is not None
        if stays and self._world.rank == 0:
            self._frozen = weights_fingerprint(self._start, self._seed)
        return size

    def load_teachers(self, checkpoints: Mapping[str, str], scorer: ScorerConfig) -> None:
        """A frozen policy for each domain, whole on each rank; domains that name one directory share its weights."""
        self._teachers.load(checkpoints, scorer)

    def train(
        self, batches: Sequence[TrainBatch | None], loss: Loss, lr_scale: float = 1.0, temperature: float = 1.0
    ) -> Accumulator:
        """One optimizer step for each batch, of which this rank gets its share; together they are one rollout batch.

        Raises TrainStateError when a state that was being written meanwhile could not be.
        """
        try:
            self._writer.check()
        except TrainStateError as error:  # the other ranks are about to wait for this one
            self._world.leave(str(error))
            raise
        metrics = Accumulator()
        self.trainer.statistics.scores.clear()
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            metrics.merge(
                self.trainer.train(batch, loss, lr_scale=lr_scale, temperature=temperature, last_of_batch=last)
            )
        return metrics

    def warm_up(self, loss: Loss, temperature: float = 1.0, *, routes: bool = False, teacher: bool = False) -> None:
        """See `Trainer.warm_up`."""
        self.trainer.warm_up(loss, temperature=temperature, routes=routes, teacher=teacher)

    def pair_cost(self) -> float:
        """What a pair of tokens costs this model (`k3rl.parallel.pair_cost`)."""
        return pair_cost(self.trainer.model.config)

    def notes(self) -> list[str]:
        """What a person should read about this rank's GPU and the last steps; each is given once.

        Raises TrainStateError where a state that was being written meanwhile could not be.
        """
        self._writer.check()
        slow = [text for text in slow_paths(self._device) if text not in self._told]
        self._told += slow
        notes, self.trainer.notes = self.trainer.notes, []
        return [*slow, *notes]

    def annotations(self) -> tuple[dict[str, SequenceScores], np.ndarray | None]:
        """What the last `train` computed on this rank: scores by sequence id, of steps that were not captured, and the
        load of experts [MoE layers, experts]. Given once."""
        statistics = self.trainer.statistics
        return statistics.scores.take(), statistics.expert_load

    def evaluate(self, batch: TrainBatch | None, loss: Loss) -> Accumulator:
        """The loss's metrics on this rank's share."""
        return self.trainer.evaluate(batch, loss)

    def logprobs(self, batch: TrainBatch | None, temperature: float = 1.0) -> np.ndarray:
        """float32 [N] of this rank's share."""
        return self.trainer.logprobs(batch, temperature)

    def teacher_logprobs(self, batch: TrainBatch, domains: Sequence[str], temperature: float = 1.0) -> np.ndarray:
        """float32 [N]: each sequence scored by the teacher of its domain, or by the one named `*`. No collective."""
        return self._teachers.logprobs(batch, domains, temperature)

    # --------------------------------------------------------------------------------------------------- weights

    def set_version(self, number: int, keep_base: bool = True) -> None:
        """Continues the numbering of versions, after engines were loaded afresh with the weights that are held now."""
        self.weights.set_version(number, keep_base)

    def publish(self, served: Sequence[BaseVersion], stream: bool = False) -> Publication | None:
        """The next weight version for engines that serve these; see `WeightSource.publish`."""
        return self.weights.publish(served, stream)

    def export(self) -> Export:
        """Writes this rank's shard of the next weight version; see `WeightSource.export`."""
        return self.weights.export()

    def location(self) -> Location | None:
        """Where this rank's weights are; None of a rank whose weights others send."""
        return self.weights.location() if self.weights.sends_shard else None

    def open_transfer(self, transport: Transport, receivers: int, timeout_s: float, *, nccl: bool) -> Link:
        """Where engines may meet this rank; `join_transfer` then waits for them."""
        return self.weights.open(transport, receivers, timeout_s, nccl=nccl)

    def join_transfer(self) -> None:
        """Raises TransferBroken when an engine does not come."""
        self.weights.join()

    def send(self) -> int:
        """Sends what was published or exported last to engines that prepare it meanwhile; returns its bytes."""
        return self.weights.send()

    def close_transfer(self) -> None:
        self.weights.close()

    # ----------------------------------------------------------------------------------------------------- files

    def save_checkpoint(self, directory: str, card: Mapping[str, Any]) -> str:
        """Writes the official layout, each rank its files; returns the directory."""
        with self.trainer.whole() as model:
            save_checkpoint(model, directory, tokenizer=self._tokenizer, card=dict(card), mesh=self.trainer.mesh)
        return directory

    def save_adapter(self, directory: str, base: str, card: Mapping[str, Any]) -> str:
        """Writes the adapter that is trained, in PEFT's format, on rank 0; returns the directory.

        base: where to write the weights beside it, when they came from no checkpoint.
        """
        trainer = self.trainer
        adapter = trainer.model.adapter
        if adapter is None:
            raise RuntimeError("this learner trains the weights themselves; call save_checkpoint(...)")
        if self._start is None:
            with trainer.whole() as model, adapted(model, None):
                save_checkpoint(model, base, tokenizer=self._tokenizer, mesh=trainer.mesh)
        tensors = {name: tensor.cpu() for name, tensor in trainer.adapter_tensors().items()}
        with self._world.together("writing an adapter"):
            if self._world.rank == 0:
                save_adapter(
                    tensors,
                    adapter.config,
                    directory,
                    activations=trainer.model.config.quantization.activations,
                    base=self._start or base,
                    fingerprint=None
                    if self._start is None
                    else self._frozen,  # of what was loaded, not of what is there
                    tokenizer=self._tokenizer,
                    card=card,
                )
        return directory

    def save_state(self, directory: str, extra: Mapping[str, Any], save_id: str) -> None:
        """Begins to write this rank's part of all that a bit-equal continuation needs; `state_saved` waits for it.

        extra: the pipeline's own JSON.
        """
        model = {"config": self.trainer.model.config.to_dict(), "start": self._start, "seed": self._seed}
        settings = self.trainer.config.model_dump(mode="json")
        learner = {"model": model | {"frozen": self._frozen}, "trainer": settings, "rounded_to": self._computes}
        extra = {**extra, "weight_version": self.weights.version, "learner": learner}
        self._writer.save(Path(directory), self.trainer.owned_state(), extra, save_id=save_id, fresh=True)

    def state_saved(self) -> None:
        """Returns when the state of the last `save_state` is on the disk. Raises TrainStateError."""
        self._writer.wait()

    def load_state(self, directory: str) -> dict[str, Any]:
        """Restores `save_state`, written by any number of ranks; returns its `extra`. Raises TrainStateError."""
        trainer, state = self.trainer, TrainState(Path(directory))
        with self._world.together("comparing a training state with the model"):
            frozen = None if self._frozen is None else (self._start, self._frozen)
            refuse_foreign(state, trainer.model.config, trainer.config.lora, frozen)
        extra = restore(trainer, state, self._writer.rank)
        self.weights.version = extra["weight_version"]
        return extra


def _model_device(name: DeviceName, trainer: TrainerConfig) -> torch.device:
    """Where a model begins: one that is cut over ranks need not fit a device whole, and is moved by its trainer."""
    place_of(name)
    return torch.device("cpu" if trainer.shard_frozen > 1 else name)


def _packs(trainer: TrainerConfig, learner: LearnerConfig) -> bool:
    """Whether experts are kept packed from the start. DeepSpeed takes hold of every parameter, frozen ones too."""
    return trainer.packs and learner.backend == "native"


def _mesh_of(meshes: dict[tuple[int, int], Mesh], world: World, config: TrainerConfig) -> Mesh:
    """The layout that a trainer asks for; each is made once, as its groups stay."""
    degrees = config.expert_parallel, config.context_parallel
    if degrees not in meshes:
        meshes[degrees] = Mesh(world, expert=degrees[0], context=degrees[1])
    return meshes[degrees]
