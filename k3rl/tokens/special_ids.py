"""Ids of the special tokens, as plain ints: the builtin 512-id tokenizers and the released K3 and K2 (k3.md 10.1).

A model config takes its `bos_token_id`, `eos_token_id` (= end_of_msg, the stop token), `pad_token_id` and
`media_placeholder_token_id` (= media_pad) from here, so that a model and its tokenizer agree.
"""

from __future__ import annotations

SMALL_VOCAB_SIZE = 512
BOS = 500
EOS = 501
END_OF_MSG = 502
OPEN = 503
CLOSE = 504
SEP = 505
MEDIA_BEGIN = 506
MEDIA_CONTENT = 507
MEDIA_END = 508
MEDIA_PAD = 509
UNK = 510
PAD = 511

SMALL_SPECIAL_IDS: dict[str, int] = {
    "bos": BOS,
    "eos": EOS,
    "end_of_msg": END_OF_MSG,
    "open": OPEN,
    "close": CLOSE,
    "sep": SEP,
    "media_begin": MEDIA_BEGIN,
    "media_content": MEDIA_CONTENT,
    "media_end": MEDIA_END,
    "media_pad": MEDIA_PAD,
    "unk": UNK,
    "pad": PAD,
}

# The table of the small sizes of Kimi Linear, which speak K2's chat form: where both have a token, it has one id.
SMALL_K2_SPECIAL_IDS: dict[str, int] = {
    "tool_call_end": 499,
    "bos": BOS,
    "eos": EOS,
    "im_end": 502,
    "im_user": 503,
    "im_assistant": 504,
    "im_system": 505,
    "im_middle": 506,
    "tool_calls_section_begin": 507,
    "tool_calls_section_end": 508,
    "tool_call_begin": 509,
    "tool_call_argument_begin": 510,
    "pad": PAD,
}

K3_RANKS = 163_584  # ordinary ids 0 .. K3_RANKS - 1; the specials follow
K3_VOCAB_SIZE = 163_840
K3_SPECIAL_IDS: dict[str, int] = {
    "bos": 163_584,
    "eos": 163_585,
    "end_of_msg": 163_586,
    "open": 163_587,
    "close": 163_588,
    "sep": 163_589,
    "start_header_id": 163_590,
    "end_header_id": 163_591,
    "eot": 163_593,
    "media_begin": 163_602,
    "media_content": 163_603,
    "media_end": 163_604,
    "media_pad": 163_605,
    "osagent_mode": 163_649,
    "unk": 163_838,
    "pad": 163_839,
}

# Kimi K2 and Kimi Linear have the same ranks, and other specials behind them.
K2_SPECIAL_IDS: dict[str, int] = {
    "bos": 163_584,
    "eos": 163_585,
    "im_end": 163_586,
    "im_user": 163_587,
    "im_assistant": 163_588,
    "eot": 163_593,
    "im_system": 163_594,
    "tool_calls_section_begin": 163_595,
    "tool_calls_section_end": 163_596,
    "tool_call_begin": 163_597,
    "tool_call_argument_begin": 163_598,
    "tool_call_end": 163_599,
    "im_middle": 163_601,
    "unk": 163_838,
    "pad": 163_839,
}

# How a special token is written in text for people (viewers, `Tokenizer.decode`). Never read back into ids.
SPECIAL_STRINGS: dict[str, str] = {
    "bos": "[BOS]",
    "eos": "[EOS]",
    "end_of_msg": "<|end_of_msg|>",
    "open": "<|open|>",
    "close": "<|close|>",
    "sep": "<|sep|>",
    "start_header_id": "[start_header_id]",
    "end_header_id": "[end_header_id]",
    "eot": "[EOT]",
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_end": "<|media_end|>",
    "media_pad": "<|media_pad|>",
    "osagent_mode": "<osagent_mode>",
    "unk": "[UNK]",
    "pad": "[PAD]",
}
