"""Images inside batches: where their rows go, and what is refused. Numbers against the official code: test_golden."""

from __future__ import annotations

import pytest
import torch

from k3rl.model import InputError


@pytest.fixture
def seeing(golden):
    gold = golden("v")
    return gold, gold.load(torch.float64)


def test_packed_sequences_with_images_equal_separate_ones(seeing) -> None:
    gold, model = seeing
    ids, pixels, grids = gold.inputs["ids"], gold.inputs["pixel_values"], gold.inputs["grid_thws"]
    text = gold.inputs["decode_ids"]
    packed = model(
        torch.cat([text, ids, text], dim=1),
        cu_seqlens=torch.tensor([0, 2, 11, 13]),
        pixel_values=pixels,
        grid_thws=grids,
    )
    alone = [model(text).logits, model(ids, pixel_values=pixels, grid_thws=grids).logits, model(text).logits]
    assert (packed.logits - torch.cat(alone, dim=1)).abs().max() < 1e-9  # summation order only


def test_gradients_reach_the_tower_and_the_projector(seeing) -> None:
    gold, model = seeing
    images = {"pixel_values": gold.inputs["pixel_values"], "grid_thws": gold.inputs["grid_thws"]}
    model(gold.inputs["ids"], **images).logits.square().sum().backward()
    for name, parameter in model.official_parameters():
        if name.startswith(("vision_tower", "mm_projector")):
            assert bool(parameter.grad.any()), name


def test_images_given_as_rows_and_places_are_the_same_images(seeing) -> None:
    gold, model = seeing
    ids, pixels, grids = gold.inputs["ids"][0], gold.inputs["pixel_values"], gold.inputs["grid_thws"]
    images = model.image_rows(pixels, grids)
    shown = ids == model.config.media_placeholder_token_id
    counts = torch.ones_like(ids)
    counts[shown] = torch.tensor([len(image) for image in images])
    places = torch.nonzero(shown.repeat_interleave(counts)).view(-1)
    out = model.hidden(ids.repeat_interleave(counts)[None], images=(torch.cat(images), places))
    expected = model.hidden(ids[None], pixel_values=pixels, grid_thws=grids)
    assert torch.equal(out.hidden, expected.hidden)
    assert torch.equal(out.routes, expected.routes)


def test_a_placeholder_without_images_is_an_ordinary_token(seeing) -> None:
    _, model = seeing
    ids = torch.full((1, 2), model.config.media_placeholder_token_id)
    assert model(ids).logits.shape[1] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid_thws": None}, "grid_thws is missing"),
        ({"grid_thws": torch.tensor([[1, 6, 8]])}, "describes 48 patches"),
        ({"grid_thws": torch.tensor([[1, 3, 16], [1, 8, 5]])}, "multiple of"),
        ({"pixel_values": torch.zeros(88, 3, 7, 7)}, "pixel_values must be"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, "0 image placeholders and 2 images"),
    ],
)
def test_images_that_do_not_fit_are_refused(seeing, change, message) -> None:
    gold, model = seeing
    given = {
        "input_ids": gold.inputs["ids"],
        "pixel_values": gold.inputs["pixel_values"],
        "grid_thws": gold.inputs["grid_thws"],
        **change,
    }
    with pytest.raises(InputError, match=message):
        model(given.pop("input_ids"), **given)


def test_a_batch_whose_images_make_it_ragged_is_refused(seeing) -> None:
    gold, model = seeing
    ids = gold.inputs["ids"]
    batch = torch.cat([ids, torch.zeros_like(ids)])
    with pytest.raises(InputError, match="pack them instead"):
        model(batch, pixel_values=gold.inputs["pixel_values"], grid_thws=gold.inputs["grid_thws"])
