"""Buckets: stored tensors in pieces of bounded size, written where they are to travel from, on the host or on a device.

A bucket of tensors has the layout of a safetensors file, so that a copy of its bytes is one. Its checksum finds every
change within one word of eight bytes and nearly every other; the digests of the manifest are what proves the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from k3rl.config import K3Error

_CODES = {
    torch.uint8: "U8",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_WORD = 8
_STRETCH = 1 << 20  # words that are added at a time
_MODULUS = 1 << 64


class BucketDamaged(K3Error):
    """A bucket is not what was sent; its version is refused."""


class Bucket(Protocol):
    """Bytes that can be written into a buffer: `size` of them.

    resident: where they lie already, in memory that the sender may share or broadcast as it is. Such a bucket needs no
    checksum: whoever takes it proves all of it by other means.
    """

    size: int
    resident: Tensor | None

    def write(self, into: Tensor) -> None:
        """Fills uint8 [size], on any device."""
        ...

    def to_bytes(self) -> bytes:
        """The same in host memory."""
        ...


class TensorBucket:
    """Whole tensors, which may lie anywhere; they are copied once, by `write`."""

    resident: Tensor | None = None

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        ordered = sorted(tensors, key=lambda item: -item[1].element_size())  # so that each is aligned
        header: dict[str, object] = {}
        end = 0
        for name, tensor in ordered:
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _WORD)
        self._head = len(text).to_bytes(_WORD, "little") + text
        self._tensors = [tensor for _, tensor in ordered]
        self.size = len(self._head) + end

    def write(self, into: Tensor) -> None:
        _put(into, self._head)
        at = len(self._head)
        for tensor in self._tensors:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            into[at : at + len(flat)].copy_(flat)
            at += len(flat)

    def to_bytes(self) -> bytes:
        buffer = torch.empty(self.size, dtype=torch.uint8)
        self.write(buffer)
        return content_of(buffer)


class BytesBucket:
    """Bytes as they are, such as a bucket of a delta."""

    resident: Tensor | None = None

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def write(self, into: Tensor) -> None:
        _put(into, self._content)

    def to_bytes(self) -> bytes:
        return self._content


class FlatBucket:
    """A shard of a version, in one flat buffer. stays: whether it is sent from where it lies."""

    def __init__(self, buffer: Tensor, *, stays: bool) -> None:
        self._buffer, self.size = buffer, buffer.numel()
        self.resident = buffer if stays else None

    def write(self, into: Tensor) -> None:
        into.copy_(self._buffer)

    def to_bytes(self) -> bytes:
        return content_of(self._buffer)


def _put(into: Tensor, content: bytes) -> None:
    into[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def tensor_buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Buckets of whole tensors, each of about `limit` bytes unless one tensor is larger."""
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if pending and size + own > limit:
            yield TensorBucket(pending)
            pending, size = [], 0
        pending.append((name, tensor))
        size += own
    if pending:
        yield TensorBucket(pending)


def tensors_in(bucket: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors of a uint8 bucket, as views of it on its device. Raises BucketDamaged."""
    try:
        length = int.from_bytes(content_of(bucket[:_WORD]), "little")
        if length > bucket.numel() - _WORD:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(content_of(bucket[_WORD : _WORD + length]))
        data = bucket[_WORD + length :]
        found = []
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found.append((name, data[begin:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise BucketDamaged(f"a bucket of {bucket.numel()} bytes has no readable header ({error})") from error
    return found


def content_of(bucket: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    return bucket.cpu().numpy().tobytes()


def checksum(bucket: Tensor) -> int:
    """Of uint8 [n], computed where it lies: the sum of its words times 1, 3, 5, ... and of its size, modulo 2^64.

    Odd factors have inverses there, so no change within a single word leaves the sum as it was.
    """
    whole = bucket.numel() // _WORD * _WORD
    words = bucket[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=bucket.device)
    for start in range(0, words.numel(), _STRETCH):
        part = words[start : start + _STRETCH]
        total += (part * torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=bucket.device)).sum()
    rest = int.from_bytes(content_of(bucket[whole:]), "little") * (2 * words.numel() + 1)
    return (int(total) + rest + bucket.numel()) % _MODULUS
