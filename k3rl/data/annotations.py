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
from dataclasses import dataclass
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
        parts = [_Columns.of(batch, scores) for batch in batches]
        place = {"stage": stage, "attempt": self._attempt, "step": step}
        file = self._folder / f"{stage}-a{self._attempt}-{step:06d}.parquet"
        tables = [columns.table(place) for columns in parts]
        table = pa.concat_tables(tables) if tables else ANNOTATION_SCHEMA.empty_table()
        table = table.replace_schema_metadata({"schema_version": str(ANNOTATION_SCHEMA_VERSION)})
        part = file.with_name(file.name + ".tmp")
        pq.write_table(table, part, compression="zstd", compression_level=1)
        os.replace(part, file)
        line: dict[str, Any] = place | {
            "t": time.time(),
            "file": file.name,
            "advantages": {
                name: float(f"{value:.6g}")
                for columns in parts
                for name, value in zip(columns.episodes, columns.advantages.tolist(), strict=True)
            },
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
    """The rows of one episode, a row a branch, as ANNOTATION_SCHEMA names them. Raises ValueError for another schema.

    Raises FileNotFoundError when the file is gone.
    """
    with pq.ParquetFile(file) as source:
        metadata = source.schema_arrow.metadata or {}
        version = metadata.get(b"schema_version", b"none").decode()
        if version != str(ANNOTATION_SCHEMA_VERSION):
            raise ValueError(f"{file} is of schema version {version}; this program reads {ANNOTATION_SCHEMA_VERSION}")
        table = source.read()
    return table.filter(pc.equal(table["episode_id"], episode)).to_pylist()


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


@dataclass(slots=True)
class _Columns:
    """The rows of a batch, one for each sequence, whose ids are `EPISODE/BRANCH`.

    values: name -> float32 [N], NaN where there is none; scored: sequences that have values.
    """

    episodes: list[str]
    branches: list[str]
    advantages: np.ndarray
    ends: np.ndarray
    mask: np.ndarray
    scored: np.ndarray
    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, batch: TrainBatch, scores: Mapping[str, SequenceScores]) -> _Columns:
        names = [name.partition("/") for name in batch.sequence_ids]
        ends, mask = batch.cu_seqlens.astype(np.int64), batch.loss_mask
        targets = np.flatnonzero(mask)
        first = np.searchsorted(targets, ends[:-1])  # the first target behind the beginning of each sequence
        place = targets[first.clip(max=max(len(targets) - 1, 0))] if len(targets) else np.zeros(len(names), np.int64)
        trained = (first < len(targets)) & (place < ends[1:])
        found = [scores.get(name) for name in batch.sequence_ids]
        logprobs, entropies = (np.full(batch.tokens, np.nan, np.float32) for _ in range(2))
        for number, own in enumerate(found):
            if own is not None:
                logprobs[ends[number] : ends[number + 1]] = own.logprobs
                entropies[ends[number] : ends[number + 1]] = own.entropies
        with np.errstate(over="ignore"):
            ratios = np.exp(logprobs - batch.sampler_logprobs)
        return cls(
            episodes=[name[0] for name in names],
            branches=[name[2] for name in names],
            advantages=np.where(trained, batch.advantages[place], np.float32(0)),
            ends=ends,
            mask=mask,
            scored=np.array([own is not None for own in found], bool),
            values={"learner_logprobs": logprobs, "entropies": entropies, "ratios": ratios},
        )

    def table(self, place: Mapping[str, Any]) -> pa.Table:
        """As ANNOTATION_SCHEMA has them."""
        count = len(self.episodes)
        columns = {name: pa.repeat(pa.scalar(place[name], ANNOTATION_SCHEMA.field(name).type), count) for name in place}
        columns |= {
            "episode_id": pa.array(self.episodes, pa.string()),
            "branch_id": pa.array(self.branches, pa.string()),
        }
        columns |= {"advantage": pa.array(self.advantages, pa.float32())}
        columns["loss_mask"] = pa.ListArray.from_arrays(self.ends.astype(np.int32), pa.array(self.mask))
        for name, values in self.values.items():
            columns[name] = self._lists(values)
        return pa.table({name: columns[name] for name in ANNOTATION_SCHEMA.names}, schema=ANNOTATION_SCHEMA)

    def _lists(self, values: np.ndarray) -> pa.Array:
        """One list for each scored sequence, null for the others; NaN is null."""
        lengths = np.where(self.scored, np.diff(self.ends), 0)
        kept = values[np.repeat(self.scored, np.diff(self.ends))]
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        offsets = pa.array(ends, mask=np.append(~self.scored, False))
        return pa.ListArray.from_arrays(offsets, pa.array(kept, pa.float32(), from_pandas=True))
