"""A model as the ranks of a mesh compute with it: whose the rows of a micro-batch are, and the logprobs of targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from k3rl.data import TrainBatch, stack
from k3rl.losses import LossInputs, target_logprobs
from k3rl.model import K3ForCausalLM, prepare_adapter
from k3rl.parallel.agree import agree_on_start, check_layout
from k3rl.parallel.context import ContextParallel, ContextShare, pair_cost
from k3rl.parallel.exact import ValueOf, exact_target_logprobs
from k3rl.parallel.expert import ExpertParallel
from k3rl.parallel.frozen import FrozenSlices
from k3rl.parallel.mesh import Mesh
from k3rl.parallel.settings import TrainerConfig


class ModelOnMesh:
    """A model, the mesh that trains it, and what ranks of the mesh exchange inside a forward.

    experts: routed experts on other ranks, None where each rank holds all. frozen: frozen weights cut over ranks.
    context: ranks that share the rows of a micro-batch. meets: whether ranks meet inside a forward, so that they take
    each micro-batch together.

    Making one is a collective. A vision tower is frozen: its parameters no longer require a gradient. With
    `config.lora` everything but the adapter is: the one that is attached to the model, or a fresh one. Raises
    ConfigError when mesh, adapter and config do not fit, RanksDisagree when ranks have different configurations or
    weights.
    """

    def __init__(self, model: K3ForCausalLM, config: TrainerConfig, mesh: Mesh) -> None:
        self.model, self.config, self.mesh = model, config, mesh
        prepare_adapter(model, config.lora)
        check_layout(mesh, model, config)
        agree_on_start(mesh, model, config)
        self.frozen = FrozenSlices(model, mesh, config.shard_frozen)
        self.experts: ExpertParallel | None = None
        if mesh.expert.size > 1:
            self.experts = ExpertParallel(mesh, model.config.num_experts)
            model.connect(self.experts)
        model.recompute(config.recompute)
        self.context = ContextParallel(mesh.context, mesh.world, pair=pair_cost(model.config))
        self.meets = mesh.expert.size > 1 or mesh.context.size > 1 or config.shard_frozen > 1
        for name, parameter in model.named_parameters():
            if name.startswith("vision_tower."):
                parameter.requires_grad_(False)

    @property
    def sent_bytes(self) -> int:
        """What left this rank for experts of others so far."""
        return 0 if self.experts is None else self.experts.sent_bytes

    def cut(self, batch: TrainBatch | None) -> list[TrainBatch]:
        """This rank's micro-batches. Raises BatchError or SequenceTooLong for what model or budget cannot take."""
        if batch is None:
            return []
        batch.check_fits(self.model.config.vocab_size, self.model.config.num_experts)
        budget = self.config.micro_batch_tokens * self.context.size  # of one micro-batch, on all that share it
        return batch.split(budget, self.context.pair if self.meets else None)

    def forwards(self, batch: TrainBatch | None) -> Iterator[TrainBatch]:
        """The micro-batches of a forward-only pass; dummy forwards then take part in those of other ranks.

        Raises as `cut` does, and PeerFailed where ranks meet and another one's batch cannot be cut.
        """
        if not self.meets:
            yield from self.cut(batch)
            return
        with self.mesh.world.together("cutting a batch"):  # the others wait here and have to hear of an error
            micros = self.cut(batch)
        most = torch.tensor([len(micros)], device=self.model.device)
        self.mesh.world.maximum(most)
        yield from micros
        for _ in range(int(most) - len(micros)):
            self.model.dummy_forward()
        self.frozen.release()

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
            inputs = self._inputs(batch, share, temperature)
        if self.config.exact:
            value = exact_target_logprobs(self.model, batch, temperature).to(inputs.logprobs.device)
            inputs = replace(inputs, logprobs=ValueOf.apply(inputs.logprobs, value))
        return inputs

    def target_values(self, batch: TrainBatch, temperature: float, share: ContextShare) -> Tensor:
        """The logprobs [P] alone, of the exact forward with `config.exact`; to be called under no_grad."""
        if self.config.exact:
            return exact_target_logprobs(self.model, batch, temperature)
        return self.target_inputs(batch, temperature, share).logprobs

    def _inputs(self, batch: TrainBatch, share: ContextShare, temperature: float) -> LossInputs:
        """Logprobs and entropies [P] by the usual forward, and the batch's streams at the targets [P]."""
        device = self.model.device

        def head() -> Tensor:
            return self.frozen.gather(self.model.language_model.lm_head).weight

        logprobs, entropy = scored_targets(self.model, batch, share, head, temperature)

        def at_targets(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values[share.targets]).to(device, logprobs.dtype)

        teacher = batch.teacher_logprobs
        return LossInputs(
            logprobs=logprobs,
            sampler_logprobs=at_targets(batch.sampler_logprobs),
            advantages=at_targets(batch.advantages),
            weights=at_targets(batch.weights),
            teacher_logprobs=None if teacher is None else at_targets(teacher),
            entropy=entropy,
        )


def scored_targets(
    model: K3ForCausalLM, batch: TrainBatch, share: ContextShare, head: Callable[[], Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [P] of the P targets of a share of a packed micro-batch, by the usual forward.

    head: gives its weight [V, H] once the layers have run.
    """
    device = model.device
    ids = torch.from_numpy(batch.input_ids).to(device)
    targets = torch.from_numpy(share.targets).to(device)
    rows = ids[share.tokens].repeat_interleave(torch.from_numpy(share.rows_per_token).to(device))
    routes = None if batch.routes is None else torch.from_numpy(batch.routes[share.rows])[None].to(device)
    out = model.hidden(
        rows[None],
        cu_seqlens=torch.from_numpy(share.cu_seqlens),
        routes=routes,
        images=_images(model, share),
        context=share.communicator,
    )
    before = out.hidden[0].index_select(0, torch.from_numpy(share.before).to(device))
    sampling_mask = None if batch.sampling_mask is None else batch.sampling_mask.take(share.targets)
    return target_logprobs(before, head(), ids[targets], temperature, sampling_mask)


def _images(model: K3ForCausalLM, share: ContextShare) -> tuple[Tensor, Tensor] | None:
    """The `images` of `K3ForCausalLM.hidden`: their rows, with gradients into the projector, and places."""
    if not share.images:
        return None
    pixels, grids = stack(share.images)
    rows = torch.cat(model.image_rows(torch.from_numpy(pixels), torch.from_numpy(grids)))
    return rows, torch.from_numpy(share.places).to(rows.device)
