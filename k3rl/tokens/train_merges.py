"""Makes the small sizes' merge table: `python -m k3rl.tokens.train_merges TEXTFILE --note TEXT`.

TEXTFILE holds the bodies of prompts and answers, one after the other, as they will be tokenized. The same text
gives the same table, byte for byte. Plain byte pair encoding over the pieces of the split rule, so digits stay
single and nothing merges across a newline.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from k3rl.tokens import special_ids
from k3rl.tokens.vocab import SMALL_PATTERN

# Strings of the chat form that are segments of their own, so that each costs one token. `"` is a byte already.
MARKUP = (
    *("message", " role", '="', "system", "user", "assistant", "tool", " tool", " index", " name", " type"),
    *("think", "response", "tools", "call", "argument", " key", "json"),
    *("string", "number", "boolean", "null", "object", "array"),
    *("tool-declare", "tool-choice", "thinking-effort", "response-format"),
)
_SPLIT = re.compile(r"\d|\n|[^\d\n]+")  # SMALL_PATTERN without the rare digits of other scripts


def learn_merges(text: str, count: int, *, taken: Sequence[str] = MARKUP) -> list[str]:
    """The `count` most useful merges of `text`, in the order in which they apply.

    A merge joins two neighbours wherever their joined text is the token, as tiktoken does. Ties go to the
    smaller text, so the result depends on nothing but the arguments. Raises ValueError when the text is too
    small to give `count` merges that occur twice.
    """
    counts = Counter(piece for piece in _SPLIT.findall(text) if len(piece) > 1 and piece not in taken)
    pieces = [(list(piece), times) for piece, times in sorted(counts.items())]
    merges: list[str] = []
    while len(merges) < count:
        pairs: Counter[str] = Counter()
        for parts, times in pieces:
            for left, right in pairwise(parts):
                pairs[left + right] += times
        best = min(pairs, key=lambda token: (-pairs[token], token), default=None)
        if best is None or pairs[best] < 2:
            raise ValueError(f"the text gives only {len(merges)} merges that occur twice, {count} are wanted")
        for parts, _ in pieces:
            _join(parts, best)
        if best not in taken and best not in merges:
            merges.append(best)
    return merges


def _join(parts: list[str], token: str) -> None:
    """Join neighbours whose text is `token`, left to right, in place."""
    index = 0
    while index + 1 < len(parts):
        if len(parts[index]) + len(parts[index + 1]) == len(token) and parts[index] + parts[index + 1] == token:
            parts[index : index + 2] = [token]
        index += 1


def make_table(text: str, note: str) -> str:
    """The JSON text of `small_vocab.json` for this training text. `note` says how the text was made."""
    room = special_ids.SMALL_VOCAB_SIZE - len(special_ids.SMALL_SPECIAL_IDS) - 256 - len(MARKUP)
    table = {
        "made_by": {
            "command": "python -m k3rl.tokens.train_merges TEXTFILE",
            "text": note,
            "text_characters": len(text),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
        "pattern": SMALL_PATTERN,
        "markup": list(MARKUP),
        "merges": learn_merges(text, room),
        "specials": special_ids.SMALL_SPECIAL_IDS,
    }
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Make the merge table of the small tokenizer.")
    parser.add_argument("text", type=Path, help="UTF-8 file with the bodies of prompts and answers")
    parser.add_argument("--note", required=True, help="how the text was made: command and seed")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("small_vocab.json"))
    options = parser.parse_args()
    options.out.write_text(make_table(options.text.read_text(encoding="utf-8"), options.note), encoding="utf-8")


if __name__ == "__main__":
    main()
