"""A conversation with an image trains and generates on a tiny random tower, which stays frozen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from k3rl.checkpoint import load_checkpoint, save_checkpoint
from k3rl.data import BatchError, TrainBatch
from k3rl.data.images import conversation_images, stack
from k3rl.data.sft import chat_sequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM, VisionConfig
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.tokens import Tokenizer, xtml

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


def test_it_learns_to_name_the_colour_of_an_image_it_is_shown(tmp_path) -> None:
    model = seeing()
    trainer = Trainer(model, TrainerConfig(muon_lr=0.02, adamw_lr=0.01))
    tower = {n: p.clone() for n, p in model.official_parameters() if n.startswith("vision_tower.")}
    projector = {n: p.clone() for n, p in model.official_parameters() if n.startswith("mm_projector.")}
    batch = TrainBatch.pack([sequence(colour, answered(colour)) for colour in COLOURS])
    losses = [trainer.train(batch, CrossEntropy()).values()["loss/mean"] for _ in range(25)]
    assert losses[-1] < 0.3 < losses[0]
    now = dict(model.official_parameters())
    assert all(torch.equal(now[name], value) for name, value in tower.items())
    assert any(not torch.equal(now[name], value) for name, value in projector.items())
    save_checkpoint(model, tmp_path / "ck", tokenizer=TOKENIZER)
    assert (tmp_path / "ck" / "preprocessor_config.json").is_file()
    loaded = load_checkpoint(tmp_path / "ck", dtype=torch.float32)
    for colour in COLOURS:
        assert greedy(loaded, question(colour)) == colour


def test_images_train_the_same_in_any_micro_batches_and_beside_text() -> None:
    whole = TrainBatch.pack([
        sequence("a", answered("red")), text_only("t"), sequence("b", answered("blue", (100, 30))), text_only("u")
    ])  # fmt: skip
    found = []
    for budget in (70, 4096):
        trainer = Trainer(seeing(torch.float64), TrainerConfig(micro_batch_tokens=budget))
        for micro in whole.split(budget):
            CrossEntropy()(trainer.target_inputs(micro)).loss.backward()
        found.append({n: p.grad.clone() for n, p in trainer.optimizer.params.items() if p.grad is not None})
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


def test_recorded_routes_with_images_are_refused() -> None:
    batch = TrainBatch.pack([sequence("a", answered("red"))])
    routed = dataclasses.replace(batch, routes=np.zeros((batch.tokens, 4, 2), np.int16))
    with pytest.raises(BatchError, match="images and recorded routes"):
        Trainer(seeing(), TrainerConfig()).target_inputs(routed)
