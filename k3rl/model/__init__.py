"""The K3 architecture in plain torch: exact in float64, quick on a CPU.

config.py   K3Config, official key names      layout.py    packed rows, chunks, grids
decoder.py  K3ForCausalLM                     cache.py     recurrent, convolution and latent state per row
kda.py kda_chunks.py kda_gates.py kda_tiles.py kda_context.py    Kimi Delta Attention
mla.py moe.py attn_res.py situ.py norm.py vision.py    one part of k3.md each
ablation.py  the common choice for a part     gated.py     SiTU or SwiGLU      watch.py   largest activation
fused.py    parameters joined in memory       blocks.py    element-wise work in the cache      init.py   fresh weights
lora.py low_rank.py    adapters beside frozen matrices
Not here: kernels, optimizers, losses, anything parallel.
"""

from k3rl.model.ablation import CHOICES as ABLATION_CHOICES
from k3rl.model.ablation import AblationConfig
from k3rl.model.cache import Cache, CacheError
from k3rl.model.config import K3Config, LinearAttnConfig, ModelConfigError, QuantizationConfig, VisionConfig
from k3rl.model.decoder import HiddenOutput, InputError, K3ForCausalLM, K3Output
from k3rl.model.layout import LayoutError
from k3rl.model.lora import Adapter, AdapterError, LoraConfig

__all__ = [
    "ABLATION_CHOICES",
    "AblationConfig",
    "Adapter",
    "AdapterError",
    "Cache",
    "CacheError",
    "HiddenOutput",
    "InputError",
    "K3Config",
    "K3ForCausalLM",
    "K3Output",
    "LayoutError",
    "LinearAttnConfig",
    "LoraConfig",
    "ModelConfigError",
    "QuantizationConfig",
    "VisionConfig",
]
