"""Checkpoints: the official layout in and out, what a model consists of, and training state for resuming.

hf.py       official tensors, load, save      replace.py      directories replaced at once
inspect.py  parameters and bytes of a model   train_state.py, state_writer.py  resume
manifest.py digests of stored tensors         delta.py        a version as its difference from another
partial.py  single tensors, read and replaced
sharded.py  experts spread over ranks         card.py         facts about a checkpoint
adapter.py  adapters in PEFT's format
Not here: how values are quantized (`k3rl.numerics`) and who decides when to save.
"""

from k3rl.checkpoint.adapter import is_adapter, load_adapter, save_adapter, weights_of
from k3rl.checkpoint.hf import (
    CheckpointError,
    add_to_card,
    assign_official_tensors,
    load_checkpoint,
    official_tensors,
    read_card,
    save_checkpoint,
    stored_dtype,
)

__all__ = [
    "CheckpointError",
    "add_to_card",
    "assign_official_tensors",
    "is_adapter",
    "load_adapter",
    "load_checkpoint",
    "official_tensors",
    "read_card",
    "save_adapter",
    "save_checkpoint",
    "stored_dtype",
    "weights_of",
]
