"""Multi-head latent attention: decode and chunked prefill over latents in pages, and what QK-clip reads."""
