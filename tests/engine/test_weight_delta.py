"""Weight versions as deltas: the same engine as after a whole update, or the old one."""

from __future__ import annotations

import pytest
import torch

from k3rl.checkpoint import load_checkpoint, manifest_of, official_tensors, save_checkpoint
from k3rl.checkpoint.delta import encode
from k3rl.engine import Engine, WeightUpdateError
from k3rl.types import SamplingParams

PROMPT, PARAMS = [5, 9, 2], SamplingParams(max_tokens=8, seed=1)


@pytest.fixture(scope="module")
def stored(model):
    return dict(official_tensors(model))


@pytest.fixture(scope="module")
def trained(build_model):
    """The model after a small step: a few values of each kind of tensor are others."""
    other = build_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in other.official_parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < 0.05
            parameter[chosen] = parameter[chosen] * 1.5
    return dict(official_tensors(other))


def delta(base, new, versions=(0, 1), bucket=3000):
    manifests = manifest_of(base.items()), manifest_of(new.items())
    header, buckets = encode(base, new, manifests, versions, bucket)
    return header.to_bytes(manifests[0]), list(buckets)


def send(engine, header, buckets, version=1):
    engine.start_weight_delta(header)
    for bucket in buckets:
        engine.update_weights_by_delta(bucket)
    engine.finish_weight_update(version)


def whole(model, stored):
    engine = Engine(model)
    engine.start_weight_update(1, manifest_of(stored.items()))
    engine.update_weights(stored.items())
    engine.finish_weight_update(1)
    return engine


def test_a_delta_gives_the_engine_that_a_whole_update_gives(model, stored, trained):
    engine, expected = Engine(model), whole(model, trained)
    before = manifest_of(stored.items())
    send(engine, *delta(stored, trained))
    assert engine.manifest == expected.manifest == manifest_of(trained.items())
    assert manifest_of(official_tensors(engine.model)) == manifest_of(trained.items())
    assert engine.generate([PROMPT], PARAMS) == expected.generate([PROMPT], PARAMS)
    assert manifest_of(official_tensors(model)) == before, "the caller's model is never written"
    send(engine, *delta(trained, stored, (1, 2)), version=2)  # and back, from packed bytes that came in
    assert manifest_of(official_tensors(engine.model)) == before
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == Engine(model).generate([PROMPT], PARAMS)[0].token_ids


def test_an_engine_loaded_from_a_checkpoint_of_the_base_takes_the_delta(model, stored, trained, tmp_path):
    save_checkpoint(model, tmp_path / "v0")
    fresh = Engine(load_checkpoint(tmp_path / "v0", dtype=torch.float64))
    send(fresh, *delta(stored, trained))
    assert fresh.manifest == manifest_of(trained.items())
    assert fresh.generate([PROMPT], PARAMS) == whole(model, trained).generate([PROMPT], PARAMS)


def test_an_engine_with_another_base_refuses_by_name(model, build_model, stored, trained):
    header, buckets = delta(stored, trained)
    with pytest.raises(WeightUpdateError, match="while version 0 is served: the delta to version 1 starts from"):
        Engine(build_model(seed=5)).start_weight_delta(header)
    with pytest.raises(WeightUpdateError, match="a delta to version 0, and 7 is served"):
        Engine(model, version=7).start_weight_delta(delta(stored, trained, (0, 8))[0])
    with pytest.raises(WeightUpdateError, match="not later"):
        Engine(model, version=1).start_weight_delta(delta(stored, trained, (1, 1))[0])
    engine = Engine(model)
    engine.start_weight_delta(header)
    with pytest.raises(WeightUpdateError, match="opened as a delta"):
        engine.update_weights(trained.items())
    engine.start_weight_update(1, manifest_of(trained.items()))
    with pytest.raises(WeightUpdateError, match="opened for whole tensors"):
        engine.update_weights_by_delta(buckets[0])
