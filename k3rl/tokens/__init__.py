"""Text <-> token ids, and nothing else: the only place that knows how a conversation becomes tokens. No torch.

tokenizer.py   byte pair encoding              vocab.py       its files
special_ids.py    ids that a model's config needs
xtml.py        K3's chat form: render, continue, parse (xtml_normalize.py, xtml_render.py, xtml_parse.py)
message_keys.py    what a message may say   markup.py      text and markup of a sampled turn
segments.py    pieces of a rendered prompt     images.py      the images of a conversation
openai/        the dialect of requests and answers over HTTP          anthropic.py  the other one, through it
train_merges.py    the tool that made `small_vocab.json`
Not here: tasks, weights, losses, pixels.
"""

from typing import TYPE_CHECKING

from k3rl.tokens import xtml
from k3rl.tokens.images import (
    IMAGE_KINDS,
    RELEASED_IMAGES,
    ImageConfig,
    ImageError,
    data_url,
    encode_image,
    encoded_images,
    image_parts,
    image_prompts,
    image_rows,
    open_image,
    part_source,
    shown_text,
    target_size,
    url_bytes,
)
from k3rl.tokens.markup import TurnText
from k3rl.tokens.message_keys import LOSS_KEYS, nearest_key
from k3rl.tokens.segments import Segment, Special, Text
from k3rl.tokens.special_ids import K3_SPECIAL_IDS, SMALL_SPECIAL_IDS
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.vocab import RANKS_FILE, SMALL_FILE, TOKENIZER_FILES, TokenizerError

if TYPE_CHECKING:  # a namespace that is imported where it is used: it costs what pydantic costs
    from k3rl.tokens import anthropic, openai

__all__ = [
    "IMAGE_KINDS",
    "K3_SPECIAL_IDS",
    "LOSS_KEYS",
    "RANKS_FILE",
    "RELEASED_IMAGES",
    "SMALL_FILE",
    "SMALL_SPECIAL_IDS",
    "TOKENIZER_FILES",
    "ImageConfig",
    "ImageError",
    "Segment",
    "Special",
    "Text",
    "Tokenizer",
    "TokenizerError",
    "TurnText",
    "anthropic",
    "data_url",
    "encode_image",
    "encoded_images",
    "image_parts",
    "image_prompts",
    "image_rows",
    "nearest_key",
    "open_image",
    "openai",
    "part_source",
    "shown_text",
    "target_size",
    "url_bytes",
    "xtml",
]
