"""What changes weights: the optimizer with its masters, QK-clip, Quantile Balancing and the learning-rate schedule.

classify.py          which parameter is trained how (official names)       config.py  rates, and how state is stored
per_head_muon.py     the step, over state.py (masters and moments in buckets.py) and gradients.py (norm, clipping)
newton_schulz.py     orthogonalization of many blocks                      joined.py  neighbours in storage as one
offload.py           state on the host and its prefetch, in host_memory.py
stored.py            what a checkpoint stores of a master
qk_clip.py           weight clipping of MLA heads
quantile_balance.py  the router bias           router_balance.py  what it replaces
schedule.py          learning-rate factor of a step
Nothing here knows a loss, a model class or a checkpoint.
"""

from k3rl.optim import buckets, host_memory, offload
from k3rl.optim.buckets import BUCKET_ELEMENTS, FixedGradients, Project, fill_buckets, master_dtype, storage_kind
from k3rl.optim.classify import ClassifyError, HeadLayout, ParamInfo, adamw_scale, classify, trained
from k3rl.optim.config import ADAMW_BETAS, ADAMW_EPS, MuonConfig, Variant
from k3rl.optim.gradients import NonFiniteGradient
from k3rl.optim.joined import joined
from k3rl.optim.newton_schulz import STEPS, newton_schulz
from k3rl.optim.offload import SLOTS, StateStorage
from k3rl.optim.per_head_muon import PerHeadMuon
from k3rl.optim.qk_clip import QKClipError, clip_heads_, qk_clip_
from k3rl.optim.quantile_balance import BalanceError, QuantileBalancer
from k3rl.optim.router_balance import AuxiliaryLoss, fixed_step
from k3rl.optim.schedule import Schedule
from k3rl.optim.state import OptimizerStateError
from k3rl.optim.stored import stored_values

__all__ = [
    "ADAMW_BETAS",
    "ADAMW_EPS",
    "BUCKET_ELEMENTS",
    "SLOTS",
    "STEPS",
    "AuxiliaryLoss",
    "BalanceError",
    "ClassifyError",
    "FixedGradients",
    "HeadLayout",
    "MuonConfig",
    "NonFiniteGradient",
    "OptimizerStateError",
    "ParamInfo",
    "PerHeadMuon",
    "Project",
    "QKClipError",
    "QuantileBalancer",
    "Schedule",
    "StateStorage",
    "Variant",
    "adamw_scale",
    "buckets",
    "classify",
    "clip_heads_",
    "fill_buckets",
    "fixed_step",
    "host_memory",
    "joined",
    "master_dtype",
    "newton_schulz",
    "offload",
    "qk_clip_",
    "storage_kind",
    "stored_values",
    "trained",
]
