"""Which optimizer trains a parameter, and how its rows are cut (k3.md 8.3, 8.4).

Decided by the official name alone, so that a checkpoint of any size is treated alike:

    Muon, one block per head    q_proj, k_proj, v_proj of KDA; q_b_proj, or q_proj of MLA; kv_b_proj (K, V rows apart)
    Muon, the whole matrix      o_proj, g_proj, g_a/g_b_proj, f_a/f_b_proj, q_a_proj, kv_a_proj_with_mqa, dense and
                                shared MLPs, routed_expert_down/up_proj, the router's gate, w1/w2/w3 of every expert on
                                its own
    AdamW                       embeddings, lm_head, norms, A_log, dt_bias, convolutions, b_proj, AttnRes projections,
                                vision tower and projector, A and B of adapters
    neither                     e_score_correction_bias, which QuantileBalancer moves

The report gives Muon to "matrix parameters" and its public readings list what AdamW takes; the router is a matrix that
no such list names, so it goes to Muon. The two factors of an adapter are no weight matrices: orthogonalizing each does
not orthogonalize the update of their product, and A's few rows belong to no head. Weight decay leaves vectors alone,
also those stored as [1, n]; a factor of an adapter is a matrix, of rank 1 too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from k3rl.optim.config import Scaling, Variant

Group = Literal["muon", "adamw", "balanced"]

BASE_WIDTH = 64
"""Columns of a matrix for which `Scaling` "width" leaves a rate as it is: the hidden size of `k3-nano`."""


class HeadLayout(Protocol):
    """The part of `K3Config` that says how attention projections are cut."""

    def __hash__(self) -> int: ...
    @property
    def linear_attn_config(self) -> _KdaHeads: ...
    @property
    def kda_layers(self) -> tuple[int, ...]: ...
    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


class _KdaHeads(Protocol):
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class ClassifyError(ValueError):
    """A parameter name or shape that the rules above do not cover."""


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """How one parameter is trained.

    A Muon matrix [R, C] has `heads` equal runs of rows, each cut into blocks of `segments` rows:
    R = heads * sum(segments). A whole matrix is one head of one segment.
    """

    group: Group
    decay: bool
    heads: int = 1
    segments: tuple[int, ...] = ()

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Rows of every block, top to bottom."""
        return self.segments * self.heads


_PER_HEAD = re.compile(r"\.self_attn\.(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj)\.weight$")
_WHOLE = re.compile(
    r"\.self_attn\.(o_proj|g_proj|g_a_proj|g_b_proj|f_a_proj|f_b_proj|q_a_proj|kv_a_proj_with_mqa)\.weight$"
    r"|\.mlp\.(gate|up|down)_proj\.weight$"
    r"|\.block_sparse_moe\.(gate|routed_expert_down_proj|routed_expert_up_proj)\.weight$"
    r"|\.shared_experts\.(gate|up|down)_proj\.weight$"
    r"|\.experts\.\d+\.w[123]\.weight$"
)
_ADAMW = re.compile(
    r"(?:^|\.)(embed_tokens|lm_head|[a-z_]*norm|[qkv]_conv1d|b_proj|[a-z_]*_res_proj)\.weight$"
    r"|\.self_attn\.(A_log|dt_bias)$"
    r"|^(vision_tower|mm_projector)\."
    r"|\.lora_[AB]\.weight$"
)
_READS_HIDDEN = re.compile(r"\.(lm_head|b_proj|[a-z_]*_res_proj)\.weight$")
_LAYER = re.compile(r"\.layers\.(\d+)\.self_attn\.q_proj\.")
_BALANCED = re.compile(r"\.e_score_correction_bias$")


def is_mla_query(name: str, config: HeadLayout) -> bool:
    """Whether this is the matrix that makes the queries of an MLA layer: q_b_proj, or q_proj without a low rank."""
    if name.endswith(".q_b_proj.weight"):
        return True
    # Who knows K3 alone says nothing of a rank, and its `q_proj` are those of KDA.
    if (found := _LAYER.search(name)) is None or getattr(config, "q_lora_rank", 0) is not None:
        return False
    return int(found[1]) not in config.kda_layers


def _head_cut(name: str, kind: str, config: HeadLayout) -> tuple[int, tuple[int, ...]]:
    """(heads, segments) of a projection that is cut per head."""
    if is_mla_query(name, config):
        return config.num_attention_heads, (config.qk_nope_head_dim + config.qk_rope_head_dim,)
    if kind == "kv_b_proj":
        return config.num_attention_heads, (config.qk_nope_head_dim, config.v_head_dim)
    return config.linear_attn_config.num_heads, (config.linear_attn_config.head_dim,)


def classify(name: str, shape: Sequence[int], config: HeadLayout) -> ParamInfo:
    """The optimizer group and row blocks of the parameter with this official name and shape.

    Raises ClassifyError for a name that no rule covers, or a matrix whose rows do not fit its heads.
    """
    if _BALANCED.search(name):
        return ParamInfo("balanced", decay=False)
    per_head = _PER_HEAD.search(name)
    if per_head or _WHOLE.search(name):
        if len(shape) != 2:
            raise ClassifyError(f"{name} has shape {tuple(shape)}; Muon trains matrices [rows, columns]")
        if not per_head:
            return ParamInfo("muon", decay=True, heads=1, segments=(shape[0],))
        heads, segments = _head_cut(name, per_head.group(1), config)
        if shape[0] != heads * sum(segments):
            raise ClassifyError(
                f"{name} has {shape[0]} rows; the config wants {heads} heads of {' + '.join(map(str, segments))} rows"
            )
        return ParamInfo("muon", decay=True, heads=heads, segments=segments)
    if _ADAMW.search(name):
        return ParamInfo("adamw", decay=".lora_" in name or sum(size > 1 for size in shape) > 1)
    raise ClassifyError(
        f"no rule of k3rl.optim.classify covers the parameter {name!r} of shape {tuple(shape)}; "
        "official names end in '.weight', '.A_log', '.dt_bias' or '.e_score_correction_bias'"
    )


def adamw_scale(name: str, shape: Sequence[int], scaling: Scaling) -> float:
    """What AdamW's rate is multiplied with for this parameter (`MuonConfig.scaling`).

    Entries of a matrix that reads rows of C features all move together, so what it gives moves C times as far as one of
    them; embeddings, convolutions, norms, vectors and adapters read no such rows.
    """
    reads = _READS_HIDDEN.search(name) or _PER_HEAD.search(name) or _WHOLE.search(name)
    return BASE_WIDTH / shape[-1] if scaling == "width" and reads else 1.0


def _as_variant(variant: Variant, info: ParamInfo, shape: torch.Size) -> ParamInfo:
    """What `variant` makes of a parameter's class."""
    if info.group != "muon" or variant == "per_head_muon":
        return info
    if variant == "muon_whole":
        return ParamInfo("muon", info.decay, heads=1, segments=(shape[0],))
    return ParamInfo("adamw", info.decay)


def trained(
    named_params: Iterable[tuple[str, Tensor]], config: HeadLayout, variant: Variant = "per_head_muon"
) -> dict[str, tuple[ParamInfo, Tensor]]:
    """name -> (how it is trained, parameter) of those that an optimizer moves.

    Raises ValueError for a name given twice.
    """
    found: dict[str, tuple[ParamInfo, Tensor]] = {}
    for name, param in named_params:
        if name in found:
            raise ValueError(f"the parameter {name} was given twice")
        info = _as_variant(variant, classify(name, param.shape, config), param.shape)
        if info.group != "balanced" and param.requires_grad:
            found[name] = info, param
    return found
