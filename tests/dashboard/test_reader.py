"""A run is read from its files alone, whatever state they are in."""

from __future__ import annotations

import json
import shutil

import pytest
from dashboard_runs import an_episode
from hypothesis import given
from hypothesis import strategies as st

from k3rl.config import MissingResource
from k3rl.dashboard import Bodies, Catalogue, UnknownRun
from k3rl.dashboard.rows import GrowingFile
from k3rl.dashboard.run_reader import RunReader
from k3rl.run import RunOptions
from k3rl.types import Failed


def reader(root) -> RunReader:
    return RunReader("one", root)


def test_a_run_is_found_with_its_curves_and_episodes(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0"), an_episode("rl-0-0-1", 0.0)], loss__mean=2.5)
    root = run.end()
    (summary,) = Catalogue(root.parent).summaries()
    assert (summary["name"], summary["status"], summary["episodes"], summary["stages"]) == (
        "one",
        "finished",
        2,
        ["rl"],
    )
    columns = reader(root).metrics()["stages"]["rl"]
    assert columns["steps"] == [0]
    assert columns["values"]["loss/mean"] == [2.5]


def test_a_folder_that_is_a_run_is_itself_the_catalogue(write):
    root = write().end()
    assert list(Catalogue(root).runs()) == ["."]


def test_a_killed_run_is_called_crashed_and_a_live_one_running(write):
    run = write()
    assert reader(run.root).summary()["status"] == "running"
    run.end(None)
    assert reader(run.root).summary()["status"] == "crashed"


def test_a_run_whose_run_json_is_damaged_is_listed_with_the_reason(write):
    root = write().end()
    (root / "run.json").write_text("{")
    summary = reader(root).summary()
    assert summary["status"] == "unreadable"
    assert "damaged" in summary["error"]


def test_a_catalogue_of_nothing_says_so(tmp_path):
    with pytest.raises(MissingResource, match="no folder"):
        Catalogue(tmp_path / "missing")


def test_a_link_that_leads_out_of_the_folder_is_no_run(write, tmp_path):
    root = write("outside").end()
    runs = tmp_path / "shown"
    runs.mkdir()
    (runs / "link").symlink_to(root)
    assert Catalogue(runs).runs() == {}
    with pytest.raises(UnknownRun):
        Catalogue(runs).run("../runs/outside")


def test_what_a_resumed_attempt_went_over_again_is_replaced(write):
    first = write()
    for step in range(3):
        first.step(step, [an_episode(f"rl-{step}-0-0", 0.0), an_episode(f"rl-{step}-0-1", 1.0)], loss__mean=1.0)
    first.end("interrupted")
    second = write(options=RunOptions(resume=True))
    second.step(1, [an_episode("rl-1-0-0", 0.5), an_episode("rl-1-0-1", 0.5)], loss__mean=9.0)
    run = reader(second.end())
    assert [(e.id, e.attempt, e.reward) for e in run.episodes()] == [
        ("rl-0-0-0", 1, 0.0),
        ("rl-0-0-1", 1, 1.0),
        ("rl-1-0-0", 2, 0.5),
        ("rl-1-0-1", 2, 0.5),
    ]
    assert run.metrics()["stages"]["rl"]["values"]["loss/mean"] == [1.0, 9.0]
    assert run.episode("rl-1-0-0", 1).reward == 0.0, "an address that names the attempt still leads there"
    assert run.episode("rl-1-0-0").attempt == 2


def test_a_run_that_is_started_afresh_in_its_place_is_read_afresh(write):
    first = write()
    first.step(0, [an_episode(f"rl-0-0-{i}") for i in range(8)])
    root = first.end()
    run = reader(root)
    assert len(run.episodes()) == 8
    again = write(options=RunOptions(clean=True))
    again.step(0, [an_episode("rl-0-0-0", 0.25)])
    again.end()
    assert [entry.reward for entry in run.episodes()] == [0.25]


def test_a_torn_last_line_waits_and_a_damaged_one_is_counted(write):
    run = write()
    run.step(0, [an_episode()])
    root = run.end()
    index = root / "traces" / "stream.index.jsonl"
    line = index.read_bytes().splitlines()[-1]
    one = reader(root)
    assert len(one.episodes()) == 1
    with open(index, "ab") as file:
        file.write(b"not json\n[1]\n" + line[:20])
        file.flush()
        assert len(one.episodes()) == 1
        file.write(line[20:] + b"\n")
        file.flush()
        assert len(one.episodes()) == 2
    assert one.summary()["damaged_lines"] == 2


def test_rows_of_other_shapes_take_nothing_down(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0")], loss__mean=1.0)
    root = run.end()
    odd = ['{"step": "x", "source": "rl", "t": 1}', '{"step": 1, "source": ["rl"], "t": 1}', "[]", '{"step": 2}']
    with open(root / "metrics.jsonl", "a") as file:
        file.write("".join(f"{line}\n" for line in odd))
    index = json.loads((root / "traces" / "stream.index.jsonl").read_text().splitlines()[-1])
    with open(root / "traces" / "stream.index.jsonl", "a") as file:
        for changes in ({"reward": "NaN", "episode": "rl-0-0-1"}, {"reward": "x"}, {"t": None}, {"level": 1e999}):
            file.write(json.dumps(index | changes) + "\n")
    with open(root / "traces" / "annotations" / "steps.jsonl", "a") as file:
        file.write('{"stage": [], "attempt": 1, "step": 0, "advantages": {}}\n{"advantages": 3}\n')
    one = reader(root)
    assert one.metrics()["stages"]["rl"]["steps"] == [0]
    assert [(entry.id, entry.reward) for entry in one.episodes()] == [("rl-0-0-0", 1.0), ("rl-0-0-1", None)]
    assert one.advantage(one.episodes()[0]) == -0.5
    assert one.summary()["damaged_lines"] == 7
    with pytest.raises(UnknownRun, match="no whole record"):
        Bodies().body(one, "rl-0-0-1")


def test_long_curves_are_thinned_and_keep_their_last_step(write):
    run = write()
    for step in range(4500):
        run.metrics.write(step, "rl", {"loss/mean": float(step)})
    columns = reader(run.end()).metrics()["stages"]["rl"]
    assert (columns["every"], columns["steps"][:2], columns["steps"][-1]) == (3, [2, 5], 4499)
    assert columns["values"]["loss/mean"] == [float(step) for step in columns["steps"]]
    assert reader(run.root).step_metrics("rl", 4) == {"loss/mean": 4.0}


@given(rows=st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=3), max_size=8), data=st.data())
def test_every_row_comes_once_however_the_file_is_cut(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("growing") / "rows.jsonl"
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    growing, seen = GrowingFile(path, lambda: None), []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        with open(path, "ab") as file:
            file.write(whole[start:stop])
        seen += list(growing.more())
    assert seen == rows
    assert growing.damaged == 0


def test_tokens_join_what_sampler_and_learner_said_of_them(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0"), an_episode("rl-0-0-1")])
    one = reader(run.end())
    body = Bodies().body(one, "rl-0-0-1")
    (columns,) = body.branches.values()
    window = columns.window(0, 10)
    assert window["pieces"] == [" w1", " w2", " w5", " w6"]
    assert window["kinds"] == [0, 0, 1, 1]
    assert window["logprobs"] == [None, None, -0.5, -0.5]
    assert window["advantages"] == [None, None, 0.5, 0.5]
    assert window["trained"] == [False, False, True, True]
    assert window["ratios"][2] == pytest.approx(1.2840254, rel=1e-5), "exp(-0.25 - -0.5) at 6 digits"
    assert body.learner is None
    assert one.expert_load("rl") == {"steps": [0], "load": [[[0.75, 0.25], [0.5, 0.5]]]}


def test_what_the_learner_has_not_said_is_called_unavailable_and_is_not_zero(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0")], trained=False)
    one = reader(run.end())
    body = Bodies().body(one, "rl-0-0-0")
    assert "not trained" in body.learner
    (columns,) = body.branches.values()
    window = columns.window(0, 10)
    assert (window["learner_logprobs"], window["advantages"], window["trained"]) == (None, None, None)
    assert one.advantage(body.entry) is None


def test_learner_values_appear_in_a_body_that_was_looked_at_before(write):
    run, bodies = write(), Bodies()
    run.step(0, [an_episode("rl-0-0-0")], trained=False)
    one = reader(run.end("interrupted"))
    assert bodies.body(one, "rl-0-0-0").learner is not None
    again = write(options=RunOptions(resume=True))
    again.attempt = 1  # the learner of the same attempt, which was late
    again.step(0, [an_episode("rl-0-0-0")], trained=True)
    again.end()
    assert bodies.body(one, "rl-0-0-0", 1).learner is None


def test_a_failed_episode_and_one_without_texts_open(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0", score=Failed("sandbox died"))], trained=False, pieces=None)
    body = Bodies().body(reader(run.end()), "rl-0-0-0")
    assert body.entry.reward is None
    (columns,) = body.branches.values()
    assert columns.window(0, 9)["pieces"] is None
    assert "no tokenizer" in columns.unavailable


def test_an_episode_whose_record_is_gone_is_named(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0")])
    root = run.end()
    with open(root / "traces" / "stream.jsonl", "r+b") as file:
        file.truncate(200)
    with pytest.raises(UnknownRun, match="rl-0-0-0"):
        Bodies().body(reader(root), "rl-0-0-0")


def test_a_deleted_learner_record_is_said(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0")])
    root = run.end()
    for file in (root / "traces" / "annotations").glob("*.parquet"):
        file.unlink()
    assert "cannot be read" in Bodies().body(reader(root), "rl-0-0-0").learner


def test_a_run_that_is_deleted_leaves_the_catalogue(write):
    root = write().end()
    catalogue = Catalogue(root.parent)
    assert list(catalogue.runs()) == ["one"]
    shutil.rmtree(root)
    catalogue._scanned = -100.0  # as two seconds later
    assert catalogue.runs() == {}
