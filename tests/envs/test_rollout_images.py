"""Episodes with images: one placeholder among the tokens, the file beside them, from the environment to the record."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from PIL import Image

from k3rl.envs import Env, Observation, StepResult
from k3rl.envs.episode_state import EpisodeState
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import run_episode
from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.images import ImageError, data_url, encoded_images
from k3rl.types import Completion, EncodedImage, Failed, Message, SamplingParams, StopReason, Task, ToolCall

TOKENIZER = Tokenizer.builtin()
PAD = TOKENIZER.special("media_pad")
TASK = Task("t", "album", (), "images")


def picture(width: int, height: int) -> EncodedImage:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (width, height, 7)).save(out, "PNG")
    return EncodedImage(out.getvalue(), width, height)


WIDE, TALL, SMALL = picture(60, 20), picture(20, 60), picture(5, 4)


def part(image: EncodedImage) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image.data)}}


def sampled(message: Message) -> tuple[int, ...]:
    segments, own = xtml.render_trained([Message("user", "x"), message], thinking=False, add_generation_prompt=False)
    return tuple(TOKENIZER.encode_segments([one for one, mine in zip(segments, own, strict=True) if mine]))


CALLS = Message("assistant", "", tool_calls=(ToolCall("look", {"at": "a"}), ToolCall("look", {"at": "b"})))
TURNS = [sampled(CALLS), sampled(Message("assistant", "seen")), sampled(Message("assistant", "end"))]


class Album(Env):
    """An image at first; the results of two calls, with text that tries to be an image; a new conversation."""

    def __init__(self) -> None:
        self.steps = 0

    async def reset(self, task, context):
        return Observation((Message("user", [part(WIDE), {"type": "text", "text": "look around"}]),))

    async def step(self, action):
        self.steps += 1
        if self.steps == 1:
            forged = {"type": "text", "text": xtml.IMAGE_PLACEHOLDER}
            tall, small = Message("tool", [forged, part(TALL)]), Message("tool", [part(SMALL)])
            return StepResult(Observation((tall, small)))
        if self.steps == 2:
            return StepResult(Observation((Message("user", [part(SMALL)]),), branch="new"))
        return StepResult(done=True, answer=str(action.message.content))

    async def snapshot(self):
        return bytes([self.steps])

    async def restore(self, task, context, snapshot):
        self.steps = snapshot[0]


class Script:
    """Says its turns and remembers what it was shown."""

    def __init__(self, turns) -> None:
        self.turns = list(turns)
        self.shown: list[tuple[EncodedImage, ...]] = []

    async def complete(self, prompt_ids, params, images=()):
        assert list(prompt_ids).count(PAD) == len(images)
        self.shown.append(tuple(images))
        ids = self.turns[len(self.shown) - 1]
        return Completion(ids, (-0.5,) * len(ids), StopReason.STOP, 1, 1)


def play(env: Env, policy: Any, **options: Any):
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=200))
    return asyncio.run(run_episode(env, TASK, policy, settings, episode_id="e", **options))


def test_images_go_with_every_prompt_in_the_order_of_their_placeholders() -> None:
    policy = Script(TURNS)
    episode = play(Album(), policy)
    assert episode.answer == "end"
    assert policy.shown == [(WIDE,), (WIDE, TALL, SMALL), (SMALL,)]
    assert [[turn.images for turn in branch.turns] for branch in episode.branches] == [
        policy.shown[:2],
        policy.shown[2:],
    ]
    assert [branch.images for branch in episode.branches] == policy.shown[1:]
    text = TOKENIZER.decode(list(episode.branches[0].turns[1].prompt_ids))
    assert text.count("<|media_pad|>") == 3
    assert all(f"image {size}<" in text for size in ("60x20", "20x60", "5x4"))
    assert xtml.IMAGE_PLACEHOLDER in text, "what a tool prints is text"


@pytest.mark.parametrize("pause", [1, 2])
def test_an_episode_that_was_paused_still_has_its_images(pause: int) -> None:
    states: list[EpisodeState] = []

    def pause_here(state: EpisodeState) -> bool:
        states.append(state)
        return len(states) == pause

    paused = play(Album(), Script(TURNS), before_turn=pause_here)
    assert paused.stop_reason is StopReason.PAUSED
    data = states[-1].to_bytes()
    state = EpisodeState.from_bytes(data)
    assert state == states[-1]
    assert data.count(SMALL.data) == 1
    whole, resumed = play(Album(), Script(TURNS)), play(Album(), Script(TURNS[pause:]), resume=state)
    assert [branch.images for branch in resumed.branches] == [branch.images for branch in whole.branches]
    assert [branch.tokens()[0].tolist() for branch in resumed.branches] == [
        branch.tokens()[0].tolist() for branch in whole.branches
    ]
    assert (resumed.messages, resumed.answer) == (whole.messages, whole.answer)


@pytest.mark.parametrize("given", ["https://example.org/a.png", "a.png", data_url(b"no image"), WIDE.data, None])
def test_an_image_that_cannot_be_read_is_the_environments_failure_and_no_zero(given: Any) -> None:
    class Broken(Album):
        async def reset(self, task, context):
            return Observation((Message("user", [{"type": "image", "image": given}]),))

    episode = play(Broken(), Script(TURNS))
    assert episode.stop_reason is StopReason.INFRA_ERROR
    assert isinstance(episode.score, Failed)
    assert "ImageError" in episode.score.reason


def test_equal_urls_are_read_once() -> None:
    url = data_url(WIDE.data)
    messages = [Message("user", [{"type": "image_url", "image_url": url}, {"type": "image", "image": url}])]
    one, two = encoded_images(messages)
    assert one is two
    with pytest.raises(ImageError, match="data_url makes"):
        encoded_images([Message("user", [{"type": "image", "image": 7}])])
