"""A conversation with an image trains and generates on a tiny random tower, which stays frozen."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from k3rl.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from k3rl.data import TrainBatch, from_episodes
from k3rl.data.images import ImageConfig, conversation_images, preprocess_files, stack
from k3rl.data.sft import chat_sequence
from k3rl.data.trajectories import TrajectoryWriter, read_groups
from k3rl.engine import Engine, PrefixCache
from k3rl.envs import Env, Observation, StepResult
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import run_episode
from k3rl.losses import CrossEntropy, K3Policy
from k3rl.model import K3Config, K3ForCausalLM, VisionConfig
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.images import data_url
from k3rl.types import Episode, Group, Message, SamplingParams, Scored, Task

TOKENIZER = Tokenizer.builtin()
COLOURS = {"red": (230, 20, 20), "blue": (20, 30, 220)}


def seeing(dtype: torch.dtype = torch.float32) -> K3ForCausalLM:
    vision = VisionConfig(
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        vt_num_attention_heads=2,
        vt_num_hidden_layers=2,
        vt_hidden_size=32,
        vt_intermediate_size=64,
        qkv_hidden_size=32,
        mm_hidden_size=32,
        text_hidden_size=64,
    )
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4, vision_config=vision), dtype=dtype)
    model.init_weights(2)
    return model


def question(colour: str, size: tuple[int, int] = (40, 50)) -> list[dict]:
    image = Image.new("RGB", size, COLOURS[colour])
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "colour?"}]}]


def sequence(name: str, messages: list[dict]):
    return chat_sequence(name, messages, None, TOKENIZER, False)


def answered(colour: str, size: tuple[int, int] = (40, 50)) -> list[dict]:
    return [*question(colour, size), {"role": "assistant", "content": colour}]


def text_only(name: str):
    return sequence(name, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}])


def greedy(model: K3ForCausalLM, messages: list[dict], most: int = 24) -> str:
    """Prefill with the image, then one token at a time from the cache."""
    images = conversation_images(messages)
    prompt = xtml.render(messages, thinking=False, image_prompts=[image.prompt for image in images])
    ids = torch.tensor([TOKENIZER.encode_segments(prompt)])
    pixels, grids = stack(images)
    cache, found = model.new_cache(1), []
    out = model(ids, cache=cache, pixel_values=torch.from_numpy(pixels), grid_thws=torch.from_numpy(grids))
    assert int(cache.lengths) == ids.shape[1] + sum(image.rows - 1 for image in images)
    while len(found) < most and (not found or found[-1] != xtml.stop_id(TOKENIZER)):
        found.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([[found[-1]]]), cache=cache)
    message = xtml.parse(found, TOKENIZER, thinking=False)
    return message.content if hasattr(message, "content") else f"no message: {TOKENIZER.decode(found)}"


def official(model: K3ForCausalLM, part: str) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.official_parameters() if n.startswith(part)}


@pytest.fixture(scope="module")
def taught():
    """A trainer whose model has seen both colours: (trainer, first and last loss, tower and projector before)."""
    model = seeing()
    trainer = Trainer(model, TrainerConfig(muon_lr=0.02, adamw_lr=0.01))
    before = official(model, "vision_tower."), official(model, "mm_projector.")
    batch = TrainBatch.pack([sequence(colour, answered(colour)) for colour in COLOURS])
    losses = [trainer.train(batch, CrossEntropy()).values()["loss/mean"] for _ in range(25)]
    return trainer, (losses[0], losses[-1]), *before


def test_it_learns_to_name_the_colour_of_an_image_it_is_shown(taught, tmp_path) -> None:
    trainer, (first, last), tower, projector = taught
    assert last < 0.3 < first
    now = dict(trainer.model.official_parameters())
    assert all(torch.equal(now[name], value) for name, value in tower.items())
    assert any(not torch.equal(now[name], value) for name, value in projector.items())
    save_checkpoint(trainer.model, tmp_path / "ck", tokenizer=TOKENIZER)
    assert (tmp_path / "ck" / "preprocessor_config.json").is_file()
    loaded = load_checkpoint(tmp_path / "ck", dtype=torch.float32)
    for colour in COLOURS:
        assert greedy(loaded, question(colour)) == colour


def test_a_checkpoint_that_wants_images_prepared_another_way_is_refused(tmp_path) -> None:
    save_checkpoint(seeing(), tmp_path / "ck")
    file = tmp_path / "ck" / "preprocessor_config.json"
    file.write_text(json.dumps(ImageConfig(patch_limit=64).to_dict()))
    with pytest.raises(CheckpointError, match="patch_limit=64"):
        load_checkpoint(tmp_path / "ck")


class Gallery(Env):
    """Shows two images, one after the other, and asks for their colours."""

    async def reset(self, task, context):
        self._answers: list[str] = []
        return Observation((self._shown("red"),))

    async def step(self, action):
        self._answers.append(str(action.message.content))
        if len(self._answers) == 2:
            return StepResult(done=True, answer=" ".join(self._answers))
        return StepResult(Observation((self._shown("blue"),)))

    def _shown(self, colour: str) -> Message:
        file = io.BytesIO()
        Image.new("RGB", (40, 50), COLOURS[colour]).save(file, "PNG")
        url = {"url": data_url(file.getvalue())}
        return Message("user", [{"type": "image_url", "image_url": url}, {"type": "text", "text": "colour?"}])


class InProcess:
    """An engine as a policy."""

    def __init__(self, model: K3ForCausalLM) -> None:
        self.engine = Engine(model, prefill_tokens=7, prefix_cache=PrefixCache.of_bytes(1 << 24, block=8))

    async def complete(self, prompt_ids, params, images=()):
        return self.engine.generate([prompt_ids], params, [preprocess_files(images, {})])[0]


def played(model: K3ForCausalLM, name: str, **sampling) -> Episode:
    task = Task("t", "gallery", (), "colours")
    params = SamplingParams(max_tokens=24, return_routes=True, **sampling)
    return asyncio.run(run_episode(Gallery(), task, InProcess(model), TurnSettings(TOKENIZER, params), episode_id=name))


def test_an_episode_with_images_is_sampled_stored_and_trained_on(taught, tmp_path) -> None:
    trainer = taught[0]
    good, other = played(trainer.model, "good", temperature=0.0), played(trainer.model, "other", seed=3)
    assert good.answer.startswith("red")
    turns = good.branches[0].turns
    assert [len(turn.images) for turn in turns] == [1, 2]
    assert turns[1].images[0] is turns[0].images[0], "one object, so that it travels and is stored once"
    assert turns[0].prompt_ids.count(TOKENIZER.special("media_pad")) == 1
    group = Group("g", "t", tuple(dataclasses.replace(e, score=Scored(0.0)) for e in (good, other)))
    entry = TrajectoryWriter(tmp_path, actor="a", tokenizer_hash="h").write([group], generation=0)
    (back,) = read_groups(tmp_path, entry, routes=True)
    batch = from_episodes(back.episodes, {"good": 1.0, "other": -1.0}, routes=True)
    assert batch.routes is not None
    assert len(batch.routes) == batch.row_lengths.sum() > batch.tokens
    assert batch.images[0][0] is batch.images[1][0], "prepared once"
    tower, projector, text = (official(trainer.model, part) for part in ("vision_tower.", "mm_projector.", "language"))
    metrics = trainer.train(batch, K3Policy()).values()
    assert metrics["mismatch/kl/max"] < 1e-6, "float32, the same experts on both sides"
    now = dict(trainer.model.official_parameters())
    assert all(torch.equal(now[name], value) for name, value in tower.items())
    for part in (projector, text):
        assert any(not torch.equal(now[name], value) for name, value in part.items())


def test_images_train_the_same_in_any_micro_batches_and_beside_text() -> None:
    whole = TrainBatch.pack([
        sequence("a", answered("red")), text_only("t"), sequence("b", answered("blue", (100, 30))), text_only("u")
    ])  # fmt: skip
    found = []
    for budget in (70, 4096):
        trainer = Trainer(seeing(torch.float64), TrainerConfig(micro_batch_tokens=budget))
        for micro in whole.split(budget):
            CrossEntropy()(trainer.target_inputs(micro)).loss.backward()
        found.append({n: p.grad.clone() for n, p in trainer.native.optimizer.params.items() if p.grad is not None})
    assert len(whole.split(70)) > 1
    assert found[0].keys() == found[1].keys()
    worst = max(float((found[0][n] - g).norm() / g.norm().clamp_min(1e-30)) for n, g in found[1].items())
    assert worst < 1e-8  # float64, another order of sums


def test_a_targets_logprob_is_read_at_the_row_before_it_behind_the_expanded_image() -> None:
    model = seeing(torch.float64)
    made = sequence("a", answered("red"))
    batch = TrainBatch.pack([made])
    got = Trainer(model, TrainerConfig()).logprobs(batch)
    pixels, grids = stack(made.images)
    ids = torch.from_numpy(made.ids)[None]
    with torch.no_grad():
        logits = model(ids, pixel_values=torch.from_numpy(pixels), grid_thws=torch.from_numpy(grids)).logits[0]
    extra = made.images[0].rows - 1  # every target stands behind the image
    for i in np.flatnonzero(made.loss_mask):
        expected = torch.log_softmax(logits[i - 1 + extra], -1)[made.ids[i]]
        assert got[i] == pytest.approx(float(expected), abs=1e-6)  # kept as float32


def test_rows_of_images_count_in_the_load_when_they_are_fresh() -> None:
    batch = TrainBatch.pack([sequence("a", answered("red")), text_only("t")])
    stale = np.zeros(batch.tokens, bool)
    stale[batch.cu_seqlens[1] :] = True
    trainer = Trainer(seeing(), TrainerConfig(balance="fresh"))
    seen: list[int] = []
    update = trainer.balancer.update
    trainer.balancer.update = lambda given: (seen.append(int(trainer.balancer.loads[0].sum())), update(given))[1]
    trainer.train(dataclasses.replace(batch, fresh=stale), CrossEntropy())
    trainer.train(dataclasses.replace(batch, fresh=~stale), CrossEntropy())
    assert seen == [2 * int(batch.row_lengths[1]), 2 * int(batch.row_lengths[0])]  # two experts a row


def test_replayed_routes_give_the_learner_the_engines_logprobs() -> None:
    model = seeing(torch.float64)
    ungraded = [played(model, name, seed=seed) for seed, name in enumerate("ab")]
    episodes = [dataclasses.replace(episode, score=Scored(0.0)) for episode in ungraded]
    batch = from_episodes(episodes, {episode.id: 1.0 for episode in episodes}, routes=True)
    trainer = Trainer(model, TrainerConfig())
    sampled = [value for episode in episodes for turn in episode.branches[0].turns for value in turn.logprobs]
    assert len(sampled) == batch.target_tokens
    whole = trainer.target_inputs(batch).logprobs.detach().numpy()
    # float64 in another order of sums; what is recorded of an episode is float32
    np.testing.assert_allclose(whole, sampled, atol=1e-9, rtol=2**-23)
    parts = [trainer.target_inputs(batch.select([i])).logprobs.detach().numpy() for i in (0, 1)]
    np.testing.assert_allclose(np.concatenate(parts), sampled, atol=1e-9, rtol=2**-23)
    turned = dataclasses.replace(batch, routes=(batch.routes + 1) % 4)
    assert np.abs(trainer.target_inputs(turned).logprobs.detach().numpy() - sampled).max() > 1e-3


def test_a_placeholder_that_was_sampled_is_no_image() -> None:
    model, made = seeing(torch.float64), sequence("a", answered("red"))
    pad = TOKENIZER.special("media_pad")
    ids = made.ids.copy()
    ids[np.flatnonzero(made.loss_mask)[1]] = pad
    batch = TrainBatch.pack([dataclasses.replace(made, ids=ids), text_only("t")])
    rows = batch.rows_per_token(pad)
    assert rows.sum() == batch.row_lengths.sum()
    assert (rows > 1).sum() == 1
    assert np.isfinite(Trainer(model, TrainerConfig()).logprobs(batch)).all()
