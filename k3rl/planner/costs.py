"""What one model costs, from its configuration: parameters by part, work, saved activations, state.

Counts follow the code that runs here (`k3rl/model`), tensor by tensor, and tests compare them with measured ones.
Everything is for one sequence mix (`Mix`) and whole, unsplit; `k3rl.planner.plan` divides it among devices.

Letters as in the model: H hidden, h heads, D head width, Z latent, I expert width, E experts, k chosen, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from k3rl.losses.logprob import TABLE_ELEMENTS
from k3rl.model import K3Config
from k3rl.model.mla import SAVED_PROBABILITIES
from k3rl.model.table import TensorEntry, tensor_table
from k3rl.optim.buckets import BUCKET_ELEMENTS
from k3rl.optim.classify import ParamInfo, classify
from k3rl.optim.newton_schulz import STEPS

CHUNK = 16  # tokens of one KDA chunk in the torch path; the kernels' 32 change its work by about 2 %
KERNEL_CHUNK = 32
WIDE = 4  # bytes of what is computed in float32
ROUTED = "routed_experts"
_SITE = re.compile(r"language_model\.model\.layers\.(?P<layer>\d+)\.(?P<site>self_attn|mlp|block_sparse_moe)\.")


@dataclass(frozen=True, slots=True)
class Mix:
    """Packed sequences: `tokens` in all, in sequences of `length` each, `targets` of them read by the loss.

    bytes_each: of one number in the compute dtype (2 for bf16, 4 for float32, 8 for float64). kernels: a GPU computes,
    by the kernels of `k3rl.kernels`. ranks: of the context axis, over which documents are spread; `tokens` are those
    of one rank, `before` the rows of its first document on other ranks. grouped: all experts are multiplied at once;
    not those that other ranks hold or that have adapters. load: rows that a rank's experts get, over those it sends.
    """

    tokens: int
    length: int
    targets: int
    bytes_each: int = 2
    kernels: bool = False
    ranks: int = 1
    grouped: bool = True
    before: int = 0
    load: float = 1.0

    @property
    def split(self) -> bool:
        """Whether documents are spread over ranks."""
        return self.ranks > 1

    @property
    def seen(self) -> int:
        """Rows that the last query of a sequence attends to."""
        return min(self.length, self.before + self.tokens) if self.split else self.length

    @property
    def wide(self) -> int:
        """Bytes of a number where the model computes wider than bf16."""
        return max(WIDE, self.bytes_each)

    @property
    def padding(self) -> float:
        """KDA works on whole chunks: slots for each token."""
        return math.ceil(self.length / CHUNK) * CHUNK / self.length

    @property
    def extended(self) -> float:
        """The short convolution sees three more rows a sequence: rows for each token."""
        return (self.length + 3) / self.length


def parameters(config: K3Config) -> dict[str, int]:
    """Numbers of each part, as `k3rl inspect` names them."""
    found: Counter[str] = Counter()
    for entry in tensor_table(config):
        found[entry.part] += entry.parameters
    return dict(found)


def shipped_bytes(config: K3Config) -> dict[str, int]:
    """Bytes of each part as a checkpoint, and an engine that keeps experts packed, store them."""
    found: Counter[str] = Counter()
    for entry in tensor_table(config):
        found[entry.part] += entry.bytes
    return dict(found)


def frozen_parts(config: K3Config) -> list[int]:
    """Numbers in each part of the model that `k3rl.parallel.frozen` cuts over ranks and gathers, in forward order.

    Embedding, attention and MLP of each layer without its routed experts, head. Norms between them, what mixes the
    residual stream, router biases and the vision tower stay whole on every rank.
    """
    first, last = "language_model.model.embed_tokens.", "language_model.lm_head."
    found: Counter[tuple[int, int]] = Counter()
    for entry in tensor_table(config):
        match = _SITE.match(entry.name)
        if entry.name.startswith((first, last)):
            found[(-1, 0) if entry.name.startswith(first) else (config.num_hidden_layers, 0)] += entry.parameters
        elif match is not None and entry.part != ROUTED and not entry.name.endswith("e_score_correction_bias"):
            found[int(match["layer"]), int(match["site"] != "self_attn")] += entry.parameters
    return [found[place] for place in sorted(found)]


@dataclass(frozen=True, slots=True)
class OptimizerCosts:
    """Of one step on the whole model; the keys are True for routed experts and False for all else.

    muon and adamw: numbers in each group; flops: of Newton-Schulz; workspace: bytes of temporaries of the bucket that
    needs most, and bucket: its numbers, when one process has everything.
    """

    muon: dict[bool, int]
    adamw: dict[bool, int]
    flops: dict[bool, float]
    workspace: float
    bucket: float


def optimizer_costs(config: K3Config, variant: str = "per_head_muon", products: int = WIDE) -> OptimizerCosts:
    """Costs with a `TrainerConfig.optimizer`. products: bytes of a number in Newton-Schulz, 2 on a GPU."""
    muon, adamw, flops = ({True: 0, False: 0}, {True: 0, False: 0}, {True: 0.0, False: 0.0})
    stacked: Counter[tuple[int, int]] = Counter()  # numbers in blocks of one shape, which are stepped together
    longest: dict[tuple[int, int] | str, int] = {}  # of one matrix; a bucket has at least that
    for entry in tensor_table(config):
        routed = entry.part == ROUTED
        info = _info(entry, config)
        if info.group == "balanced":
            continue
        size = math.prod(entry.shape)
        if info.group == "adamw" or variant == "adamw":
            adamw[routed] += entry.parameters
            longest["adamw"] = max(longest.get("adamw", 0), size)
            continue
        muon[routed] += entry.parameters
        columns = entry.shape[1]
        for rows in info.row_blocks if variant == "per_head_muon" else (entry.shape[0],):
            flops[routed] += entry.copies * _newton_schulz(rows, columns)
            shape = (min(rows, columns), max(rows, columns))
            stacked[shape] += entry.copies * rows * columns
            longest[shape] = max(longest.get(shape, 0), size)
    # Newton-Schulz holds the gradient, two copies of the blocks and three of their Gram matrices; AdamW one row.
    spaces = []
    for shape, total in stacked.items():
        size = min(total, max(BUCKET_ELEMENTS, longest[shape]))
        spaces.append((WIDE * size + products * size * (2 + 3 * shape[0] / shape[1]), float(size)))
    size = min(sum(adamw.values()), max(BUCKET_ELEMENTS, longest.get("adamw", 0)))
    spaces.append((float(WIDE * size), float(size)))
    return OptimizerCosts(muon, adamw, flops, *max(spaces))


def _info(entry: TensorEntry, config: K3Config) -> ParamInfo:
    return classify(entry.name, entry.shape, config)


def _newton_schulz(rows: int, columns: int) -> float:
    """Five steps of X X', a product of two of those, and their product with X; worked on with the fewer rows."""
    r, c = min(rows, columns), max(rows, columns)
    return STEPS * 2.0 * (2 * r * r * c + r**3)


