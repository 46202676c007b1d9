"""What changes weights: the optimizer with its masters, QK-clip, Quantile Balancing and the learning-rate schedule.

classify.py          which parameter is trained how (official names)
per_head_muon.py     Per-Head Muon + AdamW over buckets.py (state) and newton_schulz.py
rest.py              where state lies between steps, host_memory.py what of it is on the host
qk_clip.py           weight clipping of MLA heads
quantile_balance.py  the router bias           router_balance.py  what it replaces
schedule.py          learning-rate factor of a step
Nothing here knows a loss, a model class or a checkpoint.
"""

from k3rl.optim.classify import ClassifyError, HeadLayout, ParamInfo, classify
from k3rl.optim.newton_schulz import newton_schulz
from k3rl.optim.offload import Rest
from k3rl.optim.per_head_muon import NonFiniteGradient, OptimizerStateError, PerHeadMuon, trained
from k3rl.optim.qk_clip import QKClipError, clip_heads_, qk_clip_
from k3rl.optim.quantile_balance import BalanceError, QuantileBalancer
from k3rl.optim.router_balance import AuxiliaryLoss, fixed_step
from k3rl.optim.schedule import Schedule

__all__ = [
    "AuxiliaryLoss",
    "BalanceError",
    "ClassifyError",
    "HeadLayout",
    "NonFiniteGradient",
    "OptimizerStateError",
    "ParamInfo",
    "PerHeadMuon",
    "QKClipError",
    "QuantileBalancer",
    "Rest",
    "Schedule",
    "classify",
    "clip_heads_",
    "fixed_step",
    "newton_schulz",
    "qk_clip_",
    "trained",
]
