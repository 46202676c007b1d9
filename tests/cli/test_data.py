"""`k3rl data check`: one report for programs, and one conversation with its loss for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3rl.cli.main import main

CASES = Path(__file__).parents[1] / "cases" / "chat"
WANTED = {
    "rows", "turns", "tokens", "trained_tokens", "masked_share", "reasoning_turns", "tool_calls", "longest", "problems",
}  # fmt: skip


@pytest.mark.parametrize(("name", "status"), [("good.ndjson", 0), ("text_key.jsonl", 2), ("late_bad_row.jsonl", 2)])
def test_the_report_is_one_object_on_the_last_line_and_the_status_says_whether_there_are_problems(name, status, capsys):
    assert main(["data", "check", str(CASES / name), "--json"]) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() >= WANTED
    assert all(problem.keys() == {"row", "key", "why"} for problem in found["problems"])
    assert bool(found["problems"]) == (status == 2)


def test_a_conversation_is_shown_with_a_mark_at_what_carries_loss_and_in_colour_on_a_terminal(capsys, monkeypatch):
    assert main(["data", "check", str(CASES / "weight0.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    [trained] = [line for line in text.splitlines() if line.startswith("+ ")]
    assert "GOOD 4" in trained
    assert any("BAD 5" in line and line.startswith("  ") for line in text.splitlines())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["data", "check", str(CASES / "weight0.jsonl")]) == 0
    assert "\x1b[32m+ GOOD 4" in capsys.readouterr().out


def test_text_of_the_file_cannot_steer_the_terminal(tmp_path, capsys):
    said = {"messages": [{"role": "user", "content": "\x1b[2J\u202e"}, {"role": "assistant", "\x1b]0;": "x"}]}
    good = {"messages": [{"role": "user", "content": "\x1b[2J\u202e"}, {"role": "assistant", "content": "x"}]}
    (tmp_path / "d.jsonl").write_text(json.dumps(said) + "\n" + json.dumps(good) + "\n")
    assert main(["data", "check", str(tmp_path / "d.jsonl")]) == 2
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\u241b[2J<U+202E>" in text


def test_every_flag_changes_what_is_said(tmp_path, capsys):
    def checked(*words: str) -> dict:
        main(["data", "check", str(CASES / "reasoning.jsonl"), "--json", *words])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    plain = checked()
    assert checked("--thinking", "off")["tokens"] < plain["tokens"] < checked("--thinking", "on")["tokens"]
    assert [problem["row"] for problem in checked("--max-tokens", str(plain["longest"] - 1))["problems"]] == [1]
    assert main(["data", "check", str(CASES / "good.ndjson"), "--row", "2"]) == 0
    assert "xs[::-1] #2" in capsys.readouterr().out
    assert main(["data", "check", str(CASES / "good.ndjson"), "--model", str(tmp_path)]) == 3
    assert "no tokenizer" in capsys.readouterr().err


def test_a_missing_file_and_an_unknown_word_are_refused(tmp_path, capsys):
    assert main(["data", "check", str(tmp_path / "none.jsonl"), "--json"]) == 2
    assert "no such file" in json.loads(capsys.readouterr().out.splitlines()[-1])["problems"][0]["why"]
    assert main(["data", "chek", "x"]) == 2
    assert "nearest: check" in capsys.readouterr().err
