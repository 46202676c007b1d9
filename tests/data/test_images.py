"""The image preprocessor against the rules of k3.md 11, worked out by hand, and images inside conversations."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from k3rl.data import BatchError, TrainBatch
from k3rl.data.images import (
    ImageConfig,
    ImageError,
    conversation_images,
    image_rows,
    preprocess,
    rows_per_token,
    stack,
    target_size,
)
from k3rl.data.sft import chat_sequence, encode_example, sft_sequence
from k3rl.tokens import Tokenizer, xtml

TOKENIZER = Tokenizer.builtin()


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values.squeeze(), mode=mode) if channels == 1 else Image.fromarray(values)


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def byte(value: float) -> float:
    return (float(value) * 0.5 + 0.5) * 255


@pytest.mark.parametrize(
    ("size", "scaled", "rows"),
    [
        ((224, 224), (224, 224), 8 * 8),
        ((37, 53), (37, 53), 2 * 2),  # padded to 56 x 56
        ((1, 1), (1, 1), 1),
        ((29, 28), (29, 28), 2),
        ((4096, 4096), (3591, 3591), 129 * 129),  # sqrt(65536 / 292^2) = 0.876712
        ((28672, 224), (7168, 56), 256 * 2),  # 512 patches along the longer side
        ((13, 9000), (10, 7168), 256),
        ((3584, 3584), (3584, 3584), 128 * 128),  # exactly at the limit
    ],
)
def test_sizes_follow_the_scale_rule(size, scaled, rows) -> None:
    assert target_size(*size) == scaled
    assert image_rows(*size) == rows


def test_patches_are_cut_row_by_row_normalised_and_padded_with_black() -> None:
    image = noise(30, 20)
    found = preprocess(image)
    pixels = np.asarray(image)
    assert found.grid == (1, 2, 4)
    assert (found.pixels.shape, found.pixels.dtype, found.rows) == ((8, 3, 14, 14), np.float32, 2)
    assert (found.width, found.height) == (30, 20)
    for patch in range(8):
        for y, x, channel in ((0, 0, 0), (5, 13, 2), (13, 1, 1)):
            row, column = patch // 4 * 14 + y, patch % 4 * 14 + x
            inside = row < 20 and column < 30
            wanted = pixels[row, column, channel] if inside else 0
            assert found.pixels[patch, channel, y, x] == pytest.approx(wanted / 127.5 - 1, abs=1e-6)


def test_an_image_over_the_limit_is_resized_bicubically() -> None:
    config = ImageConfig(patch_limit=16)
    image = noise(112, 112)
    found = preprocess(image, config)
    small = np.asarray(image.resize((56, 56), Image.Resampling.BICUBIC))
    assert found.grid == (1, 4, 4)
    assert byte(found.pixels[5, 1, 3, 4]) == pytest.approx(small[14 + 3, 14 + 4, 1], abs=1e-3)


def test_transparent_pixels_show_a_checkerboard_that_is_white_at_the_top_left() -> None:
    found = preprocess(Image.new("RGBA", (56, 56), (9, 9, 9, 0)))
    grid = found.pixels.reshape(4, 4, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(56, 56, 3)
    for y in (0, 7, 8, 30, 55):
        for x in (0, 7, 8, 17, 55):
            assert byte(grid[y, x, 0]) == pytest.approx(180 if (y // 8 + x // 8) % 2 else 255, abs=1e-3)


def test_half_transparent_pixels_are_blended_and_truncated() -> None:
    found = preprocess(Image.new("RGBA", (28, 28), (10, 20, 30, 128)))
    alpha = np.float32(128) / np.float32(255)
    for channel, value in enumerate((10, 20, 30)):
        assert byte(found.pixels[0, channel, 0, 0]) == pytest.approx(int(alpha * value + (1 - alpha) * 255), abs=1e-3)
        assert byte(found.pixels[0, channel, 0, 8]) == pytest.approx(int(alpha * value + (1 - alpha) * 180), abs=1e-3)


def test_the_board_is_drawn_after_resizing_and_opaque_images_see_none() -> None:
    config = ImageConfig(patch_limit=4)
    board = preprocess(Image.new("RGBA", (280, 280), (0, 0, 0, 0)), config)
    assert sorted({round(byte(v)) for v in board.pixels.ravel()}) == [180, 255]  # squares stay 8 pixels wide
    image = noise(28, 28)
    opaque = image.copy()
    opaque.putalpha(255)
    assert np.array_equal(preprocess(opaque).pixels, preprocess(image).pixels)


@pytest.mark.parametrize("mode", ["L", "LA", "1", "P", "CMYK", "I;16"])
def test_every_mode_of_pillow_gives_three_channels(mode) -> None:
    image = noise(40, 30, "L")
    converted = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    assert preprocess(converted).pixels.shape == (4 * 4, 3, 14, 14)


def test_a_palette_with_a_transparent_colour_shows_the_board() -> None:
    image = Image.new("P", (28, 28), 0)
    image.putpalette([200, 10, 10, 0, 0, 0])
    image.info["transparency"] = 0
    assert byte(preprocess(image).pixels[0, 1, 0, 0]) == pytest.approx(255, abs=1e-3)


def test_the_official_preprocessor_file_is_written_and_read() -> None:
    config = ImageConfig(patch_limit=100)
    assert ImageConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    other = config.to_dict()
    other["media_proc_cfg"]["transparent_bg_fill_stage"] = "before_resize"
    with pytest.raises(ImageError, match="after_resize"):
        ImageConfig.from_dict(other)


# --------------------------------------------------------------------------------------------- conversations


def test_images_come_from_data_urls_bytes_files_and_pillow(tmp_path) -> None:
    image = noise(30, 20)
    (tmp_path / "a.png").write_bytes(png(image))
    url = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    parts = [
        {"type": "image", "image": image},
        {"type": "image", "image": png(image)},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": "a.png"},
    ]
    found = conversation_images([{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], folder=tmp_path)
    assert len(found) == 4
    assert all(np.array_equal(one.pixels, found[0].pixels) for one in found)


@pytest.mark.parametrize(
    ("given", "folder", "message"),
    [
        ("https://example.org/a.png", True, "would have to be downloaded"),
        ("../secret.png", True, "leads out of the folder"),
        ("a.png", False, "no folder of images"),
        ("missing.png", True, "cannot be read"),
        ("data:image/png;base64,!!", True, "holds no base64"),
        (b"no image", True, "8 bytes cannot be read"),
        (b"P6\n1x 1\n255\n000", True, "cannot be read: invalid literal"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\n", True, "cannot identify"),
        (7, True, "holds int"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path, given, folder, message) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": given}]}]
    with pytest.raises(ImageError, match=message):
        conversation_images(messages, folder=tmp_path if folder else None)


def test_images_of_tool_results_follow_the_order_of_the_calls() -> None:
    wide, tall = noise(60, 20), noise(20, 60)
    call = [{"id": name, "function": {"name": "look", "arguments": {}}} for name in ("a", "b")]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "image", "image": tall}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "image", "image": wide}]},
    ]
    assert [image.width for image in conversation_images(messages)] == [60, 20]


def test_a_conversation_becomes_ids_with_one_placeholder_and_its_original_size() -> None:
    messages = [
        {"role": "user", "content": [{"type": "image", "image": noise(60, 33)}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "noise"},
    ]
    images = conversation_images(messages)
    ids, mask = encode_example(messages, None, TOKENIZER, False, images=images)
    text = TOKENIZER.decode(ids.tolist())
    assert "<|media_begin|>image 60x33<|media_content|><|media_pad|><|media_end|>what?" in text
    pad = TOKENIZER.special("media_pad")
    assert (ids == pad).sum() == 1
    assert not mask[ids == pad].any()
    rows = rows_per_token(ids, images, pad)
    assert rows[ids == pad].tolist() == [images[0].rows] == [6]
    assert (rows[ids != pad] == 1).all()
    with pytest.raises(ImageError, match="1 placeholder ids stand for 0 images"):
        rows_per_token(ids, (), pad)
    with pytest.raises(xtml.XTMLError, match="more images"):
        encode_example(messages, None, TOKENIZER, False, images=())


def sequence(name: str, pictures: int):
    content = [{"type": "image", "image": noise(60, 33, seed=i)} for i in range(pictures)]
    messages = [
        {"role": "user", "content": [*content, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "ok"},
    ]
    return chat_sequence(name, messages, None, TOKENIZER, False)


def test_a_batch_keeps_images_with_their_sequences_and_budgets_their_rows() -> None:
    batch = TrainBatch.pack([sequence("a", 2), sequence("b", 0), sequence("c", 1)])
    assert (batch.row_lengths - batch.lengths).tolist() == [10, 0, 5]
    counts = batch.rows_per_token(TOKENIZER.special("media_pad"))
    assert counts.sum() == batch.row_lengths.sum()
    chosen = batch.select([2, 1])
    assert chosen.images is not None
    assert [len(images) for images in chosen.images] == [1, 0]
    parts = batch.split(int(batch.row_lengths[0]))
    assert sorted(name for part in parts for name in part.sequence_ids) == ["a", "b", "c"]
    assert all(part.row_lengths.sum() <= batch.row_lengths[0] for part in parts)
    pixels, grids = stack(image for images in batch.images or () for image in images)
    assert pixels.shape == (3 * 4 * 6, 3, 14, 14)
    assert grids.tolist() == [[1, 4, 6]] * 3
    with pytest.raises(BatchError, match="sequence a: 2 placeholder ids"):
        TrainBatch.pack([sft_sequence("a", *encode(2), sequence("x", 1).images)]).rows_per_token(
            TOKENIZER.special("media_pad")
        )


def encode(pictures: int) -> tuple[np.ndarray, np.ndarray]:
    made = sequence("x", pictures)
    return made.ids, made.loss_mask
