"""An update that is damaged, incomplete or of another model is refused by name, and the version before it is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from k3rl.checkpoint import assign_official_tensors, empty_buffer, official_tensors, shard_layout, shard_of, write_flat
from k3rl.checkpoint.delta import encode
from k3rl.checkpoint.manifest import manifest_digest, manifest_of
from k3rl.engine import AdapterHeader, Engine, WeightUpdateError
from k3rl.model import Adapter, K3ForCausalLM, LoraConfig
from k3rl.types import SamplingParams

PROMPT = [5, 9, 2]
LORA = LoraConfig(rank=2, alpha=4.0)


class Sender:
    """What sends the good update of each kind, or what became of it."""

    def __init__(self, model, build_model) -> None:
        self.served = dict(official_tensors(model))
        self.tensors = dict(official_tensors(build_model(seed=1)))
        self.other_shape = dict(official_tensors(build_model(intermediate_size=64)))
        self.shards = [shard(model.config, self.tensors, run) for run in (range(0, 1), range(1, 4))]
        adapter, generator = Adapter(model, LORA), torch.Generator().manual_seed(2)
        adapter.assign({name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in adapter.parameters()})
        self.adapter = dict(adapter.stored_tensors())

    def whole(self, engine: Engine, damage: Callable[[dict], dict] = dict) -> None:
        sent = damage(dict(self.tensors))
        listed = sent if sent is self.other_shape else self.tensors
        engine.start_weight_update(1, manifest_of(listed.items()))
        engine.update_weights(sent.items())
        engine.finish_weight_update(1)

    def twice(self, engine: Engine, damage: Callable[[dict], dict] = dict) -> None:
        engine.start_weight_update(1, manifest_of(self.tensors.items()))
        engine.update_weights(self.tensors.items())
        engine.update_weights(damage(dict(self.tensors)).items())

    def delta(self, engine: Engine, damage: Callable[[bytes, list], tuple[bytes, list]] = lambda *both: both) -> None:
        manifests = manifest_of(self.served.items()), manifest_of(self.tensors.items())
        header, buckets = encode(self.served, self.tensors, manifests, (0, 1), 3000)
        start, sent = damage(header.to_bytes(manifests[0]), list(buckets))
        engine.start_weight_delta(start)
        for bucket in sent:
            engine.update_weights_by_delta(bucket)
        engine.finish_weight_update(1)

    def flat(self, engine: Engine, damage: Callable[[list], list] = list) -> None:
        described = [shard_of(number, layout, buffer) for number, (layout, buffer) in enumerate(self.shards)]
        sent = damage(
            [
                [one, number, buffer.clone()]
                for number, (one, (_, buffer)) in enumerate(zip(described, self.shards, strict=True))
            ]
        )
        engine.start_flat_update(1, list({number: one for one, number, _ in sent if one is not None}.values()))
        for _, number, buffer in sent:
            if buffer is not None:
                engine.update_weights_by_shard(number, buffer)
        engine.finish_weight_update(1)

    def adapter_of(self, engine: Engine, version: int, tensors: dict) -> None:
        base = manifest_digest(engine.manifest)
        engine.adapters.open(
            version, AdapterHeader("a", LORA, base).to_bytes(), manifest_of(self.adapter.items()), base
        )
        engine.adapters.add(tensors.items())
        engine.finish_weight_update(version)

    def adapted(self, engine: Engine, damage: Callable[[dict], dict] = dict) -> None:
        self.adapter_of(engine, 2, damage(dict(self.adapter)))


def shard(config, tensors, run):
    """What an expert rank sends of these tensors: (layout, buffer)."""
    model = K3ForCausalLM(config, experts=run, dtype=torch.float64)
    own = {name for name, _ in official_tensors(model)}
    assign_official_tensors(model, {name: tensor for name, tensor in tensors.items() if name in own})
    layout = shard_layout(model, rest=run.start == 0)
    buffer = empty_buffer(layout, torch.device("cpu"))
    write_flat(model, layout, buffer)
    return layout, buffer


@pytest.fixture(scope="module")
def sender(model, build_model) -> Sender:
    return Sender(model, build_model)


def without_one(tensors):
    del tensors[sorted(tensors)[3]]
    return tensors


def changed(ending, change):
    def damage(tensors):
        name = next(name for name in tensors if name.endswith(ending))
        tensors[name] = change(tensors[name].clone())
        return tensors

    return damage


def flipped(tensor):
    tensor.view(-1)[0] ^= 1
    return tensor


def with_another(tensors):
    return {**tensors, "model.extra.weight": torch.zeros(2)}


def only_one(tensors):
    return dict([next(iter(tensors.items()))])


def without_the_last_bucket(header, buckets):
    return header, buckets[:-1]


def with_a_flipped_bit(header, buckets):
    damaged = bytearray(buckets[0])
    damaged[len(damaged) // 2] ^= 4
    return header, [bytes(damaged), *buckets[1:]]


def cut_short(header, buckets):
    return header, [*buckets[:-1], buckets[-1][:-3]]


def with_a_flipped_byte(sent):
    sent[1][2][-1] ^= 1
    return sent


def without_a_rank(sent):
    return [sent[0], [sent[1][0], 1, None]]


def with_a_rank_twice(sent):
    return [sent[0], [None, 0, sent[0][2]], sent[1]]


def from_another_table(sent):
    return [[dataclasses.replace(sent[0][0], layout="0" * 64), 0, sent[0][2]], sent[1]]


def of_another_version(header, buckets):
    return header.replace(b'"version": 1', b'"version": 2'), buckets


@pytest.mark.parametrize(
    ("kind", "damage", "says"),
    [
        ("whole", without_one, "1 of"),
        ("whole", changed("weight_packed", flipped), "weight_packed has digest"),
        ("whole", changed("e_score_correction_bias", lambda t: t + 1), "e_score_correction_bias has digest"),
        ("whole", with_another, r"model\.extra\.weight is not in the manifest"),
        ("whole", changed("embed_tokens.weight", lambda t: t.reshape(-1, 2)), "embed_tokens"),
        ("whole", "another shape", "do not fit"),
        ("twice", only_one, "sent twice"),
        ("delta", without_the_last_bucket, "is incomplete"),
        ("delta", with_a_flipped_bit, "damaged"),
        ("delta", cut_short, "cut short"),
        ("delta", of_another_version, "version 1 is not the one"),
        ("flat", with_a_flipped_byte, r"experts\.3\.w2\.weight_scale has digest .* learner rank 1"),
        ("flat", without_a_rank, r"learner rank 1 \(experts 1 to 3\) is missing"),
        ("flat", with_a_rank_twice, "shard 0 came twice"),
        ("flat", from_another_table, "rank 0 .* does not fit this model"),
        ("adapted", without_one, "missing"),
        ("adapted", changed("", lambda t: t + 1), "digest"),
        ("adapted", with_another, "not in the manifest"),
    ],
)
def test_a_damaged_update_is_refused_and_the_old_version_is_served(model, sender, kind, damage, says):
    engine, adapter = Engine(model), "a" if kind == "adapted" else ""
    params = SamplingParams(max_tokens=8, seed=1, adapter=adapter)
    if adapter:
        sender.adapter_of(engine, 1, sender.adapter)
    if damage == "another shape":
        damage = lambda _: sender.other_shape  # noqa: E731
    expected = engine.generate([PROMPT], params)
    with pytest.raises(WeightUpdateError, match=says):
        getattr(sender, kind)(engine, damage)
    assert (engine.version, engine.adapters.version(adapter, 0)) == (0, int(bool(adapter)))
    assert engine.generate([PROMPT], params) == expected
    with pytest.raises(WeightUpdateError, match="trained beside" if adapter else "no weight update is open"):
        engine.finish_weight_update(1)
    if kind != "twice":
        getattr(sender, kind)(engine)  # a good one is still taken
        assert engine.adapters.version(adapter, engine.version) == (2 if adapter else 1)
