"""What a loss is given: a forward over a rank's share of a packed micro-batch, and the batch's values at targets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.data.batch import TrainBatch
from k3rl.data.images import stack
from k3rl.losses import LossInputs, target_logprobs
from k3rl.model import K3ForCausalLM
from k3rl.parallel.context import ContextShare
from k3rl.parallel.frozen import FrozenSlices


def loss_inputs(
    model: K3ForCausalLM, frozen: FrozenSlices, batch: TrainBatch, share: ContextShare, temperature: float
) -> LossInputs:
    """Logprobs and entropies [P] of the P targets of the share, with gradients, and the batch's streams at them [P]."""
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
    head = frozen.need(model.language_model.lm_head).weight
    sampling_mask = None if batch.sampling_mask is None else batch.sampling_mask.take(share.targets)
    logprobs, entropy = target_logprobs(before, head, ids[targets], temperature, sampling_mask)

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


def _images(model: K3ForCausalLM, share: ContextShare) -> tuple[Tensor, Tensor] | None:
    """The `images` of `K3ForCausalLM.hidden`: their rows, with gradients into the projector, and places."""
    if not share.images:
        return None
    pixels, grids = stack(share.images)
    rows = torch.cat(model.image_rows(torch.from_numpy(pixels), torch.from_numpy(grids)))
    return rows, torch.from_numpy(share.places).to(rows.device)
