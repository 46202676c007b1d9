"""Text <-> token ids for the builtin 512-id tables and for the tiktoken ranks of K2 and K3 (k3.md 10.1).

Both run on tiktoken's byte pair encoder. `encode` never gives a special id, whatever the text says; only
`encode_segments` does, for the `Special` pieces that the renderer made.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken

from k3rl.tokens import special_ids, vocab
from k3rl.tokens.chat_template import ChatTemplate, find_template
from k3rl.tokens.segments import Segment, Special
from k3rl.tokens.vocab import TokenizerError, Vocabulary

# k3.md 10.1: the released wrapper cuts text before the split regex; the cuts change ids, so they are kept.
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUNS = re.compile(r"\s+|\S+")


class Tokenizer:
    """A byte-level BPE tokenizer with named special ids. Immutable, picklable, cheap to share.

    Get one with `Tokenizer.builtin()` or `Tokenizer.load(folder)`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._specials = dict(vocabulary.specials)
        self._special_names = {value: name for name, value in self._specials.items()}
        self._bytes: list[bytes] = [b""] * (len(vocabulary.ranks) + len(self._specials))
        for token, value in vocabulary.ranks.items():
            self._bytes[value] = token
        self._bpe = tiktoken.Encoding(
            "k3rl", pat_str=vocabulary.pattern, mergeable_ranks=dict(vocabulary.ranks), special_tokens={}
        )

    @classmethod
    def builtin(cls, form: vocab.ChatForm = "xtml") -> Tokenizer:
        """The 512-id tokenizer of the small sizes; its special ids are those of `tokens.special_ids`.

        form: "k2" for those of Kimi Linear. It has one merge less, as its chat form has one special token more.
        """
        path = importlib.resources.files("k3rl.tokens") / "small_vocab.json"
        text = path.read_text(encoding="utf-8")
        if form == "k2":
            table = json.loads(text)
            table = table | {"merges": table["merges"][:-1], "specials": special_ids.SMALL_K2_SPECIAL_IDS}
            text = json.dumps(table, ensure_ascii=False, indent=1)
        return cls(vocab.small_vocabulary(text, "k3rl/tokens/small_vocab.json"))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a checkpoint folder: `tiktoken.model` (K2/K3 ranks) or `k3rl_tokenizer.json`.

        Raises TokenizerError when the folder has neither, both, or a broken one.
        """
        folder = Path(folder)
        found = [name for name in (vocab.RANKS_FILE, vocab.SMALL_FILE) if (folder / name).is_file()]
        if len(found) != 1:
            raise TokenizerError(
                f"{folder} holds {' and '.join(found) or 'no tokenizer'}; "
                f"wanted exactly one of {vocab.RANKS_FILE} and {vocab.SMALL_FILE}"
            )
        if found == [vocab.RANKS_FILE]:
            return cls(vocab.read_ranks_folder(folder))
        path = folder / vocab.SMALL_FILE
        return cls(vocab.small_vocabulary(path.read_text(encoding="utf-8"), str(path)))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that `load` reads (names in `vocab.TOKENIZER_FILES`) into `folder`, each atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        source = self._vocabulary.source
        if source is not None:
            _write(folder / vocab.SMALL_FILE, source.encode())
            return
        _write(folder / vocab.RANKS_FILE, vocab.format_ranks(self._vocabulary.ranks))
        companions = {vocab.CONFIG_FILE: vocab.added_tokens_config(self._specials), **self._vocabulary.companions}
        for name, data in companions.items():
            _write(folder / name, data)

    @property
    def form(self) -> vocab.ChatForm:
        """The chat form that the special tokens are made for; `chat_format` speaks it."""
        return self._vocabulary.form

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template that came along, in a file of its own or in the tokenizer's configuration.

        Raises TokenizerError for one that cannot be read.
        """
        return find_template(self._vocabulary)

    @property
    def vocab_size(self) -> int:
        """How many ids there are, specials included; ids are 0 .. vocab_size - 1."""
        return len(self._bytes)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that decides ids: tokens, split pattern, special names and ids."""
        digest = hashlib.sha256(vocab.format_ranks(self._vocabulary.ranks))
        digest.update(json.dumps([self._vocabulary.pattern, sorted(self._specials.items())]).encode())
        return digest.hexdigest()

    def special(self, name: str) -> int:
        """The id of a special token by name ("open", "end_of_msg", "media_pad", ...). Raises TokenizerError."""
        if name not in self._specials:
            known = ", ".join(sorted(name for name in self._specials if not name.startswith("reserved")))
            raise TokenizerError(f"no special token is named {name!r}; this tokenizer has {known}")
        return self._specials[name]

    def special_name(self, token_id: int) -> str | None:
        """The name of a special id, or None for an ordinary id. Raises TokenizerError for an id out of range."""
        self._check(token_id)
        return self._special_names.get(token_id)

    def text_end(self, ids: Sequence[int], start: int) -> int:
        """Place of the first id from `start` on that is special or out of range, or the end."""
        specials, size = self._special_names, len(self._bytes)
        for place in range(start, len(ids)):
            if ids[place] in specials or not 0 <= ids[place] < size:
                return place
        return len(ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of ordinary text; never a special id. Raises TokenizerError for text that is not Unicode.

        A lone surrogate has no UTF-8 form; replacing it would train on a text that nobody wrote.
        """
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"character {error.start} is the lone surrogate {text[error.start]!r}, which has no UTF-8 form; "
                    "remove or replace it before encoding"
                ) from error
        if len(text) <= MAX_RUN_CHARS:
            return self._bpe.encode_ordinary(text)
        return [value for piece in _cuts(text) for value in self._bpe.encode_ordinary(piece)]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of rendered segments, each text segment encoded on its own."""
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, Special):
                ids.append(self.special(segment.name))
            else:
                ids += self.encode(segment.text)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids for people: specials as `<|open|>`, bytes that are not UTF-8 as U+FFFD."""
        parts = []
        for token_id in ids:
            name = self.special_name(token_id)
            if name is None:
                parts.append(self._bytes[token_id])
            elif not skip_special:
                parts.append(vocab.special_string(name).encode())
        return b"".join(parts).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of ordinary ids. Raises TokenizerError for a special id or one out of range."""
        given = list(ids)
        if (place := self.text_end(given, 0)) < len(given):
            name = self.special_name(given[place])
            raise TokenizerError(f"id {given[place]} is the special token {name!r}, which stands for no bytes")
        return b"".join([self._bytes[token_id] for token_id in given])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One string per id, for viewers. A token that is only part of a character shows its bytes as \\xNN."""
        return [
            vocab.special_string(name) if (name := self.special_name(token_id)) else self._piece(token_id)
            for token_id in ids
        ]

    def _piece(self, token_id: int) -> str:
        return self._bytes[token_id].decode("utf-8", errors="backslashreplace")

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < len(self._bytes):
            raise TokenizerError(
                f"token id {token_id} is out of range; this tokenizer has ids 0 .. {self.vocab_size - 1}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self._vocabulary,)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, hash={self.hash[:12]})"


def _cuts(text: str) -> Iterator[str]:
    """`text` cut at 400,000 characters, and inside that wherever a run of one kind passes 25,000 characters."""
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        chunk = text[start : start + MAX_ENCODE_CHARS]
        begin = 0
        for run in _RUNS.finditer(chunk):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield chunk[begin:cut]
                begin = cut
        yield chunk[begin:]


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".tmp")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
