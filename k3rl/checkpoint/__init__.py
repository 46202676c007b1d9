"""Checkpoints: what a model's stored tensors are, the official layout in and out, and training state for resuming.

official.py  a model's official tensors        hf.py  shards.py    directories of them: load, save
adapter.py   adapters in PEFT's format         card.py     facts about a checkpoint
inspect.py   parameters and bytes of a model   export.py   copies, merged adapters, exported training states
train_state.py  state_writer.py    training state: on disk, saved and restored
delta.py     a version as its difference from another       manifest.py  fingerprint.py    which weights they are
flat_layout.py  flat_version.py  flat_digest.py    a version in flat buffers, and its digests, made where they lie
check_export.py  a folder opened as others open it
replace.py   directories replaced at once      threads.py  work on tensors by several threads
Not here: how values are quantized (`k3rl.numerics`) and who decides when to save.
"""

from k3rl.checkpoint.adapter import (
    check_base,
    is_adapter,
    load_adapter,
    read_adapter_config,
    save_adapter,
    weights_of,
)
from k3rl.checkpoint.card import add_to_card, read_card
from k3rl.checkpoint.check_export import ExportCheck, check_export
from k3rl.checkpoint.delta import BUCKET_BYTES, DeltaDecoder, DeltaError, DeltaHeader, encode
from k3rl.checkpoint.export import copy_adapter, copy_checkpoint, export_state, merge_adapter
from k3rl.checkpoint.fingerprint import weights_fingerprint
from k3rl.checkpoint.flat_layout import FlatLayout, read_flat, shard_layout, write_flat
from k3rl.checkpoint.flat_version import FlatError, FlatShard, empty_buffer, layouts_of, prove, shard_of
from k3rl.checkpoint.hf import StoredFiles, load_checkpoint, save_checkpoint
from k3rl.checkpoint.inspect import inspect_model
from k3rl.checkpoint.manifest import digest, manifest_digest, manifest_of
from k3rl.checkpoint.official import (
    CheckpointError,
    StoredView,
    assign_official_tensors,
    collected_tensors,
    copy_with,
    fill,
    official_tensors,
    second_model,
)
from k3rl.checkpoint.state_writer import StateWriter, refuse_foreign, restore
from k3rl.checkpoint.train_state import (
    TrainState,
    TrainStateError,
    chosen_train_state,
    clear_unfinished,
    go_back_to,
    prune_train_states,
)

__all__ = [
    "BUCKET_BYTES",
    "CheckpointError",
    "DeltaDecoder",
    "DeltaError",
    "DeltaHeader",
    "ExportCheck",
    "FlatError",
    "FlatLayout",
    "FlatShard",
    "StateWriter",
    "StoredFiles",
    "StoredView",
    "TrainState",
    "TrainStateError",
    "add_to_card",
    "assign_official_tensors",
    "check_base",
    "check_export",
    "chosen_train_state",
    "clear_unfinished",
    "collected_tensors",
    "copy_adapter",
    "copy_checkpoint",
    "copy_with",
    "digest",
    "empty_buffer",
    "encode",
    "export_state",
    "fill",
    "go_back_to",
    "inspect_model",
    "is_adapter",
    "layouts_of",
    "load_adapter",
    "load_checkpoint",
    "manifest_digest",
    "manifest_of",
    "merge_adapter",
    "official_tensors",
    "prove",
    "prune_train_states",
    "read_adapter_config",
    "read_card",
    "read_flat",
    "refuse_foreign",
    "restore",
    "save_adapter",
    "save_checkpoint",
    "second_model",
    "shard_layout",
    "shard_of",
    "weights_fingerprint",
    "weights_of",
    "write_flat",
]
