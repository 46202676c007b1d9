"""Conversations and episodes as training batches, and episodes as files. NumPy only, no torch.

batch.py          TrainBatch, the packed batch that a learner trains on; episodes as one
headers.py        what a driver knows of episodes     columns.py      their tokens, many episodes as a few arrays
plan.py           a batch by reference, packed by the rank that trains it
packing.py        sequences into token budgets          images.py        images as the vision tower reads them
chat_files.py     rows of a file of chat data           chat_forms.py  a row of any form as a conversation
chat_check.py     all rows looked at before a run       sft.py         chat data, encoded with loss masks
trajectories.py   episodes as Parquet files
rows.py  image_files.py    their table rows, and their images
annotations.py    what the learner adds to them later
Not here: advantages, which are only joined to their sequences by id, and losses.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3rl.data.annotations import AnnotationWriter, SequenceScores, load_reader, read_annotations
    from k3rl.data.batch import BatchError, TrainBatch, TrainSequence, WeightMode, from_episodes, token_weights
    from k3rl.data.chat_check import DataReport, Fit, Problem, check_chat_file, thinks
    from k3rl.data.chat_files import DatasetError, raw_rows
    from k3rl.data.chat_forms import ChatExample, example_of
    from k3rl.data.columns import EpisodeColumns, check_turns, payload_of, played, without_turns
    from k3rl.data.headers import EpisodeHeader, Payload, PlayedGroup, SequenceHeader, header_of
    from k3rl.data.images import ImageConfig, ImageError, ImagePatches, conversation_images, preprocess_files, stack
    from k3rl.data.packing import SequenceTooLong, balanced_fit, best_fit, sequence_costs
    from k3rl.data.plan import BatchPlan
    from k3rl.data.sft import ChatDataset, chat_sequence, encode_example, load_chat_dataset, sft_sequence
    from k3rl.data.trajectories import ManifestEntry, TrajectoryError, TrajectoryWriter, read_groups, read_manifest

_HOMES = {
    "AnnotationWriter": "annotations",
    "BatchError": "batch",
    "BatchPlan": "plan",
    "ChatDataset": "sft",
    "ChatExample": "chat_forms",
    "DataReport": "chat_check",
    "DatasetError": "chat_files",
    "EpisodeColumns": "columns",
    "EpisodeHeader": "headers",
    "Fit": "chat_check",
    "ImageConfig": "images",
    "ImageError": "images",
    "ImagePatches": "images",
    "ManifestEntry": "trajectories",
    "Payload": "headers",
    "PlayedGroup": "headers",
    "Problem": "chat_check",
    "SequenceHeader": "headers",
    "SequenceScores": "annotations",
    "SequenceTooLong": "packing",
    "TrainBatch": "batch",
    "TrainSequence": "batch",
    "TrajectoryError": "trajectories",
    "TrajectoryWriter": "trajectories",
    "WeightMode": "batch",
    "balanced_fit": "packing",
    "best_fit": "packing",
    "chat_sequence": "sft",
    "check_chat_file": "chat_check",
    "check_turns": "columns",
    "conversation_images": "images",
    "encode_example": "sft",
    "example_of": "chat_forms",
    "from_episodes": "batch",
    "header_of": "headers",
    "load_chat_dataset": "sft",
    "load_reader": "annotations",
    "payload_of": "columns",
    "played": "columns",
    "preprocess_files": "images",
    "raw_rows": "chat_files",
    "read_annotations": "annotations",
    "read_groups": "trajectories",
    "read_manifest": "trajectories",
    "sequence_costs": "packing",
    "sft_sequence": "sft",
    "stack": "images",
    "thinks": "chat_check",
    "token_weights": "batch",
    "without_turns": "columns",
}
"""Name -> the module that has it, imported when it is first asked for: who plays episodes reads and writes no files."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AnnotationWriter",
    "BatchError",
    "BatchPlan",
    "ChatDataset",
    "ChatExample",
    "DataReport",
    "DatasetError",
    "EpisodeColumns",
    "EpisodeHeader",
    "Fit",
    "ImageConfig",
    "ImageError",
    "ImagePatches",
    "ManifestEntry",
    "Payload",
    "PlayedGroup",
    "Problem",
    "SequenceHeader",
    "SequenceScores",
    "SequenceTooLong",
    "TrainBatch",
    "TrainSequence",
    "TrajectoryError",
    "TrajectoryWriter",
    "WeightMode",
    "balanced_fit",
    "best_fit",
    "chat_sequence",
    "check_chat_file",
    "check_turns",
    "conversation_images",
    "encode_example",
    "example_of",
    "from_episodes",
    "header_of",
    "load_chat_dataset",
    "load_reader",
    "payload_of",
    "played",
    "preprocess_files",
    "raw_rows",
    "read_annotations",
    "read_groups",
    "read_manifest",
    "sequence_costs",
    "sft_sequence",
    "stack",
    "thinks",
    "token_weights",
    "without_turns",
]
