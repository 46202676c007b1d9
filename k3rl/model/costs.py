"""What one model costs, from its configuration: parameters by part, work, saved activations, state of a sequence.

Counts follow the code of this folder, tensor by tensor, and tests compare them with measured ones. Everything is for
one `MicroBatch` and the whole model; `k3rl.planner` divides it among devices and adds losses and the optimizer.

Letters as in the model: H hidden, h heads, D head width, Z latent, I expert width, E experts, k chosen, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from k3rl.model.config import K3Config
from k3rl.model.mla import SAVED_PROBABILITIES
from k3rl.model.table import tensor_table

CHUNK = 16  # tokens of one KDA chunk in the torch path; the kernels' 32 change its work by about 2 %
KERNEL_CHUNK = 32
WIDE = 4  # bytes of what is computed in float32
ROUTED = "routed_experts"


@dataclass(frozen=True, slots=True)
class MicroBatch:
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
    def rows_seen(self) -> int:
        """Rows that the last query of a sequence attends to."""
        return min(self.length, self.before + self.tokens) if self.split else self.length

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number where the model computes wider than bf16."""
        return max(WIDE, self.bytes_each)

    @property
    def slots_per_token(self) -> float:
        """Rows that KDA computes for each token, because it works on whole chunks."""
        return math.ceil(self.length / CHUNK) * CHUNK / self.length

    @property
    def conv_rows_per_token(self) -> float:
        """Rows that the short convolution reads for each token: three more in a sequence."""
        return (self.length + 3) / self.length


def parameters(config: K3Config) -> dict[str, int]:
    """Numbers of each part, as `k3rl inspect` names them."""
    found: Counter[str] = Counter()
    for entry in tensor_table(config):
        found[entry.part] += entry.parameters
    return dict(found)


def stored_bytes(config: K3Config) -> dict[str, int]:
    """Bytes of each part as a checkpoint, and an engine that keeps experts packed, store them."""
    found: Counter[str] = Counter()
    for entry in tensor_table(config):
        found[entry.part] += entry.bytes
    return dict(found)


def flops(config: K3Config, batch: MicroBatch) -> dict[str, float]:
    """Floating-point operations of one forward by part, two for each multiplication of a matrix product.

    A backward costs twice as much. Recomputation adds the forward of what it covers.
    """
    found: dict[str, float] = defaultdict(float)
    n, hidden = batch.tokens, config.hidden_size
    for layer in range(config.num_hidden_layers):
        if layer in config.kda_layers:
            found["kda"] += n * _kda_flops(config, batch)
        else:
            found["mla"] += n * _mla_flops(config, batch)
        if layer in config.moe_layers:
            for part, each in _moe_flops(config).items():
                found[part] += n * each
        else:
            found["dense_mlp"] += n * 2.0 * 3 * hidden * config.intermediate_size
    if config.ablation.residual == "attn_res":
        found["attention_residuals"] += n * 2.0 * hidden * sum(sources for sources in _sources(config))
    found["head"] += batch.targets * 2.0 * hidden * config.vocab_size
    return dict(found)


def _kda_flops(config: K3Config, batch: MicroBatch) -> float:
    linear, hidden = config.linear_attn_config, config.hidden_size
    inner, width = linear.num_heads * linear.head_dim, linear.head_dim
    projections = 2.0 * (hidden * (3 * inner + width + linear.num_heads) + width * inner) * batch.conv_rows_per_token
    gate = hidden * inner if linear.use_full_rank_gate else width * (hidden + inner)
    outer = 2.0 * (hidden * inner + gate)  # output and its gate
    # Six products with 16 rows of the chunk (two of them pairs), three with the state, for each head and slot.
    chunk = 2.0 * linear.num_heads * (5 * CHUNK * width + 3 * width * width) * batch.slots_per_token
    return projections + outer + chunk


def _mla_flops(config: K3Config, batch: MicroBatch) -> float:
    h, hidden = config.num_attention_heads, config.hidden_size
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    projections = hidden * (_mla_inputs(config) + h * value)
    projections += (config.q_lora_rank or 0) * h * key + config.kv_lora_rank * h * (config.qk_nope_head_dim + value)
    # With all logits at once the masked half is computed too; by runs of queries it is left out.
    seen = batch.length if h * batch.tokens * batch.length <= SAVED_PROBABILITIES else batch.length / 2
    return 2.0 * projections + 2.0 * h * seen * (key + value)


def _mla_inputs(config: K3Config) -> int:
    """Columns of the product that reads what an MLA layer reads: queries or their low rank, latent, key, gate."""
    h, key = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    queries = h * key if config.q_lora_rank is None else config.q_lora_rank
    gate = h * config.v_head_dim if config.mla_use_output_gate else 0
    return queries + config.kv_lora_rank + config.qk_rope_head_dim + gate


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


