"""How one optimizer step is computed: the trainer core that SFT, RL and distillation share.

trainer.py           packed tokens and a loss -> one step, on one process or on its rank of a mesh
backends/            what computes and applies gradients: native.py, or deepspeed.py; settings.py configures a trainer
forward_backward.py  micro-batches by autograd; captured.py the same as CUDA graphs, flat_gradients.py what they add to
zero.py              owners of masters and optimizer state; gradient_reduction.py sums on them, clipping.py their norm
world.py             the processes: collectives; liveness.py who died or hangs; mesh.py data x expert x context
model_on_mesh.py     a forward on its ranks: expert.py rows to experts on other ranks, context.py ranks that share rows
                     of a micro-batch, frozen.py frozen weights cut over ranks
balance.py           sequences over ranks
agree.py             what ranks compare before they start      nonfinite.py  where a NaN comes from
scorer.py            a frozen policy's logprobs, without a trainer
exact.py             logprobs with the bits of an exact engine
Nothing here knows Ray, environments or files.
"""

from k3rl.parallel.agree import flat
from k3rl.parallel.backends import DeepSpeedConfig, LearnerConfig, NativeBackend, check_backend
from k3rl.parallel.balance import balanced_shares
from k3rl.parallel.context import ContextParallel, ContextShare, balanced_cuts, pair_cost
from k3rl.parallel.exact import exact_target_logprobs
from k3rl.parallel.expert import ExpertParallel
from k3rl.parallel.forward_backward import Loss
from k3rl.parallel.frozen import FrozenSlices, check_slices
from k3rl.parallel.liveness import PeerFailed, RankFailed, find_lost
from k3rl.parallel.mesh import Mesh, data_degree, expert_run
from k3rl.parallel.nonfinite import NonFiniteGradients, NonFiniteLogprobs, NonFiniteLoss, NonFiniteStep
from k3rl.parallel.scorer import Scorer, ScorerConfig
from k3rl.parallel.settings import TrainerConfig
from k3rl.parallel.statistics import Statistics
from k3rl.parallel.trainer import Trainer, make_trainer
from k3rl.parallel.world import Axis, RanksDisagree, World
from k3rl.parallel.zero import gather_tensors, step_cost

__all__ = [
    "Axis",
    "ContextParallel",
    "ContextShare",
    "DeepSpeedConfig",
    "ExpertParallel",
    "FrozenSlices",
    "LearnerConfig",
    "Loss",
    "Mesh",
    "NativeBackend",
    "NonFiniteGradients",
    "NonFiniteLogprobs",
    "NonFiniteLoss",
    "NonFiniteStep",
    "PeerFailed",
    "RankFailed",
    "RanksDisagree",
    "Scorer",
    "ScorerConfig",
    "Statistics",
    "Trainer",
    "TrainerConfig",
    "World",
    "balanced_cuts",
    "balanced_shares",
    "check_backend",
    "check_slices",
    "data_degree",
    "exact_target_logprobs",
    "expert_run",
    "find_lost",
    "flat",
    "gather_tensors",
    "make_trainer",
    "pair_cost",
    "step_cost",
]
