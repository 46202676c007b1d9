"""Whole long tasks through the real tool loop: files written, run and handed in, then judged by the real graders."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from k3rl.envs import make
from k3rl.envs.harness import files_from
from k3rl.types import Scored, StopReason

_EXAMPLE = Path(__file__).parents[2] / "examples" / "scripted_agent.py"
_SPEC = importlib.util.spec_from_file_location("scripted_agent", _EXAMPLE)
assert _SPEC is not None
assert _SPEC.loader is not None
agent = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(agent)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_scripted_agent_completes_a_milestone_of_the_compiler(level: int) -> None:
    environment = make("compiler", harness={"show_budget": False})
    task = environment.source.get("train", 0, level=level)
    files = files_from(environment.oracle(task)) or {}
    turns = [
        agent.call("bash", command="ls; wc -l SPEC.md"),
        agent.call("read_file", path="example.json"),
        *agent.writing(files),
        agent.call("bash", command=f"python3 -m minitriton {task.data['command']} < example.json"),
        agent.call("submit"),
    ]
    episode = agent.play(environment.make_env(), task, turns)
    said = agent.tool_results(episode)
    answer = json.loads(task.data["files"]["example_answer.json"])
    assert episode.stop_reason is StopReason.COMPLETED
    assert json.loads(said[-1].removeprefix("exit status 0\n")) == answer
    assert files_from(episode.answer) == files
    rubric = environment.grader()
    scores = rubric.score_batch([(task, episode.answer), (task, '{"files": {}}')])
    rubric.close()
    assert [score.reward for score in scores if isinstance(score, Scored)] == [1.0, 0.0]
    assert str(task.hidden["cases"][0]["source"] if task.hidden else "") not in str(episode.messages)


def test_a_scripted_agent_builds_the_multiply_accumulate_unit_of_the_chip() -> None:
    environment = make("chip", harness={})
    task = environment.source.get("train", 0, family="mac")
    design = environment.oracle(task)
    turns = [
        agent.call("write_file", path="dut.v", content="module dut; wrong"),
        agent.call("write_file", path="notes/old.v", content="not handed in"),
        agent.call("write_file", path="dut.v", content=design),
        agent.call("bash", command="iverilog -g2012 -t null dut.v && echo fine"),
        agent.call("submit"),
        agent.call("write_file", path="dut.v", content="module dut; worse"),
        agent.call("submit"),
        *[agent.Message("assistant", "done")] * 2,
    ]
    episode = agent.play(environment.make_env(), task, turns)
    assert episode.stop_reason is StopReason.COMPLETED
    results = agent.tool_results(episode)
    assert "exit status 0\nfine" in results[3]
    assert results[4].startswith("valid, score 0.5; this is the best so far.")
    assert results[-1].startswith("not valid, score 0; the best so far stays.")
    assert "47 h 59 min of real time" in results[0]
    assert files_from(episode.answer) == {"dut.v": design}
    rubric = environment.grader()
    (score,) = rubric.score_batch([(task, episode.answer)])
    rubric.close()
    assert isinstance(score, Scored)
    assert score.reward == pytest.approx(environment.oracle_expected, abs=1e-9)  # the reference meets itself
