"""What a run prints: progress, summary, and other people's text."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from k3rl.config import Config, MissingResource
from k3rl.run import Recorder, RunDirectory, follow_run
from k3rl.run.progress import Progress, duration, sparkline
from k3rl.run.summary import StageSummary, plot_rewards, print_summary
from k3rl.run.terminal import framed, visible

HOSTILE = "ok\x1b[2J\x1b]0;title\x07\r\x9b31m\u202egnirts\u200b\ud800 end"


def pieces(ids):
    return [HOSTILE if token % 10 == 5 else f"<{token}>" for token in ids]


# --- other people's text ------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_nothing_that_steers_a_terminal_is_left(text):
    shown = visible(text)
    hidden = [c for c in shown if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert not hidden
    assert shown.count("\n") == text.count("\n")


def test_ordinary_text_is_left_as_it_is():
    assert visible("def f(x):\n    return x  # é 漢字") == "def f(x):\n    return x  # é 漢字"


def test_escapes_are_shown():
    assert visible("a\x1b[31mb\x7f\t\u202e") == "a\u241b[31mb\u2421\u2409<U+202E>"


def test_every_line_of_framed_text_carries_the_margin():
    assert framed("a\nk3rl: fake message\n", "| ") == "| a\n| k3rl: fake message\n| "


# --- tail ---------------------------------------------------------------------------------------------------


def recorded(root, episodes):
    with RunDirectory.create(root, Config(), "rl") as run, Recorder(run.traces_dir) as recorder:
        for one in episodes:
            recorder.episode(one, 4, pieces)


def test_tail_prints_every_turn_and_ends_with_the_run(tmp_path, episode, failed_episode):
    recorded(tmp_path / "run", [episode("e0"), failed_episode])
    out = io.StringIO()
    assert follow_run(tmp_path / "run", out.write) == 2
    text = out.getvalue()
    assert text.count(" turn 0  ") == 2
    assert "step 4  e0  main turn 1  v1-2  2 tokens  stop  mean logprob -0.187" in text
    assert "reward 1  2 turns  env_done" in text
    assert "no reward: sandbox died" in text
    assert text.rstrip().endswith("run run: finished")
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\u241b[2J" in text


def test_tail_can_start_with_the_last_episodes(tmp_path, episode):
    recorded(tmp_path / "run", [episode(f"e{number}") for number in range(5)])
    for last, first in ((2, "e3"), (99, "e0"), (0, None)):
        out = io.StringIO()
        shown = follow_run(tmp_path / "run", out.write, follow=False, last=last)
        assert shown == min(last, 5)
        assert out.getvalue().startswith(f"step 4  {first}") or first is None


def test_tail_follows_a_live_run_until_it_ends(tmp_path, episode):
    out, root = io.StringIO(), tmp_path / "run"
    run = RunDirectory.create(root, Config(), "rl")
    follower = threading.Thread(target=follow_run, args=(root, out.write), kwargs={"poll_s": 0.02})
    follower.start()
    with Recorder(run.traces_dir) as recorder:
        recorder.episode(episode("first"), 0, pieces)
        deadline = time.monotonic() + 10
        while "first" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "first" in out.getvalue()
        recorder.episode(episode("second"), 1, pieces)
    run.finish("finished")
    follower.join(10)
    assert not follower.is_alive()
    assert "second" in out.getvalue()


def test_tail_of_a_crashed_run_says_so(tmp_path, episode):
    recorded(tmp_path / "run", [episode()])
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"finished"', '"running"'))
    out = io.StringIO()
    follow_run(tmp_path / "run", out.write)
    assert out.getvalue().rstrip().endswith("crashed")


def test_tail_of_what_is_no_run_is_a_missing_resource(tmp_path):
    with pytest.raises(MissingResource):
        follow_run(tmp_path, print)


# --- progress -----------------------------------------------------------------------------------------------


def test_off_a_terminal_each_step_is_one_plain_line():
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        progress.note("waiting for 2 CPUs: 1 free\x1b[2J")
        stage = progress.stage("rl", 3)
        for step in range(1, 4):
            stage.step(step, tokens=100, reward=step / 4, kl=0.001)
        stage.end()
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "waiting for 2 CPUs: 1 free\u241b[2J"
    assert lines[2].startswith("rl  2/3  reward 0.5  kl 0.001")
    assert "tokens/s" in lines[2]
    assert "eta" in lines[2]
    assert "eta" not in lines[3]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_log_has_every_note_and_step_and_the_error_that_ended_the_run(tmp_path, terminal):
    def ends_badly():
        with Progress(Console(file=io.StringIO(), force_terminal=terminal)) as progress:
            progress.log_to(tmp_path / "driver.log")
            progress.note("starting")
            progress.stage("rl", 3).step(1, reward=0.25)
            raise ZeroDivisionError("in the learner")

    with pytest.raises(ZeroDivisionError):
        ends_badly()
    lines = (tmp_path / "driver.log").read_text().splitlines()
    assert [line[21:] for line in lines[:2]] == ["starting", lines[1][21:]]
    assert lines[1][21:].startswith("rl  1/3  reward 0.25")
    assert lines[-1] == "ZeroDivisionError: in the learner"


def test_on_a_terminal_there_is_one_panel_and_the_cursor_comes_back():
    def work():
        with Progress(Console(file=out, force_terminal=True, width=120)) as progress:
            stage = progress.stage("sft", 10)
            stage.step(4, tokens=50, reward=0.1)
            stage.step(5, tokens=50, reward=0.9)
            raise KeyboardInterrupt

    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert "5/10" in out.getvalue()
    assert "▁█" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


def test_steps_of_an_earlier_attempt_do_not_count_for_the_speed():
    stage = Progress(Console(file=io.StringIO())).stage("rl", 100)
    stage.resume_at(90)
    time.sleep(0.05)
    stage.step(91)
    left = 9 * stage.seconds()
    assert stage.columns()[-1] == f"eta {duration(left)}"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.4, "59s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_a_sparkline_spans_its_own_range():
    assert sparkline([0, 0.5, 1]) == "▁▅█" or sparkline([0, 0.5, 1]) == "▁▄█"
    assert sparkline([]) == ""
    assert sparkline([2, 2]) == "▁▁"
    assert len(sparkline(range(1000))) == 24


# --- summary ------------------------------------------------------------------------------------------------


def test_the_summary_has_a_row_for_each_stage_and_a_dash_for_what_was_not_measured(tmp_path):
    out = io.StringIO()
    stages = [
        StageSummary("sft", 160, 500_000, None, 0.312, 41.25),
        StageSummary("rl", 60, 1_250_000, 0.312, 0.75, 99.5, note="greedy 0.9"),
    ]
    print_summary(stages, Console(file=out, width=140), paths={"run": tmp_path}, notes=["n = 512"])
    text = out.getvalue()
    cells = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if line.startswith("│")]
    assert cells[0][1:-1] == ["sft", "160", "500,000", "-", "0.312", "41.2", ""]
    assert cells[1][1:-1] == ["rl", "60", "1,250,000", "0.312", "0.750", "99.5", "greedy 0.9"]
    assert "2m21s" in text
    assert f"run: {tmp_path}" in text


def test_the_reward_curve_is_a_png(tmp_path):
    path = plot_rewards({"rl": [(0, 0.2), (1, 0.5)]}, tmp_path / "a" / "reward.png", levels={"held out": 0.4})
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (960, 540)


def test_an_empty_picture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no rewards"):
        plot_rewards({"rl": []}, tmp_path / "reward.png")


def test_the_run_room_does_not_load_matplotlib_until_it_draws():
    program = "import sys, k3rl.run.summary; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
