"""Deltas between stored tensors: exact for any bits, bounded messages, and nothing damaged gets through."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.checkpoint.delta import DeltaDecoder, DeltaError, DeltaHeader, deflated, encode
from k3rl.checkpoint.manifest import manifest_digest, manifest_of

KINDS = {torch.uint8: np.uint8, torch.bfloat16: np.uint16, torch.float32: np.uint32}


def tensor(words: np.ndarray, kind: torch.dtype, shape=(-1,)) -> torch.Tensor:
    return torch.from_numpy(words.view(np.uint8).copy()).view(kind).view(*shape)


def delta(base, new, bucket=4096):
    manifests = manifest_of(base.items()), manifest_of(new.items())
    header, buckets = encode(base, new, manifests, (3, 4), bucket)
    return header, list(buckets), manifests


def rebuilt(base, header_bytes, buckets):
    manifest = manifest_of(base.items())
    decoder = DeltaDecoder(DeltaHeader.from_bytes(header_bytes, manifest), base.__getitem__)
    for bucket in buckets:
        decoder.add(bucket)
    changed = dict(decoder.tensors())
    assert decoder.check_result(manifest) == {**manifest, **manifest_of(changed.items())}
    return {**base, **changed}


def some_tensors(seed: int, sizes, share: float, reach: int):
    """(base, new): of each tensor a share of the words moved by at most `reach`, NaN and -0 patterns included."""
    rng = np.random.default_rng(seed)
    base, new = {}, {}
    for number, (kind, size) in enumerate(sizes):
        words = rng.integers(0, np.iinfo(KINDS[kind]).max, size, dtype=KINDS[kind], endpoint=True)
        moved = words.copy()
        chosen = rng.random(size) < share
        steps = rng.integers(-reach, reach, int(chosen.sum()), endpoint=True).astype(np.int64)
        moved[chosen] = (moved[chosen].astype(np.int64) + steps).astype(KINDS[kind])
        base[f"layer.{number}"], new[f"layer.{number}"] = tensor(words, kind), tensor(moved, kind)
    return base, new


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.tuples(st.sampled_from(list(KINDS)), st.integers(1, 3000)), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
    reach=st.sampled_from([1, 3, 1000]),
    bucket=st.sampled_from([1100, 2000, 1 << 20]),
    backwards=st.booleans(),
)
def test_any_change_comes_out_bit_for_bit_from_buckets_within_their_bound(seed, sizes, share, reach, bucket, backwards):
    base, new = some_tensors(seed, sizes, share, reach)
    header, buckets, (before, after) = delta(base, new, bucket)
    assert all(len(piece) <= bucket for piece in buckets)
    assert header.names == tuple(name for name in sorted(base) if before[name] != after[name])
    got = rebuilt(base, header.to_bytes(before), buckets[::-1] if backwards else buckets)
    assert manifest_of(got.items()) == after


@pytest.fixture
def threads():
    """Sets torch's number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_makes_the_same_bytes_and_takes_them(threads, monkeypatch):
    monkeypatch.setattr("k3rl.checkpoint.delta.DIGEST_BYTES", 5000)  # digests go to threads too
    sizes = [(kind, size) for size in (1, 9000, 40, 7000, 3) for kind in KINDS]
    base, new = some_tensors(2, sizes, 0.1, 2)
    made = []
    for count in (1, 2, 5):
        threads(count)
        header, buckets, (before, after) = delta(base, new, 3000)
        made.append((header.to_bytes(before), buckets))
        assert manifest_of(rebuilt(base, *made[0]).items()) == after
    assert made[0] == made[1] == made[2]
    header, buckets = made[0]
    with pytest.raises(DeltaError, match=r"layer\.\d+ is incomplete"):
        rebuilt(base, header, buckets[:2] + buckets[3:])
    honest = DeltaHeader.from_bytes(header, before)
    wrong = dataclasses.replace(honest, digests=(b"\0" * 8,) * len(honest.names))
    first = next(name for name in wrong.names if new[name].element_size() == 1)
    with pytest.raises(DeltaError, match=f"{first} came out with another digest"):
        rebuilt(base, wrong.to_bytes(before), buckets)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=20),
    repeats=st.integers(1, 5000),
    zeros=st.integers(0, 20000),
)
def test_what_is_deflated_without_a_search_is_plain_zlib_and_hardly_longer_than_it_was(values, repeats, zeros):
    data = bytes(values) * repeats + b"\0" * zeros
    packed = deflated(data)
    assert zlib.decompress(packed) == data
    assert len(packed) <= len(data) + 5 * (len(data) // 16384 + 1) + 11  # the bound that buckets are cut by


def test_steps_of_a_learning_rate_cost_no_more_than_where_repeats_are_searched_for():
    base, new = some_tensors(3, [(torch.uint8, 200_000), (torch.bfloat16, 200_000)], 0.05, 1)
    sent = sum(map(len, delta(base, new, 1 << 20)[1]))
    old, fresh = (tensors["layer.1"].view(torch.int16).numpy() for tensors in (base, new))
    moved = np.packbits(np.stack([old != fresh, old > fresh], 1).reshape(-1))
    flips = np.flatnonzero(base["layer.0"].numpy() != new["layer.0"].numpy())
    gaps, values = np.diff(flips).astype(np.uint8), (base["layer.0"] ^ new["layer.0"]).numpy()[flips]
    searched = sum(len(zlib.compress(part.tobytes())) for part in (moved, gaps, values))
    assert sent < searched


def test_few_changes_cost_few_bytes():
    base, new = some_tensors(0, [(torch.uint8, 200_000), (torch.bfloat16, 200_000)], 0.01, 1)
    header, buckets, (before, _) = delta(base, new, 1 << 20)
    sent = sum(map(len, buckets)) + len(header.to_bytes(before))
    assert sent < 0.03 * 600_000


def test_buckets_of_few_changes_do_not_wait_until_they_are_full(monkeypatch):
    monkeypatch.setattr("k3rl.checkpoint.delta.RECORD_WORDS", 10_000)
    monkeypatch.setattr("k3rl.checkpoint.delta.COVERED_BYTES", 40_000)
    base, new = some_tensors(0, [(torch.uint8, 200_000), (torch.bfloat16, 100_000)], 0.001, 1)
    header, buckets, (before, after) = delta(base, new, 1 << 20)
    assert len(buckets) == 200_000 / 40_000 + 2 * 100_000 / 40_000
    assert manifest_of(rebuilt(base, header.to_bytes(before), buckets).items()) == after


def test_equal_versions_give_an_empty_delta():
    base, _ = some_tensors(0, [(torch.uint8, 50)], 0, 1)
    header, buckets, (before, _) = delta(base, base)
    assert (header.names, buckets) == ((), [])
    assert rebuilt(base, header.to_bytes(before), []).keys() == base.keys()


@pytest.fixture
def sent():
    base, new = some_tensors(1, [(torch.uint8, 4000), (torch.bfloat16, 4000), (torch.float32, 300)], 0.3, 2)
    header, buckets, (before, _) = delta(base, new, 1200)
    assert len(buckets) > 3
    return base, header.to_bytes(before), buckets


@settings(max_examples=60, deadline=None)
@given(bucket=st.integers(0, 10**6), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_a_bucket_is_refused(bucket, place, bit):
    base, new = some_tensors(1, [(torch.uint8, 900), (torch.bfloat16, 900)], 0.3, 2)
    header, buckets, (before, _) = delta(base, new, 1200)
    which = bucket % len(buckets)
    damaged = bytearray(buckets[which])
    damaged[place % len(damaged)] ^= 1 << bit
    buckets[which] = bytes(damaged)
    with pytest.raises(DeltaError):
        rebuilt(base, header.to_bytes(before), buckets)


def relabelled(base, header: bytes, **change) -> bytes:
    """The header with other fields."""
    manifest = manifest_of(base.items())
    return dataclasses.replace(DeltaHeader.from_bytes(header, manifest), **change).to_bytes(manifest)


def cut(size):
    return lambda base, header, buckets: (base, header, [buckets[0], buckets[1][:size], *buckets[2:]])


def unreadable(spoil):
    return lambda base, header, buckets: (base, spoil(header), buckets)


DAMAGE = [  # (what becomes of base, header and buckets, what the error says)
    (lambda base, header, buckets: (base, header, buckets[1:]), r"layer\.\d is incomplete"),
    (lambda base, header, buckets: (base, header, buckets[:1] + buckets[2:]), r"layer\.\d is incomplete"),
    (lambda base, header, buckets: (base, header, buckets[:-1]), r"layer\.\d is incomplete"),
    (lambda base, header, buckets: (base, header, [*buckets, buckets[0]]), "twice"),
    *((cut(size), "cut short") for size in (0, 5, 17, -1)),
    (
        lambda base, header, buckets: ({**base, "layer.0": base["layer.0"] + 1}, header, buckets),
        "starts from version 3",
    ),
    (
        lambda base, header, buckets: (
            base,
            relabelled(base, header, result_digest=manifest_digest(manifest_of(base.items()))),
            buckets,
        ),
        "another manifest",
    ),
    (
        lambda base, header, buckets: (base, relabelled(base, header, digests=(b"\0" * 8,) * len(base)), buckets),
        "another digest",
    ),
    *(
        (unreadable(spoil), "cannot be read")
        for spoil in (
            lambda header: b"",
            lambda header: b"{}",
            lambda header: header[:-5],
            lambda header: header.replace(b'"base"', b'"bass"'),
        )
    ),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_what_is_not_the_delta_that_was_made_is_refused_by_name(sent, damage, says):
    base, header, buckets = damage(*sent)
    with pytest.raises(DeltaError, match=says):
        rebuilt(base, header, buckets)


def test_tensors_of_two_models_make_no_delta():
    base, new = some_tensors(0, [(torch.uint8, 50), (torch.uint8, 50)], 0.5, 1)
    with pytest.raises(DeltaError, match="in one version only"):
        delta(base, {"layer.0": new["layer.0"]})
    with pytest.raises(DeltaError, match="changed its shape"):
        delta(base, {**new, "layer.1": new["layer.1"][:40]})
