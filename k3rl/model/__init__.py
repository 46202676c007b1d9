"""The K3 architecture in plain torch: exact in float64, quick on a CPU, on kernels where a GPU has them.

config.py ablation.py table.py    K3Config, official key names; the common choice for a part; every tensor's size
decoder.py  K3ForCausalLM         layout.py cache.py    packed rows, chunks, grids; recurrent and latent state per row
kda.py kda_chunks.py kda_gates.py kda_tiles.py kda_context.py mla.py flash.py moe.py moe_grouped.py train_routing.py
attn_res.py situ.py gated.py norm.py vision.py    one part of k3.md each, as a CPU and as a GPU computes it
joined.py fuse.py side_stream.py recompute.py blocks.py cells.py    how the work is laid out: none of it changes a value
packed.py bank_gradients.py       experts as stored bytes; their gradients      exact.py flat_step.py    other steps
lora.py low_rank.py    adapters beside frozen matrices       init.py device.py watch.py    fresh weights, places, a look
Not here: kernels, optimizers, losses, anything parallel.
"""

from k3rl.model import flash
from k3rl.model.ablation import CHOICES as ABLATION_CHOICES
from k3rl.model.ablation import AblationConfig, ModelConfigError
from k3rl.model.attn_res import ResidualStream
from k3rl.model.bank_gradients import EXPERT_LEAVES, BankGradients, clear_gradients
from k3rl.model.cache import Cache, CacheError, ChunkCache, Slots, StepCache, slot_index
from k3rl.model.config import K3Config
from k3rl.model.config_parts import LinearAttnConfig, ModelFileError, QuantizationConfig, VisionConfig
from k3rl.model.decoder import HiddenOutput, InputError, K3ForCausalLM, K3Output
from k3rl.model.device import DeviceName, place_of
from k3rl.model.exact import (
    EXACT_BLOCK,
    ExactError,
    exact_hidden,
    exact_logits,
    exact_logprob,
    exact_logprobs,
    fixed_arithmetic,
)
from k3rl.model.flat_step import FlatStep
from k3rl.model.fuse import fused, fusing
from k3rl.model.gated import SiTU, SwiGLU
from k3rl.model.joined import joined_in
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import FixedLayout, Layout, LayoutError
from k3rl.model.lora import Adapter, AdapterError, LoraConfig, adapted, merge, prepare_adapter
from k3rl.model.mla import SAVED_PROBABILITIES, GatedMLA
from k3rl.model.moe import MLP, ExpertBank, LatentMoE
from k3rl.model.origin import Origin, QuantizationLoss
from k3rl.model.packed import (
    EXPERT_NAME,
    PACKED_RUN_BYTES,
    PackedExperts,
    PackError,
    assign_parameter,
    fill_packed,
    pack_experts,
    packed_entry,
    serves_packed,
    stored_block,
)
from k3rl.model.side_stream import side_streams
from k3rl.model.sizes import SIZES
from k3rl.model.table import TensorEntry, active_parameters, tensor_table
from k3rl.model.vision import check_grids
from k3rl.model.watch import watch_activations

__all__ = [
    "ABLATION_CHOICES",
    "EXACT_BLOCK",
    "EXPERT_LEAVES",
    "EXPERT_NAME",
    "MLP",
    "PACKED_RUN_BYTES",
    "SAVED_PROBABILITIES",
    "SIZES",
    "AblationConfig",
    "Adapter",
    "AdapterError",
    "BankGradients",
    "Cache",
    "CacheError",
    "ChunkCache",
    "DeviceName",
    "ExactError",
    "ExpertBank",
    "FixedLayout",
    "FlatStep",
    "GatedMLA",
    "HiddenOutput",
    "InputError",
    "K3Config",
    "K3ForCausalLM",
    "K3Output",
    "KimiDeltaAttention",
    "LatentMoE",
    "Layout",
    "LayoutError",
    "LinearAttnConfig",
    "LoraConfig",
    "ModelConfigError",
    "ModelFileError",
    "Origin",
    "PackError",
    "PackedExperts",
    "QuantizationConfig",
    "QuantizationLoss",
    "ResidualStream",
    "SiTU",
    "Slots",
    "StepCache",
    "SwiGLU",
    "TensorEntry",
    "VisionConfig",
    "active_parameters",
    "adapted",
    "assign_parameter",
    "check_grids",
    "clear_gradients",
    "exact_hidden",
    "exact_logits",
    "exact_logprob",
    "exact_logprobs",
    "fill_packed",
    "fixed_arithmetic",
    "flash",
    "fused",
    "fusing",
    "joined_in",
    "merge",
    "pack_experts",
    "packed_entry",
    "place_of",
    "prepare_adapter",
    "serves_packed",
    "side_streams",
    "slot_index",
    "stored_block",
    "tensor_table",
    "watch_activations",
]
