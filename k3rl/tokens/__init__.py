"""Text <-> token ids, and nothing else: the only place that knows how a conversation becomes tokens.

`tokenizer.py` is byte pair encoding, `vocab.py` its files, `special_ids.py` the ids a model config needs,
`xtml.py` K3's chat form (render, continue, parse), `images.py` finds the images of a conversation, `openai/` is the
dialect of requests and answers over HTTP, `train_merges.py` the tool that made `small_vocab.json`.
No torch here, and no knowledge of tasks, weights or losses.
"""

from typing import TYPE_CHECKING

from k3rl.tokens import xtml
from k3rl.tokens.segments import Segment, Special, Text
from k3rl.tokens.special_ids import K3_SPECIAL_IDS, SMALL_SPECIAL_IDS
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.vocab import TOKENIZER_FILES, TokenizerError

if TYPE_CHECKING:  # a namespace that is imported where it is used: it costs what pydantic costs
    from k3rl.tokens import openai

__all__ = [
    "K3_SPECIAL_IDS",
    "SMALL_SPECIAL_IDS",
    "TOKENIZER_FILES",
    "Segment",
    "Special",
    "Text",
    "Tokenizer",
    "TokenizerError",
    "openai",
    "xtml",
]
