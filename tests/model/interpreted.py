"""Runs KDA layers and a whole small K3 on the kernels under Triton's interpreter, against the torch path in float64.

    TRITON_INTERPRET=1 python tests/model/interpreted.py CASE

In a process of its own, as `tests/kernels/interpreted.py`. Dispatch is told that the kernels take every bf16 tensor;
float64 models with the same weights take the torch path. Errors are relative Frobenius norms against float64. What
bf16 itself costs is measured beside it, by the torch path on the same bf16 weights; to that the kernels may add, in the
sense of independent errors, what their own caps allow (`tests/kernels/interpreted.py`).
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import torch

from k3rl.engine import Engine
from k3rl.kernels import dispatch
from k3rl.model import K3Config, K3ForCausalLM, LinearAttnConfig, QuantizationConfig
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.types import SamplingParams

OUTPUT, STATE, GRADIENT = 6e-3, 3e-3, 1.5e-2
SPREAD = 1.25  # two paths in bf16 err in different places; how much differs from one to the other by about this
SUMS = ("gradient of A_log", "gradient of dt_bias")  # over all tokens, where terms cancel
SUM = 2e-2
kernels_on = True


def forced(family: str, *tensors: torch.Tensor, **_: object) -> bool:
    return kernels_on and tensors[0].dtype == torch.bfloat16


def config(**changes: object) -> K3Config:
    """KDA heads as the kernels take them, everything else small."""
    linear = LinearAttnConfig(num_heads=2, head_dim=128, kda_layers=(1, 2), full_attn_layers=(3,))
    small = dict(
        vocab_size=40, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=64, moe_intermediate_size=32,
        num_experts=4, num_experts_per_token=2, num_shared_experts=1, routed_expert_hidden_size=32,
        attn_res_block_size=2, linear_attn_config=linear, max_position_embeddings=256, media_placeholder_token_id=39,
        pad_token_id=38, bos_token_id=0, eos_token_id=0, quantization=QuantizationConfig(activations="none"),
    )  # fmt: skip
    return K3Config.named("k3-nano").replace(**(small | changes))


def models(**changes: object) -> dict[torch.dtype, K3ForCausalLM]:
    """The same weights in bf16 and float64."""
    made = {dtype: K3ForCausalLM(config(**changes), dtype=dtype) for dtype in (torch.bfloat16, torch.float64)}
    made[torch.bfloat16].init_weights(0)
    with torch.no_grad():
        for (name, narrow), wide in zip(
            made[torch.bfloat16].named_parameters(), made[torch.float64].parameters(), strict=True
        ):
            if name.endswith(("A_log", "dt_bias")):
                narrow.add_(0.3 * torch.randn_like(narrow))
            wide.copy_(narrow)
    return made


def layers() -> dict[torch.dtype, KimiDeltaAttention]:
    return {dtype: model.language_model.model.layers[1].self_attn for dtype, model in models().items()}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    value = float(((got.double() - want.double()).norm() / want.double().norm()).detach())
    return value if value == value else float("inf")


def require(name: str, kernels: torch.Tensor, plain: torch.Tensor, want: torch.Tensor, cap: float) -> None:
    """kernels, plain: results in bf16 by either path; want: in float64; cap: of the kernels alone."""
    found, own = error(kernels, want), error(plain, want)
    if not found <= math.hypot(SPREAD * own, SUM if name in SUMS else cap):
        raise SystemExit(f"{name}: relative error {found:.2e}; the torch path has {own:.2e}, the kernels' cap is {cap}")


def switched(on: bool) -> None:
    global kernels_on
    kernels_on = on


def both_ways(run):
    """What `run` gives with kernels and without."""
    switched(True)
    first = run()
    switched(False)
    second = run()
    switched(True)
    return first, second


def layer() -> None:
    """One layer over packed documents, one of a single token: output and every gradient; documents apart."""
    own, lengths = layers(), [17, 1, 33]
    x = torch.randn(sum(lengths), 64).bfloat16()
    up = torch.randn(sum(lengths), 64).bfloat16()

    def run(dtype: torch.dtype):
        given = x.to(dtype).requires_grad_()
        out = own[dtype](given, Layout(lengths), None)
        return [out, *torch.autograd.grad(out, [given, *own[dtype].parameters()], up.to(dtype))]

    kernels, plain = both_ways(lambda: run(torch.bfloat16))
    want = run(torch.float64)
    names = ["output", "gradient of x", *(f"gradient of {name}" for name, _ in own[torch.float64].named_parameters())]
    for name, *three in zip(names, kernels, plain, want, strict=True):
        require(name, *three, cap=GRADIENT if name.startswith("gradient") else OUTPUT)
    pieces = [own[torch.bfloat16](piece, Layout([len(piece)]), None) for piece in x.split(lengths)]
    if not torch.equal(torch.cat(pieces), kernels[0]):
        raise SystemExit("packed documents are not the documents by themselves")


def states() -> None:
    """Chunked prefill of two rows into a pool, then decode on its slots, then prefill again, against one pass."""
    made = models()
    tokens = torch.randint(0, 38, (2, 24))
    cuts = [0, 17, 18, 19, 24]  # of one token: decode

    def run(model: K3ForCausalLM):
        cache = model.new_cache(5)
        view = cache.select(torch.tensor([3, 1]))
        hidden = [model.hidden(tokens[:, a:b], cache=view).hidden for a, b in pairwise(cuts)]
        layers = model.config.kda_layers
        return torch.cat(hidden, 1), [view.recurrent(n) for n in layers], [view.conv(n) for n in layers], cache

    kernels, plain = both_ways(lambda: run(made[torch.bfloat16]))
    wide = made[torch.float64]
    cache = wide.new_cache(2)
    want = wide.hidden(tokens, cache=cache).hidden
    require("hidden rows", kernels[0], plain[0], want, cap=OUTPUT)
    for index, number in enumerate(wide.config.kda_layers):
        require(f"state {number}", kernels[1][index], plain[1][index], cache.recurrent(number), cap=STATE)
        require(f"history {number}", kernels[2][index], plain[2][index], cache.conv(number), cap=OUTPUT)
        untouched = [0, 2, 4]
        if kernels[3].recurrent(number)[untouched].any() or kernels[3].conv(number)[untouched].any():
            raise SystemExit("rows of the pool that are nobody's were written")


def whole() -> None:
    """A model with quantized activations: hidden rows and gradients of a packed batch, recorded routes."""
    made = models(quantization=QuantizationConfig(activations="mxfp8"))
    tokens = torch.randint(0, 38, (1, 30))
    ends = torch.tensor([0, 12, 30])
    routes = made[torch.float64].hidden(tokens, cu_seqlens=ends).routes
    up = torch.randn(1, 30, 64)

    def run(model: K3ForCausalLM):
        out = model.hidden(tokens, cu_seqlens=ends, routes=routes).hidden
        named = {n: p for n, p in model.named_parameters() if p.requires_grad and "experts." not in n}
        grads = torch.autograd.grad((out * up.to(out.dtype)).sum(), list(named.values()), allow_unused=True)
        used = [(n, g) for n, g in zip(named, grads, strict=True) if g is not None]
        return out, torch.cat([g.flatten().double() for n, g in used if ".self_attn." in n]), len(used)

    kernels, plain = both_ways(lambda: run(made[torch.bfloat16]))
    want = run(made[torch.float64])
    require("hidden rows", kernels[0], plain[0], want[0], cap=OUTPUT)
    require("gradients of attention", kernels[1], plain[1], want[1], cap=GRADIENT)
    if kernels[2] != want[2]:
        raise SystemExit("other parameters have gradients with kernels than without")


def engine() -> None:
    """The engine on the kernels, decoding by the program of fixed shapes: logprobs against the learner's."""
    made = models()
    prompts, own = [[5, 9, 2], list(range(1, 20))], SamplingParams(max_tokens=4, seed=1)
    gaps = []
    engine = Engine(made[torch.bfloat16], max_running=3, max_context=40, page_tokens=8, static_decode=True)
    for prompt, completion in zip(prompts, engine.generate(prompts, own), strict=True):
        with torch.no_grad():
            logits = made[torch.float64](torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        expected = rows[torch.arange(4), list(completion.token_ids)]
        gaps.append((torch.tensor(completion.logprobs) - expected).abs().max())
    if not max(gaps) < 2e-2:  # nats, bf16 against float64 on an untrained model
        raise SystemExit(f"logprobs are {float(max(gaps)):.2e} nats from the learner's")


CASES = {"layer": layer, "states": states, "whole": whole, "engine": engine}

if __name__ == "__main__":
    dispatch.use_kernel = forced
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        torch.manual_seed(0)
        CASES[case]()
