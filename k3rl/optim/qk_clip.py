"""QK-clip: keeps the pre-softmax logits of MLA below a limit by scaling weights, after the optimizer step (k3.md 8.5).

For a head whose largest logit S of the step exceeds tau, with g = tau / S: rows q_n of q_b_proj and k_n of kv_b_proj
are scaled by sqrt(g), rows q_r of q_b_proj by g (their key part is shared by all heads and stays). V rows stay. Where
queries have no low rank their matrix is q_proj. KDA needs nothing: its queries and keys have unit norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from k3rl.optim.classify import HeadLayout, is_mla_query
from k3rl.optim.per_head_muon import PerHeadMuon

TAU = 100.0
_QUERY = re.compile(r"\.layers\.(\d+)\.self_attn\.q(_b)?_proj\.weight$")


class QKClipError(ValueError):
    """Maximal logits that cannot belong to this model; the message says what was got and wanted."""


@lru_cache(maxsize=8)
def _queries(names: tuple[str, ...], config: HeadLayout) -> dict[int, str]:
    """The names of MLA's query matrices by layer; of thousands, so it is looked up once."""
    found = {name: found for name in names if (found := _QUERY.search(name))}
    return {int(match[1]): name for name, match in found.items() if is_mla_query(name, config)}


@torch.no_grad()
def clip_heads_(
    q_b: Tensor | None, kv_b: Tensor | None, max_logits: Tensor, config: HeadLayout, tau: float = TAU
) -> int:
    """Scale one layer's q_b [H*(nope+rope), q_lora] and kv_b [H*(nope+v), kv_lora] in place; None is left to its owner.

    max_logits [H]: largest pre-softmax logit of each head over the batch, softmax scale included; best on the host,
    which reads them. Returns how many heads exceeded tau. Raises QKClipError for a wrong number of heads or a
    non-finite logit.
    """
    heads = config.num_attention_heads
    if max_logits.shape != (heads,):
        raise QKClipError(
            f"max_logits has shape {tuple(max_logits.shape)}; the model has {heads} heads, wanted ({heads},)"
        )
    if not bool(max_logits.isfinite().all()):
        raise QKClipError(f"max_logits is {max_logits.tolist()}; a non-finite logit is a fault of the forward pass")
    clipped = max_logits > tau
    gamma = torch.where(clipped, tau / max_logits, torch.ones_like(max_logits)).view(heads, 1, 1)
    nope = config.qk_nope_head_dim
    if q_b is not None:
        factor = gamma.to(q_b)
        query = q_b.unflatten(0, (heads, nope + config.qk_rope_head_dim))
        query[:, :nope] *= factor.sqrt()
        query[:, nope:] *= factor
    if kv_b is not None:
        keys = kv_b.unflatten(0, (heads, nope + config.v_head_dim))[:, :nope]
        keys *= gamma.to(kv_b).sqrt()
    return int(clipped.sum())


@torch.no_grad()
def qk_clip_(optimizer: PerHeadMuon, max_logits: Mapping[int, Tensor], config: HeadLayout, tau: float = TAU) -> int:
    """Clip the masters of every MLA layer in `max_logits`, and project what changed. Call once after the step.

    max_logits: model layer (from 0) -> [H]. Layers within tau are not touched, not even by rounding. Momenta stay.
    Masters that other ranks own are left to them. Returns the number of heads clipped. Raises QKClipError for a layer
    without trained MLA weights.
    """
    queries = _queries(optimizer.names, config)
    total = 0
    for layer, maximum in max_logits.items():
        if layer not in queries:
            wanted = "q_b_proj or q_proj" if not queries else next(iter(queries.values())).split(".")[-2]
            raise QKClipError(f"layer {layer} has no trained {wanted}; MLA layers are {sorted(queries)}")
        if bool((maximum <= tau).all()):
            continue
        q_b, kv_b = queries[layer], f"{queries[layer].rpartition('self_attn.')[0]}self_attn.kv_b_proj.weight"
        masters = optimizer.masters(name for name in (q_b, kv_b) if name in optimizer.params)
        total += clip_heads_(masters.get(q_b), masters.get(kv_b), maximum, config, tau)
        optimizer.set_masters(masters)
    return total
