"""How one optimizer step is computed: the trainer core that SFT, RL and distillation share.

trainer.py   packed tokens and a loss -> one step, on one process or on its rank of several
data.py      data parallelism: sums over ranks, and how sequences are dealt to them
Nothing here knows Ray, environments or files.
"""

from k3rl.parallel.data import DataParallel, PeerFailed, deal
from k3rl.parallel.trainer import Loss, NonFiniteLoss, Trainer, TrainerConfig

__all__ = ["DataParallel", "Loss", "NonFiniteLoss", "PeerFailed", "Trainer", "TrainerConfig", "deal"]
