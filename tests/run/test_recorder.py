"""The recorder: what it writes, and that it never gets in the way."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time

import pytest

from k3rl.run.files import read_lines
from k3rl.run.recorder import Recorder, rounded
from k3rl.types import EncodedImage, Invalid


def rows_of(path):
    return [row for row, _ in read_lines(path)]


def pieces(ids):
    return [f"<{token}>" for token in ids]


def test_an_episode_is_written_turn_by_turn_and_then_as_a_whole(tmp_path, episode):
    with Recorder(tmp_path, run_id="abc", config_hash="def") as recorder:
        recorder.episode(episode(), 3, pieces)
    header, first, second, last = rows_of(tmp_path / "stream.jsonl")
    assert (header["kind"], header["schema"], header["run"], header["config_hash"]) == ("header", 1, "abc", "def")
    assert first["prompt"] == {"token_ids": [1, 2], "pieces": ["<1>", "<2>"]}
    assert first["sampled"] == {"token_ids": [5, 6], "pieces": ["<5>", "<6>"], "logprobs": [-0.25, -0.123457]}
    assert second["prompt"]["token_ids"] == [11, 12], "only what is new before the sampled tokens"
    assert (second["turn"], second["step"], second["branch"], second["versions"]) == (1, 3, "main", [1, 2])
    assert last["score"] == {"status": "scored", "reward": 1.0, "parts": {"tests": 1.0}}
    assert (last["kind"], last["turns"], last["sampled_tokens"], last["answer"]) == ("episode", 2, 4, "return xs")


def test_a_turn_names_the_images_that_its_prompt_adds(tmp_path, episode):
    one, two = EncodedImage(b"one", 4, 5), EncodedImage(b"two", 6, 7)
    given = episode()
    first, second = given.branches[0].turns
    turns = dataclasses.replace(first, images=(one,)), dataclasses.replace(second, images=(one, two))
    branch = dataclasses.replace(given.branches[0], turns=turns)
    with Recorder(tmp_path) as recorder:
        recorder.episode(dataclasses.replace(given, branches=(branch,)), 0, pieces)
    rows = rows_of(tmp_path / "stream.jsonl")[1:3]
    digests = [hashlib.sha256(data).hexdigest() for data in (b"one", b"two")]
    assert [row["images"] for row in rows] == [
        [{"sha256": digests[0], "width": 4, "height": 5}],
        [{"sha256": digests[1], "width": 6, "height": 7}],
    ]


def test_the_index_leads_to_the_bytes_of_each_episode(tmp_path, episode, failed_episode):
    with Recorder(tmp_path) as recorder:
        recorder.episode(episode("a"), 0, pieces)
        recorder.episode(failed_episode, 0, pieces)
    body = (tmp_path / "stream.jsonl").read_bytes()
    entries = [row for row in rows_of(tmp_path / "stream.index.jsonl") if row["kind"] == "episode"]
    assert [entry["episode"] for entry in entries] == ["a", "e1"]
    for entry in entries:
        piece = body[entry["offset"] : entry["offset"] + entry["bytes"]].splitlines()
        assert {json.loads(line)["episode"] for line in piece} == {entry["episode"]}
        assert [json.loads(line)["kind"] for line in piece] == ["turn", "turn", "episode"]
    assert entries[-1]["offset"] + entries[-1]["bytes"] == len(body)


def test_a_missing_reward_is_no_number(tmp_path, failed_episode):
    with Recorder(tmp_path) as recorder:
        recorder.episode(failed_episode, 0)
    entry = rows_of(tmp_path / "stream.index.jsonl")[-1]
    assert entry["status"] == "failed"
    assert "reward" not in entry
    assert rows_of(tmp_path / "stream.jsonl")[-1]["score"] == {
        "status": "failed",
        "reason": "sandbox died",
        "kind": "other",
    }


def test_a_cheat_keeps_its_evidence(tmp_path, episode):
    with Recorder(tmp_path) as recorder:
        recorder.episode(episode(score=Invalid("reads-grader", "open('/proc/1/mem')")), 0)
    score = rows_of(tmp_path / "stream.jsonl")[-1]["score"]
    assert score == {"status": "invalid", "hack": "reads-grader", "evidence": "open('/proc/1/mem')"}


def test_without_a_tokenizer_or_with_a_broken_one_the_reason_is_written(tmp_path, episode):
    def broken(ids):
        raise KeyError("no such id")

    with Recorder(tmp_path) as recorder:
        recorder.episode(episode("a", turns=1), 0)
        recorder.episode(episode("b", turns=1), 0, broken)
    turns = [row for row in rows_of(tmp_path / "stream.jsonl") if row["kind"] == "turn"]
    assert turns[0]["prompt"]["unavailable"] == "no tokenizer was given"
    assert "no such id" in turns[1]["prompt"]["unavailable"]
    assert turns[1]["prompt"]["token_ids"] == [1, 2]


def test_a_full_queue_drops_with_a_count_and_never_waits(tmp_path, episode):
    gate = threading.Event()

    def slow(ids):
        gate.wait(20)
        return pieces(ids)

    recorder = Recorder(tmp_path, capacity=2)
    begun = time.monotonic()
    for number in range(50):
        recorder.episode(episode(f"e{number}"), 0, slow)
    assert time.monotonic() - begun < 1
    assert recorder.stats().dropped >= 50 - 2 - 1
    gate.set()
    stats = recorder.close()
    assert stats.written + stats.dropped == 50
    assert stats.failed == 0
    written = [row for row in rows_of(tmp_path / "stream.jsonl") if row["kind"] == "episode"]
    assert len(written) == stats.written
    assert written[-1]["dropped_before"] == stats.dropped


def test_a_disk_that_fails_is_counted_said_once_and_not_raised(tmp_path, episode, capsys):
    (tmp_path / "traces").write_text("a file where a folder belongs")
    recorder = Recorder(tmp_path / "traces")
    for number in range(3):
        recorder.episode(episode(f"e{number}"), 0)
    assert recorder.close().failed == 3
    assert capsys.readouterr().err.count("recording failed") == 1


def test_after_close_nothing_is_written_and_nothing_is_raised(tmp_path, episode):
    recorder = Recorder(tmp_path)
    recorder.close()
    recorder.episode(episode(), 0)
    assert recorder.stats().dropped == 1
    assert recorder.close().written == 0


def test_close_ends_within_its_time_even_when_writing_hangs(tmp_path, episode):
    gate = threading.Event()
    recorder = Recorder(tmp_path)
    recorder.episode(episode("a"), 0, lambda ids: gate.wait(20) or [])
    recorder.episode(episode("b"), 0)
    begun = time.monotonic()
    assert recorder.close(timeout_s=0.2).dropped == 1
    assert time.monotonic() - begun < 2
    gate.set()


def test_a_second_attempt_goes_on_behind_the_first(tmp_path, episode):
    for attempt in (1, 2):
        with Recorder(tmp_path, attempt=attempt) as recorder:
            recorder.episode(episode(f"e{attempt}", turns=1), 0)
    assert [row["kind"] for row in rows_of(tmp_path / "stream.jsonl")] == ["header", *["turn", "episode"] * 2]
    entries = rows_of(tmp_path / "stream.index.jsonl")[1:]
    assert [entry["attempt"] for entry in entries] == [1, 2]
    assert entries[1]["offset"] == entries[0]["offset"] + entries[0]["bytes"]


@pytest.mark.parametrize(("value", "shown"), [(-1.23456789e-7, -1.23457e-7), (0.1, 0.1), (True, True), (7, 7)])
def test_numbers_keep_six_digits_however_small(value, shown):
    assert rounded([value]) == [shown]
