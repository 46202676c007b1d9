"""The disk tier: what leaves memory comes back from files, and a disk that fails costs time, not answers."""

from __future__ import annotations

import errno
import io

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.engine import Engine, PrefixCache
from k3rl.engine.prefix import DiskTier, MemoryTier
from k3rl.types import SamplingParams

TOLERANCE = 1e-9  # float64: only the order of summation differs between a cached and a computed prefix
LARGE = 1 << 30
SMALL = 8000  # bytes: one or two states of the tiny model
PROMPTS = [[start, *range(1, 14)] for start in range(1, 8)]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "seed": 1, **changes})


def tiered(model, tier: DiskTier, host: int = 0) -> Engine:
    below = MemoryTier(host, device="cpu", below=tier) if host else tier
    tiers = [MemoryTier(SMALL, below=below), *([below] if host else []), tier]
    return Engine(model, poison=True, prefix_cache=PrefixCache(tiers, 4))


def assert_alike(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE, rtol=0)


class FullDisk(io.BytesIO):
    """A file on a disk that takes some bytes and then has no room."""

    def write(self, data) -> int:
        super().write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("host", [0, 2 * SMALL])
def test_what_leaves_memory_comes_back_from_files(model, tmp_path, host):
    tier = DiskTier(tmp_path, LARGE)
    engine = tiered(model, tier, host)
    first = engine.generate(PROMPTS, params(return_routes=True))
    before = engine.counters.prefilled_tokens
    again = engine.generate(PROMPTS, params(return_routes=True))
    assert engine.counters.prefilled_tokens == before, "all of it was somewhere"
    assert tier.counters.read > 0
    assert_alike(again, first)
    assert all(np.array_equal(a.routes, b.routes) for a, b in zip(again, first, strict=True))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) == tier.bytes


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    plan=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 37), max_size=5), st.booleans()), max_size=8),
    disk=st.sampled_from([SMALL, 4 * SMALL, LARGE]),
    failing=st.integers(0, 3),
)
def test_any_conversation_gives_what_it_gives_without_a_cache(model, tmp_path, plan, disk, failing):
    writes = [0]

    def open_file(path):
        writes[0] += 1
        return FullDisk() if failing and writes[0] % failing == 0 else path.open("wb")

    tier = DiskTier(tmp_path, disk, open_file=open_file)
    engine, plain = tiered(model, tier), Engine(model)
    histories = [[3, 1, 4, 1, 5]]
    for parent, extra, salted in plan:
        prompt = (histories[parent % len(histories)] + extra)[:60]
        own = params(cache_salt="b" if salted else "")
        (got,) = engine.generate([prompt], own)
        assert_alike([got], plain.generate([prompt], own))
        histories.append([*prompt, *got.token_ids])
    files = {file.path: file.size for state in tier.states.values() for file in (state.fixed, *state.segments)}
    assert sum(files.values()) == tier.bytes <= tier.budget_bytes
    assert files.keys() == set(tier.folder.iterdir())


def test_a_full_disk_is_a_counted_drop_and_nobody_gets_an_error(model, tmp_path):
    tier = DiskTier(tmp_path, LARGE, open_file=lambda path: FullDisk())
    engine = tiered(model, tier)
    first = engine.generate(PROMPTS, params())
    assert (len(tier), tier.counters.kept, tier.bytes) == (0, 0, 0)
    assert tier.counters.dropped > 0
    assert_alike(engine.generate(PROMPTS, params()), first)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_no_hit_and_is_forgotten(model, tmp_path, damage):
    tier = DiskTier(tmp_path, LARGE)
    engine = tiered(model, tier)
    first = engine.generate(PROMPTS, params())
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-8] ^= 64  # in a number
        if damage == "remove":
            file.unlink()
        else:
            file.write_bytes(data if damage == "flip" else data[:-9])
    assert_alike(engine.generate(PROMPTS, params()), first)
    assert tier.counters.damaged > 0
    assert tier.counters.read == 0


def test_versions_and_salts_do_not_share_and_a_switch_removes_the_files(model, build_model, tmp_path):
    tier = DiskTier(tmp_path, LARGE)
    engine = tiered(model, tier)
    engine.generate(PROMPTS, params())
    salted = engine.generate(PROMPTS, params(cache_salt="b"))
    assert all(got.cached_tokens == 0 for got in salted)
    tensors = dict(official_tensors(build_model(seed=9)))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(1)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert all(got.cached_tokens == 0 for got in engine.generate(PROMPTS, params()))


def test_the_least_recently_used_file_leaves_first_and_the_folder_goes_with_the_tier(model, tmp_path):
    tier = DiskTier(tmp_path, LARGE)
    engine = tiered(model, tier)
    engine.generate(PROMPTS[:4], params())
    oldest, second = list(tier.states)[:2]
    tier.states.move_to_end(oldest)
    tier.budget_bytes = tier.bytes
    engine.generate(PROMPTS[4:5], params())
    assert second not in tier.states
    assert oldest in tier.states
    folder = tier.folder
    tier.close()
    assert not folder.exists()
    with pytest.raises(ValueError, match="room for something"):
        DiskTier(tmp_path, 0)
    with pytest.raises(ValueError, match="name one for the files"):
        PrefixCache.of_bytes(1000, disk_bytes=10)
    assert [type(tier) for tier in PrefixCache.of_bytes(9, 9, disk_bytes=9, directory=tmp_path).tiers] == [
        MemoryTier, MemoryTier, DiskTier
    ]  # fmt: skip


def test_states_of_all_kinds_of_numbers_survive_the_file(build_model, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        tier = DiskTier(tmp_path, LARGE)
        engine = tiered(build_model(dtype=dtype), tier)
        first = engine.generate(PROMPTS, params())
        again = engine.generate(PROMPTS, params())
        assert tier.counters.read > 0
        assert [got.token_ids for got in again] == [got.token_ids for got in first]


def test_a_conversation_appends_what_is_new(model, tmp_path):
    """Forty turns that leave memory each time: as many bytes as the tokens once, and the fixed part for each turn."""
    tier, prompt = DiskTier(tmp_path, LARGE), [3, 1, 4, 1, 5]
    engine = Engine(model, poison=True, prefix_cache=PrefixCache([MemoryTier(1, below=tier), tier], 4))
    plain, sizes = Engine(model), []
    for turn in range(40):
        own = params(session="a", seed=turn, max_tokens=2)
        (got,) = engine.generate([prompt], own)
        assert_alike([got], plain.generate([prompt], own))
        assert got.cached_tokens == (len(prompt) - 3 if turn else 0)
        prompt += [*got.token_ids, turn % 30, 7]
        sizes.append(tier.counters.written)
    grown = np.diff(sizes)
    assert grown[-1] < 1.05 * grown[4], "a late turn writes what an early one writes"
    assert tier.counters.damaged == 0
    engine.end_sessions("a")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) == tier.bytes
    assert len(tier) <= 1, "the prompt that it began with"
