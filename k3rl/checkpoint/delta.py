"""A weight version as its difference from an earlier one, exact to the bit, in messages of bounded size.

A step of training changes few of a checkpoint's bytes: of MXFP4 experts some codes, of bf16 tensors the last place of
some values. Only tensors whose digest changed are sent. All of one element size form one stream of words, in the order
of their names; a record holds a stretch of a stream, coded as what is smallest:

    steps   the distance of each value from its old one on the number line of its format: 0, +1, -1 in two bits each,
            larger ones apart; both in the order of the old values' exponents, on which the size of a step depends
    sparse  of uint8: how far it is to the next byte that changed, and the exclusive or there
    planes  all distances, byte by byte (of uint8: the exclusive or), for streams in which much has changed
    plain   the new words

each through zlib, which is not made to search for repeats: bytes of a delta have frequencies and runs, and little else.
Records are made, unpacked and digested by as many threads as torch may use. The header names the base by the digest of
its whole manifest, carries one digest for each changed tensor, and the digest of the whole manifest that must come out.
Nothing is assumed: a record that is missing, altered or out of place, and a result that differs in one bit, is refused
with a `DeltaError`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from k3rl.checkpoint.manifest import digests, manifest_digest
from k3rl.checkpoint.threads import in_batches, map_in_order
from k3rl.config import K3Error

BUCKET_BYTES = 64 << 20
_RECORD = struct.Struct("<BBQII")  # element size, coding, first word, words, bytes of the record's body
_MAGIC, _CHECK, _PREFIX = b"K3DELTA1", 8, 8  # bytes of a bucket's check, and of each tensor's digest
_STEPS, _SPARSE, _PLANES, _PLAIN = 0, 1, 2, 3
MAX_RECORD_WORDS = 1 << 20  # of a record that a decoder takes
RECORD_WORDS = 1 << 18  # of one that is made: a thread's share, whose temporaries stay in a core's cache
COVERED_BYTES = 1 << 28  # bytes of tensors after which a bucket is sealed: who waits for it sees that something happens
DIGEST_BYTES = 1 << 19  # bytes of tensors that a thread digests at a time
_DENSE = 0.25  # of the bytes differ from zero: then there may be too few runs to look for
_EXPONENT = {2: 7, 4: 23, 8: 52}  # its lowest bit, by element size; bf16's of two bytes
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


class DeltaError(K3Error, ValueError):
    """A delta that cannot be made or cannot be trusted; whoever held the base still holds it."""


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """From which version to which. names: the changed tensors, sorted; sizes: bytes of an element of each; digests:
    the first bytes of each one's digest after.

    base_digest and result_digest: of the whole manifests before and after.
    """

    version: int
    base: int
    base_digest: str
    result_digest: str
    names: tuple[str, ...]
    sizes: bytes
    digests: tuple[bytes, ...]

    def to_bytes(self, base_names: Mapping[str, str]) -> bytes:
        """JSON; the names as bits over the sorted names of the base's manifest."""
        chosen = set(self.names)
        bits = np.packbits([name in chosen for name in sorted(base_names)])
        return json.dumps(
            {
                "version": self.version,
                "base": self.base,
                "base_digest": self.base_digest,
                "result_digest": self.result_digest,
                "names": base64.b64encode(bits.tobytes()).decode(),
                "sizes": base64.b64encode(zlib.compress(self.sizes)).decode(),
                "digests": base64.b64encode(b"".join(self.digests)).decode(),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes, base_manifest: Mapping[str, str]) -> DeltaHeader:
        """The header, read by someone who holds the base. Raises DeltaError when it is not of that base."""
        try:
            found = json.loads(data)
            version, base = int(found["version"]), int(found["base"])
            base_digest, result_digest = str(found["base_digest"]), str(found["result_digest"])
            bits = base64.b64decode(found["names"], validate=True)
            sizes = base64.b64decode(found["sizes"], validate=True)
            digests = base64.b64decode(found["digests"], validate=True)
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise DeltaError(f"the header of a delta cannot be read ({error}); send the whole version") from error
        own = manifest_digest(base_manifest)
        if base_digest != own:
            raise DeltaError(
                f"the delta to version {version} starts from version {base} (manifest {base_digest[:12]}), and the "
                f"weights here have manifest {own[:12]}; send the whole version"
            )
        chosen = np.unpackbits(np.frombuffer(bits, np.uint8))[: len(base_manifest)]
        names = tuple(name for name, bit in zip(sorted(base_manifest), chosen, strict=False) if bit)
        if len(digests) != _PREFIX * len(names):
            raise DeltaError(f"the delta names {len(names)} tensors and has {len(digests)} bytes of digests")
        each = tuple(digests[i : i + _PREFIX] for i in range(0, len(digests), _PREFIX))
        return cls(version, base, base_digest, result_digest, names, _inflated(sizes, len(names)), each)


# ------------------------------------------------------------------------------------------------ words


def _words(tensor: Tensor) -> np.ndarray:
    """The elements as unsigned integers, flat, sharing memory with a CPU tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(_UNSIGNED[tensor.element_size()])


def _ordered(words: np.ndarray) -> np.ndarray:
    """Floating-point words as signed integers in the order of their values; an involution on the integers' bits."""
    signed = words.view(_SIGNED[words.itemsize])
    below_sign = signed >> (8 * words.itemsize - 1)  # all ones where negative
    below_sign &= np.iinfo(signed.dtype).max
    return np.bitwise_xor(signed, below_sign, out=below_sign)


def _distance(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Unsigned words that tell new from old: exclusive or of bytes, else zigzag steps on the number line."""
    if old.itemsize == 1:
        return old ^ new
    steps = _ordered(new) - _ordered(old)  # wraps around, as its inverse does
    return ((steps << 1) ^ (steps >> (8 * old.itemsize - 1))).view(old.dtype)


def _moved(old: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The inverse of `_distance` in its second argument."""
    if old.itemsize == 1:
        return old ^ distance
    signed = _SIGNED[old.itemsize]
    steps = (distance >> 1).view(signed) ^ -(distance & 1).view(signed)
    return _ordered((_ordered(old) + steps).view(old.dtype)).view(old.dtype)


# ------------------------------------------------------------------------------------------------ records


def _encoded(old: np.ndarray, new: np.ndarray) -> tuple[int, bytes]:
    """(coding, body) of a stretch of words: the smallest of those that may be, which depends on how much changed."""
    distance = _distance(old, new)
    forms = [(_SPARSE, _sparse(distance)) if old.itemsize == 1 else (_STEPS, _steps(distance[_by_exponent(old)]))]
    share = np.count_nonzero(distance) / len(distance)
    if share > 0.1:
        forms.append((_PLANES, deflated(_planes(distance))))
    if share > 0.8:
        forms.append((_PLAIN, deflated(_planes(new))))
    return min(forms, key=lambda form: len(form[1]))


def _by_exponent(old: np.ndarray) -> np.ndarray:
    """The order of words by the exponents of their values; equal ones stay in order."""
    return np.argsort((old >> _EXPONENT[old.itemsize]).astype(np.uint8), kind="stable")


def _steps(distance: np.ndarray) -> bytes:
    codes = np.where(distance < 3, distance, 3).astype(np.uint8)
    codes = np.pad(codes, (0, -len(codes) % 4)).reshape(-1, 4)
    packed = deflated((codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6).tobytes())
    return struct.pack("<I", len(packed)) + packed + deflated(_planes(distance[distance >= 3]))


def _sparse(distance: np.ndarray) -> bytes:
    """Pairs (gap 1..255, byte), a zero byte where a gap is longer than that."""
    places = np.flatnonzero(distance != 0)  # of booleans it is fast
    gaps = np.diff(places, prepend=-1)
    extra = (gaps - 1) // 255  # steps of 255 before the last one of a gap
    ends = np.cumsum(extra + 1) - 1
    steps, values = np.full(int((extra + 1).sum()), 255, np.uint8), np.zeros(int((extra + 1).sum()), np.uint8)
    steps[ends], values[ends] = gaps - 255 * extra, distance[places]
    packed = deflated(steps.tobytes())
    return struct.pack("<II", len(steps), len(packed)) + packed + deflated(values.tobytes())


def _decoded(coding: int, body: bytes, old: np.ndarray) -> np.ndarray:
    """The new words of a record. Raises DeltaError."""
    kind, size = old.dtype, len(old) * old.itemsize
    if coding == _PLAIN:
        return _unplaned(_inflated(body, size), kind)
    if coding == _PLANES:
        return _moved(old, _unplaned(_inflated(body, size), kind))
    if coding == _STEPS and kind.itemsize > 1:
        distance = np.empty_like(old)
        distance[_by_exponent(old)] = _unsteps(body, len(old), kind)
        return _moved(old, distance)
    if coding == _SPARSE and kind.itemsize == 1:
        return _moved(old, _unsparse(body, len(old)))
    raise DeltaError(f"a record has coding {coding}, which there is not for elements of {kind.itemsize} bytes")


def _unsteps(body: bytes, count: int, kind: np.dtype) -> np.ndarray:
    (length,) = _heads("<I", body)
    packed = np.frombuffer(_inflated(body[4 : 4 + length], -(-count // 4)), np.uint8)
    codes = np.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], 1).reshape(-1)[:count]
    distance, far = codes.astype(kind), codes == 3
    distance[far] = _unplaned(_inflated(body[4 + length :], int(far.sum()) * kind.itemsize), kind)
    return distance


def _unsparse(body: bytes, count: int) -> np.ndarray:
    pairs, length = _heads("<II", body)
    if pairs > count:
        raise DeltaError(f"a record changes {pairs} of {count} bytes")
    steps = np.frombuffer(_inflated(body[8 : 8 + length], pairs), np.uint8)
    values = np.frombuffer(_inflated(body[8 + length :], pairs), np.uint8)
    places = np.cumsum(steps.astype(np.int64)) - 1
    if pairs and (places[-1] >= count or not steps.all()):
        raise DeltaError("a record changes bytes behind its end")
    distance = np.zeros(count, np.uint8)
    distance[places] = values
    return distance


def deflated(data: bytes) -> bytes:
    forms = [_with(zlib.Z_RLE, data)]
    if np.count_nonzero(np.frombuffer(data, np.uint8)) > _DENSE * len(data):
        forms.append(_with(zlib.Z_HUFFMAN_ONLY, data))
    return min(forms, key=len)


def _with(strategy: int, data: bytes) -> bytes:
    machine = zlib.compressobj(strategy=strategy)
    return machine.compress(data) + machine.flush()


def _heads(form: str, body: bytes) -> tuple[int, ...]:
    if len(body) < struct.calcsize(form):
        raise DeltaError("a record ends within its head")
    return struct.unpack_from(form, body)


def _planes(words: np.ndarray) -> bytes:
    """All lowest bytes, then all second ones, and so on: like bytes lie together."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T).tobytes()


def _unplaned(data: bytes, kind: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(kind.itemsize, -1).T).reshape(-1).view(kind)


def _inflated(data: bytes, size: int) -> bytes:
    """Exactly `size` bytes, and never more in memory. Raises DeltaError."""
    machine = zlib.decompressobj()
    try:
        out = machine.decompress(data, size + 1)
    except zlib.error as error:
        raise DeltaError(f"a record is damaged ({error})") from error
    if len(out) != size or not machine.eof or machine.unused_data:
        raise DeltaError(f"a record holds {len(out)} bytes or more; {size} were expected")
    return out


# ------------------------------------------------------------------------------------------------ the learner's side


def encode(
    base: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    manifests: tuple[Mapping[str, str], Mapping[str, str]],
    versions: tuple[int, int],
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[DeltaHeader, Iterator[bytes]]:
    """(header, buckets) that turn `base` into `new`; both pairs are (before, after). Buckets are made as they are read.

    Raises DeltaError when the two are not tensors of one model.
    """
    before, after = manifests
    if before.keys() != after.keys():
        raise DeltaError(f"{len(before.keys() ^ after.keys())} tensors are in one version only; send the whole version")
    names = tuple(sorted(name for name in after if after[name] != before[name]))
    for name in names:
        if base[name].shape != new[name].shape or base[name].dtype != new[name].dtype:
            raise DeltaError(f"{name} changed its shape or dtype; send the whole version")
    prefixes = tuple(bytes.fromhex(after[name])[:_PREFIX] for name in names)
    sizes = bytes(new[name].element_size() for name in names)
    ends = manifest_digest(before), manifest_digest(after)
    header = DeltaHeader(versions[1], versions[0], *ends, names, sizes, prefixes)
    return header, _buckets(base, new, names, bucket_bytes)


def _buckets(
    base: Mapping[str, Tensor], new: Mapping[str, Tensor], names: tuple[str, ...], limit: int
) -> Iterator[bytes]:
    pending: list[bytes] = []
    held, covered = len(_MAGIC) + _CHECK, 0
    for size, record in map_in_order(_record, _sources(base, new, names, limit)):
        if pending and (held + len(record) > limit or covered >= COVERED_BYTES):
            yield _sealed(pending)
            pending, held, covered = [], len(_MAGIC) + _CHECK, 0
        pending.append(record)
        held, covered = held + len(record), covered + size
    if pending:
        yield _sealed(pending)


class _RecordSource(NamedTuple):
    """What a record is for: its first word, and old and new words in stretches."""

    place: int
    old: list[np.ndarray]
    new: list[np.ndarray]


def _sources(
    base: Mapping[str, Tensor], new: Mapping[str, Tensor], names: tuple[str, ...], limit: int
) -> Iterator[_RecordSource]:
    """The tensors of each element size laid end to end, and cut."""
    for size in _UNSIGNED:
        # zlib's worst case adds five bytes per 16 KiB, so a record of so many words always fits.
        words, piece, count = max(1, min(RECORD_WORDS, (limit - 1024) // (size + 1))), _RecordSource(0, [], []), 0
        for name in names:
            if new[name].element_size() != size:
                continue
            old_words, new_words = _words(base[name]), _words(new[name])
            start = 0
            while start < len(new_words):
                stop = min(len(new_words), start + words - count)
                piece.old.append(old_words[start:stop])
                piece.new.append(new_words[start:stop])
                count, start = count + stop - start, stop
                if count == words:
                    yield piece
                    piece, count = _RecordSource(piece.place + words, [], []), 0
        if count:
            yield piece


def _record(piece: _RecordSource) -> tuple[int, bytes]:
    """(bytes of the tensors that it is for, record)."""
    old, new = np.concatenate(piece.old), np.concatenate(piece.new)
    coding, body = _encoded(old, new)
    return new.nbytes, _RECORD.pack(new.itemsize, coding, piece.place, len(new), len(body)) + body


def _sealed(records: list[bytes]) -> bytes:
    body = b"".join(records)
    return _MAGIC + hashlib.blake2b(body, digest_size=_CHECK).digest() + body


# ------------------------------------------------------------------------------------------------ the engine's side


class DeltaDecoder:
    """Collects buckets in any order and gives the changed tensors, each proved equal to its digest.

    base(name): the stored tensor of the base, on the CPU. Holds the buckets as they came, and one stretch unpacked.
    """

    def __init__(self, header: DeltaHeader, base: Callable[[str], Tensor]) -> None:
        self._header, self._base = header, base
        self._records: dict[tuple[int, int], tuple[int, int, bytes]] = {}  # (size, place) -> coding, words, body
        self._found: dict[str, str] = {}  # digests of the tensors given so far
        self.bytes = 0

    def add(self, bucket: bytes) -> None:
        """Takes a bucket in. Raises DeltaError when it is cut short, altered, or was there before."""
        head = len(_MAGIC) + _CHECK
        body = bytes(bucket[head:])
        check = hashlib.blake2b(body, digest_size=_CHECK).digest()
        if bytes(bucket[: len(_MAGIC)]) != _MAGIC or bytes(bucket[len(_MAGIC) : head]) != check:
            raise DeltaError("a bucket of the delta is damaged or cut short")
        at = 0
        while at < len(body):
            if at + _RECORD.size > len(body):
                raise DeltaError("a bucket of the delta ends within a record")
            size, coding, place, words, length = _RECORD.unpack_from(body, at)
            at += _RECORD.size
            if at + length > len(body) or size not in _UNSIGNED or not 0 < words <= MAX_RECORD_WORDS:
                raise DeltaError("a record of the delta has a length or an element size that cannot be")
            if (size, place) in self._records:
                raise DeltaError("a bucket of the delta came twice")
            self._records[size, place] = coding, words, body[at : at + length]
            at += length
        self.bytes += len(bucket)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The changed tensors, one after the other. Raises DeltaError for the first that is incomplete or wrong."""
        wanted = dict(zip(self._header.names, self._header.digests, strict=True))
        batches: deque[list[tuple[str, Tensor]]] = deque()

        def noted() -> Iterator[list[tuple[str, Tensor]]]:
            for batch in in_batches(self._unpacked(), DIGEST_BYTES):
                batches.append(batch)
                yield batch

        for found in map_in_order(digests, noted()):
            for (name, tensor), (_, own) in zip(batches.popleft(), found, strict=True):
                if bytes.fromhex(own)[:_PREFIX] != wanted[name]:
                    raise DeltaError(f"{name} came out with another digest than the header says")
                self._found[name] = own
                yield name, tensor

    def _unpacked(self) -> Iterator[tuple[str, Tensor]]:
        """The same, not proved yet."""
        header, used = self._header, 0
        for size in _UNSIGNED:
            names = [name for name, own in zip(header.names, header.sizes, strict=True) if own == size]
            records = {place: record for (own, place), record in self._records.items() if own == size}
            used += len(records) if names else 0
            yield from self._stream(size, names, records)
        if used != len(self._records):
            raise DeltaError(f"{len(self._records) - used} records of the delta belong to no changed tensor")

    def _stream(
        self, size: int, names: list[str], records: dict[int, tuple[int, int, bytes]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one element size, each when the records that cover it are decoded."""
        held: deque[_OpenTensor] = deque()
        for target in map_in_order(_RecordTarget.decode, self._targets(size, names, records, held)):
            for part, words in target.covers:
                part.filled += words
            while held and held[0].filled == len(held[0].old):
                part = held.popleft()
                yield part.name, part.tensor()
        if held:
            raise DeltaError(f"{held[0].name} is incomplete: a bucket of the delta is missing")
        if records:
            raise DeltaError(f"{len(records)} records of the delta lie where no tensor is")

    def _targets(
        self, size: int, names: list[str], records: dict[int, tuple[int, int, bytes]], held: deque[_OpenTensor]
    ) -> Iterator[_RecordTarget]:
        """Each record, taken out of `records`, with the words it covers; the tensors of these are put into `held`."""
        open_tensors: deque[_OpenTensor] = deque()  # whose words have no record yet, some of them
        place = behind = 0  # words that have records; words of open tensors behind them
        for name in names:
            part = _OpenTensor(name, self._base(name))
            if part.old.itemsize != size:
                raise DeltaError(f"{name} has elements of {part.old.itemsize} bytes here, and {size} in the delta")
            held.append(part)
            open_tensors.append(part)
            behind += len(part.old)
            while place in records and records[place][1] <= behind:
                coding, words, body = records.pop(place)
                target = _RecordTarget(coding, body, words, open_tensors)
                place, behind = place + words, behind - words
                yield target

    def check_result(self, base: Mapping[str, str]) -> dict[str, str]:
        """The manifest after, of the one before and the tensors that were given. Raises DeltaError."""
        after = {**base, **self._found}
        if manifest_digest(after) != self._header.result_digest:
            raise DeltaError("the result has another manifest than the header says")
        return after


class _OpenTensor:
    """A tensor being decoded: its old words, and its new ones, of which the first are `given` to stretches, and fewer
    `filled` by them."""

    def __init__(self, name: str, old: Tensor) -> None:
        self.name, self._like = name, old
        self.old = _words(old)
        self.new, self.given, self.filled = np.empty_like(self.old), 0, 0

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.new.view(np.uint8)).view(self._like.dtype).view(self._like.shape)


class _RecordTarget:
    """A record and the words that it is for: the first of these tensors that no other record is for. covers: how many
    of each. Takes tensors that are given whole out of `parts`."""

    def __init__(self, coding: int, body: bytes, words: int, parts: deque[_OpenTensor]) -> None:
        self._coding, self._body = coding, body
        self.covers: list[tuple[_OpenTensor, int]] = []
        self._old, self._new = [], []
        while words:
            part = parts[0]
            count = min(words, len(part.old) - part.given)
            here = slice(part.given, part.given + count)
            self._old.append(part.old[here])
            self._new.append(part.new[here])
            self.covers.append((part, count))
            part.given, words = part.given + count, words - count
            if part.given == len(part.old):
                parts.popleft()

    def decode(self) -> _RecordTarget:
        """Fills the new words of the tensors, which no other record writes to. Raises DeltaError."""
        new, at = _decoded(self._coding, self._body, np.concatenate(self._old)), 0
        for piece in self._new:
            piece[:] = new[at : at + len(piece)]
            at += len(piece)
        return self
