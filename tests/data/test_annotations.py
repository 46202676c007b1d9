"""What the learner adds to recorded episodes."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from k3rl.data import AnnotationWriter, SequenceScores, TrainBatch, TrainSequence, read_annotations
from k3rl.data.annotations import ANNOTATION_SCHEMA


def sequence(name: str, tokens: int, first_target: int, advantage: float) -> TrainSequence:
    """Tokens from `first_target` on are targets with sampler logprob -1."""
    mask = np.arange(tokens) >= first_target
    logprobs, advantages = np.where(mask, -1.0, 0.0), np.where(mask, advantage, 0.0)
    return TrainSequence(name, np.arange(tokens), mask, logprobs.astype(np.float32), advantages.astype(np.float32))


def scores(tokens: int, first_target: int, logprob: float) -> SequenceScores:
    targets = np.arange(tokens) >= first_target
    values = np.where(targets, logprob, np.nan).astype(np.float32)
    return SequenceScores(values, np.where(targets, 0.5, np.nan).astype(np.float32))


@pytest.fixture
def written(tmp_path):
    batch = TrainBatch.pack(
        [sequence("e0/main", 5, 2, 0.75), sequence("e0/b1", 3, 1, 0.75), sequence("e1/0", 4, 3, -1)]
    )
    known = {"e0/main": scores(5, 2, -0.5), "e0/b1": scores(3, 1, -3.0)}
    load = np.array([[6, 2], [0, 0]])
    file = AnnotationWriter(tmp_path, attempt=2).write("rl", 7, [batch], known, load, 3)
    return tmp_path, file


def test_a_row_is_a_branch_with_typed_columns(written):
    _, file = written
    assert file.name == "rl-a2-000007.parquet"
    assert pq.read_schema(file).names == ANNOTATION_SCHEMA.names
    main, branch = read_annotations(file, "e0")
    assert (main["stage"], main["attempt"], main["step"], main["branch_id"], main["advantage"]) == (
        "rl",
        2,
        7,
        "main",
        0.75,
    )
    assert main["loss_mask"].tolist() == [False, False, True, True, True]
    np.testing.assert_array_equal(main["learner_logprobs"], [np.nan, np.nan, -0.5, -0.5, -0.5])
    np.testing.assert_array_equal(main["entropies"], [np.nan, np.nan, 0.5, 0.5, 0.5])
    assert pq.read_table(file)["entropies"][0].as_py()[:3] == [None, None, 0.5], "null in the file"
    assert main["ratios"][2:] == pytest.approx([np.exp(0.5)] * 3, rel=1e-6), "float32"
    assert branch["ratios"][1:] == pytest.approx([np.exp(-2.0)] * 2, rel=1e-6), "float32"


def test_what_was_not_scored_is_null_and_not_zero(written):
    _, file = written
    (row,) = read_annotations(file, "e1")
    assert (row["learner_logprobs"], row["entropies"], row["ratios"]) == (None, None, None)
    assert row["advantage"] == -1
    assert read_annotations(file, "e2") == []


def test_the_line_of_a_step_needs_no_parquet(written):
    folder, file = written
    (line,) = [json.loads(text) for text in (folder / "steps.jsonl").read_text().splitlines()]
    assert line["file"] == file.name
    assert line["advantages"] == {"e0": 0.75, "e1": -1.0}
    assert (line["scored"], line["version"]) == (2, 3)
    assert line["expert_load"] == [[0.75, 0.25], [0.0, 0.0]], "a layer that saw nothing has no share to give"


def test_a_line_that_a_crash_tore_does_not_take_the_next_one_with_it(written):
    folder, _ = written
    with open(folder / "steps.jsonl", "ab") as file:
        file.write(b'{"stage": "r')
    AnnotationWriter(folder, attempt=3).write("rl", 7, [], {})
    lines = (folder / "steps.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["attempt"] == 3
    assert len(lines) == 3


def test_a_step_without_experts_or_batches_says_so(tmp_path):
    file = AnnotationWriter(tmp_path, attempt=1).write("rl", 0, [], {}, np.zeros((0, 0)))
    line = json.loads((tmp_path / "steps.jsonl").read_text())
    assert "expert_load" not in line
    assert line["advantages"] == {}
    assert read_annotations(file, "e0") == []


def test_a_file_of_another_schema_is_refused(written):
    _, file = written
    table = pq.read_table(file).replace_schema_metadata({"schema_version": "99"})
    pq.write_table(table, file)
    with pytest.raises(ValueError, match="schema version 99"):
        read_annotations(file, "e0")


def test_ranks_that_share_a_sequence_fill_each_others_gaps():
    left = SequenceScores(np.array([1, np.nan, np.nan], np.float32), np.array([4, np.nan, np.nan], np.float32))
    right = SequenceScores(np.array([np.nan, 2, np.nan], np.float32), np.array([np.nan, 5, np.nan], np.float32))
    both = left.filled_by(right)
    np.testing.assert_array_equal(both.logprobs, [1, 2, np.nan])
    np.testing.assert_array_equal(both.entropies, [4, 5, np.nan])
