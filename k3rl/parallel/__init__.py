"""How one optimizer step is computed: the trainer core that SFT, RL and distillation share.

trainer.py   packed tokens and a loss -> one step, on one process or on its rank of a mesh
world.py     the processes: collectives, who died or hangs     mesh.py   their layout, data x expert x context
expert.py    rows to experts on other ranks and back           zero.py   owners of masters and optimizer state
context.py   ranks that share the rows of a micro-batch        data.py   how sequences are dealt to ranks
frozen.py    frozen weights cut over ranks
agree.py     what ranks compare before they start              nonfinite.py  where a NaN comes from
deepspeed.py the step on DeepSpeed ZeRO, and which of the two is chosen; extensions.py builds what it needs
Nothing here knows Ray, environments or files.
"""

from k3rl.parallel.balance import deal
from k3rl.parallel.context import ContextParallel, ContextShare, balanced_cuts, pair_cost
from k3rl.parallel.deepspeed import DeepSpeedConfig, LearnerConfig, check_backend, make_trainer
from k3rl.parallel.expert import ExpertParallel
from k3rl.parallel.frozen import check_slices
from k3rl.parallel.mesh import Axis, Mesh, data_degree
from k3rl.parallel.nonfinite import NonFiniteGradients, NonFiniteLoss, NonFiniteStep
from k3rl.parallel.trainer import Loss, Trainer, TrainerConfig
from k3rl.parallel.world import PeerFailed, RankFailed, RanksDisagree, World, find_lost

__all__ = [
    "Axis",
    "ContextParallel",
    "ContextShare",
    "DeepSpeedConfig",
    "ExpertParallel",
    "LearnerConfig",
    "Loss",
    "Mesh",
    "NonFiniteGradients",
    "NonFiniteLoss",
    "NonFiniteStep",
    "PeerFailed",
    "RankFailed",
    "RanksDisagree",
    "Trainer",
    "TrainerConfig",
    "World",
    "balanced_cuts",
    "check_backend",
    "check_slices",
    "data_degree",
    "deal",
    "find_lost",
    "make_trainer",
    "pair_cost",
]
