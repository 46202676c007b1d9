"""Norms and what is fused with them: RMSNorm, the gated output norm of KDA, attention residuals."""
