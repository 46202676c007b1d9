"""Publishing over a real Ray: deltas where the base is known, else, and after a refusal, the whole version.

Through the object store, and by a broadcast between the actors' processes. And what the engines tell environments of a
conversation that outgrows them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError

from k3rl.actors import AnswerStreams, ClusterConfig, EnvironmentWorker, EpisodeJob, LearnerActor, RolloutActor, TaskRef
from k3rl.actors.weight_sync import BaseVersion, Canary, PublishError, WeightPublisher, WeightSource
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.envs.rollout import gradable
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.model.lora import LoraConfig
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.pipelines import EnvConfig
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Completion, Failed, FailureKind, SamplingParams, StopReason

PROMPT = Tokenizer.builtin().encode("one two three")
TRAINER = TrainerConfig(muon_lr=1e-4, adamw_lr=1e-4)
CANARY = Canary(PROMPT)
ONE_THREAD = ClusterConfig(rollout_threads=1, call_timeout_s=60.0, weight_transfer="object_store")


class Saboteur(LearnerActor):
    """A learner whose payloads lose a bucket on the way, in some encodings."""

    damaged: tuple[str, ...] = ()

    def publish(self, served, stream=False):
        publication = super().publish(served, stream)
        if stream and next(iter(publication.payloads.values())).encoding in self.damaged:
            key, buckets = self.weights.outgoing
            self.weights.outgoing = key, lambda: iter(list(buckets())[:-1])
        payloads = {
            base: dataclasses.replace(each, buckets=each.buckets[:-1]) if each.encoding in self.damaged else each
            for base, each in publication.payloads.items()
        }
        return dataclasses.replace(publication, payloads=payloads)

    def export(self):
        made = super().export()
        if "flat" in self.damaged:
            self.weights._flat[1][700_000] ^= 1
        return made

    def damage(self, *encodings):
        self.damaged = encodings


class Mortal(RolloutActor):
    """An engine whose process can end in the middle of a version."""

    async def arm(self):
        self.weights.take = lambda *_: os._exit(1)


def batch(seed: int) -> TrainBatch:
    ids = np.random.default_rng(seed).integers(0, 400, 40).astype(np.int64)
    mask = np.ones(40, bool)
    mask[0] = False
    zeros = np.zeros(40, np.float32)
    return TrainBatch.pack([TrainSequence("a", ids, mask, zeros, zeros)])


@pytest.fixture(scope="module")
def fleet(ray_cluster, tmp_path_factory):
    """(learner, two rollout actors, publisher, checkpoint) of one small model."""
    folder = str(tmp_path_factory.mktemp("publish") / "start")
    learner = ray.remote(Saboteur).options(num_cpus=0.5).remote(1)
    engines = [ray.remote(Mortal).options(num_cpus=0.5).remote(ONE_THREAD, i, 8, i) for i in range(2)]
    ray.get(learner.create.remote(K3Config.named("k3-nano").to_dict(), TRAINER, 0))
    ray.get(learner.save_checkpoint.remote(folder, {}))
    publisher = WeightPublisher([learner], engines, CANARY, ONE_THREAD)
    yield learner, engines, publisher, folder
    for actor in (learner, *engines):
        ray.kill(actor)


def fresh(fleet):
    """All of them as after a start, with nothing damaged."""
    learner, engines, _, folder = fleet
    ray.get(learner.damage.remote())
    ray.get(learner.load.remote(folder, TRAINER))
    ray.get(learner.set_version.remote(0))
    ray.get([engine.load.remote(folder) for engine in engines])


def by_broadcast(fleet) -> WeightPublisher:
    fresh(fleet)
    learner, engines, _, _ = fleet
    config = ONE_THREAD.replace(weight_transfer="broadcast", weight_delta="on", transfer_timeout_s=30.0)
    return WeightPublisher([learner], engines, CANARY, config)


def by_memory(fleet) -> WeightPublisher:
    """What `auto` takes between processes of one host."""
    fresh(fleet)
    learner, engines, _, _ = fleet
    return WeightPublisher([learner], engines, CANARY, ClusterConfig(rollout_threads=1, call_timeout_s=60.0))


def served(engines) -> list[BaseVersion]:
    return ray.get([engine.served.remote() for engine in engines])


def test_deltas_reach_engines_whose_base_is_known_and_the_whole_version_the_others(fleet):
    learner, engines, publisher, folder = fleet
    fresh(fleet)
    first = publisher.publish()
    assert (first["deltas"], first["refused"]) == (2, 0), "the checkpoint that all loaded is a base"
    assert first["bytes"] < 0.01 * first["bytes_full"], "nothing was trained yet"
    ray.get(learner.train.remote([batch(1)], CrossEntropy()))
    second = publisher.publish()
    assert second["deltas"] == 2
    assert 0.001 < second["bytes"] / second["bytes_full"] < 0.2
    ray.get(engines[1].load.remote(folder))  # it restarted
    ray.get(learner.train.remote([batch(2)], CrossEntropy()))
    third = publisher.publish()
    assert (third["deltas"], third["version"]) == (1, 3)
    assert third["bytes"] > third["bytes_full"], "the largest payload counts"
    one, two = served(engines)
    assert one == two
    assert one[0] == 3
    params = SamplingParams(temperature=0, max_tokens=6)
    answers = [ray.get(engine.generate.remote([(PROMPT, params)]))[0] for engine in engines]
    assert answers[0] == answers[1]
    assert third["canary"] < 1e-4


@pytest.mark.parametrize("transport", ["object_store", "broadcast"])
@pytest.mark.parametrize("damaged", [("delta",), ("delta", "whole")], ids="+".join)
def test_a_damaged_delta_is_sent_again_whole_and_a_damaged_version_leaves_the_old_one(fleet, transport, damaged):
    learner, engines, by_store, _ = fleet
    publisher = by_store if transport == "object_store" else by_broadcast(fleet)
    fresh(fleet)
    ray.get(learner.damage.remote(*damaged))
    ray.get(learner.train.remote([batch(1)], CrossEntropy()))
    if "whole" in damaged:
        with pytest.raises(PublishError, match="tensors are missing"):
            publisher.publish()
    else:
        done = publisher.publish()
        assert (done["refused"], done["deltas"], done["version"], done["fell_back"]) == (1, 0, 2, 0)
    serves = 0 if "whole" in damaged else 2
    assert [version for version, _ in served(engines)] == [serves, serves]


TALK = """
from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task

