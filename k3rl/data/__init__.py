"""Conversations and episodes as training batches, and episodes as files. NumPy only, no torch.

batch.py          TrainBatch, the packed batch that a learner trains on; episodes as one
packing.py        sequences into token budgets          images.py        images as the vision tower reads them
chat_files.py     rows of a file of chat data           chat_forms.py  a row of any form as a conversation
chat_check.py     all rows looked at before a run       sft.py         chat data, encoded with loss masks
trajectories.py   episodes as Parquet files
rows.py  image_files.py    their table rows, and their images
annotations.py    what the learner adds to them later
Not here: advantages, which are only joined to their sequences by id, and losses.
"""

from k3rl.data.annotations import AnnotationWriter, SequenceScores, load_reader, read_annotations
from k3rl.data.batch import BatchError, TrainBatch, TrainSequence, WeightMode, from_episodes, token_weights
from k3rl.data.chat_check import DataReport, Fit, Problem, check_chat_file, thinks
from k3rl.data.chat_files import DatasetError, raw_rows
from k3rl.data.chat_forms import ChatExample, example_of
from k3rl.data.images import (
    ImageConfig,
    ImageError,
    ImagePatches,
    conversation_images,
    preprocess_files,
    stack,
)
from k3rl.data.packing import SequenceTooLong, balanced_fit, best_fit, sequence_costs
from k3rl.data.sft import (
    ChatDataset,
    chat_sequence,
    encode_example,
    load_chat_dataset,
    sft_sequence,
)
from k3rl.data.trajectories import ManifestEntry, TrajectoryError, TrajectoryWriter, read_groups, read_manifest

__all__ = [
    "AnnotationWriter",
    "BatchError",
    "ChatDataset",
    "ChatExample",
    "DataReport",
    "DatasetError",
    "Fit",
    "ImageConfig",
    "ImageError",
    "ImagePatches",
    "ManifestEntry",
    "Problem",
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
    "conversation_images",
    "encode_example",
    "example_of",
    "from_episodes",
    "load_chat_dataset",
    "load_reader",
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
]
