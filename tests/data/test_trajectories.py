from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.data import trajectories
from k3rl.data.trajectories import TrajectoryError, TrajectoryWriter
from k3rl.packed import SamplingMasks
from k3rl.tokens.images import data_url
from k3rl.types import (
    Branch,
    EncodedImage,
    Episode,
    Failed,
    Group,
    Invalid,
    Message,
    Scored,
    StopReason,
    ToolCall,
    Turn,
)


def turn(prompt, sampled, version, routes=None, sampling_mask=None):
    logprobs = tuple(float(np.float32(-0.1 * value)) for value in sampled)
    return Turn(
        tuple(prompt),
        tuple(sampled),
        logprobs,
        StopReason.STOP,
        version,
        version + 1,
        routes,
        0.25,
        0.5,
        sampling_mask=sampling_mask,
    )


ROUTES = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
SCORES = [Scored(0.0, {"tests": 0.5}), Invalid("reads the answer", "open('/answer')"), Failed("sandbox is gone")]


def episode(name, score=SCORES[0], branches=None):
    first = turn([1, 2, 3], [4, 5], 7, ROUTES, SamplingMasks.of([np.array([2, 4]), np.array([5])]))
    if branches is None:
        branches = (
            Branch("0", (first, turn([1, 2, 3, 4, 5, 6], [7], 8))),
            Branch("1", (first,), parent="0"),
        )
    return Episode(
        *(name, "task-1", "coding", "list", 2, branches, StopReason.ENV_DONE, score, "return xs\n"),
        {"tokens": 3.0},
        {"turns": 2.0},
        (
            Message("user", "é"),
            Message("assistant", "", tool_calls=(ToolCall("run", {"a": [1]}, "id"), ToolCall("x", "{no"))),
        ),
    )


GROUPS = [
    Group("g0", "task-1", (episode("e0"), episode("e1", SCORES[1]))),
    Group("g1", "task-1", (episode("e2", SCORES[2], branches=()),)),
]


def without_routes(groups):
    def bare(branch):
        return dataclasses.replace(branch, turns=tuple(dataclasses.replace(turn, routes=None) for turn in branch.turns))

    return [
        dataclasses.replace(
            group,
            episodes=tuple(dataclasses.replace(e, branches=tuple(map(bare, e.branches))) for e in group.episodes),
        )
        for group in groups
    ]


def writer(folder, actor="rollout-0"):
    return TrajectoryWriter(folder, actor=actor, tokenizer_hash="abc")


def test_groups_come_back_as_they_were_written(tmp_path):
    entry = writer(tmp_path).write(GROUPS, generation=3, seed=11)
    assert trajectories.read_manifest(tmp_path) == [entry]
    assert trajectories.read_groups(tmp_path, entry) == without_routes(GROUPS)
    assert (entry.episodes, entry.rows, entry.generation, entry.schema_version) == (3, 5, 3, 3)


def test_recorded_experts_are_in_a_file_of_their_own_until_it_is_deleted(tmp_path):
    entry = writer(tmp_path).write(GROUPS, generation=0)
    first = trajectories.read_groups(tmp_path, entry, routes=True)[0].episodes[0].branches[0].turns
    np.testing.assert_array_equal(first[0].routes, ROUTES)
    assert first[0].routes.dtype == np.int16
    assert first[1].routes is None
    assert "routes" not in pq.read_schema(tmp_path / entry.file).names
    (tmp_path / entry.routes_file).unlink()
    assert trajectories.read_groups(tmp_path, entry) == without_routes(GROUPS)
    with pytest.raises(TrajectoryError, match="are deleted"):
        trajectories.read_groups(tmp_path, entry, routes=True)


def test_experts_of_whole_prompts_are_read_as_those_of_the_new_rows(tmp_path):
    again = np.concatenate([ROUTES + 1, ROUTES[:2] + 50])  # 4 rows of the turn before, 6 + 1 - 1 rows in all
    turns = turn([1, 2, 3], [4, 5], 7, ROUTES), turn([1, 2, 3, 4, 5, 6], [7], 8, again)
    entry = writer(tmp_path).write([Group("g", "t", (episode("e", branches=(Branch("0", turns),)),))], generation=0)
    found = trajectories.read_groups(tmp_path, entry, routes=True)[0].episodes[0].branches[0].turns
    np.testing.assert_array_equal(found[0].routes, ROUTES)
    np.testing.assert_array_equal(found[1].routes, ROUTES[:2] + 50)


