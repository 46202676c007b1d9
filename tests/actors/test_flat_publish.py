"""Weights from several learner ranks straight into engines, in flat buffers, while those sample: without Ray, over real
stores, shared memory and groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from k3rl.actors import ClusterConfig, RolloutActor
from k3rl.actors.weight_sync import Export, Payload, TransferBroken, WeightSink, WeightSource
from k3rl.actors.weight_sync.buckets import tensor_buckets
from k3rl.checkpoint import manifest_of, official_tensors, save_checkpoint
from k3rl.engine import Engine, WeightUpdateError
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.tokens import Tokenizer
from k3rl.types import SamplingParams

NANO = K3Config.named("k3-nano")
CPU = torch.device("cpu")
PROMPT, SAMPLED = [5, 9, 2], 300


def made(seed: int, experts: range | None = None) -> K3ForCausalLM:
    model = K3ForCausalLM(NANO, experts=experts)
    model.init_weights(seed)
    return model


class Rank:
    """A learner rank that holds a run of experts; what it trains is drawn anew from a seed."""

    def __init__(self, number: int, runs: list[range]) -> None:
        self.model = made(0, runs[number])
        alone, place = SimpleNamespace(rank=0, size=1), SimpleNamespace(rank=number, size=len(runs))

        @contextmanager
        def whole() -> Iterator[K3ForCausalLM]:
            yield self.model

        mesh = SimpleNamespace(data=alone, context=alone, expert=place, world=place)
        self.source = WeightSource(CPU)
        self.source.attach(SimpleNamespace(model=self.model, whole=whole, mesh=mesh))

    def export(self, seed: int) -> Export:
        self.model.init_weights(seed)
        return self.source.export()


class Flipping(WeightSink):
    """A sink at which one byte of the second rank's shard changes after it came."""

    def take_shard(self, engine, number, buffer):
        if number == 1:
            buffer[-1000] ^= 4
        super().take_shard(engine, number, buffer)


class Net:
    """Two expert ranks and engines that have met, each call in a thread as in a process of its own."""

    def __init__(self, transport: str, kinds: list[type[WeightSink]], timeout_s: float = 20.0) -> None:
        runs = [range(0, 5), range(5, 16)]
        self.ranks = [Rank(number, runs) for number in range(2)]
        self.engines = [Engine(made(0)) for _ in kinds]
        self.sinks = [kind("cpu") for kind in kinds]
        self.pool = ThreadPoolExecutor(8)
        links = [rank.source.open(transport, len(kinds), timeout_s, nccl=False) for rank in self.ranks]
        calls = [self.pool.submit(rank.source.join) for rank in self.ranks]
        calls += [self.pool.submit(asyncio.run, sink.join(links, i)) for i, sink in enumerate(self.sinks)]
        for call in calls:
            call.result(40)

    def prepare(self, seed: int, senders: int = 2) -> list:
        """The first phase of a version: what each engine answers, or raises."""
        exports = [rank.export(seed) for rank in self.ranks]
        version = exports[0].version
        payload = Payload("flat", b"", (), 0, f"{version}", tuple(export.shard for export in exports))
        sending = [self.pool.submit(rank.source.send) for rank in self.ranks[:senders]]
        calls = [
            self.pool.submit(asyncio.run, sink.prepare(engine, version, {}, payload))
            for sink, engine in zip(self.sinks, self.engines, strict=True)
        ]
        found = [call.exception(40) or call.result() for call in calls]
        self.sent = [call.exception(40) or call.result() for call in sending]
        return found

    def close(self) -> None:
        for rank in self.ranks:
            rank.source.close()
        for sink in self.sinks:
            sink.close()
        self.pool.shutdown()


@pytest.fixture
def net():
    made_: list[Net] = []

    def make(*arguments, **options) -> Net:
        made_.append(Net(*arguments, **options))
        return made_[-1]

    yield make
    for each in made_:
        each.close()


def serves(engine: Engine, seed: int) -> bool:
    return manifest_of(official_tensors(engine.model)) == manifest_of(official_tensors(made(seed)))


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_each_ranks_own_experts_reach_every_engine_and_all_of_it_is_served_after_the_switch(net, transport):
    both = net(transport, [WeightSink, WeightSink])
    for version, seed in ((1, 11), (2, 12), (3, 13)):
        answers = both.prepare(seed)
        assert all(part["verify_seconds"] > 0 for part in answers)
        assert not any(serves(engine, seed) for engine in both.engines), "before the switch the old one is served"
        paused = [sink.commit(engine, version) for sink, engine in zip(both.sinks, both.engines, strict=True)]
        assert all(0 < seconds < 5 for seconds in paused)
        assert all(engine.version == version and serves(engine, seed) for engine in both.engines)
    assert sum(both.sent) == sum(rank.source._flat[0].size for rank in both.ranks), "no rank sends what another has"