def activations(config: K3Config, batch: MicroBatch) -> dict[str, float]:
    """Bytes that one forward keeps for its backward, by part: each saved tensor once, parameters left out.

    What the loss keeps of the targets' rows is not of the model; `k3rl.planner.memory` adds it.
    """
    found: dict[str, float] = defaultdict(float)
    n, hidden, e, w = batch.tokens, config.hidden_size, batch.bytes_each, batch.wide_bytes
    for layer in range(config.num_hidden_layers):
        if layer in config.kda_layers:
            found["kda"] += _kda_activations(config, batch)
        else:
            found["mla"] += n * (_mla_saved_by_kernels(config, batch) if batch.kernels else _mla_saved(config, batch))
        found["norms"] += n * 2 * (e * hidden + w)
        if layer in config.moe_layers:
            for part, each in _moe_saved(config, batch).items():
                found[part] += n * each
        else:
            found["dense_mlp"] += n * (e * hidden + config.intermediate_size * _unit_saved(batch))
    found["norms"] += n * (e * hidden + w)
    if config.ablation.residual == "attn_res":
        found["attention_residuals"] += n * _residual_saved(config, batch)
    return dict(found)


def _kda_activations(config: K3Config, batch: MicroBatch) -> float:
    """Bytes of one layer."""
    if batch.kernels:
        return batch.tokens * _kda_saved_by_kernels(config, batch)
    return batch.tokens * _kda_saved(config, batch) + _kda_final(config, batch)


def _unit_saved(batch: MicroBatch) -> float:
    """Bytes that a gated unit keeps for each number that it gives: its parts, on a GPU its input, and its output."""
    return 3 * batch.bytes_each if batch.kernels else 3 * batch.wide_bytes + batch.bytes_each


def _kda_saved_by_kernels(config: K3Config, batch: MicroBatch) -> float:
    """Bytes a token: inputs (twice on ranks that share rows, once behind those of the rank before), the joint
    projection, its convolution, gates, outputs before and after their norm; of a chunk four tiles of its rows, two of
    its pairs, the state, and what decays (`k3rl.kernels.kda.autograd`)."""
    linear, hidden, e = config.linear_attn_config, config.hidden_size, batch.bytes_each
    h, width = linear.num_heads, linear.head_dim
    inner = h * width
    rows = e * (hidden + 3 * inner + width + h + 7 * inner + (hidden if batch.split else 0))
    padding = math.ceil(batch.length / KERNEL_CHUNK) * KERNEL_CHUNK / batch.length
    tiles = e * (4 * inner + 2 * h * KERNEL_CHUNK + inner * width / KERNEL_CHUNK)
    return rows + (tiles + WIDE * (inner / KERNEL_CHUNK + 2 * h)) * padding


def _mla_saved_by_kernels(config: K3Config, batch: MicroBatch) -> float:
    """Bytes a token: as `_mla_saved`, with queries, keys, values and outputs of the flash kernel, all as wide as a key,
    and a normalizer for each head. Rows on other ranks have latents, keys and values here too."""
    e, h, hidden = batch.bytes_each, config.num_attention_heads, config.hidden_size
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    outputs = 2 if config.mla_use_output_gate else 1
    rows = float(
        hidden
        + _mla_inputs(config)
        + (config.q_lora_rank or 0)
        + config.kv_lora_rank
        + outputs * h * value
        + 4 * h * key
    )
    if batch.before:
        rows += batch.before / batch.tokens * (config.kv_lora_rank + config.qk_rope_head_dim + 2 * h * key)
    return e * rows + WIDE * (2 + h)


def _kda_saved(config: K3Config, batch: MicroBatch) -> float:
    """Bytes a token: inputs, the joint projection before and after its convolution, ten chunk tensors of a row each,
    three of a chunk's pairs, and the state at every chunk."""
    linear, hidden, e, w = config.linear_attn_config, config.hidden_size, batch.bytes_each, batch.wide_bytes
    h, width = linear.num_heads, linear.head_dim
    inner = h * width
    rows = e * (hidden + 3 * inner + width + h) + w * 3 * inner
    chunks = w * (10 * inner + inner * width / CHUNK + 3 * h * CHUNK + 3 * h + inner / CHUNK)
    output = e * (hidden + 2 * inner) + w * (inner + h)
    return rows * batch.conv_rows_per_token + chunks * batch.slots_per_token + output


