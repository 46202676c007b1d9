"""What computes and applies the gradients of a trainer's step, behind one interface.

base.py       the interface                      config.py     which backend, and what DeepSpeed cannot train
native.py     k3rl's own: sharded Per-Head Muon or AdamW
deepspeed.py  DeepSpeed ZeRO, imported where it is chosen; extensions.py builds what it needs
Loss, batch and balancing are the trainer's; a backend knows parameters.
"""

from k3rl.parallel.backends import extensions
from k3rl.parallel.backends.base import Backend, Update
from k3rl.parallel.backends.config import DeepSpeedConfig, LearnerConfig, check_backend
from k3rl.parallel.backends.native import NativeBackend

__all__ = ["Backend", "DeepSpeedConfig", "LearnerConfig", "NativeBackend", "Update", "check_backend", "extensions"]
