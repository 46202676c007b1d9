"""K3's ranks format, with a small ranks file of our own: the released one is not shipped."""

from __future__ import annotations

import base64
import json

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from k3rl.tokens import Tokenizer, TokenizerError, special_ids
from k3rl.tokens.vocab import K3_PATTERN, Vocabulary, k3_specials

WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"12", b"123", b"  ", b"\n\n", "第".encode(), "第一".encode()]
RANKS = {token: rank for rank, token in enumerate([bytes([value]) for value in range(256)] + WORDS)}
FIRST_SPECIAL = len(RANKS)
K3 = Tokenizer(Vocabulary(RANKS, K3_PATTERN, k3_specials(FIRST_SPECIAL)))


def write_ranks(folder, ranks=RANKS):
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    return folder


def test_the_named_specials_of_the_released_size_have_their_published_ids():
    specials = k3_specials(163_584)
    published = {"bos": 163584, "eos": 163585, "end_of_msg": 163586, "open": 163587, "close": 163588, "sep": 163589}
    published |= {"media_begin": 163602, "media_content": 163603, "media_end": 163604, "media_pad": 163605}
    published |= {"eot": 163593, "unk": 163838, "pad": 163839}
    assert {name: specials[name] for name in published} == published
    assert sorted(specials.values()) == list(range(163584, 163840))
    assert specials["reserved_token_163592"] == 163592


def test_a_ranks_folder_loads_with_256_specials_after_its_ranks(tmp_path):
    loaded = Tokenizer.load(write_ranks(tmp_path))
    assert loaded.vocab_size == FIRST_SPECIAL + 256
    assert loaded.special("bos") == FIRST_SPECIAL
    assert loaded.special("end_of_msg") == FIRST_SPECIAL + 2
    assert loaded.special("pad") == loaded.vocab_size - 1
    assert loaded.hash == K3.hash
    assert loaded.encode("hello") == [RANKS[b"hello"]]


@given(st.text())
def test_ranks_round_trip_any_text(text):
    ids = K3.encode(text)
    assert K3.decode(ids) == text
    assert all(token_id < FIRST_SPECIAL for token_id in ids)


@given(st.text(alphabet=st.sampled_from(list("aBé第一 \n\r\t'sS12३.,!\u0301ǅ"))))
def test_no_token_crosses_a_piece_of_the_split_rule(text):
    """The expected pieces come from another regex engine and the alternatives as k3.md 10.1 prints them."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    end = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rule = (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    pieces = regex.findall(rule, text, flags=regex.V1)
    assert "".join(pieces) == text
    assert K3.encode(text) == [token_id for piece in pieces for token_id in K3.encode(piece)]


@pytest.mark.parametrize("filler", ["z", " "])
def test_a_run_longer_than_25000_characters_is_cut_before_the_split_rule(filler):
    """The token that would lie across the cut is absent; 25,000 characters themselves are not cut."""
    token = b"he" if filler == "z" else b"  "
    run = filler * 24_999 + token.decode()
    assert K3.encode(run)[-2:] == ([RANKS[b"h"], RANKS[b"e"]] if filler == "z" else [RANKS[b"  "], RANKS[b" "]])
    assert K3.encode(filler * 24_998 + token.decode())[-1] == RANKS[token]
    assert K3.decode(K3.encode(run)) == run


def test_text_is_cut_at_400000_characters():
    """The cut falls inside "hello", whose single token is therefore absent."""
    text = "\n" * 20_000 + "a " * 189_999 + "\nhello"
    assert text[:400_000].endswith("\nh")
    assert RANKS[b"hello"] not in K3.encode(text)
    assert RANKS[b"hello"] in K3.encode(text[4:])
    assert K3.decode(K3.encode(text)) == text


def test_save_writes_ranks_and_a_config_that_names_the_specials(tmp_path):
    K3.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.hash == K3.hash
    added = json.loads((tmp_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert added[str(FIRST_SPECIAL + 3)]["content"] == "<|open|>"


def test_files_beside_the_ranks_travel_with_the_tokenizer(tmp_path):
    (tmp_path / "a").mkdir()
    source = write_ranks(tmp_path / "a")
    (source / "encoding_k3.py").write_bytes(b"raise SystemExit('never imported')\n")
    (source / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}, "model_max_length": 1048576}')
    Tokenizer.load(source).save(tmp_path / "b")
    for name in ("encoding_k3.py", "tokenizer_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()


def test_a_config_that_contradicts_the_ranks_is_refused(tmp_path):
    write_ranks(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"300": {"content": "<|open|>"}}}')
    with pytest.raises(TokenizerError, match=r"<\|open\|> the id 300"):
        Tokenizer.load(tmp_path)


def test_broken_ranks_are_refused_with_the_line(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"aGVsbG8= 0\nnot base64!\n")
    with pytest.raises(TokenizerError, match="line 2"):
        Tokenizer.load(tmp_path)


def test_ranks_with_a_hole_or_a_missing_byte_are_refused(tmp_path):
    holed = {token: rank + (rank > 100) for token, rank in RANKS.items()}
    with pytest.raises(TokenizerError, match="are not 0"):
        Tokenizer.load(write_ranks(tmp_path, holed))
    short = {token: rank for rank, token in enumerate(token for token in RANKS if token != b"A")}
    with pytest.raises(TokenizerError, match=r"lacks the single bytes \[65\]"):
        Tokenizer.load(write_ranks(tmp_path, short))


def test_a_folder_with_two_tokenizers_is_refused(tmp_path):
    Tokenizer.builtin().save(write_ranks(tmp_path))
    with pytest.raises(TokenizerError, match="exactly one"):
        Tokenizer.load(tmp_path)


def test_the_small_special_ids_are_named_as_in_k3():
    assert set(special_ids.SMALL_SPECIAL_IDS) <= set(special_ids.K3_SPECIAL_IDS)
