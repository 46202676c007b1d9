"""What the learner adds to episodes that are already recorded: advantages, its own logprobs, ratios.

An episode is written once, before it is trained on; these are later facts, joined to it by id. traces/annotations has
one Parquet file for each trained step, `STAGE-aATTEMPT-STEP.parquet`, whole or absent, and `steps.jsonl`, one line for
each of them with what a list needs, so that a list opens no Parquet file:

    {"stage": "rl", "attempt": 1, "step": 3, "t": ..., "file": "rl-a1-000003.parquet",
     "advantages": {"rl-3-0-0": 0.5, ...},          episodes that were trained on, by id
     "version": 3,                                  weights that the step began with, absent where not known
     "scored": 128,                                 sequences whose tokens the learner scored
     "expert_load": [[0.06, ...], ...]}             [MoE layers, experts], shares that sum to 1; absent without experts
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from k3rl.data.batch import TrainBatch

ANNOTATION_SCHEMA_VERSION = 1
_FLOATS = pa.list_(pa.float32())
ANNOTATION_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("attempt", pa.int32()),
        ("step", pa.int32()),  # the step that trained on it, from 0
        ("episode_id", pa.string()),
        ("branch_id", pa.string()),
        ("advantage", pa.float32()),
        ("loss_mask", pa.list_(pa.bool_())),  # over the branch's tokens: what this step trained
        ("learner_logprobs", _FLOATS),  # over the branch's tokens, before the step; null where not trained
        ("entropies", _FLOATS),  # of the learner's next-token distribution, nats
        ("ratios", _FLOATS),  # learner probability / sampler probability
    ]
)
STEPS_FILE = "steps.jsonl"


class SequenceScores(NamedTuple):
    """What the learner computed for one sequence of T tokens: float32 [T] each, NaN where a token is no target."""

    logprobs: np.ndarray
    entropies: np.ndarray

    def filled_by(self, other: SequenceScores) -> SequenceScores:
        """The tokens of both; ranks that share a sequence have a part of it each."""
        return SequenceScores(*(np.where(np.isnan(a), b, a) for a, b in zip(self, other, strict=True)))


class AnnotationWriter:
    """Writes the annotations of one attempt's steps. A line in `steps.jsonl` follows the file that it names."""

    def __init__(self, folder: Path, *, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt

    def write(
        self,
        stage: str,
        step: int,
        batches: Sequence[TrainBatch],
        scores: Mapping[str, SequenceScores],
        expert_load: np.ndarray | None = None,
        version: float | None = None,
    ) -> Path:
        """Stores what was trained in `step`. scores: by sequence id; sequences without any keep null in their place.

        expert_load: float [MoE layers, experts], any scale. version: of the weights that the step began with.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        place = {"stage": stage, "attempt": self._attempt, "step": step}
        file = self._folder / f"{stage}-a{self._attempt}-{step:06d}.parquet"
        tables = [_table(place, batch, scores) for batch in batches] or [ANNOTATION_SCHEMA.empty_table()]
        table = pa.concat_tables(tables).replace_schema_metadata({"schema_version": str(ANNOTATION_SCHEMA_VERSION)})
        episodes = [name.partition("/")[0] for batch in batches for name in batch.sequence_ids]
        advantages = [advantage for batch in batches for advantage in _advantages(batch)]
        part = file.with_name(file.name + ".tmp")
        pq.write_table(table, part, compression="zstd", compression_level=1)
        os.replace(part, file)
        line: dict[str, Any] = place | {
            "t": time.time(),
            "file": file.name,
            "advantages": {name: float(f"{own:.6g}") for name, own in zip(episodes, advantages, strict=True)},
            "scored": sum(batch_id in scores for batch in batches for batch_id in batch.sequence_ids),
        }
        if version is not None:
            line["version"] = version
        if expert_load is not None and expert_load.size and expert_load.sum() > 0:
            shares = expert_load / np.maximum(expert_load.sum(axis=1, keepdims=True), 1e-30)
            line["expert_load"] = [[float(f"{share:.4g}") for share in layer] for layer in shares]
        _append_line(self._folder / STEPS_FILE, json.dumps(line, separators=(",", ":"), allow_nan=False))
        return file


def read_annotations(file: Path, episode: str) -> list[dict[str, Any]]:
    """The rows of one episode, a row a branch, as ANNOTATION_SCHEMA names them.

    Lists are arrays over the branch's tokens: bool [T], and float32 [T] with NaN where the file has null, or None.
    Raises ValueError for another schema, FileNotFoundError when the file is gone.
    """
    with pq.ParquetFile(file) as source:
        metadata = source.schema_arrow.metadata or {}
        version = metadata.get(b"schema_version", b"none").decode()
        if version != str(ANNOTATION_SCHEMA_VERSION):
            raise ValueError(f"{file} is of schema version {version}; this program reads {ANNOTATION_SCHEMA_VERSION}")
        table = source.read()
    own = table.filter(pc.equal(table["episode_id"], episode))
    return [{name: _value(own[name][number]) for name in own.column_names} for number in range(own.num_rows)]


def _value(cell: pa.Scalar) -> Any:
    if not isinstance(cell, pa.ListScalar) or not cell.is_valid:
        return cell.as_py()
    return cell.values.to_numpy(zero_copy_only=False).astype(np.float32 if cell.type == _FLOATS else bool)


def load_reader() -> None:
    """Loads what the first Parquet file of a process waits for, half a second, before one is asked for."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"episode_id": ["a"]}), sink)
    with pq.ParquetFile(sink) as source:
        table = source.read()
    table.filter(pc.equal(table["episode_id"], "a")).to_pylist()


def _append_line(path: Path, line: str) -> None:
    """A last line that a crash left unfinished is ended first: it stays damaged, and this one is whole."""
    with open(path, "a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())


def _table(place: Mapping[str, Any], batch: TrainBatch, scores: Mapping[str, SequenceScores]) -> pa.Table:
    """A row for each sequence of a batch, whose ids are `EPISODE/BRANCH`; whole columns at once, as they are long."""
    names, lengths = batch.sequence_ids, batch.lengths
    found = [scores.get(name) for name in names]
    blank = [np.full(length, np.nan, np.float32) for length in lengths]
    logprobs, entropies = (
        np.concatenate([gap if one is None else one[stream] for one, gap in zip(found, blank, strict=True)])
        for stream in range(2)
    )
    with np.errstate(over="ignore"):
        ratios = np.exp(logprobs - batch.sampler_logprobs)
    offsets = pa.array(batch.cu_seqlens, pa.int32())
    missing = pa.array([one is None for one in found], pa.bool_())

    def lists(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32(), mask=np.isnan(values)), mask=missing)

    columns = {name: [value] * len(names) for name, value in place.items()} | {
        "episode_id": [name.partition("/")[0] for name in names],
        "branch_id": [name.partition("/")[2] for name in names],
        "advantage": _advantages(batch),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(batch.loss_mask)),
        "learner_logprobs": lists(logprobs),
        "entropies": lists(entropies),
        "ratios": lists(ratios),
    }
    return pa.table(columns, schema=ANNOTATION_SCHEMA)


def _advantages(batch: TrainBatch) -> list[float]:
    """That of each sequence, which all its trained tokens have; 0 where it has none."""
    parts = (np.split(values, batch.cu_seqlens[1:-1]) for values in (batch.advantages, batch.loss_mask))
    return [float(own[mask][0]) if mask.any() else 0.0 for own, mask in zip(*parts, strict=True)]
