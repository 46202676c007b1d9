"""Text <-> token ids, and nothing else: the only place that knows how a conversation becomes tokens. No torch.

tokenizer.py   byte pair encoding              vocab.py       its files
special_ids.py    ids that a model's config needs
chat.py        the chat form of a checkpoint    chat_template.py    its own template, which that is checked against
xtml.py        K3's chat form: render, continue, parse (xtml_normalize.py, xtml_render.py, xtml_parse.py)
k2.py          that of K2 and Kimi Linear (k2_render.py, k2_parse.py)    reader.py    a cursor over sampled ids
message_keys.py    what a message may say   markup.py      text and markup of a sampled turn
segments.py    pieces of a rendered prompt     images.py      the images of a conversation
openai/        the dialect of requests and answers over HTTP          anthropic.py  the other one, through it
train_merges.py    the tool that made `small_vocab.json`
Not here: tasks, weights, losses, pixels.
"""

from typing import TYPE_CHECKING

from k3rl.tokens import k2, xtml
from k3rl.tokens.chat import ChatFormat, chat_format
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
from k3rl.tokens.markup import TurnText, turn_text
from k3rl.tokens.message_keys import LOSS_KEYS, ChatError, nearest_key
from k3rl.tokens.reader import ParseError
from k3rl.tokens.segments import Segment, Special, Text
from k3rl.tokens.special_ids import K2_SPECIAL_IDS, K3_SPECIAL_IDS, SMALL_SPECIAL_IDS
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.vocab import RANKS_FILE, SMALL_FILE, TOKENIZER_FILES, TokenizerError

if TYPE_CHECKING:  # a namespace that is imported where it is used: it costs what pydantic costs
    from k3rl.tokens import anthropic, openai

__all__ = [
    "IMAGE_KINDS",
    "K2_SPECIAL_IDS",
    "K3_SPECIAL_IDS",
    "LOSS_KEYS",
    "RANKS_FILE",
    "RELEASED_IMAGES",
    "SMALL_FILE",
    "SMALL_SPECIAL_IDS",
    "TOKENIZER_FILES",
    "ChatError",
    "ChatFormat",
    "ImageConfig",
    "ImageError",
    "ParseError",
    "Segment",
    "Special",
    "Text",
    "Tokenizer",
    "TokenizerError",
    "TurnText",
    "anthropic",
    "chat_format",
    "data_url",
    "encode_image",
    "encoded_images",
    "image_parts",
    "image_prompts",
    "image_rows",
    "k2",
    "nearest_key",
    "open_image",
    "openai",
    "part_source",
    "shown_text",
    "target_size",
    "turn_text",
    "url_bytes",
    "xtml",
]
