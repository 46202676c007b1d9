"""Files of chat data as users have them, and what is said of rows that cannot be trained."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.data import DatasetError, Fit, check_chat_file, encode_example, example_of, load_chat_dataset, raw_rows
from k3rl.tokens import Tokenizer, xtml

CASES = Path(__file__).parents[1] / "cases" / "chat"
TOKENIZER = Tokenizer.builtin()


def user(content):
    return {"role": "user", "content": content}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def lines(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report(path: Path, **more):
    return check_chat_file(path, TOKENIZER, **more)


def trained_text(path: Path, row: int = 0, thinking: bool = False) -> str:
    """The trained tokens of a row, as text."""
    raw = list(raw_rows(path))[row]
    example = example_of(raw, path)
    ids, mask = encode_example(example.messages, example.tools, TOKENIZER, thinking)
    return TOKENIZER.decode(ids[mask].tolist())


@pytest.mark.parametrize("name", ["blank_lines.jsonl", "bom.jsonl", "good.jsonl.gz", "good.ndjson"])
def test_files_with_blank_lines_marks_compression_or_another_suffix_are_read_whole(name, tmp_path):
    assert report(CASES / name).problems == []
    dataset = load_chat_dataset(CASES / name, cache_dir=tmp_path)
    assert [row.messages[1]["content"] for row in dataset] == [f"xs[::-1] #{n}" for n in range(4)]
    assert [row.row for row in dataset] == [0, 1, 2, 3]


def test_zstd_arrays_and_documents_over_many_lines_are_read(tmp_path):
    rows = [{"messages": [user(f"a{n}"), answer("b")]} for n in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with pa.CompressedOutputStream(str(tmp_path / "d.jsonl.zst"), "zstd") as file:
        file.write(text)
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "flat.json").write_text(json.dumps(rows))
    (tmp_path / "one.json").write_text(json.dumps(rows[0], indent=1))
    (tmp_path / "misnamed.jsonl").write_bytes(gzip.compress(text))
    for name, count in {"d.jsonl.zst": 3, "array.json": 3, "flat.json": 3, "one.json": 1, "misnamed.jsonl": 3}.items():
        found = load_chat_dataset(tmp_path / name, cache_dir=tmp_path / "cache")
        assert [row.messages[0]["content"] for row in found] == [f"a{n}" for n in range(count)], name


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("empty.jsonl", b"", "empty"),
        ("blank.jsonl", b"\n \n", "empty"),
        ("wide.jsonl", "{}\n".encode("utf-16"), "UTF-16"),
        ("cut.jsonl.gz", gzip.compress(b"{}\n" * 9)[:-4], "too early"),
        ("other.jsonl", b"PAR1....", "Parquet"),
        ("words.csv", b"a,b", "suffix"),
        ("array.json", b'[{"messages": ', "neither JSON lines nor one JSON array"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    [problem] = report(tmp_path / name).problems[-1:]
    assert said in problem.why
    with pytest.raises(DatasetError, match=said):
        load_chat_dataset(tmp_path / name, cache_dir=tmp_path / "cache")


def test_a_turn_with_weight_0_is_context_and_its_siblings_say_the_same(tmp_path):
    assert "GOOD 4" in trained_text(CASES / "weight0.jsonl")
    assert "BAD" not in trained_text(CASES / "weight0.jsonl")
    for keys in ({"train": False}, {"loss": 0}, {"masked": True}, {"weight": 0.0, "masked": 1}):
        path = lines(tmp_path / "d.jsonl", {"messages": [user("a"), answer("BAD", **keys), user("b"), answer("GOOD")]})
        assert "BAD" not in trained_text(path)
        assert report(path).untrained_answers == 1


@pytest.mark.parametrize(
    ("message", "key", "said"),
    [
        (answer("x", weight=0.5), "weight", "wanted 0 or 1"),
        (answer("x", train="no"), "train", "wanted 0 or 1"),
        (answer("x", weight=1, masked=True), "weight", "trained and that it is not"),
        (user("x") | {"train": True}, "train", "only assistant turns"),
        (answer("x", function_call={"name": "f", "arguments": "{}"}), "function_call", "'tool_calls'"),
        (answer("x", thinking="hm"), "thinking", "'reasoning_content'"),
        (answer("x", reasoning_contents="hm"), "reasoning_contents", "'reasoning_content'"),
        (answer(None), "content", "content is null"),
        ({"role": "assistant"}, "content", "no content"),
        ({"role": "bot", "content": "x"}, "role", "wanted one of"),
        (user("x") | {"reasoning_content": "hm"}, "reasoning_content", "role user"),
        (
            answer("", tool_calls=[{"function": {"name": "f", "args": {}, "parameters": {"a": 1}}}]),
            "parameters",
            "'arg",
        ),
        (answer([{"type": "tool_use", "name": "f"}]), "content", "content part"),
        (answer("x", reasoning="a", reasoning_content="b"), "reasoning", "keep one"),
    ],
)
def test_what_would_be_left_out_without_a_word_is_refused_by_name(tmp_path, message, key, said):
    path = lines(tmp_path / "d.jsonl", {"messages": [user("a"), answer("b")]}, {"messages": [user("a"), message]})
    [problem] = report(path).problems
    assert (problem.row, problem.key) == (1, key)
    assert said in problem.why


def test_keys_that_are_null_or_empty_say_nothing_and_are_let_through(tmp_path):
    said = answer(
        "b", function_call=None, refusal=None, audio=None, annotations=[], tool_calls=[], reasoning_content=""
    )
    assert report(lines(tmp_path / "d.jsonl", {"messages": [user("a"), said]})).problems == []


def test_text_under_another_key_is_refused_in_every_row():
    found = report(CASES / "text_key.jsonl")
    assert {(problem.row, problem.key) for problem in found.problems} == {
        (0, "text"), (1, "value"), (2, "contents"), (3, "Content")
    }  # fmt: skip
    assert all("'content'" in problem.why for problem in found.problems)
    assert found.trained_tokens == 0


def test_reasoning_is_rendered_into_the_think_channel_and_trained():
    path = CASES / "reasoning.jsonl"
    found = report(path)
    assert (found.problems, found.reasoning_turns, found.tagged_answers) == ([], 2, 1)
    for row, thought in ((0, "two and two are four"), (2, "two and two")):
        text = trained_text(path, row, thinking=True)
        assert text.startswith(f"{thought}<|close|>think<|sep|><|open|>response<|sep|>4<|close|>")
    assert trained_text(path, 1).startswith("<think>two and two</think>4<|close|>response")


def test_a_bad_row_far_down_is_named_with_its_line():
    [problem] = report(CASES / "late_bad_row.jsonl").problems
    assert (problem.row, "no assistant turn" in problem.why) == (33, True)


def test_a_lone_surrogate_is_named_with_row_place_and_character():
    first, second = report(CASES / "surrogate.jsonl").problems
    assert (first.row, first.key) == (0, "content")
    assert "message 0" in first.why
    assert "character 10" in first.why
    assert r"'\ud83d'" in first.why
    assert "message 1" in second.why


def test_text_of_special_tokens_stays_text():
    path = CASES / "special.jsonl"
    assert report(path).problems == []
    example = example_of(next(raw_rows(path)), path)
    ids, _ = encode_example(example.messages, None, TOKENIZER, False)
    ends = TOKENIZER.special("end_of_msg")
    assert (ids == ends).sum() == 2  # one a message, although both name the token


def test_results_of_tools_stand_in_call_order_and_broken_arguments_carry_no_loss():
    path = CASES / "tools.jsonl"
    found = report(path)
    assert [problem.row for problem in found.problems] == [1]  # a null answer without calls, and a result of no call
    example = example_of(next(raw_rows(path)), path)
    whole = TOKENIZER.encode_segments(xtml.render(example.messages, thinking=False, add_generation_prompt=False))
    text = TOKENIZER.decode(whole)
    assert text.index(">3<") < text.index(">20<")
    assert '{"city": "Os' not in trained_text(path, 2)


@pytest.mark.parametrize(
    ("messages", "key", "said"),
    [
        ([user("a"), answer("b"), {"role": "tool", "content": "c"}], "tool_call_id", "without a call"),
        ([user("a"), answer("b"), answer("c")], "role", "right after another"),
        ([user("a"), answer("", tool_calls=[{"id": "x", "name": "f"}]), user("b"), answer("c")], "tool_calls", "x"),
        ([user("a")], "messages", "no assistant turn"),
        ([user("a"), answer("b", weight=0)], "messages", "no assistant turn that is trained"),
    ],
)
def test_an_order_that_no_policy_meets_is_a_problem(tmp_path, messages, key, said):
    [problem] = report(lines(tmp_path / "d.jsonl", {"messages": messages})).problems
    assert problem.key == key
    assert said in problem.why


def test_a_result_with_another_id_and_a_second_result_of_a_call_are_problems(tmp_path):
    calls = [{"id": "x", "name": "f"}]
    for ids in (["y"], ["x", "x"]):
        results = [{"role": "tool", "content": "r", "tool_call_id": name} for name in ids]
        path = lines(tmp_path / "d.jsonl", {"messages": [user("a"), answer("", tool_calls=calls), *results]})
        assert [problem.key for problem in report(path).problems] == ["tool_call_id"]


def test_other_forms_are_read_as_the_conversation_that_they_are(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {"prompt": "q", "completion": "a", "system": "s"},
        {"prompt": [{"role": "system", "content": "s"}, user("q")], "completion": [answer("a")]},
        {"instruction": "q", "input": "", "output": "a", "system": "s"},
        {"conversations": [{"role": "system", "content": "s"}, user("q"), answer("a")]},
        {"messages": [{"role": "developer", "content": "s"}, user("q"), answer("a")]},
    ]
    wanted = [("system", "s"), ("user", "q"), ("assistant", "a")]
    for row in load_chat_dataset(lines(tmp_path / "d.jsonl", *rows), cache_dir=tmp_path / "cache"):
        assert [(said["role"], said["content"]) for said in row.messages] == wanted
    for name in ("sharegpt", "prompt_completion"):
        assert report(CASES / f"{name}.jsonl").problems == []


def test_answers_inside_a_prompt_are_context(tmp_path):
    prompt = [user("a"), answer("BEFORE"), user("b")]
    path = lines(tmp_path / "d.jsonl", {"prompt": prompt, "completion": [answer("AFTER")]})
    assert "BEFORE" not in trained_text(path)
    assert "AFTER" in trained_text(path)


@pytest.mark.parametrize(
    ("row", "key", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen", "preference data"),
        ({"question": "a", "answer": "b"}, "answer", '"completion": answer'),
        ({"text": "a"}, "text", "plain text"),
        ({"message": [user("a")]}, "message", "near"),
        ({"messages": [user("a"), answer("b")], "functions": [{"name": "f"}]}, "functions", "under tools"),
        ({"messages": [user("a"), answer("b")], "images": ["x.png"]}, "images", "image_url"),
        ({"messages": [user("a"), answer("b")], "weight": 0}, "weight", "in the message"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "from", "tool_calls"),
        ({"conversations": [{"from": "human", "text": "x"}]}, "text", "no value"),
    ],
)
def test_a_form_that_is_not_read_is_named_with_what_to_write(tmp_path, row, key, said):
    [problem] = report(lines(tmp_path / "d.jsonl", row)).problems
    assert problem.key == key
    assert said in problem.why


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n')
    assert "'content' stands twice" in report(tmp_path / "d.jsonl").problems[0].why


def test_a_row_longer_than_fits_is_named_with_what_sets_the_limit(tmp_path):
    path = lines(
        tmp_path / "d.jsonl", {"messages": [user("a"), answer("b")]}, {"messages": [user("a" * 99), answer("b")]}
    )
    whole = report(path)
    assert whole.longest == max(whole.lengths) == whole.lengths[1]
    [problem] = report(path, fit=Fit(whole.lengths[0], "trainer.micro_batch_tokens")).problems
    assert problem.row == 1
    assert "trainer.micro_batch_tokens" in problem.why


def test_counts_are_those_of_the_encoded_rows(tmp_path):
    path = CASES / "good.ndjson"
    encoded = [
        encode_example(row.messages, None, TOKENIZER, False) for row in load_chat_dataset(path, cache_dir=tmp_path)
    ]
    found = report(path)
    assert found.tokens == sum(len(ids) for ids, _ in encoded)
    assert found.trained_tokens == sum(int(mask.sum()) for _, mask in encoded)
    assert found.masked_share == pytest.approx(1 - found.trained_tokens / found.tokens, abs=1e-12)
    assert (found.rows, found.turns) == (4, 8)


def test_parquet_has_the_same_rows_and_problems(tmp_path):
    rows = [{"messages": [user("a"), answer("b", weight=1)]}, {"messages": [user("a"), answer("b", weight=0)]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert [problem.row for problem in report(tmp_path / "d.parquet").problems] == [1]


def test_a_file_that_may_not_be_read_is_not_called_missing(tmp_path, monkeypatch):
    path = lines(tmp_path / "d.jsonl", {"messages": [user("a"), answer("b")]})

    def refused(*_args, **_more):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    assert "may not be read" in report(path).problems[0].why


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)
KEYS = ["messages", "tools", "conversations", "prompt", "completion", "instruction", "output", "system", "weight"]


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4) | JSON, min_size=1, max_size=4))
def test_no_row_whatever_it_holds_ends_the_check(tmp_path_factory, rows):
    good = {"messages": [user("a"), answer("b")]}
    path = lines(tmp_path_factory.mktemp("any") / "d.jsonl", good, *rows)
    found = report(path)
    assert len({problem.row for problem in found.problems}) + len(found.lengths) == found.rows
