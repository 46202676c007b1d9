from __future__ import annotations

import hashlib
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3rl.data import TrainBatch
from k3rl.data.sft import DatasetError, encode_example, load_chat_dataset, sft_sequence
from k3rl.tokens import Tokenizer, TokenizerError, special_ids, xtml

TOKENIZER = Tokenizer.builtin()


def user(content):
    return {"role": "user", "content": content}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def spans(ids, mask):
    """Text of each run of trained tokens."""
    runs, current = [], []
    for token_id, train in zip(ids.tolist(), mask.tolist(), strict=True):
        if train:
            current.append(token_id)
        elif current:
            runs.append(TOKENIZER.decode(current))
            current = []
    return runs + ([TOKENIZER.decode(current)] if current else [])


def test_the_first_and_last_trained_token_of_one_answer():
    """First: the first token of the answer's body. Last: END_OF_MSG. Nothing else outside."""
    ids, mask = encode_example([user("2+2?"), answer("4!")], None, TOKENIZER, thinking=False)
    trained = mask.nonzero()[0]
    assert ids[trained[0]] == TOKENIZER.encode("4!")[0] == ord("4")
    assert ids[trained[0] - 1] == special_ids.SEP
    assert ids[trained[-1]] == special_ids.END_OF_MSG
    assert trained[-1] == len(ids) - 1
    assert spans(ids, mask) == ["4!<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"]


def test_the_untrained_head_is_the_prompt_that_the_policy_is_given():
    messages = [user("2+2?"), answer("4!", reasoning="hm")]
    for thinking in (True, False):
        ids, mask = encode_example(messages, None, TOKENIZER, thinking)
        prompt = TOKENIZER.encode_segments(xtml.render(messages[:1], thinking=thinking))
        assert ids[: mask.argmax()].tolist() == prompt


def test_with_an_empty_think_channel_training_starts_at_its_closing():
    ids, mask = encode_example([user("hi"), answer("yo")], None, TOKENIZER, thinking=True)
    assert ids[mask][0] == special_ids.CLOSE
    assert spans(ids, mask) == [
        "<|close|>think<|sep|><|open|>response<|sep|>yo<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    ]


def test_every_assistant_turn_of_a_tool_conversation_is_trained_and_nothing_between():
    call = {"id": "1", "function": {"name": "run", "arguments": '{"code": "x"}'}}
    messages = [
        user("<|open|>message"),
        answer("", tool_calls=[call]),
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
        answer("done"),
        user("more"),
        answer("again"),
    ]
    ids, mask = encode_example(messages, [{"type": "function"}], TOKENIZER, thinking=False)
    end = "<|close|>message<|sep|><|end_of_msg|>"
    assert spans(ids, mask) == [
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="run" index="1"<|sep|>'
        '<|open|>argument key="code" type="string"<|sep|>x<|close|>argument<|sep|>'
        f"<|close|>call<|sep|><|close|>tools<|sep|>{end}",
        f"done<|close|>response<|sep|>{end}",
        f"again<|close|>response<|sep|>{end}",
    ]


def test_arguments_that_are_not_json_are_not_trained():
    call = {"function": {"name": "run", "arguments": "{oops"}}
    ids, mask = encode_example([user("x"), answer("", tool_calls=[call])], None, TOKENIZER, thinking=False)
    text = "".join(spans(ids, mask))
    assert "json" not in text
    assert "oops" not in text
    assert "oops" in TOKENIZER.decode(ids)


def test_the_encoding_of_a_conversation_equals_the_tokens_of_its_rollout():
    """Prompt, sampled turn, continuation, sampled turn: what the engine saw is what supervised training sees."""
    messages = [
        user("go"),
        answer("a", tool_calls=[{"name": "f", "arguments": {}}]),
        {"role": "tool", "content": "r"},
        answer("b"),
    ]
    ids, mask = encode_example(messages, None, TOKENIZER, thinking=False)
    rollout = TOKENIZER.encode_segments(xtml.render(messages[:1], thinking=False))
    turns = []
    for place in (1, 3):
        whole = TOKENIZER.encode_segments(xtml.render([messages[place]], thinking=False, add_generation_prompt=False))
        prefix = TOKENIZER.encode_segments(xtml.render([], thinking=False))
        turns.append(whole[len(prefix) :])
    more = TOKENIZER.encode_segments(xtml.continuation(messages[:2], messages[2:3], thinking=False))
    assert ids.tolist() == [*rollout, *turns[0], *more, *turns[1]]
    assert mask.tolist() == [False] * len(rollout) + [True] * len(turns[0]) + [False] * len(more) + [True] * len(
        turns[1]
    )


def test_a_conversation_that_cannot_be_trained_is_refused():
    with pytest.raises(xtml.XTMLError, match="no assistant turn"):
        encode_example([user("x")], None, TOKENIZER, thinking=False)
    with pytest.raises(TokenizerError, match="surrogate"):
        encode_example([user("\ud800"), answer("x")], None, TOKENIZER, thinking=False)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" if isinstance(row, dict) else row + "\n" for row in rows))
    return path


ROWS = [
    {
        "messages": [user("a"), answer("b", tool_calls=[{"name": "f", "arguments": {"x": 1}}])],
        "task_id": "t0",
        "level": 2,
    },
    {
        "messages": [user("c\u2028d\u0085"), answer("e", tool_calls=[{"name": "f", "arguments": {"y": [None]}}])],
        "level": 1,
    },
]


def test_jsonl_rows_come_back_as_they_were_written_with_no_key_added(tmp_path):
    dataset = load_chat_dataset(write_lines(tmp_path / "d.jsonl", ROWS), cache_dir=tmp_path / "cache")
    assert len(dataset) == 2
    assert [example.messages for example in dataset] == [row["messages"] for row in ROWS]
    assert dataset[0].meta == {"task_id": "t0", "level": 2}
    assert [example.row for example in dataset[:]] == [0, 1]
    assert dataset[-1].row == 1


def test_parquet_rows_with_structs_or_json_strings_are_read(tmp_path):
    plain = [{"messages": [user("a"), answer("b")], "level": 1}]
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "plain.parquet")
    first = load_chat_dataset(tmp_path / "plain.parquet", cache_dir=tmp_path / "cache")[0]
    assert [(message["role"], message["content"]) for message in first.messages] == [("user", "a"), ("assistant", "b")]
    assert first.meta == {"level": 1}
    text = [{"messages": json.dumps(row["messages"]), "tools": json.dumps([{"type": "function"}])} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(text), tmp_path / "text.parquet")
    dataset = load_chat_dataset(tmp_path / "text.parquet", cache_dir=tmp_path / "cache")
    assert [example.messages for example in dataset] == [row["messages"] for row in ROWS]
    assert dataset[0].tools == [{"type": "function"}]


