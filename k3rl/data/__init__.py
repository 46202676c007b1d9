"""Conversations and episodes as training batches, and episodes as files. NumPy only, no torch.

`batch.py` is the packed batch a learner trains on, `packing.py` fits sequences into token budgets, `sft.py` reads
chat data and masks it, `images.py` prepares images for the vision tower, `stream.py` walks over examples and can
resume, `trajectories.py` stores episodes (`rows.py`: as table rows; `image_files.py`: their images). Advantages are
computed elsewhere; here they are only joined to their sequences by id.
"""

from k3rl.data.batch import BatchError, TrainBatch, TrainSequence, from_branches, from_episodes, token_weights
from k3rl.data.packing import SequenceTooLong, best_fit

__all__ = [
    "BatchError",
    "SequenceTooLong",
    "TrainBatch",
    "TrainSequence",
    "best_fit",
    "from_branches",
    "from_episodes",
    "token_weights",
]
