"""Multi-head latent attention over latents in pages, and what training wants of its heads.

decode_attention.py    one new token a row       chunked_prefill.py    several new tokens of some rows
decode_step.py         what stands before and behind the attention of a decode step
heads.py               keys and values put together, gradients taken apart    max_logits.py    what QK-clip reads
"""

from k3rl.kernels.mla import chunked_prefill, decode_attention, decode_step, heads, max_logits

__all__ = ["chunked_prefill", "decode_attention", "decode_step", "heads", "max_logits"]
