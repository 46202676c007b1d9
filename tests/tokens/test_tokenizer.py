from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3rl.tokens import SMALL_SPECIAL_IDS, Special, Text, Tokenizer, TokenizerError, special_ids

SMALL = Tokenizer.builtin()


def test_the_builtin_tokenizer_has_512_ids_with_the_specials_last():
    assert SMALL.vocab_size == special_ids.SMALL_VOCAB_SIZE == 512
    assert sorted(SMALL_SPECIAL_IDS.values()) == list(range(500, 512))
    for name, token_id in SMALL_SPECIAL_IDS.items():
        assert SMALL.special(name) == token_id
        assert SMALL.special_name(token_id) == name


@given(st.text())
@example("")
@example("12 apples\n\tand 3.5 pears\r\n   é 第一行 🙂\x00")
@example("<|open|>message<|sep|>[BOS][PAD]")
def test_decoding_what_was_encoded_gives_the_text_and_no_special_id(text):
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert all(token_id < 500 for token_id in ids)


@given(st.text(alphabet=st.characters(categories=["Cs"]), min_size=1), st.text())
def test_a_lone_surrogate_is_refused_with_its_position(surrogates, before):
    with pytest.raises(TokenizerError, match=f"character {len(before)} is the lone surrogate"):
        SMALL.encode(before + surrogates)


def test_digits_are_single_tokens_and_nothing_crosses_a_newline():
    assert [SMALL.decode([token_id]) for token_id in SMALL.encode("2024")] == ["2", "0", "2", "4"]
    for token_id in range(500):
        text = SMALL.decode_bytes([token_id])
        if len(text) > 1:
            assert b"\n" not in text
            assert not any(48 <= byte <= 57 for byte in text)


def test_every_single_byte_is_the_id_of_its_value():
    assert [SMALL.decode_bytes([value]) for value in range(256)] == [bytes([value]) for value in range(256)]


@pytest.mark.parametrize(
    "markup",
    [
        *("message", " role", '="', '"', "user", "assistant", "system", "tool", "response", "think", "tools", "call"),
        *(" tool", " index", "argument", " key", " type", "string"),
    ],
)
def test_a_markup_segment_costs_one_token(markup):
    assert len(SMALL.encode(markup)) == 1


def test_segments_are_encoded_one_by_one_and_only_special_segments_become_special_ids():
    joined = SMALL.encode_segments([Text("return"), Text(" "), Text("<|open|>"), Special("open")])
    assert joined == [*SMALL.encode("return"), 32, *SMALL.encode("<|open|>"), special_ids.OPEN]
    assert joined.count(special_ids.OPEN) == 1


def test_decode_shows_or_skips_specials_and_replaces_broken_bytes():
    ids = [special_ids.OPEN, *SMALL.encode("message"), 0xC3, special_ids.END_OF_MSG, special_ids.BOS]
    assert SMALL.decode(ids) == "<|open|>message\ufffd<|end_of_msg|>[BOS]"
    assert SMALL.decode(ids, skip_special=True) == "message\ufffd"
    assert SMALL.pieces(ids) == ["<|open|>", "message", "\\xc3", "<|end_of_msg|>", "[BOS]"]
    assert SMALL.decode(np.array(ids)) == SMALL.decode(ids)


def test_decode_bytes_refuses_a_special_id():
    with pytest.raises(TokenizerError, match="'sep'"):
        SMALL.decode_bytes([65, special_ids.SEP])


@pytest.mark.parametrize("token_id", [-1, 512, 10**9])
def test_an_id_out_of_range_is_refused(token_id):
    with pytest.raises(TokenizerError, match=r"ids 0 \.\. 511"):
        SMALL.decode([token_id])


def test_an_unknown_special_name_lists_the_known_ones():
    with pytest.raises(TokenizerError, match=r"'begin'.*end_of_msg"):
        SMALL.special("begin")


def test_save_load_and_pickle_keep_the_hash_and_the_ids(tmp_path):
    SMALL.save(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["k3rl_tokenizer.json"]
    text = "list: keep values above 5, then reverse"
    for other in (Tokenizer.load(tmp_path / "out"), pickle.loads(pickle.dumps(SMALL))):
        assert other.hash == SMALL.hash
        assert other.encode(text) == SMALL.encode(text)


def test_the_hash_changes_with_the_table(tmp_path):
    SMALL.save(tmp_path)
    path = tmp_path / "k3rl_tokenizer.json"
    table = json.loads(path.read_text())
    table["merges"][-1] = "quite another"
    path.write_text(json.dumps(table))
    assert Tokenizer.load(tmp_path).hash != SMALL.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.pop("merges"), "not a k3rl tokenizer table"),
        (lambda table: table["merges"].append(table["merges"][0]), "twice"),
        (lambda table: table["merges"].append("one more"), "must follow the 501 ordinary ids"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, change, message):
    SMALL.save(tmp_path)
    path = tmp_path / "k3rl_tokenizer.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_importing_tokens_does_not_import_torch():
    code = "import sys, k3rl.tokens; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