WORDS = ((1, 6000), (1, 1), (6000, 1))  # of the first message and of the second


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        first, second = WORDS[index]
        text = "word " * first
        return Task(f"talk/{index}", "talk", (Message("user", text),), "talk", data={"second": second})


class Talk(Env):
    async def reset(self, task, context):
        self.second = task.data["second"]
        return Observation(task.messages)

    async def step(self, action):
        return StepResult(Observation((Message("user", "word " * self.second),)))

    async def conclude(self, reason):
        return f"what stood at {reason}"


def environment():
    return Environment("talk", "talks", Source(), Talk, lambda **_: Rubric.of(len), lambda task: "")
"""


class FirstWords(AnswerStreams):
    """A policy whose first turn is written down, because random weights say no valid message; then the real engine."""

    def __init__(self, engine) -> None:
        super().__init__()
        self._engine = engine
        self.asked: list[int] = []
        prompt = xtml.render([], thinking=False)
        said = xtml.render([{"role": "assistant", "content": "a"}], thinking=False, add_generation_prompt=False)
        self.said = tuple(Tokenizer.builtin().encode_segments(said[len(prompt) :]))

    def begin(self, requests):
        self.asked.append(len(requests))
        first = Completion(self.said, (-0.1,) * len(self.said), StopReason.STOP, 0, 0)
        written = len(self.asked) == 1
        return [
            asyncio.ensure_future(self._asked(request, first if written and len(request[0]) <= 4000 else None))
            for request in requests
        ]

    async def _asked(self, request, written):
        if written is not None:
            return written
        (answer,) = await self._engine.generate.remote([request])
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_conversation_that_outgrows_the_context_is_truncated_and_one_that_never_fitted_failed(
    fleet, tmp_path, in_process, play
):
    _, engines, _, _ = fleet
    fresh(fleet)
    module = tmp_path / "talk.py"
    module.write_text(TALK)
    policy = FirstWords(engines[0])
    worker = EnvironmentWorker(EnvConfig(name=f"{module}:environment"), in_process(policy))
    jobs = [EpisodeJob(f"e{n}", f"g{n}", TaskRef("train", n, 0), n) for n in range(3)]
    outgrown, fits, never = asyncio.run(play(worker, jobs, SamplingParams(max_tokens=8)))
    assert policy.asked == [3, 2]
    assert (outgrown.stop_reason, outgrown.answer) == (StopReason.CONTEXT_OVERFLOW, "what stood at context_overflow")
    assert gradable(outgrown)
    assert [len(turn.sampled_ids) for branch in outgrown.branches for turn in branch.turns] == [len(policy.said)]
    assert fits.stop_reason is not StopReason.CONTEXT_OVERFLOW
    assert len(fits.branches[0].turns) == 2, "the refusal of its neighbour is not its own"
    assert isinstance(never.score, Failed)
    assert never.score.kind is FailureKind.ENGINE
    assert "must fit a context of 4096" in never.score.reason


def test_a_broadcast_brings_the_bytes_that_the_object_store_brings(fleet):
    learner, engines, by_store, folder = fleet
    publisher = by_broadcast(fleet)
    ray.get(learner.train.remote([batch(1)], CrossEntropy()))
    delta = publisher.publish()
    assert (delta["deltas"], delta["refused"], delta["fell_back"]) == (2, 0, 0)
    assert 0.001 < delta["bytes"] / delta["bytes_full"] < 0.2
    assert 0 < delta["transfer_seconds"] < delta["seconds"]
    ray.get(engines[1].load.remote(folder))  # it restarted, so there is no delta for both
    ray.get(learner.train.remote([batch(2)], CrossEntropy()))
    whole = publisher.publish()
    assert (whole["deltas"], whole["version"], whole["fell_back"]) == (0, 2, 0)
    assert whole["bytes"] > whole["bytes_full"]
    assert max(delta["canary"], whole["canary"]) < 1e-4
    score = lambda batch: ray.get(learner.logprobs.remote(batch))  # noqa: E731
    # as on a GPU: with the experts that engines recorded
    assert CANARY.check(engines, score, 2, replay_routes=True, timeout_s=60.0) < 1e-4
    one, two = served(engines)
    assert one == two
    by_store.publish()  # the same weights once more
    assert [digest for _, digest in served(engines)] == [one[1], one[1]]
    assert publisher.notes() == []


def test_on_one_host_versions_go_whole_in_flat_buffers_and_a_damaged_one_is_refused_by_name(fleet):
    learner, engines, by_store, _ = fleet
    publisher = by_memory(fleet)
    for number in (1, 2):
        ray.get(learner.train.remote([batch(number)], CrossEntropy()))
        done = publisher.publish()
        assert (done["version"], done["deltas"], done["fell_back"]) == (number, 0, 0)
        assert done["bytes_full"] < done["bytes"] < 1.1 * done["bytes_full"], "padding"
        assert done["canary"] < 1e-4
        assert 0 < done["engine_paused"] < done["seconds"]
        assert min(done[f"{part}_seconds"] for part in ("gather", "digest", "receive", "verify", "transfer")) > 0
    one, two = served(engines)
    assert one == two
    ray.get(learner.damage.remote("flat"))
    with pytest.raises(PublishError, match=r"version 3 refused: \S+ has digest .* learner rank 0"):
        publisher.publish()
    assert served(engines) == [one, two]
    ray.get(learner.damage.remote())
    assert publisher.publish()["version"] == 4
    assert [digest for _, digest in served(engines)] == [one.digest, one.digest], "the same weights once more"
    by_store.publish()
    assert [digest for _, digest in served(engines)] == [one.digest, one.digest]
    assert publisher.notes() == []


def test_an_adapter_is_broadcast_alone(fleet):
    learner, engines, _, folder = fleet
    publisher = by_broadcast(fleet)
    whole = publisher.publish()["bytes_full"]
    config = TRAINER.replace(lora=LoraConfig(rank=2, alpha=4.0))
    ray.get(learner.load.remote(folder, config))
    ray.get(learner.train.remote([batch(1)], CrossEntropy()))
    done = publisher.publish()
    assert done["canary"] < 1e-4, "the engine samples with the adapter"
    assert done["fell_back"] == 0
    assert done["bytes_full"] < done["bytes"] < 0.2 * whole
    assert served(engines)[0][0] == 1, "the weights beside it are the same"


def test_a_broken_broadcast_is_left_for_the_object_store_and_that_is_said_once(fleet):
    learner, engines, _, _ = fleet
    publisher = by_broadcast(fleet)
    publisher.publish()
    ray.get(engines[1].close_transfer.remote())
    ray.get(learner.train.remote([batch(1)], CrossEntropy()))
    done = publisher.publish()
    assert (done["fell_back"], done["refused"], done["version"]) == (1, 0, 3)
    (note,) = publisher.notes()
    assert note.startswith("weights go through the object store from now on: ")
    assert "broadcast" in note or "join_transfer" in note
    assert publisher.publish()["fell_back"] == 0
    assert publisher.notes() == []
    assert [version for version, _ in served(engines)] == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the second as on a GPU, and with DeepSpeed
def test_a_publication_says_whether_its_canary_can_be_compared_closely(dtype):
    model = K3ForCausalLM(K3Config.named("k3-nano"), dtype=dtype)
    model.init_weights(0)
    source = WeightSource(torch.device("cpu"))
    source.attach(Trainer(model, TRAINER))
    assert source.publish([BaseVersion(0, "none")], stream=True).half is (dtype == torch.bfloat16)


def test_an_engine_that_dies_in_a_broadcast_leaves_the_others_on_the_old_version(fleet):
    learner, engines, _, _ = fleet  # of which one is gone afterwards: this test is the last
    publisher = by_broadcast(fleet)
    publisher.publish()
    ray.get(engines[1].arm.remote())
    ray.get(learner.train.remote([batch(1)], CrossEntropy()))
    with pytest.raises(RayActorError):  # asked what it serves, before the version goes out by the object store
        publisher.publish()
    (note,) = publisher.notes()
    assert "through the object store" in note
    assert [version for version, _ in served(engines[:1])] == [1]
    with pytest.raises(RayActorError):  # in the second phase too the loss comes first: fresh actors may help
        publisher.commit(9)
    assert [version for version, _ in served(engines[:1])] == [1]