def _kda_final(config: K3Config, batch: MicroBatch) -> float:
    """Bytes of the final states of all sequences."""
    linear = config.linear_attn_config
    return batch.tokens / batch.length * linear.num_heads * linear.head_dim**2 * batch.wide_bytes


def _mla_saved(config: K3Config, batch: MicroBatch) -> float:
    """Bytes a token; probabilities [h, length] where all of them are few, else a number for each head. A rank has the
    keys and values of its first document's rows on other ranks too."""
    e, w, h, hidden = batch.bytes_each, batch.wide_bytes, config.num_attention_heads, config.hidden_size
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    values = 3 if config.mla_use_output_gate else 1
    low = config.q_lora_rank or 0
    rows = e * (hidden + _mla_inputs(config) + low + config.kv_lora_rank + values * h * value) + (2 if low else 1) * w
    kept = batch.rows_seen if h * batch.tokens * batch.rows_seen <= SAVED_PROBABILITIES else 1
    return rows + w * h * (2 * key + value + kept + batch.before / batch.tokens * (key + value))


def _moe_saved(config: K3Config, batch: MicroBatch) -> dict[str, float]:
    e, w, hidden = batch.bytes_each, batch.wide_bytes, config.hidden_size
    z, width, k = config.expert_hidden_size, config.moe_intermediate_size, config.num_experts_per_token
    shared = config.num_shared_experts * width
    found: dict[str, float] = {
        "router": (w * hidden if e < w and not batch.kernels else 0) + w * config.num_experts + k * (2 * w + 8) + w,
        "shared_experts": e * hidden + shared * _unit_saved(batch),
        ROUTED: k * (e * z + width * (3 * w + e) + 3 * 8),
    }
    if batch.kernels and batch.grouped:  # rows are gathered again, parts made again from the products
        found[ROUTED] = e * z + k * (3 * e * width + 3 * 8)
    found[ROUTED] *= batch.load
    if config.ablation.experts == "latent_norm":
        found["latent_projections"] = 2 * e * z + w
    elif config.ablation.experts == "latent":
        found["latent_projections"] = e * z
    return found


def backward_rows(config: K3Config, batch: MicroBatch) -> float:
    """Bytes of rows that the backward of one layer makes besides what was kept, by kernels: of the experts or of KDA.

    Experts: gradients of their rows as they came, weighted, and to go back, of what the unit gave and read. KDA:
    gradients of q, k, v and gate, of every chunk's state, and three tiles a chunk. And gradients of the stream.
    """
    e, w, k = batch.bytes_each, batch.wide_bytes, config.num_experts_per_token
    linear = config.linear_attn_config
    inner = linear.num_heads * linear.head_dim
    experts = (
        k
        * 3
        * (e * config.expert_hidden_size + (e if batch.grouped else w) * config.moe_intermediate_size)
        * batch.load
    )
    kda = e * inner * (4 + linear.head_dim / KERNEL_CHUNK + 3)
    blocks = 0
    if config.ablation.residual == "attn_res":
        blocks = math.ceil(config.num_hidden_layers / config.attn_res_block_size)
    stream = config.hidden_size * (3 * e + blocks * w)
    return batch.tokens * (max(experts if config.moe_layers else 0.0, kda if config.kda_layers else 0.0) + stream)


def _residual_saved(config: K3Config, batch: MicroBatch) -> float:
    """Each reading keeps the running sum; the rows of the bank are kept once; weights and norms are small."""
    readings = list(_sources(config))
    sums, small = batch.wide_bytes, 2 * sum(readings)
    if batch.kernels:  # running sums as they are, and two more numbers a reading
        sums, small = batch.bytes_each, small + 2 * len(readings)
    rows: float = (2 * config.num_hidden_layers) * config.hidden_size * sums
    if batch.bytes_each < batch.wide_bytes:
        rows += math.ceil(config.num_hidden_layers / config.attn_res_block_size) * config.hidden_size * batch.wide_bytes
    return rows + batch.wide_bytes * small


def sequence_state_bytes(config: K3Config, *, page_bytes_each: int = 2) -> tuple[int, int]:
    """What an engine holds for one sequence: (bytes whatever its length, bytes a token).

    The first is KDA states [h, D, D] in float32 and three rows of convolution history a layer; the second the latent
    and the shared key part of every MLA layer.
    """
    linear = config.linear_attn_config
    inner = linear.num_heads * linear.head_dim
    fixed = len(config.kda_layers) * (inner * linear.head_dim * WIDE + 3 * 3 * inner * page_bytes_each)
    each = len(config.mla_layers) * (config.kv_lora_rank + config.qk_rope_head_dim) * page_bytes_each
    return fixed, each
