"""Metrics: sums and counts until printed, lines that a crash cannot spoil."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.config import ConfigError
from k3rl.run.files import open_for_append, read_lines, to_line, write_atomic
from k3rl.run.metrics import Accumulator, MetricsWriter, read_metrics, series

parts = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=7), min_size=1, max_size=5)


@given(parts)
def test_the_mean_does_not_depend_on_how_values_were_split(split):
    whole = Accumulator()
    merged = Accumulator()
    for values in split:
        part = Accumulator()
        for value in values:
            whole.add("x", value)
        part.add("x", sum(values), len(values))
        merged.merge(part)
    flat = [value for values in split for value in values]
    # The sums of at most 35 values below 1e3 are added in another order: 1e-9 is far above their rounding.
    assert merged.values()["x"] == pytest.approx(math.fsum(flat) / len(flat), abs=1e-9)
    assert whole.values()["x"] == pytest.approx(merged.values()["x"], abs=1e-9)
    assert merged.counts() == {"x": len(flat)}


def test_a_metric_that_saw_nothing_is_left_out_and_not_zero():
    metrics = Accumulator()
    metrics.add("reward/list/mean", 0.0, 0)
    assert metrics.values() == {}
    metrics.add("reward/list/mean", 3.0, 4)
    assert metrics.values() == {"reward/list/mean": 0.75}


def test_maxima_are_maxima_and_keep_a_nan():
    a, b = Accumulator(), Accumulator()
    a.maximum("m", 2.0)
    b.maximum("m", 5.0)
    a.merge(b)
    assert a.values() == {"m": 5.0}
    a.maximum("m", math.nan)
    a.maximum("m", 9.0)
    assert math.isnan(a.values()["m"])


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count"):
        Accumulator().add("x", 1.0, -1)


def test_rows_carry_time_step_source_values_and_weights(tmp_path):
    metrics = Accumulator()
    metrics.add("loss/mean", 10.0, 4)
    metrics.maximum("ratio/max", 1.5)
    with MetricsWriter(tmp_path / "metrics.jsonl", run_id="abc") as writer:
        assert writer.write(3, "learner", metrics) == {"loss/mean": 2.5, "ratio/max": 1.5}
        writer.write(3, "rollout", {"perf/tokens_per_s": 12})
    first, *rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (first["run"], first["schema"], first["source"]) == ("abc", 1, "run")
    assert all({"t", "step", "source", "attempt"} <= row.keys() for row in rows)
    assert rows[0]["counts"] == {"loss/mean": 4}
    assert series(read_metrics(tmp_path / "metrics.jsonl"), "loss/mean") == [(3, 2.5)]
    assert series(read_metrics(tmp_path / "metrics.jsonl"), "perf/tokens_per_s", "learner") == []


def test_numbers_that_are_not_finite_survive_as_valid_json(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(0, "x", values)

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    row = read_metrics(tmp_path / "m.jsonl")[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_metric_names_cannot_hide_a_column(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(ValueError, match="step"):
        writer.write(0, "x", {"step": 1.0})


def test_rows_of_steps_that_a_resumed_attempt_repeats_are_replaced(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, attempt=1) as writer:
        for step in range(5):
            writer.write(step, "learner", {"loss/mean": 10.0 + step})
        writer.write(4, "eval", {"reward/x/mean": 0.5})
    with MetricsWriter(path, attempt=2) as writer:
        for step in range(3, 6):
            writer.write(step, "learner", {"loss/mean": 20.0 + step})
    rows = read_metrics(path)
    assert series(rows, "loss/mean") == [(0, 10.0), (1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    assert series(rows, "reward/x/mean") == [(4, 0.5)]


def test_a_torn_last_line_is_ignored_by_readers_and_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, "x", {"a": 1.0})
    with open(path, "ab") as file:
        file.write(b'{"t": 1, "step": 1, "sou')
    assert len(read_metrics(path)) == 1
    with MetricsWriter(path, attempt=2) as writer:
        writer.write(1, "x", {"a": 2.0})
    assert series(read_metrics(path), "a") == [(0, 1.0), (1, 2.0)]
    assert path.read_bytes().count(b'"schema"') == 1


class BrokenSink:
    name = "broken"
    calls = 0

    def write(self, step, source, values):
        self.calls += 1
        raise ConnectionError("no route")

    def close(self):
        raise AssertionError("a sink that failed is not used again")


def test_a_sink_that_fails_is_named_once_and_then_left_out(tmp_path):
    said, sink = [], BrokenSink()
    with MetricsWriter(tmp_path / "m.jsonl", sinks=[sink], warn=said.append) as writer:
        writer.write(0, "x", {"a": 1.0})
        writer.write(1, "x", {"a": 2.0})
    assert (len(said), sink.calls) == (1, 1)
    assert "broken" in said[0]
    assert "no route" in said[0]
    assert len(read_metrics(tmp_path / "m.jsonl")) == 2


# --- the files below it -------------------------------------------------------------------------------------


@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=9), max_size=3), max_size=6),
    st.data(),
)
def test_a_reader_sees_exactly_the_whole_lines_wherever_the_file_is_cut(rows, data):
    import tempfile
    from pathlib import Path

    body = b"".join(to_line(row) for row in rows)
    cut = data.draw(st.integers(0, len(body)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes(body[:cut])
        read = list(read_lines(path))
        whole = body[:cut].count(b"\n")
        assert [row for row, _ in read] == rows[:whole]
        end = read[-1][1] if read else 0
        path.write_bytes(body)
        assert [row for row, _ in read_lines(path, end)] == rows[whole:]
        path.write_bytes(body[:cut])
        with open_for_append(path) as file:
            file.write(to_line({"new": 1}))
        assert [row for row, _ in read_lines(path)] == [*rows[:whole], {"new": 1}]


def test_a_torn_line_longer_than_a_block_is_removed_whole(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"x" * 200_000)
    open_for_append(path).close()
    assert path.read_bytes() == b'{"a":1}\n'


def test_a_whole_line_that_is_not_json_is_named_with_its_place(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\nnope\n')
    with pytest.raises(ValueError, match=r"x\.jsonl.*byte 8"):
        list(read_lines(path))


@given(st.text(st.characters(exclude_categories=()), max_size=8))
def test_any_text_survives_a_line_even_a_lone_surrogate(text):
    line = to_line({"text": text})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"text": text}


def test_an_atomic_write_leaves_no_temporary_file(tmp_path):
    write_atomic(tmp_path / "a.json", "1")
    write_atomic(tmp_path / "a.json", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "2"


def test_redone_steps_replace_those_before_and_what_they_were_is_kept_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, run_id="r") as writer:
        for step in range(4):
            writer.write(step, "sft", {"loss/mean": step})
        writer.write(3, "rl", {"loss/mean": 9})
    with MetricsWriter(path, run_id="r", attempt=2) as writer:
        assert writer.supersede("sft", 2) == 2
        assert writer.supersede("sft", 2) == 0
        writer.write(2, "sft", {"loss/mean": 20})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert "schema" in rows[0]
    assert [(row["source"], row["step"], row["loss/mean"]) for row in rows[1:]] == [
        ("sft", 0, 0), ("sft", 1, 1), ("rl", 3, 9), ("sft", 2, 20)
    ]  # fmt: skip
    aside = [json.loads(line) for line in (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()]
    assert [(row["source"], row["step"]) for row in aside] == [("sft", 2), ("sft", 3)]
    assert len(list(read_lines(path, 10**6))) == 5  # an offset into the longer file that it was


@pytest.mark.parametrize("line", ["{torn", "[1]", '{"step": "x", "source": "sft"}', '{"source": "sft"}', "\x00"])
def test_a_line_that_is_no_metric_is_named_without_a_traceback(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl.* take "):
        read_metrics(path)
