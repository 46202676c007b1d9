"""What a model consists of, from its configuration alone: parameters, bytes as stored, parts (`k3rl inspect`).

`tensor_table` lists every parameter of a configuration without building the model, so the 2.78 T-parameter one takes
a second. For a checkpoint directory the listing is also checked against what the files, or the index alone, hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rl.checkpoint.hf import CONFIG, CheckpointError, StoredFiles, as_stored
from k3rl.model import K3Config, VisionConfig
from k3rl.model.config import MX_BLOCK
from k3rl.numerics import stored_dtype

NAMED = ("k3-nano", "k3-mini", "k3-small", "k3")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`copies` parameters of one shape. `name` is the official name of one of them.

    part: the key under `parts` of `inspect`. stored_elements: with padding (A_log), equal to the parameters elsewhere.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    stored: str
    copies: int = 1
    stored_elements: int | None = None

    @property
    def parameters(self) -> int:
        """Numbers in all copies."""
        return math.prod(self.shape) * self.copies

    @property
    def bytes(self) -> int:
        """As stored: MXFP4 is half a byte a number and one scale byte per 32."""
        elements = self.parameters if self.stored_elements is None else self.stored_elements * self.copies
        if self.stored == "mxfp4":
            return elements // 2 + elements // 32
        return elements * (4 if self.stored == "fp32" else 2)

    @property
    def tensors(self) -> int:
        """Names in the checkpoint."""
        return self.copies * (2 if self.stored == "mxfp4" else 1)


def tensor_table(config: K3Config) -> Iterator[TensorEntry]:
    """Every parameter of a model (k3.md 1.3); the experts of a layer are one entry per matrix."""
    h, v = config.hidden_size, config.vocab_size
    top, mixes = "language_model.model", config.ablation.residual == "attn_res"
    yield _entry(config, f"{top}.embed_tokens.weight", "embedding", (v, h))
    for layer in range(config.num_hidden_layers):
        prefix = f"{top}.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _entry(config, f"{prefix}.{norm}.weight", "norms", (h,))
        for site in ("self_attention", "mlp") if mixes else ():
            yield _entry(config, f"{prefix}.{site}_res_norm.weight", "attention_residuals", (h,))
            yield _entry(config, f"{prefix}.{site}_res_proj.weight", "attention_residuals", (1, h))
        yield from (_kda if layer in config.kda_layers else _mla)(config, f"{prefix}.self_attn")
        if layer in config.moe_layers:
            yield from _moe(config, f"{prefix}.block_sparse_moe")
        else:
            yield from _mlp(config, f"{prefix}.mlp", "dense_mlp", config.intermediate_size)
    yield _entry(config, f"{top}.norm.weight", "norms", (h,))
    if mixes:
        yield _entry(config, f"{top}.output_attn_res_norm.weight", "attention_residuals", (h,))
        yield _entry(config, f"{top}.output_attn_res_proj.weight", "attention_residuals", (1, h))
    yield _entry(config, "language_model.lm_head.weight", "lm_head", (v, h))
    if config.vision_config is not None:
        yield from _vision(config, config.vision_config)


def _entry(config: K3Config, name: str, part: str, shape: tuple[int, ...], **more: Any) -> TensorEntry:
    return TensorEntry(name, part, shape, stored_dtype(name, config.quantization.shipped().weights), **more)


def _kda(config: K3Config, prefix: str) -> Iterator[TensorEntry]:
    linear = config.linear_attn_config
    heads, width, h = linear.num_heads, linear.head_dim, config.hidden_size
    inner = heads * width
    shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (inner, h) for x in "qkvg"}
    shapes |= {f"{x}_conv1d.weight": (inner, 1, linear.short_conv_kernel_size) for x in "qkv"}
    shapes |= {
        "f_a_proj.weight": (width, h),
        "f_b_proj.weight": (inner, width),
        "b_proj.weight": (heads, h),
        "dt_bias": (inner,),
        "o_norm.weight": (width,),
        "o_proj.weight": (h, inner),
    }
    for name, shape in shapes.items():
        yield _entry(config, f"{prefix}.{name}", "kda", shape)
    yield _entry(config, f"{prefix}.A_log", "kda", (heads,), stored_elements=max(heads, width))


def _mla(config: K3Config, prefix: str) -> Iterator[TensorEntry]:
    heads, h = config.num_attention_heads, config.hidden_size
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (config.q_lora_rank, h),
        "q_a_layernorm": (config.q_lora_rank,),
        "q_b_proj": (heads * key, config.q_lora_rank),
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, h),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "g_proj": (heads * config.v_head_dim, h),
        "o_proj": (h, heads * config.v_head_dim),
    }
    for name, shape in shapes.items():
        yield _entry(config, f"{prefix}.{name}.weight", "mla", shape)


def _mlp(config: K3Config, prefix: str, part: str, width: int) -> Iterator[TensorEntry]:
    for name, shape in (
        ("gate_proj", (width, config.hidden_size)),
        ("up_proj", (width, config.hidden_size)),
        ("down_proj", (config.hidden_size, width)),
    ):
        yield _entry(config, f"{prefix}.{name}.weight", part, shape)


def _moe(config: K3Config, prefix: str) -> Iterator[TensorEntry]:
    h, z, width, experts = (
        config.hidden_size,
        config.expert_hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
    )
    yield _entry(config, f"{prefix}.gate.weight", "router", (experts, h))
    yield _entry(config, f"{prefix}.gate.e_score_correction_bias", "router", (experts,))
    if config.ablation.experts != "full_width":
        yield _entry(config, f"{prefix}.routed_expert_down_proj.weight", "latent_projections", (z, h))
        yield _entry(config, f"{prefix}.routed_expert_up_proj.weight", "latent_projections", (h, z))
    if config.ablation.experts == "latent_norm":
        yield _entry(config, f"{prefix}.routed_expert_norm.weight", "norms", (z,))
    yield from _mlp(config, f"{prefix}.shared_experts", "shared_experts", config.num_shared_experts * width)
    for name, shape in (("w1", (width, z)), ("w3", (width, z)), ("w2", (z, width))):
        yield _entry(config, f"{prefix}.experts.0.{name}.weight", "routed_experts", shape, copies=experts)


def _vision(config: K3Config, vision: VisionConfig) -> Iterator[TensorEntry]:
    w, inner, mlp = vision.vt_hidden_size, vision.qkv_hidden_size, vision.vt_intermediate_size
    tower = "vision_tower"
    patch = (w, 3, vision.patch_size, vision.patch_size)
    table = (vision.init_pos_emb_height, vision.init_pos_emb_width, w)
    yield _entry(config, f"{tower}.patch_embed.proj.weight", tower, patch)
    yield _entry(config, f"{tower}.patch_embed.pos_emb.weight", tower, table)
    for block in range(vision.vt_num_hidden_layers):
        for name, shape in (
            ("wqkv", (3 * inner, w)),
            ("wo", (w, inner)),
            ("mlp.fc0", (mlp, w)),
            ("mlp.fc1", (w, mlp)),
            ("norm0", (w,)),
            ("norm1", (w,)),
        ):
            yield _entry(config, f"{tower}.encoder.blocks.{block}.{name}.weight", tower, shape)
    yield _entry(config, f"{tower}.encoder.final_layernorm.weight", tower, (w,))
    merged = vision.mm_hidden_size * math.prod(vision.merge_kernel_size)
    for name, shape in (
        ("proj.0", (merged, merged)),
        ("proj.2", (vision.text_hidden_size, merged)),
        ("post_norm", (vision.text_hidden_size,)),
    ):
        yield _entry(config, f"mm_projector.{name}.weight", "mm_projector", shape)


def _active(config: K3Config, table: list[TensorEntry]) -> int:
    """Parameters that take part in one text token: k of the routed experts, no input embedding, no vision."""
    total = 0
    for entry in table:
        if entry.part in ("embedding", "vision_tower", "mm_projector"):
            continue
        if entry.part == "routed_experts":
            total += entry.parameters // config.num_experts * config.num_experts_per_token
        else:
            total += entry.parameters
    return total


def inspect(directory_or_name: str | Path) -> dict[str, Any]:
    """A checkpoint directory, or one of the named sizes, as one JSON-ready object.

    A directory may hold all of a checkpoint, or only `config.json` and the index, without weights.
    parameters (A_log by its real heads, router biases, vision and projector included); active_parameters, those that
    one text token uses, without the input embedding; bytes and tensors as stored; parts {name: {parameters, bytes,
    tensors, dtypes {format: parameters}}}; quantized, the parts that are stored as MXFP4; model, the named size with
    the fewest differing keys; differences {key: [here, there]} to it; config.

    Raises ModelConfigError for an unknown name, CheckpointError when a directory's files disagree with its config.
    """
    path = Path(directory_or_name)
    if str(directory_or_name) in NAMED and not path.is_dir():
        config = K3Config.named(str(directory_or_name))
    elif path.is_dir():
        config = _checked_directory(path)
    else:
        raise CheckpointError(f"{directory_or_name} is neither a checkpoint directory nor one of {', '.join(NAMED)}")
    table = list(tensor_table(config))
    parts: dict[str, dict[str, Any]] = {}
    for entry in table:
        part = parts.setdefault(entry.part, {"parameters": 0, "bytes": 0, "tensors": 0, "dtypes": {}})
        part["parameters"] += entry.parameters
        part["bytes"] += entry.bytes
        part["tensors"] += entry.tensors
        part["dtypes"][entry.stored] = part["dtypes"].get(entry.stored, 0) + entry.parameters
    nearest, differences = _nearest(config)
    return {
        "name": str(directory_or_name),
        "parameters": sum(entry.parameters for entry in table),
        "active_parameters": _active(config, table),
        "bytes": sum(entry.bytes for entry in table),
        "tensors": sum(entry.tensors for entry in table),
        "parts": parts,
        "quantized": [name for name, part in parts.items() if "mxfp4" in part["dtypes"]],
        "model": nearest,
        "differences": differences,
        "config": config.to_dict(),
    }


def _checked_directory(path: Path) -> K3Config:
    """The configuration of a directory, experts as they are stored, after its names and sizes were compared with it.

    Raises CheckpointError when a name is missing or unknown, or a tensor or the index's total has another size.
    """
    files = StoredFiles(path)
    config = as_stored(K3Config.from_json(path / CONFIG), files)
    sizes = {name: size for entry in tensor_table(config) for name, size in _stored_names(entry)}
    if sizes.keys() != set(files):
        odd = min(sizes.keys() ^ set(files))
        side = "is not stored" if odd in sizes else "belongs to no parameter"
        raise CheckpointError(f"{path} and its {CONFIG} disagree: {odd} {side}")
    if not files.has_weights:
        total = sum(sizes.values())
        if files.total_size not in (None, total):
            raise CheckpointError(
                f"{path}: the index says {files.total_size} bytes; a model of its {CONFIG} has {total}"
            )
        return config
    for name, size in sizes.items():
        if (found := files.stored_bytes(name)) != size:
            raise CheckpointError(f"{path} and its {CONFIG} disagree: {name} has {found} bytes, wanted {size}")
    return config


def _stored_names(entry: TensorEntry) -> Iterator[tuple[str, int]]:
    """(name in the files, bytes) of every tensor of an entry."""
    for name in _copies(entry):
        if entry.stored == "mxfp4":
            elements = math.prod(entry.shape)
            yield f"{name}_packed", elements // 2
            yield f"{name}_scale", elements // MX_BLOCK
        else:
            yield name, entry.bytes // entry.copies


def _copies(entry: TensorEntry) -> Iterator[str]:
    if entry.part != "routed_experts":
        yield entry.name
        return
    for expert in range(entry.copies):
        yield entry.name.replace(".experts.0.", f".experts.{expert}.")


def _nearest(config: K3Config) -> tuple[str, dict[str, list[Any]]]:
    """The named size with the fewest differing keys, and those keys with both values."""
    best: tuple[str, dict[str, list[Any]]] | None = None
    here = _flat(config.to_dict())
    for name in NAMED:
        there = _flat(K3Config.named(name).to_dict())
        differing = {
            key: [here.get(key), there.get(key)] for key in sorted(here.keys() | there.keys())
            if here.get(key) != there.get(key)
        }  # fmt: skip
        if best is None or len(differing) < len(best[1]):
            best = name, differing
    assert best is not None
    return best


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys; JSON types throughout."""
    if not isinstance(value, dict):
        return {prefix: json.loads(json.dumps(value))}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat
