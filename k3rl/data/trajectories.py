"""Episodes as Parquet files: the durable record of what policies did.

One file per `write`, whole or absent: written beside its name, synced, renamed, then announced by one line in the
writer's manifest. Readers trust the manifest alone. Recorded experts weigh two hundred times the tokens, so they
go into a file of their own, which can be deleted without the rest. Images too are in a file of their own, each
distinct one once, as the bytes that the environment gave; episodes and messages name them by their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.data import image_files, rows
from k3rl.types import EncodedImage, Group

SCHEMA_VERSION = 3
ROW_GROUP_TOKENS = 1_000_000
ROW_GROUP_BYTES = 64 << 20  # of recorded experts and of images


class TrajectoryError(ValueError):
    """A trajectory file or manifest that is damaged, missing or of another schema. Names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One manifest line: a file that is whole, of one rollout step (`generation`).

    `routes_file` and `routes_sha256` are None when no experts were recorded, `images_file` and `images_sha256` when no
    prompt had an image.
    """

    file: str
    generation: int
    episodes: int
    rows: int
    bytes: int
    sha256: str
    routes_file: str | None
    routes_sha256: str | None
    tokenizer_hash: str
    schema_version: int
    images_file: str | None = None
    images_sha256: str | None = None


class TrajectoryWriter:
    """Appends files to `folder` for one actor; two writers never share an actor name.

    Files are `ACTOR-GENERATION-SEQUENCE.parquet`, the manifest is `ACTOR.manifest.jsonl`. A writer that starts again
    continues the manifest; a line torn by a crash announces nothing and is cut off.
    """

    def __init__(self, folder: str | os.PathLike[str], *, actor: str, tokenizer_hash: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._actor = actor
        self._tokenizer_hash = tokenizer_hash
        self._manifest = self._folder / f"{actor}.manifest.jsonl"
        self._sequence = len(_manifest_lines(self._manifest, repair=True))

    def write(self, groups: Sequence[Group], *, generation: int, seed: int = 0) -> ManifestEntry:
        """Store these groups as one file. generation: the rollout step they belong to; seed: the run's seed."""
        stem = f"{self._actor}-{generation:06d}-{self._sequence:06d}"
        table = rows.episode_rows(groups, seed)
        metadata = {"schema_version": str(SCHEMA_VERSION), "tokenizer_hash": self._tokenizer_hash}
        sizes = [len(tokens) for tokens in table["token_ids"]]
        file = self._folder / f"{stem}.parquet"
        digest = _write_table(file, table, rows.EPISODE_SCHEMA, metadata, sizes, ROW_GROUP_TOKENS)
        experts, images = rows.route_rows(groups), image_files.image_rows(groups)
        routes_file, routes_digest = self._beside(stem, "routes", experts, "routes", rows.ROUTE_SCHEMA, metadata)
        images_file, images_digest = self._beside(stem, "images", images, "data", image_files.IMAGE_SCHEMA, metadata)
        entry = ManifestEntry(
            file=file.name,
            generation=generation,
            episodes=sum(len(group.episodes) for group in groups),
            rows=len(table["token_ids"]),
            bytes=file.stat().st_size,
            sha256=digest,
            routes_file=routes_file,
            routes_sha256=routes_digest,
            tokenizer_hash=self._tokenizer_hash,
            schema_version=SCHEMA_VERSION,
            images_file=images_file,
            images_sha256=images_digest,
        )
        _append_line(self._manifest, json.dumps({name: getattr(entry, name) for name in ManifestEntry.__slots__}))
        self._sequence += 1
        return entry

    def _beside(
        self,
        stem: str,
        kind: str,
        columns: Mapping[str, list[Any]],
        heavy: str,
        schema: pa.Schema,
        metadata: Mapping[str, str],
    ) -> tuple[str | None, str | None]:
        """(name, SHA-256) of the file of these columns, whose weight is in column `heavy`; None twice without rows."""
        if not columns[heavy]:
            return None, None
        name = f"{stem}.{kind}.parquet"
        sizes = [len(data) for data in columns[heavy]]
        return name, _write_table(self._folder / name, columns, schema, metadata, sizes, ROW_GROUP_BYTES)


def read_manifest(folder: str | os.PathLike[str]) -> list[ManifestEntry]:
    """Every whole file in `folder`, by actor and in the order of writing. Raises TrajectoryError."""
    entries = []
    for path in sorted(Path(folder).glob("*.manifest.jsonl")):
        for number, line in enumerate(_manifest_lines(path, repair=False), start=1):
            try:
                entries.append(ManifestEntry(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise TrajectoryError(f"{path}, line {number} is no manifest entry: {error}") from error
    return entries


def read_groups(folder: str | os.PathLike[str], entry: ManifestEntry, *, routes: bool = False) -> list[Group]:
    """The groups in one file as they were written, logprobs rounded to float32; without experts unless `routes`.

    Raises TrajectoryError when the file, or that of its images, is missing, differs from its manifest line, or is of
    another schema, and when `routes` are asked for but were not recorded or are deleted.
    """
    file = Path(folder) / entry.file
    table = _read_table(_whole(file, entry.sha256), file, rows.EPISODE_SCHEMA)
    experts: Mapping[tuple[str, str, int], np.ndarray] = {}
    if routes:
        if entry.routes_file is None or entry.routes_sha256 is None or not (Path(folder) / entry.routes_file).is_file():
            state = "were not recorded" if entry.routes_file is None else f"are deleted ({entry.routes_file} is gone)"
            raise TrajectoryError(f"the experts of {file} {state}; read with routes=False or roll out again")
        path = Path(folder) / entry.routes_file
        experts = rows.routes_by_turn(
            _read_table(_whole(path, entry.routes_sha256), path, rows.ROUTE_SCHEMA).to_pylist()
        )
    images: Mapping[str, EncodedImage] = {}
    if entry.images_file is not None and entry.images_sha256 is not None:
        path = Path(folder) / entry.images_file
        found = _read_table(_whole(path, entry.images_sha256), path, image_files.IMAGE_SCHEMA)
        images = image_files.images_by_name(found.to_pylist())
    try:
        return rows.groups(table.to_pylist(), experts, images)
    except KeyError as error:
        raise TrajectoryError(f"{file} shows the image {error}, which is not stored beside it") from error


def _whole(file: Path, sha256: str) -> bytes:
    """The bytes of a file that are exactly those its manifest line announced."""
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise TrajectoryError(f"{file} is in the manifest and not in the folder; restore it or cut its line") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise TrajectoryError(f"{file} has {len(data)} bytes that are not those that were written; restore the file")
    return data


def _read_table(data: bytes, file: Path, schema: pa.Schema) -> pa.Table:
    table = pq.read_table(pa.BufferReader(data))
    version = (table.schema.metadata or {}).get(b"schema_version", b"none").decode()
    if version != str(SCHEMA_VERSION) or table.schema.names != schema.names:
        raise TrajectoryError(f"{file} is of schema version {version}; this program reads version {SCHEMA_VERSION}")
    return table


def _write_table(
    file: Path,
    columns: Mapping[str, list[Any]],
    schema: pa.Schema,
    metadata: Mapping[str, str],
    sizes: Sequence[int],
    limit: int,
) -> str:
    """Write one Parquet file whole or not at all, row groups of about `limit` in `sizes`; its SHA-256 in hex."""
    part = file.with_name(file.name + ".tmp")
    table = pa.table(dict(columns), schema=schema.with_metadata(dict(metadata)))
    with part.open("wb") as sink:
        with pq.ParquetWriter(sink, table.schema, compression="zstd", compression_level=1) as writer:
            for start, stop in _row_groups(sizes, limit):
                writer.write_table(table.slice(start, stop - start))
        sink.flush()
        os.fsync(sink.fileno())
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    os.replace(part, file)
    _sync_folder(file.parent)
    return digest


def _row_groups(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive row ranges whose sizes sum to at most `limit`, at least one row each."""
    start, total = 0, 0
    for row, size in enumerate(sizes):
        if row > start and total + size > limit:
            yield start, row
            start, total = row, 0
        total += size
    if len(sizes) > start:
        yield start, len(sizes)


def _manifest_lines(path: Path, *, repair: bool) -> list[str]:
    """The complete lines of a manifest. What follows the last newline was never announced; `repair` cuts it off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if repair and whole < len(data):
        os.truncate(path, whole)
    return data[:whole].decode().splitlines()


def _append_line(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