def flops(config: K3Config, mix: Mix) -> dict[str, float]:
    """Floating-point operations of one forward by part, two for each multiplication of a matrix product.

    A backward costs twice as much. Recomputation adds the forward of what it covers.
    """
    found: dict[str, float] = defaultdict(float)
    n, hidden = mix.tokens, config.hidden_size
    for layer in range(config.num_hidden_layers):
        if layer in config.kda_layers:
            found["kda"] += n * _kda_flops(config, mix)
        else:
            found["mla"] += n * _mla_flops(config, mix)
        if layer in config.moe_layers:
            for part, each in _moe_flops(config).items():
                found[part] += n * each
        else:
            found["dense_mlp"] += n * 2.0 * 3 * hidden * config.intermediate_size
    if config.ablation.residual == "attn_res":
        found["attention_residuals"] += n * 2.0 * hidden * sum(sources for sources in _sources(config))
    found["head"] += mix.targets * 2.0 * hidden * config.vocab_size
    return dict(found)


def _kda_flops(config: K3Config, mix: Mix) -> float:
    linear, hidden = config.linear_attn_config, config.hidden_size
    inner, width = linear.num_heads * linear.head_dim, linear.head_dim
    projections = 2.0 * (hidden * (3 * inner + width + linear.num_heads) + width * inner) * mix.extended
    outer = 2.0 * 2 * hidden * inner  # output gate and output
    # Six products with 16 rows of the chunk (two of them pairs), three with the state, for each head and slot.
    chunk = 2.0 * linear.num_heads * (5 * CHUNK * width + 3 * width * width) * mix.padding
    return projections + outer + chunk


def _mla_flops(config: K3Config, mix: Mix) -> float:
    h, hidden = config.num_attention_heads, config.hidden_size
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    projections = hidden * (config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim + 2 * h * value)
    projections += config.q_lora_rank * h * key + config.kv_lora_rank * h * (config.qk_nope_head_dim + value)
    # With all logits at once the masked half is computed too; by runs of queries it is left out.
    seen = mix.length if h * mix.tokens * mix.length <= SAVED_PROBABILITIES else mix.length / 2
    return 2.0 * projections + 2.0 * h * seen * (key + value)


def _moe_flops(config: K3Config) -> dict[str, float]:
    hidden, z, width = config.hidden_size, config.expert_hidden_size, config.moe_intermediate_size
    found: dict[str, float] = {
        "router": 2.0 * hidden * config.num_experts,
        "shared_experts": 2.0 * 3 * hidden * config.num_shared_experts * width,
        ROUTED: 2.0 * 3 * z * width * config.num_experts_per_token,
    }
    if config.ablation.experts != "full_width":
        found["latent_projections"] = 2.0 * 2 * hidden * z
    return found


