"""Images between the actors: from an environment to the engine and back in episodes, each file once a message.

The actors are called without Ray; what they send each other is pickled as Ray would.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle

import pytest
import torch

from k3rl.actors import ClusterConfig, EnvironmentWorker, EpisodeJob, RolloutActor, TaskRef
from k3rl.checkpoint import load_checkpoint, save_checkpoint
from k3rl.data import from_episodes
from k3rl.data.images import ImageError, preprocess_files
from k3rl.engine import Engine, InvalidRequest
from k3rl.model import K3Config, K3ForCausalLM, VisionConfig
from k3rl.pipelines import EnvConfig
from k3rl.tokens import Tokenizer
from k3rl.types import Completion, EncodedImage, SamplingParams, Scored

COLOURS = """
import io

from PIL import Image

from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task
from k3rl.tokens.images import data_url
from k3rl.types import Scored


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        file = io.BytesIO()
        Image.effect_noise((200, 200), 50 + index).save(file, "PNG")
        part = {"type": "image_url", "image_url": {"url": data_url(file.getvalue())}}
        return Task(f"colours/{index}", "colours", (Message("user", [part, {"type": "text", "text": "?"}]),), "noise")


class Look(Env):
    async def reset(self, task, context):
        return Observation(task.messages)

    async def step(self, action):
        return StepResult(done=True, answer="fine")


class Grader(Rubric):
    def score_batch(self, items):
        return [Scored(1.0) for _ in items]


def environment():
    return Environment("colours", "shows noise", Source(), Look, lambda **_: Grader(), lambda task: "fine")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a random tower."""
    width = dict.fromkeys(("vt_hidden_size", "vt_intermediate_size", "qkv_hidden_size", "mm_hidden_size"), 16)
    vision = VisionConfig(
        vt_num_attention_heads=2, vt_num_hidden_layers=1, text_hidden_size=64, init_pos_emb_height=4,
        init_pos_emb_width=4, **width,
    )  # fmt: skip
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4, vision_config=vision), dtype=torch.float32)
    model.init_weights(0)
    path = tmp_path_factory.mktemp("model") / "ck"
    save_checkpoint(model, path, tokenizer=Tokenizer.builtin())
    return path


def test_a_group_sends_its_image_once_and_gets_what_the_engine_gives(checkpoint, tmp_path, in_process, play):
    module = tmp_path / "colours.py"
    module.write_text(COLOURS)

    async def run():
        rollout = RolloutActor(ClusterConfig(), max_running=8)
        await rollout.load(str(checkpoint))
        wire = in_process(rollout)
        worker = EnvironmentWorker(EnvConfig(name=f"{module}:environment"), wire)
        await worker.set_tokenizer(str(checkpoint))
        jobs = [EpisodeJob(f"e{i}", "g", TaskRef("train", 0, 0), i) for i in range(4)]
        return await play(worker, jobs, SamplingParams(max_tokens=4, return_routes=True)), wire.sent

    episodes, (message,) = asyncio.run(run())
    turns = [episode.branches[0].turns[0] for episode in episodes]
    (image,) = turns[0].images
    assert message.count(image.data) == 1
    assert pickle.dumps(episodes).count(image.data) == 1, "four prompts share it; the messages hold it as base64"
    engine = Engine(load_checkpoint(checkpoint, dtype=torch.float32))
    for number, turn in enumerate(turns):
        params = SamplingParams(max_tokens=4, seed=number * 1_000_003, return_routes=True, stop_ids=(502,))
        (expected,) = engine.generate([turn.prompt_ids], params, [preprocess_files(turn.images, {})])
        assert turn.sampled_ids == expected.token_ids
    scored = [dataclasses.replace(episode, score=Scored(1.0)) for episode in episodes]
    batch = from_episodes(scored, {episode.id: 1.0 for episode in scored}, routes=True)
    assert (batch.row_lengths - batch.lengths).tolist() == [63] * 4, "8 x 8 rows for one placeholder"


def test_a_request_with_a_broken_image_fails_alone(checkpoint):
    good = Tokenizer.builtin().encode("hello")

    async def ask():
        rollout = RolloutActor(ClusterConfig(), max_running=8)
        await rollout.load(str(checkpoint))
        params = SamplingParams(max_tokens=2)
        broken = EncodedImage(b"no image", 8, 8)
        return await rollout.generate([(good, params), (good, params, (broken,)), ([good[0], 509], params)])

    fine, unreadable, bare = asyncio.run(ask())
    assert isinstance(fine, Completion)
    assert isinstance(unreadable, ImageError)
    assert isinstance(bare, InvalidRequest)
