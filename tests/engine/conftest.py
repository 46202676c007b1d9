"""A tiny K3 with every part, quantized activations on, and an engine-free way to generate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from k3rl.engine.sampling import sampler
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.types import SamplingParams

VOCAB = 40


def tiny_config(**changes) -> K3Config:
    """Two KDA layers (the first dense), one MLA layer, 4 experts top-2, two AttnRes blocks, MXFP4 and MXFP8 on."""
    nano = K3Config.named("k3-nano")
    linear = type(nano.linear_attn_config)(num_heads=2, head_dim=8, kda_layers=(1, 2), full_attn_layers=(3,))
    tiny = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        routed_expert_hidden_size=32,
        attn_res_block_size=2,
        linear_attn_config=linear,
        max_position_embeddings=256,
        media_placeholder_token_id=VOCAB - 1,
        pad_token_id=VOCAB - 2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return nano.replace(**{**tiny, **changes})


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> K3ForCausalLM:
    """The tiny model with random weights, its head scaled up so that the distribution is far from uniform."""
    model = K3ForCausalLM(tiny_config(**changes), dtype=dtype)
    model.init_weights(seed)
    with torch.no_grad():
        for name, parameter in model.official_parameters():
            if name.endswith("lm_head.weight"):
                parameter.mul_(2)
    return model


def teacher_forced(model: K3ForCausalLM, ids: list[int]):
    """(logits [T, V], routes [T, M, k]) of one pass over ids without a cache."""
    with torch.no_grad():
        out = model.hidden(torch.tensor([ids]))
        return model.logits(out.hidden[0]), out.routes[0].numpy()


def alone(model: K3ForCausalLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    """(ids, logprobs) of one request, by whole passes over all its tokens: no cache, no batch, no engine."""
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < params.max_tokens and not (ids and ids[-1] in params.stop_ids):
        logits, _ = teacher_forced(model, [*prompt, *ids])
        draws = sampler.sample(
            logits[-1:],
            np.array([params.temperature]),
            np.array([params.top_p]),
            np.array([params.top_k]),
            sampler.uniforms(np.array([params.seed], np.uint64), np.array([len(ids)])),
        )
        ids.append(int(draws.ids[0]))
        logprobs.append(float(draws.logprobs[0]))
    return ids, logprobs


@pytest.fixture(scope="session")
def model() -> K3ForCausalLM:
    """The tiny model in float64; tests must not change it."""
    return build()


@pytest.fixture(scope="session")
def build_model() -> Callable[..., K3ForCausalLM]:
    return build


@pytest.fixture(scope="session")
def run_alone() -> Callable:
    return alone


@pytest.fixture(scope="session")
def run_teacher_forced() -> Callable:
    return teacher_forced