def test_parquet_structs_that_hide_absent_arguments_are_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    with pytest.raises(DatasetError, match="row 0: tool call arguments are Parquet structs"):
        load_chat_dataset(tmp_path / "d.parquet", cache_dir=tmp_path / "cache")[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "the line is not JSON"),
        ("[1]", "wanted an object with messages"),
        ({"prompt": "x"}, "has no messages"),
        ({"messages": []}, "has no messages"),
        ({"messages": ["x"]}, "has no messages"),
        ({"messages": [user("x")], "tools": 3}, "tools of type int"),
    ],
)
def test_a_bad_row_is_refused_by_number(tmp_path, row, reason):
    path = write_lines(tmp_path / "d.jsonl", [ROWS[0], row])
    dataset = load_chat_dataset(path, cache_dir=tmp_path / "cache")
    with pytest.raises(DatasetError, match=reason) as caught:
        list(dataset)
    assert caught.value.row == 1
    assert caught.value.path == str(path)


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="no such file"):
        load_chat_dataset(tmp_path / "none.jsonl", cache_dir=tmp_path)
    with pytest.raises(DatasetError, match=r"suffix is '\.csv'"):
        load_chat_dataset(tmp_path / "x.csv", cache_dir=tmp_path)
    pq.write_table(pa.table({"text": ["a"], "other": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DatasetError, match="wanted messages"):
        load_chat_dataset(tmp_path / "x.parquet", cache_dir=tmp_path / "cache")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-10])
    with pytest.raises(DatasetError, match="cannot be read as parquet"):
        load_chat_dataset(tmp_path / "cut.parquet", cache_dir=tmp_path / "cache")

    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\n")
    for name in ("empty.jsonl", "bytes.jsonl"):
        with pytest.raises(DatasetError, match="cannot be read as text"):
            load_chat_dataset(tmp_path / name, cache_dir=tmp_path / "cache")


def test_a_file_that_changed_in_place_is_read_anew_and_any_name_will_do(tmp_path):
    """The same path and the same time: only the content tells the two apart."""
    path = write_lines(tmp_path / "d[1]*.jsonl", ROWS[:1])
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    first = load_chat_dataset(path, cache_dir=tmp_path / "cache")
    write_lines(path, ROWS[1:])
    os.utime(path, ns=times)
    second = load_chat_dataset(path, cache_dir=tmp_path / "cache")
    assert first[0].messages == ROWS[0]["messages"]
    assert second[0].messages == ROWS[1]["messages"]
    assert second.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest() != first.fingerprint


def test_encoded_examples_pack_into_a_batch_with_advantage_one():
    parts = [
        sft_sequence(str(number), *encode_example(row["messages"], None, TOKENIZER, thinking=False))
        for number, row in enumerate(ROWS)
    ]
    batch = TrainBatch.pack(parts)
    assert batch.advantages.tolist() == batch.loss_mask.astype(float).tolist()
    assert not batch.sampler_logprobs.any()