def test_experts_that_were_not_recorded_are_not_invented(tmp_path):
    entry = writer(tmp_path).write(without_routes(GROUPS), generation=0)
    assert entry.routes_file is None
    with pytest.raises(TrajectoryError, match="were not recorded"):
        trajectories.read_groups(tmp_path, entry, routes=True)


def shown(*images):
    """An episode of two turns: the first shows the first image, the second all of them; its messages as URLs."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(image.data, "image/x"), "detail": "low"}}
        for image in images
    ]
    turns = (
        dataclasses.replace(turn([1, 9, 3], [4], 1), images=images[:1]),
        dataclasses.replace(turn([1, 9, 3, 4, 9], [7], 1), images=images),
    )
    messages = (Message("user", [{"type": "text", "text": "sha256:00"}, *parts, {"type": "image", "image": "a.png"}]),)
    return dataclasses.replace(episode("seen", branches=(Branch("0", turns),)), messages=messages)


def test_images_are_stored_once_and_come_back_in_turns_and_messages(tmp_path):
    one, two = EncodedImage(b"file one" * 500, 4, 5), EncodedImage(b"file two", 6, 7)
    groups = [Group(f"i{n}", "task-1", (shown(one, two), shown(one, one))) for n in range(3)]
    groups = [
        dataclasses.replace(
            g, episodes=tuple(dataclasses.replace(e, id=f"{g.id}-{n}") for n, e in enumerate(g.episodes))
        )
        for g in groups
    ]
    entry = writer(tmp_path).write([*groups, *GROUPS], generation=0)
    assert trajectories.read_groups(tmp_path, entry) == [*groups, *without_routes(GROUPS)]
    stored = pq.read_table(tmp_path / entry.images_file).to_pylist()
    assert [(row["data"], row["width"]) for row in sorted(stored, key=lambda row: row["width"])] == [
        (one.data, 4),
        (two.data, 6),
    ]
    row = pq.read_table(tmp_path / entry.file).to_pylist()[0]
    assert row["images"] == [hashlib.sha256(image.data).hexdigest() for image in (one, two)]
    assert f"data:image/x;base64,sha256:{row['images'][0]}" in row["messages"]
    assert base64.b64encode(one.data[:30]).decode() not in row["messages"]
    (tmp_path / entry.images_file).write_bytes(b"")
    with pytest.raises(TrajectoryError, match="restore the file"):
        trajectories.read_groups(tmp_path, entry)


def test_turns_whose_images_do_not_extend_those_before_are_refused(tmp_path):
    one, two = EncodedImage(b"1", 4, 5), EncodedImage(b"2", 6, 7)
    turns = shown(one, two).branches[0].turns
    bad = Branch("0", (dataclasses.replace(turns[0], images=(two,)), turns[1]))
    with pytest.raises(ValueError, match="images of turn 1 do not extend"):
        writer(tmp_path).write([Group("g", "task-1", (episode("e", branches=(bad,)),))], generation=0)


def test_a_missing_reward_is_null_in_the_file_and_not_zero(tmp_path):
    entry = writer(tmp_path).write(GROUPS, generation=0)
    table = pq.read_table(tmp_path / entry.file)
    assert table["reward"].to_pylist() == [0.0, 0.0, None, None, None]
    assert table["status"].to_pylist() == ["scored", "scored", "invalid", "invalid", "failed"]
    assert table.schema.metadata[b"schema_version"] == b"3"
    assert table.schema.metadata[b"tokenizer_hash"] == b"abc"


def test_the_columns_can_be_read_without_this_program(tmp_path):
    entry = writer(tmp_path).write(GROUPS, generation=0, seed=11)
    row = pq.read_table(tmp_path / entry.file).to_pylist()[0]
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert row["loss_mask"] == [0, 0, 0, 1, 1, 0, 1]
    np.testing.assert_allclose(row["behaviour_logprobs"], [0, 0, 0, -0.4, -0.5, 0, -0.7], rtol=1e-6)
    assert [turn["first_version"] for turn in row["turns"]] == [7, 8]
    assert (row["group_id"], row["task_id"], row["env"], row["seed"]) == ("g0", "task-1", "coding", 11)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 12))
@settings(max_examples=10)
def test_row_groups_are_bounded_and_lose_nothing(tmp_path_factory, episodes, limit):
    folder = tmp_path_factory.mktemp("t")
    groups = [
        Group(f"g{number}", "task-1", tuple(episode(f"e{number}.{place}") for place in range(count)))
        for number, count in enumerate(episodes)
    ]
    before = trajectories.ROW_GROUP_TOKENS
    trajectories.ROW_GROUP_TOKENS = limit
    try:
        entry = writer(folder).write(groups, generation=0)
    finally:
        trajectories.ROW_GROUP_TOKENS = before
    assert trajectories.read_groups(folder, entry) == without_routes(groups)
    file = pq.ParquetFile(folder / entry.file)
    for index in range(file.num_row_groups):
        sizes = [len(tokens) for tokens in file.read_row_group(index)["token_ids"].to_pylist()]
        assert len(sizes) == 1 or sum(sizes) <= limit


@pytest.mark.parametrize("keep", [0, 4, -1])
def test_a_truncated_file_fails_loudly(tmp_path, keep):
    entry = writer(tmp_path).write(GROUPS, generation=0)
    path = tmp_path / entry.file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TrajectoryError, match="restore the file"):
        trajectories.read_groups(tmp_path, entry)


def test_one_flipped_bit_fails_loudly(tmp_path):
    entry = writer(tmp_path).write(GROUPS, generation=0)
    path = tmp_path / entry.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(TrajectoryError, match="restore the file"):
        trajectories.read_groups(tmp_path, entry)


def test_a_truncated_experts_file_fails_loudly(tmp_path):
    entry = writer(tmp_path).write(GROUPS, generation=0)
    path = tmp_path / entry.routes_file
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TrajectoryError, match="restore the file"):
        trajectories.read_groups(tmp_path, entry, routes=True)


def test_a_file_that_is_gone_or_of_another_schema_is_refused(tmp_path):
    out = writer(tmp_path)
    gone, other = out.write(GROUPS, generation=0), out.write(GROUPS, generation=1)
    (tmp_path / gone.file).unlink()
    with pytest.raises(TrajectoryError, match="not in the folder"):
        trajectories.read_groups(tmp_path, gone)
    path = tmp_path / other.file
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"schema_version": "1"}), path)
    data = path.read_bytes()
    other = dataclasses.replace(other, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(TrajectoryError, match="schema version 1; this program reads version 3"):
        trajectories.read_groups(tmp_path, other)


def test_a_restarted_writer_continues_and_cuts_off_a_torn_line(tmp_path):
    first = writer(tmp_path).write(GROUPS, generation=0)
    path = tmp_path / "rollout-0.manifest.jsonl"
    with path.open("a") as file:
        file.write('{"file": "rollout-0-000001')
    assert trajectories.read_manifest(tmp_path) == [first]
    second = writer(tmp_path).write(GROUPS, generation=1)
    assert second.file == "rollout-0-000001-000001.parquet"
    assert trajectories.read_manifest(tmp_path) == [first, second]


def test_a_damaged_manifest_line_is_refused_by_number(tmp_path):
    writer(tmp_path).write(GROUPS, generation=0)
    path = tmp_path / "rollout-0.manifest.jsonl"
    path.write_text(path.read_text() + '{"file": 3}\n')
    with pytest.raises(TrajectoryError, match="line 2"):
        trajectories.read_manifest(tmp_path)


def test_files_of_two_actors_are_read_together(tmp_path):
    for actor in ("b", "a"):
        writer(tmp_path, actor).write(GROUPS[1:], generation=0)
    entries = trajectories.read_manifest(tmp_path)
    assert [entry.file[0] for entry in entries] == ["a", "b"]
    assert [group for entry in entries for group in trajectories.read_groups(tmp_path, entry)] == GROUPS[1:] * 2


def test_a_writer_killed_at_any_moment_leaves_only_whole_files(tmp_path):
    """A real process is killed while it writes; all that the manifest names can be read."""
    code = (
        "import pickle, sys; from k3rl.data.trajectories import TrajectoryWriter\n"
        "groups = pickle.load(open(sys.argv[2], 'rb'))\n"
        "out = TrajectoryWriter(sys.argv[1], actor='x', tokenizer_hash='h')\n"
        "for step in range(10**6): out.write(groups, generation=step)\n"
    )
    (tmp_path / "groups.pkl").write_bytes(pickle.dumps(GROUPS))
    folder = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder), str(tmp_path / "groups.pkl")])
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (not folder.exists() or len(trajectories.read_manifest(folder)) < 3):
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    entries = trajectories.read_manifest(folder)
    assert len(entries) >= 3
    for entry in entries:
        assert trajectories.read_groups(folder, entry) == without_routes(GROUPS)
    assert json.loads((folder / "x.manifest.jsonl").read_text().splitlines()[0])["file"] == entries[0].file
