"""Frozen weights that ranks share: what `k3rl.parallel.frozen` cuts over ranks and gathers part by part."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import cache

from k3rl.model import K3Config, tensor_table
from k3rl.model.costs import ROUTED
from k3rl.planner.inputs import Method
from k3rl.planner.shares import DeviceParameters, model_counts

_SITE = re.compile(r"(?:language_model\.)?model\.layers\.(?P<layer>\d+)\.(?P<site>self_attn|mlp|block_sparse_moe)\.")


@cache
def frozen_parts(config: K3Config) -> tuple[int, ...]:
    """Numbers in each part of the model that is cut and gathered, in forward order.

    Embedding, attention and MLP of each layer without its routed experts, head. Norms between them, what mixes the
    residual stream, router biases and the vision tower stay whole on every rank.
    """
    first, last = f"{config.prefix}model.embed_tokens.", f"{config.prefix}lm_head."
    found: Counter[tuple[int, int]] = Counter()
    for entry in tensor_table(config):
        match = _SITE.match(entry.name)
        if entry.name.startswith((first, last)):
            found[(-1, 0) if entry.name.startswith(first) else (config.num_hidden_layers, 0)] += entry.parameters
        elif match is not None and entry.part != ROUTED and not entry.name.endswith("e_score_correction_bias"):
            found[int(match["layer"]), int(match["site"] != "self_attn")] += entry.parameters
    return tuple(found[place] for place in sorted(found))


def cut_bytes(config: K3Config, method: Method, held: DeviceParameters) -> float:
    """Bytes of a stage's weights that are cut over ranks, before they are."""
    facts = model_counts(config)
    return held.rest * method.weight_bytes * sum(frozen_parts(config)) / (facts.rest + facts.first + facts.last)


def gathered_numbers(config: K3Config) -> int:
    """Numbers of the two largest neighbouring parts: the one that runs, and the one that comes or has just run."""
    return max(one + other for one, other in itertools.pairwise(frozen_parts(config)))