def test_an_altered_shard_is_refused_by_tensor_and_rank_and_holds_up_nobody(net):
    both = net("shm", [Flipping, WeightSink])
    refused, fine = both.prepare(11)
    assert isinstance(refused, WeightUpdateError)
    assert "has digest" in str(refused)
    assert "learner rank 1" in str(refused)
    assert fine["verify_seconds"] > 0
    for engine in both.engines:
        engine.abort_weight_update()
    assert [engine.version for engine in both.engines] == [0, 0]
    assert all(serves(engine, 0) for engine in both.engines)
    both.sinks[0].take_shard = lambda *given: WeightSink.take_shard(both.sinks[0], *given)
    both.prepare(12)
    both.sinks[0].commit(both.engines[0], 2)
    assert serves(both.engines[0], 12), "the transport is whole"


def test_a_rank_that_sends_nothing_ends_the_version_within_the_timeout_and_the_old_one_is_served(net):
    one = net("shm", [WeightSink], timeout_s=2.0)
    (error,) = one.prepare(11, senders=1)
    assert isinstance(error, TransferBroken)
    assert "did not come within 2 s" in str(error)
    one.engines[0].abort_weight_update()
    assert serves(one.engines[0], 0)


class Handed(WeightSink):
    """A sink whose shards are there already."""

    async def prepare(self, engine, version, manifest, payload):
        engine.start_flat_update(version, payload.shards)
        engine.update_weights_by_shard(0, payload.buckets[0])
        engine.verify_weight_update()
        return {}

    def commit(self, engine, version):
        self.switched = len(engine.sampled(next(iter(engine.batch.requests)))[0])
        return super().commit(engine, version)


def test_running_requests_go_on_with_the_states_that_the_configuration_names(tmp_path):
    """The reference: what each token's logprob is under each version, from one pass of the second model."""
    save_checkpoint(made(0), tmp_path / "start", tokenizer=Tokenizer.builtin())
    rank = Rank(0, [range(16)])
    found = {}

    async def run(in_flight: str):
        actor = RolloutActor(ClusterConfig(rollout_threads=1, engine={"in_flight": in_flight}))
        actor.weights = sink = Handed("cpu")
        await actor.load(str(tmp_path / "start"))
        params = SamplingParams(temperature=0.0, max_tokens=SAMPLED)
        asked = asyncio.create_task(actor.generate([(PROMPT, params)]))
        while actor.engine.counters.sampled_tokens < 10:
            await asyncio.sleep(0)
        await actor.pause()
        export = rank.export(21)
        _, buffer = rank.source._flat
        await actor.prepare(export.version, {}, Payload("flat", b"", (buffer.clone(),), 0, "", (export.shard,)))
        paused = await actor.commit(export.version)
        (answer,) = await asked
        return answer, sink.switched, paused, actor.engine.counters.recomputed_tokens

    for number, mode in enumerate(("recompute", "carry")):
        rank.source.version = number
        answer, switched, paused, recomputed = asyncio.run(run(mode))
        assert (answer.first_version, answer.weight_version) == (0, number + 1)
        assert len(answer.token_ids) == SAMPLED
        assert 10 <= switched < SAMPLED
        assert 0 < paused < 1
        found[mode] = answer, switched, recomputed
    assert found["recompute"][2] == len(PROMPT) + found["recompute"][1]
    assert found["carry"][2] == 0
    new = made(21)
    for mode, close in (("recompute", True), ("carry", False)):
        answer, switched, _ = found[mode]
        ids = torch.tensor([[*PROMPT, *answer.token_ids]])
        with torch.no_grad():
            wanted = torch.log_softmax(new(ids).logits[0], -1)[len(PROMPT) - 1 : -1]
        after = wanted[range(SAMPLED), list(answer.token_ids)][switched:].numpy()
        difference = np.abs(after - np.asarray(answer.logprobs[switched:]))
        assert bool(difference.max() < 1e-3) is close, f"{mode}: {difference.max()}"  # float32, another batch shape


def test_calls_are_answered_while_a_version_that_came_through_the_object_store_is_built_and_proved():
    """Each part of the work takes long, and the event loop of the actor goes on."""
    threads = set()

    def slow(*_):
        threads.add(threading.current_thread())
        time.sleep(0.15)

    engine = SimpleNamespace(start_weight_update=slow, update_weights=slow, verify_weight_update=slow)

    async def bucket():
        return next(iter(tensor_buckets([("a", torch.zeros(4))], 1 << 20))).to_bytes()

    async def run() -> int:
        turns = 0
        work = asyncio.ensure_future(
            WeightSink("cpu").prepare(engine, 1, {}, Payload("whole", b"", (bucket(), bucket()), 0))
        )
        while not work.done():
            await asyncio.sleep(0.005)
            turns += 1
        await work
        return turns

    assert asyncio.run(run()) > 15  # of 120 in the 0.6 s that the parts take together; between them alone it has five
    assert threading.main_thread() not in threads
