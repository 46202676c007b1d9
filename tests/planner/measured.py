"""Memory and work of real steps, measured: what the planner's formulas are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import Trainer
from k3rl.planner import LiveBytes


def logprob_sum(model: K3ForCausalLM, tokens: int, length: int, targets: int) -> torch.Tensor:
    """The sum of `targets` logprobs of a packed batch of random ids, as the trainer computes them."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    out = model.hidden(ids, cu_seqlens=torch.arange(0, tokens + 1, length))
    logits = model.logits(out.hidden[0].index_select(0, torch.arange(targets)))
    return torch.log_softmax(logits, -1).gather(1, ids[0, :targets, None]).sum()


def model_of(name: str, dtype: torch.dtype) -> K3ForCausalLM:
    model = K3ForCausalLM(K3Config.named(name), dtype=dtype)
    model.init_weights(0)
    return model


def saved_and_flops(model: K3ForCausalLM, tokens: int, length: int, targets: int) -> tuple[int, int]:
    """(bytes that a forward keeps, each storage once and parameters left out; its floating-point operations)."""
    own = {parameter.untyped_storage().data_ptr() for _, parameter in model.official_parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), storage)
        return tensor

    counter = FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        loss = logprob_sum(model, tokens, length, targets)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values()), counter.get_total_flops()


def training_peak(model: K3ForCausalLM, tokens: int, length: int, targets: int) -> int:
    """Bytes alive at the worst moment of the second of two forward-backwards, besides the parameters."""
    live = LiveBytes([parameter for _, parameter in model.official_parameters()])
    with live:
        for _ in range(2):
            logprob_sum(model, tokens, length, targets).backward()
    return live.peak


def step_peak(trainer: Trainer) -> int:
    """Bytes that an optimizer step takes at its worst, besides parameters, gradients and its own state."""
    parameters = [parameter for _, parameter in trainer.model.official_parameters()]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    optimizer = trainer.native.optimizer
    live = LiveBytes([*parameters, *gradients, *optimizer.state.tensors()])
    with live:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step(1.0)
    return live.peak