def _sources(config: K3Config) -> Iterator[int]:
    """Rows that each reading of the residual stream mixes; none before the first block is pushed."""
    bank = 0
    for layer in range(config.num_hidden_layers):
        if bank:
            yield bank + 1
        if layer % config.attn_res_block_size == 0:
            bank += 1
        yield bank + 1
    yield bank + 1


def activations(config: K3Config, mix: Mix) -> dict[str, float]:
    """Bytes that one forward keeps for its backward, by part: each saved tensor once, parameters left out."""
    found: dict[str, float] = defaultdict(float)
    n, hidden, e, w = mix.tokens, config.hidden_size, mix.bytes_each, mix.wide
    for layer in range(config.num_hidden_layers):
        if layer in config.kda_layers:
            found["kda"] += _kda_kept(config, mix)
        else:
            found["mla"] += n * (_mla_saved_by_kernels(config, mix) if mix.kernels else _mla_saved(config, mix))
        found["norms"] += n * 2 * (e * hidden + w)
        if layer in config.moe_layers:
            for part, each in _moe_saved(config, mix).items():
                found[part] += n * each
        else:
            found["dense_mlp"] += n * (e * hidden + config.intermediate_size * _unit_saved(mix))
    found["norms"] += n * (e * hidden + w)
    if config.ablation.residual == "attn_res":
        found["attention_residuals"] += n * _residual_saved(config, mix)
    found["head"] += _head_saved(config, mix)
    return dict(found)


def _kda_kept(config: K3Config, mix: Mix) -> float:
    """Bytes of one layer."""
    if mix.kernels:
        return mix.tokens * _kda_saved_by_kernels(config, mix)
    return mix.tokens * _kda_saved(config, mix) + _kda_final(config, mix)


def _unit_saved(mix: Mix) -> float:
    """Bytes that a gated unit keeps for each number that it gives: its parts, on a GPU its input, and its output."""
    return 3 * mix.bytes_each if mix.kernels else 3 * mix.wide + mix.bytes_each


def _kda_saved_by_kernels(config: K3Config, mix: Mix) -> float:
    """Bytes a token: inputs (twice on ranks that share rows, once behind those of the rank before), the joint
    projection, its convolution, gates, outputs before and after their norm; of a chunk four tiles of its rows, two of
    its pairs, the state, and what decays (`k3rl.kernels.kda.autograd`)."""
    linear, hidden, e = config.linear_attn_config, config.hidden_size, mix.bytes_each
    h, width = linear.num_heads, linear.head_dim
    inner = h * width
    rows = e * (hidden + 3 * inner + width + h + 7 * inner + (hidden if mix.split else 0))
    padding = math.ceil(mix.length / KERNEL_CHUNK) * KERNEL_CHUNK / mix.length
    tiles = e * (4 * inner + 2 * h * KERNEL_CHUNK + inner * width / KERNEL_CHUNK)
    return rows + (tiles + WIDE * (inner / KERNEL_CHUNK + 2 * h)) * padding


def _mla_saved_by_kernels(config: K3Config, mix: Mix) -> float:
    """Bytes a token: as `_mla_saved`, with queries, keys, values and outputs of the flash kernel, all as wide as a key,
    and a normalizer for each head. Rows on other ranks have latents, keys and values here too."""
    e, h, hidden = mix.bytes_each, config.num_attention_heads, config.hidden_size
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    joint = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim + h * value
    rows = float(hidden + joint + config.q_lora_rank + config.kv_lora_rank + 2 * h * value + 4 * h * key)
    if mix.before:
        rows += mix.before / mix.tokens * (config.kv_lora_rank + config.qk_rope_head_dim + 2 * h * key)
    return e * rows + WIDE * (2 + h)


def _kda_saved(config: K3Config, mix: Mix) -> float:
    """Bytes a token: inputs, the joint projection before and after its convolution, ten chunk tensors of a row each,
    three of a chunk's pairs, and the state at every chunk."""
    linear, hidden, e, w = config.linear_attn_config, config.hidden_size, mix.bytes_each, mix.wide
    h, width = linear.num_heads, linear.head_dim
    inner = h * width
    rows = e * (hidden + 3 * inner + width + h) + w * 3 * inner
    chunks = w * (10 * inner + inner * width / CHUNK + 3 * h * CHUNK + 3 * h + inner / CHUNK)
    output = e * (hidden + 2 * inner) + w * (inner + h)
    return rows * mix.extended + chunks * mix.padding + output


