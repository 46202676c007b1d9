"""What submissions are worth: the oracle at every level, the null one, wrong ones, slower and faster ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from k3rl.envs import compiler
from k3rl.envs.compiler import cuda, oracles
from k3rl.envs.compiler.grader import files_of, foreign_import, same_buffer, same_json, speed_factor
from k3rl.types import Failed, Scored


@pytest.mark.parametrize("level", range(1, 13))
def test_the_oracle_gets_what_it_should_and_the_null_submission_nothing(grader, small_task, level):
    task = small_task(level, cases=2 if level < 9 else 1)
    best, least = grader.score_batch([(task, compiler.oracle(task)), (task, compiler.null(task))])
    assert best.reward == pytest.approx(compiler.oracle_expected(task))
    assert best.parts["share"] == 1.0
    assert least == Scored(0.0, {"well_formed": 1.0, "share": 0.0, "factor": 0.0})


@pytest.mark.parametrize("level", [3, 5, 7, 10])
def test_the_oracle_passes_held_out_families(grader, small_task, level):
    task = small_task(level, split="heldout")  # its first program is of a held-out family
    assert grader.score_batch([(task, compiler.oracle(task))])[0].reward == compiler.oracle_expected(task)


def test_counts_repeat_exactly(grader, small_task):
    task = small_task(9)
    first, second = grader.score_batch([(task, compiler.oracle(task))] * 2)
    assert first.parts["factor"] == second.parts["factor"] == 0.5


def test_work_without_need_costs_reward_but_not_correctness(grader, small_task):
    task = small_task(9)
    slow = "for (volatile int32_t lost = 0; lost < 2000; lost = lost + 1) {}"
    score = grader.score_batch([(task, oracles._in_kernels(slow))])[0]
    assert score.parts["share"] == 1.0
    assert 0.0 < score.reward < 0.25


def test_a_program_that_is_not_optimized_is_worth_less_at_the_optimizer_s_milestone(grader, small_task):
    task = small_task(5)
    plain = oracles.with_entry(
        "import json, sys\nfrom .cli import run_ir\nprint(json.dumps(run_ir(json.load(sys.stdin))))\n"
    )
    score = grader.score_batch([(task, plain)])[0]
    assert 0.0 < score.reward < 1.0


def test_a_batch_keeps_its_order(grader, small_task):
    task = small_task(1)
    answers = [compiler.null(task), compiler.oracle(task), "no json", compiler.oracle(task)]
    scores = grader.score_batch([(task, answer) for answer in answers])
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0, 1.0]


def test_without_a_gpu_the_ptx_milestone_is_failed_and_not_zero(grader, monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    task = compiler.environment(gpu=True).source.get("train", 0, level=13)
    assert isinstance(grader.score_batch([(task, compiler.oracle(task))])[0], Failed)


def test_a_task_without_its_hidden_part_is_a_mistake_of_the_caller(grader, small_task):
    with pytest.raises(ValueError, match="hidden part"):
        grader.score_batch([(small_task(1).public(), "{}")])


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        ('{"files": {"minitriton/__main__.py": "x"}}', True),
        ('Here it is:\n```json\n{"files": {"minitriton/__main__.py": "x", "minitriton/a/b.py": ""}}\n```', True),
        ('{"files": {"minitriton/other.py": "x"}}', False),
        ('{"files": {"minitriton/__main__.py": "x", "../a.py": ""}}', False),
        ('{"files": {"minitriton/__main__.py": "x", "/etc/a.py": ""}}', False),
        ('{"files": {"minitriton/__main__.py": "x", "minitriton/.pth": ""}}', False),
        ('{"files": {"minitriton/__main__.py": 3}}', False),
        ('{"files": {"minitriton/__main__.py": "\\ud800"}}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_only_well_formed_submissions_are_run(answer, good):
    assert (files_of(answer) is not None) == good


def test_the_first_foreign_import_is_found():
    assert foreign_import({"minitriton/a.py": "import json\nfrom . import b\nimport minitriton.c\n"}) is None
    found = foreign_import({"minitriton/a.py": "def f():\n    from torch import nn\n"})
    assert found == "minitriton/a.py:2 imports torch"


def test_json_is_compared_with_its_types():
    assert same_json({"a": [1, 2.0, True]}, {"a": [1, 2.0, True]})
    assert not same_json({"a": [1, 2, True]}, {"a": [1, 2.0, True]})
    assert not same_json({"a": [1, 2.0, 1]}, {"a": [1, 2.0, True]})
    assert not same_json(json.loads("[NaN]"), json.loads("[NaN]"))


def test_nan_is_never_right_and_integers_are_exact():
    want = np.array([0.0, 10.0])
    assert same_buffer(np.array([0.0019, 10.0]), want)
    assert not same_buffer(np.array([0.0021, 10.0]), want)
    assert not same_buffer(np.array([np.nan, 10.0]), want)
    assert not same_buffer(np.array([1, 3]), np.array([1, 2]))


def test_speed_is_half_at_the_reference_and_one_at_the_bound():
    assert speed_factor(1000, 1000, 200) == 0.5
    assert speed_factor(2000, 1000, 200) == 0.25
    assert speed_factor(600, 1000, 200) == 0.75
    assert speed_factor(200, 1000, 200) == speed_factor(150, 1000, 200) == 1.0
