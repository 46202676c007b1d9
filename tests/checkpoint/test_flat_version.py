"""Versions in flat buffers: digests that see every change, and tables that hold what a checkpoint stores."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.checkpoint import (
    CheckpointError,
    FlatError,
    FlatLayout,
    empty_buffer,
    layouts_of,
    official_tensors,
    prove,
    read_flat,
    shard_layout,
    shard_of,
    write_flat,
)
from k3rl.checkpoint.flat_digest import BLOCK_BYTES, FlatDigests, reference_digest
from k3rl.model import K3Config, K3ForCausalLM, pack_experts

CPU = torch.device("cpu")
NANO = K3Config.named("k3-nano")
SHARDS = (range(0, 5), range(5, 16))


def filled(content: list[bytes]) -> tuple[torch.Tensor, list[int]]:
    """A buffer of these tensors' bytes, and the blocks of each."""
    blocks = [-(-len(each) // BLOCK_BYTES) for each in content]
    joined = b"".join(each + bytes(-len(each) % BLOCK_BYTES) for each in content)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8), blocks


def made(seed: int, experts: range | None = None) -> K3ForCausalLM:
    model = K3ForCausalLM(NANO, experts=experts)
    model.init_weights(seed)
    return model


def version(seed: int) -> list[tuple[FlatLayout, torch.Tensor]]:
    """A version as two expert ranks write it, the second one with what is no expert."""
    out = []
    for number, run in enumerate(SHARDS):
        model = made(seed, run)
        layout = shard_layout(model, rest=number == 1)
        buffer = empty_buffer(layout, CPU)
        write_flat(model, layout, buffer)
        out.append((layout, buffer))
    return out


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=600), min_size=1, max_size=6).filter(any))
def test_digests_are_those_of_the_definition_in_unbounded_integers(content):
    buffer, blocks = filled(content)
    found = FlatDigests(blocks)(buffer)
    assert [row.numpy().tobytes() for row in found] == [reference_digest(each) for each in content]


def test_a_digest_depends_on_its_own_bytes_and_not_on_the_place_in_the_buffer():
    generator = torch.Generator().manual_seed(0)
    size = 5000 * BLOCK_BYTES  # more than is hashed at a time
    buffer = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    two = FlatDigests([1200, 0, 3800])
    assert torch.equal(two(buffer)[0], FlatDigests([1200])(buffer[: 1200 * BLOCK_BYTES].clone())[0])
    assert torch.equal(two(buffer)[2], FlatDigests([3800])(buffer[1200 * BLOCK_BYTES :].clone())[0])
    assert two(buffer)[1].eq(0).all()


CHANGES = {
    "one bit": lambda b: b[1234].bitwise_xor_(16),
    "two sign bits": lambda b: b[1235::3086].bitwise_xor_(128),
    "two blocks in each other's place": lambda b: b.copy_(torch.cat([b[256:512], b[:256], b[512:]])),
    "two words in each other's place": lambda b: b.copy_(torch.cat([b[4:8], b[:4], b[8:]])),
    "halves of a block in each other's place": lambda b: b.copy_(torch.cat([b[128:256], b[:128], b[256:]])),
    "all sign bits": lambda b: b.bitwise_xor_(torch.tensor([0, 128], dtype=torch.uint8).repeat(len(b) // 2)),
    "zeros from the middle on": lambda b: b[len(b) // 2 :].zero_(),
    "everything one byte further": lambda b: b.copy_(b.roll(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_lane_of_a_digest_sees_what_faults_do(change):
    buffer = torch.randint(1, 256, (40 * BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    digests, before = FlatDigests([40]), FlatDigests([40])(buffer)
    change(buffer)
    assert digests(buffer).ne(before).all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_buffer_holds_what_a_checkpoint_stores_and_a_model_reads_it_back(packed):
    model = made(3)
    if packed:
        pack_experts(model)
    layout = shard_layout(model, rest=True)
    buffer = empty_buffer(layout, CPU)
    write_flat(model, layout, buffer)
    stored = dict(official_tensors(model))
    views = [view for entry in layout.entries for view in entry.of(buffer)]
    named = {layout.name(number): view for number, view in enumerate(views)}
    assert named.keys() == stored.keys()
    assert len(views) == layout.tensors == len(stored)
    assert all(
        named[name].dtype == tensor.dtype and torch.equal(named[name], tensor) for name, tensor in stored.items()
    )
    other = K3ForCausalLM(NANO, packed=packed)
    read_flat(other, layout, buffer)
    read = dict(official_tensors(other))
    assert all(torch.equal(read[name], tensor) for name, tensor in stored.items())


def test_shards_of_expert_ranks_are_together_the_whole_version():
    model = K3ForCausalLM(NANO)
    for layout, buffer in version(4):
        read_flat(model, layout, buffer)
    read = dict(official_tensors(model))
    assert all(torch.equal(read[name], tensor) for name, tensor in official_tensors(made(4)))


def test_shards_that_are_no_whole_version_of_the_model_are_refused():
    shards = [shard_of(rank, *each) for rank, each in enumerate(version(4))]
    assert [layout.experts for layout in layouts_of(NANO, shards)] == list(SHARDS)
    for wrong, says in (
        (shards[:1], "5 of 16 experts"),
        (shards[1:], "experts 0 to 4 are in no shard"),
        ([shards[0], *shards], "in no shard, or in two"),
        ([shards[0], dataclasses.replace(shards[1], rest=False)], "0 of them have everything else"),
        ([shards[0], dataclasses.replace(shards[1], layout="0" * 64)], "rank 1 .* does not fit this model"),
    ):
        with pytest.raises(FlatError, match=says):
            layouts_of(NANO, wrong)
    with pytest.raises(FlatError, match="does not fit"):
        layouts_of(NANO.replace(hidden_size=128), shards)


def test_a_shard_is_proved_tensor_by_tensor_padding_and_length_included():
    (layout, buffer), _ = version(4)
    shard = shard_of(0, layout, buffer)
    prove(shard, layout, buffer)
    with pytest.raises(FlatError, match="came with"):
        prove(shard, layout, buffer[:-1])
    scale = next(entry for entry in layout.entries if entry.region == "scales")
    assert scale.stride > scale.of(buffer)[0].numel(), "there is padding"
    for place in (layout.entries[0].start, scale.start + scale.stride - 1):
        buffer[place] ^= 1
        name = layout.name(0) if place == 0 else scale.name + "_scale"
        with pytest.raises(FlatError, match=f"{name.replace('.', '[.]')} has digest .*learner rank 0"):
            prove(shard, layout, buffer)
        buffer[place] ^= 1


@pytest.mark.parametrize(("region", "value"), [("fp32", float("nan")), ("bf16", float("inf")), ("scales", 255)])
def test_numbers_that_are_not_finite_are_refused_by_name(region, value):
    _, (layout, buffer) = version(4)
    entry = [one for one in layout.entries if one.region == region][-1]
    entry.of(buffer)[-1].view(-1)[0] = value
    with pytest.raises(CheckpointError, match="holds NaN or infinite"):
        read_flat(made(0), layout, buffer)