def _kda_final(config: K3Config, mix: Mix) -> float:
    """Bytes of the final states of all sequences."""
    linear = config.linear_attn_config
    return mix.tokens / mix.length * linear.num_heads * linear.head_dim**2 * mix.wide


def _mla_saved(config: K3Config, mix: Mix) -> float:
    """Bytes a token; probabilities [h, length] where all of them are few, else a number for each head. A rank has the
    keys and values of its first document's rows on other ranks too."""
    e, w, h, hidden = mix.bytes_each, mix.wide, config.num_attention_heads, config.hidden_size
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    joint = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim + h * value
    rows = e * (hidden + joint + config.q_lora_rank + config.kv_lora_rank + 3 * h * value) + 2 * w
    kept = mix.seen if h * mix.tokens * mix.seen <= SAVED_PROBABILITIES else 1
    return rows + w * h * (2 * key + value + kept + mix.before / mix.tokens * (key + value))


def _moe_saved(config: K3Config, mix: Mix) -> dict[str, float]:
    e, w, hidden = mix.bytes_each, mix.wide, config.hidden_size
    z, width, k = config.expert_hidden_size, config.moe_intermediate_size, config.num_experts_per_token
    shared = config.num_shared_experts * width
    found: dict[str, float] = {
        "router": (w * hidden if e < w and not mix.kernels else 0) + w * config.num_experts + k * (2 * w + 8) + w,
        "shared_experts": e * hidden + shared * _unit_saved(mix),
        ROUTED: k * (e * z + width * (3 * w + e) + 3 * 8),
    }
    if mix.kernels and mix.grouped:  # rows are gathered again, parts made again from the products
        found[ROUTED] = e * z + k * (3 * e * width + 3 * 8)
    found[ROUTED] *= mix.load
    if config.ablation.experts == "latent_norm":
        found["latent_projections"] = 2 * e * z + w
    elif config.ablation.experts == "latent":
        found["latent_projections"] = e * z
    return found


def backward_rows(config: K3Config, mix: Mix) -> float:
    """Bytes of rows that the backward of one layer makes besides what was kept, by kernels: of the experts or of KDA.

    Experts: gradients of their rows as they came, weighted, and to go back, of what the unit gave and read. KDA:
    gradients of q, k, v and gate, of every chunk's state, and three tiles a chunk. And gradients of the stream.
    """
    e, w, k = mix.bytes_each, mix.wide, config.num_experts_per_token
    linear = config.linear_attn_config
    inner = linear.num_heads * linear.head_dim
    experts = (
        k * 3 * (e * config.expert_hidden_size + (e if mix.grouped else w) * config.moe_intermediate_size) * mix.load
    )
    kda = e * inner * (4 + linear.head_dim / KERNEL_CHUNK + 3)
    blocks = math.ceil(config.num_hidden_layers / config.attn_res_block_size)
    stream = config.hidden_size * (3 * e + blocks * w)
    return mix.tokens * (max(experts if config.moe_layers else 0.0, kda if config.kda_layers else 0.0) + stream)


def _residual_saved(config: K3Config, mix: Mix) -> float:
    """Each reading keeps the running sum; the rows of the bank are kept once; weights and norms are small."""
    readings = list(_sources(config))
    sums, small = mix.wide, 2 * sum(readings)
    if mix.kernels:  # running sums as they are, and two more numbers a reading
        sums, small = mix.bytes_each, small + 2 * len(readings)
    rows: float = (2 * config.num_hidden_layers) * config.hidden_size * sums
    if mix.bytes_each < mix.wide:
        rows += math.ceil(config.num_hidden_layers / config.attn_res_block_size) * config.hidden_size * mix.wide
    return rows + mix.wide * small


def _head_saved(config: K3Config, mix: Mix) -> float:
    """Rows of the targets, and their table of log probabilities or, where it is large, a number for each."""
    if mix.targets * config.vocab_size > TABLE_ELEMENTS:
        return mix.targets * (mix.bytes_each * config.hidden_size + mix.wide)
    wide_rows = (mix.wide if mix.bytes_each < mix.wide else 0) + mix.bytes_each
    return mix.targets * (wide_rows * config.hidden_size + mix.wide * config.vocab_size)


def state_bytes(config: K3Config, *, page_bytes_each: int = 2) -> tuple[int, int]:
    """What an engine holds for one sequence: (bytes whatever its length, bytes a token).

    The first is KDA states [h, D, D] in float32 and three rows of convolution history a layer; the second the latent
    and the shared key part of every MLA layer.
    """
    linear = config.linear_attn_config
    inner = linear.num_heads * linear.head_dim
    fixed = len(config.kda_layers) * (inner * linear.head_dim * WIDE + 3 * 3 * inner * page_bytes_each)
    each = len(config.mla_layers) * (config.kv_lora_rank + config.qk_rope_head_dim) * page_bytes_each
    return fixed, each
