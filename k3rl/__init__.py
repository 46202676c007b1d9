"""k3rl: reinforcement learning, fine-tuning and distillation of models of the Kimi K3 architecture.

Start with `k3rl.types` (the vocabulary on one page), then `k3rl/pipelines/rl.py` (the loop), then `k3rl/actors`, then
any room alone. A module imports only from its own room or from floors below: cli; pipelines; actors; serve; engine;
checkpoint, planner; parallel; model, optim, losses; kernels, envs, data, run; types, config, numerics, tokens.
"""
