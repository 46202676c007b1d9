"""Reading and writing the two vocabulary formats: the small sizes' JSON table, and the tiktoken ranks of K2 and K3.

A `Vocabulary` is data only; `tokenizer.py` turns it into a tokenizer.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from k3rl.tokens import special_ids

SMALL_FILE = "k3rl_tokenizer.json"
RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# Files of a released model that other programs need beside the ranks. Carried along as bytes, never imported.
COMPANION_FILES = (CONFIG_FILE, TEMPLATE_FILE, "tokenization_kimi.py", "encoding_k3.py", "special_tokens_map.json")
TOKENIZER_FILES = (SMALL_FILE, RANKS_FILE, *COMPANION_FILES)

# Digits always single, nothing merges across a newline, merges over spaces are allowed.
SMALL_PATTERN = r"\p{N}|\n|[^\p{N}\n]+"

# k3.md 10.1: the split alternatives of Kimi K2 and K3, in order.
_WORD_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
K3_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_WORD_END}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_WORD_END}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

ChatForm: TypeAlias = Literal["xtml", "k2"]
# What only one chat form has; the ranks of both are the same.
_MARKS: dict[ChatForm, str] = {"xtml": "end_of_msg", "k2": "im_middle"}
_K3_RESERVED = special_ids.K3_VOCAB_SIZE - special_ids.K3_RANKS


class TokenizerError(ValueError):
    """Text, ids or files that a tokenizer cannot take; the message says what was got and what is wanted."""


@dataclass(frozen=True)
class Vocabulary:
    """ranks: token bytes -> id; specials: name -> id, ids after all ranks; pattern: the split regex.

    `source` is the small table's own JSON text; `companions` are released files carried along by name; `folder` is
    where they are from, for messages.
    """

    ranks: Mapping[bytes, int]
    pattern: str
    specials: Mapping[str, int]
    source: str | None = None
    companions: Mapping[str, bytes] = field(default_factory=dict)
    folder: str = ""

    @property
    def form(self) -> ChatForm:
        """The chat form that the special tokens are made for."""
        return "k2" if _MARKS["k2"] in self.specials else "xtml"


def small_vocabulary(text: str, where: str) -> Vocabulary:
    """The vocabulary in a small table: 256 bytes, markup names, merges in rank order, specials at the end.

    Raises TokenizerError when the table is not of that form. `where` names the file in messages.
    """
    try:
        table = json.loads(text)
        words = [*table["markup"], *table["merges"]]
        pattern, specials = table["pattern"], {str(name): int(value) for name, value in table["specials"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(
            f"{where} is not a k3rl tokenizer table ({error!r}); wanted the keys markup, merges, pattern, specials, "
            "as `python -m k3rl.tokens.train_merges` writes them"
        ) from error
    ranks = {bytes([value]): value for value in range(256)}
    for word in words:
        ranks.setdefault(word.encode(), len(ranks))
    if len(ranks) != 256 + len(words):
        raise TokenizerError(f"{where} holds {256 + len(words) - len(ranks)} tokens twice; each must occur once")
    if sorted(specials.values()) != list(range(len(ranks), len(ranks) + len(specials))):
        raise TokenizerError(
            f"{where} puts special ids at {sorted(specials.values())}; they must follow the {len(ranks)} ordinary ids"
        )
    return Vocabulary(ranks, pattern, specials, source=text)


def parse_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """The ranks in a tiktoken file: a line is base64 token bytes, a space, the rank. Ranks must be 0 .. n-1."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{where} line {number} is {line[:60]!r}; wanted base64 token bytes and a rank"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{where} holds {len(ranks)} tokens whose ranks are not 0 .. {len(ranks) - 1}")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"{where} lacks the single bytes {missing[:8]}; text with them could not be encoded")
    return ranks


def format_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """The tiktoken file of these ranks, in rank order."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def k3_specials(ranks: int) -> dict[str, int]:
    """Names and ids of the 256 specials that follow `ranks` ordinary ids; unnamed ones are reserved_token_ID."""
    return _specials(ranks, special_ids.K3_SPECIAL_IDS)


def k2_specials(ranks: int) -> dict[str, int]:
    """`k3_specials` for Kimi K2 and Kimi Linear."""
    return _specials(ranks, special_ids.K2_SPECIAL_IDS)


def _specials(ranks: int, released: Mapping[str, int]) -> dict[str, int]:
    shift = ranks - special_ids.K3_RANKS
    named = {value + shift: name for name, value in released.items()}
    return {named.get(value, f"reserved_token_{value}"): value for value in range(ranks, ranks + _K3_RESERVED)}


def read_ranks_folder(folder: Path) -> Vocabulary:
    """The K2 or K3 vocabulary of a checkpoint folder (k3.md 10.1), its companion files carried along as bytes."""
    path = folder / RANKS_FILE
    ranks = parse_ranks(path.read_bytes(), str(path))
    companions = {name: (folder / name).read_bytes() for name in COMPANION_FILES if (folder / name).is_file()}
    said = _added_tokens(companions[CONFIG_FILE], folder / CONFIG_FILE) if CONFIG_FILE in companions else {}
    specials = (k2_specials if _form(said, folder) == "k2" else k3_specials)(len(ranks))
    _check_added_tokens(said, specials, folder / CONFIG_FILE)
    return Vocabulary(ranks, K3_PATTERN, specials, companions=companions, folder=str(folder))


def _added_tokens(config: bytes, path: Path) -> dict[str, int]:
    """Special tokens as text -> id, as a tokenizer_config.json says."""
    try:
        added = json.loads(config).get("added_tokens_decoder", {})
        return {entry["content"]: int(key) for key, entry in added.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{path} cannot be read as a tokenizer config: {error!r}") from error


def _form(said: Mapping[str, int], folder: Path) -> ChatForm:
    """By the tokens that are named; where none tells, K2's beside a Kimi Linear, else K3's."""
    found = [form for form, mark in _MARKS.items() if special_string(mark) in said]
    if len(found) == 2:
        marks = " and ".join(map(special_string, _MARKS.values()))
        raise TokenizerError(f"{folder / CONFIG_FILE} names {marks}, which are of two chat forms; wanted one of them")
    if found:
        return found[0]
    try:
        model = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):  # whoever reads the model says what is wrong with it
        return "xtml"
    flat = isinstance(model, dict) and model.get("model_type") == "kimi_linear" and "text_config" not in model
    return "k2" if flat else "xtml"


def _check_added_tokens(said: Mapping[str, int], specials: Mapping[str, int], path: Path) -> None:
    """Refuse a folder that says another id for a token we know by name: every prompt would be wrong."""
    for name, value in specials.items():
        string = special_string(name)
        if said.get(string, value) != value:
            raise TokenizerError(
                f"{path} gives {string} the id {said[string]}, the ranks beside it give {value}; "
                "the two files are not of one tokenizer"
            )


def added_tokens_config(specials: Mapping[str, int]) -> bytes:
    """A tokenizer_config.json that names the specials, for a folder that came without one."""
    added = {
        str(value): {"content": special_string(name), "special": True}
        for name, value in sorted(specials.items(), key=lambda item: item[1])
    }
    return json.dumps({"added_tokens_decoder": added}, indent=1).encode()


def special_string(name: str) -> str:
    """How a special is written for people: `<|open|>`, `[BOS]`, `<|reserved_token_163592|>`."""
    return special_ids.SPECIAL_STRINGS.get(name, f"<|{name}|>")
