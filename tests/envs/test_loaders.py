"""Users' own tasks by `LOADER:PATH`: the given solution is worth 1, hacks nothing, and a bad row is named."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections import OrderedDict, namedtuple
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from k3rl.config import ConfigError
from k3rl.envs import Environment, make
from k3rl.envs.check import check
from k3rl.envs.coding.loaders.repository import patched, touched
from k3rl.envs.coding.loaders.rows import FixedTasks
from k3rl.envs.coding.loaders.sandboxed.run_tests import equals_anything
from k3rl.envs.harness import answer_from, files_from
from k3rl.types import Failed, Invalid, Message, Scored, Task

# ------------------------------------------------------------------------------------------------------- humaneval

ROW = {
    "task_id": "Own/0",
    "prompt": 'def half(n):\n    """Half of n."""\n    return n / 2\n\n\ndef mean(a, b):\n    """The mean."""\n',
    "entry_point": "mean",
    "canonical_solution": "    return half(a + b)\n",
    "test": "def check(candidate):\n    assert candidate(2, 4) == 3\n    assert abs(candidate(1, 2) - half(3)) < 1e-9",
}


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def scores(environment: Environment, *answers: str, split: str = "heldout") -> list[Any]:
    task = environment.source.get(split, 0)
    with closing(environment.grader()) as rubric:
        return [
            score.reward if isinstance(score, Scored) else score
            for score in rubric.score_batch([(task, answer) for answer in answers])
        ]


def test_a_humaneval_file_keeps_the_promises_of_an_environment(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "own.jsonl", ROW, {**ROW, "task_id": "Own/1"})
    report = check(f"humaneval:{path}")
    assert report.problems == []
    assert (report.oracle, report.null, len(report.hacks)) == (1.0, 0.0, 8)


def test_a_completion_and_a_whole_function_are_both_answers(tmp_path: Path) -> None:
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    environment = make(f"humaneval:{packed}", heldout=1.0)
    whole = "Here:\n```python\ndef mean(a, b):\n    return half(a) + half(b)\n```"
    wrong = "```python\ndef mean(a, b):\n    return (a + b) // 2\n```"
    found = scores(environment, "    return (a + b) / 2", whole, wrong, "def mean(a, b:", "    return None")
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0]
    task = environment.source.get("heldout", 0).public()
    assert "candidate" not in repr(task)
    assert "half(a + b)" not in repr(task)


def test_a_check_sees_values_and_the_submission_sees_arguments(tmp_path: Path) -> None:
    """The value that a check wants is never where the submission can look: all of its memory is searched."""
    wanted = 918_273_645
    row = {**ROW, "test": f"def check(candidate):\n    assert candidate(1, 2) == {wanted}\n"}
    spy = (
        "import gc, sys\ndef mean(a, b):\n    seen = set()\n    stack = [sys._getframe(), *gc.get_objects()]\n"
        f"    found = [o for o in stack if type(o) is int and o > {wanted - 1} and o < {wanted + 1}]\n"
        "    frame = sys._getframe()\n    while frame:\n        found += [v for v in frame.f_locals.values()"
        f" if v == {wanted - 1} + 1]\n        frame = frame.f_back\n    return found[0] if found else 0\n"
    )
    assert scores(make(f"humaneval:{jsonl(tmp_path / 'a.jsonl', row)}"), spy) == [0.0]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: a row must be a JSON object"),
        ({key: value for key, value in ROW.items() if key != "test"}, "line 2: it has no 'test'"),
        ({**ROW, "prompt": 3}, "line 2: 'prompt' is a int; it must be text"),
        ({**ROW, "entry_point": "median"}, "line 2: 'prompt' does not define 'median'"),
        ({**ROW, "test": "def check(c:"}, "line 2: 'test' is no Python"),
        ({**ROW, "test": "x = 1"}, "line 2: 'test' does not define check"),
        (ROW, "line 2: its id 'Own/0' is that of line 1"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, row: Any, why: str) -> None:
    path = jsonl(tmp_path / "bad.jsonl", ROW, row)
    with pytest.raises(ConfigError) as error:
        make(f"humaneval:{path}")
    assert f"{path}, {why}" in str(error.value)


def test_files_that_are_none_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        make(f"humaneval:{tmp_path}/absent.jsonl")
    with pytest.raises(ConfigError, match="holds no task"):
        make(f"swe:{jsonl(tmp_path / 'empty.jsonl', '')}")
    with pytest.raises(ConfigError, match="holds no task directory"):
        make(f"harbor:{tmp_path}")


def test_splits_are_fixed_by_the_ids_and_training_goes_round() -> None:
    tasks = [Task(f"t{n}", "t", (Message("user", str(n)),), "f") for n in range(10)]
    source = FixedTasks(tasks, 0.3)
    held = {source.get("heldout", n).id for n in range(source.length("heldout") or 0)}
    assert len(held) == 3
    assert source.length("train") is None
    passes = [[source.get("train", 7 * turn + n, 1).id for n in range(7)] for turn in range(3)]
    assert all(set(one) == {task.id for task in tasks} - held for one in passes)
    assert passes[0] != passes[1]
    assert FixedTasks(tasks[:1], 0.2).get("train", 5).id == "t0"
    assert FixedTasks(tasks, 1.0).length("heldout") == 10


# ------------------------------------------------------------------------------------------------------------- swe

BASE = {
    "shop/__init__.py": "",
    "shop/total.py": "def total(prices):\n    return sum(prices[1:])\n",
    "tests/__init__.py": "",
    "tests/test_total.py": (
        "import unittest\nfrom shop.total import total\n\n\nclass Total(unittest.TestCase):\n"
        "    def test_empty(self):\n        self.assertEqual(total([]), 0)\n"
    ),
}
PATCH = """--- a/shop/total.py
+++ b/shop/total.py
@@ -1,2 +1,2 @@
 def total(prices):
-    return sum(prices[1:])
+    return sum(prices)
"""
TEST_PATCH = """--- a/tests/test_total.py
+++ b/tests/test_total.py
@@ -5,3 +5,5 @@
 class Total(unittest.TestCase):
     def test_empty(self):
         self.assertEqual(total([]), 0)
+    def test_sum(self):
+        self.assertEqual(total([1, 2]), 3)
"""
SWE = {
    "instance_id": "shop-1",
    "repo": "shop",
    "problem_statement": "The total leaves out the first price.",
    "patch": PATCH,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["tests/test_total.py::Total::test_sum"]',
    "PASS_TO_PASS": ["test_empty (tests.test_total.Total)"],
}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for name, text in BASE.items():
        (tmp_path / "shop" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shop" / name).write_text(text)
    return tmp_path


def tried(environment: Environment, *others: str) -> list[Any]:
    """Scores of the oracle, the null agent and other answers; all hacks are refused."""
    task = environment.source.get("heldout", 0)
    assert environment.null is not None
    assert environment.hacks is not None
    hacks = environment.hacks(task)
    answers = [environment.oracle(task), environment.null(task), *others]
    found = scores(environment, *answers, *(hack.submission for hack in hacks.values()))  # type: ignore[union-attr]
    assert len(hacks) >= 3
    for name, reward in zip(hacks, found[len(answers) :], strict=True):
        assert reward == 0.0 or isinstance(reward, Invalid), name
    return found[: len(answers)]


def test_what_is_changed_is_judged_by_the_rows_own_tests(shop: Path) -> None:
    environment = make(f"swe:{jsonl(shop / 'own.jsonl', SWE)}")
    task = environment.source.get("heldout", 0)
    assert files_from(environment.oracle(task)) == {"shop/total.py": "def total(prices):\n    return sum(prices)\n"}
    assert "test_sum" not in repr(task.public())
    breaks = "def total(prices):\n    return sum(prices) if prices else 1 / 0\n"
    cheat = "import unittest\n\n\nclass Total(unittest.TestCase):\n    def test_sum(self):\n        pass\n"
    found = tried(
        environment,
        answer_from({"shop/total.py": "def total(prices):\n    return 0.0 + sum(prices)\n"}),
        answer_from({"shop/total.py": breaks}),
        answer_from({"tests/test_total.py": cheat, "conftest.py": "raise SystemExit"}),
        answer_from({"tests/test_total.py/x": ""}),
        answer_from({"../shop/total.py": "x", "a\0b": "x"}),
        "no files",
    )
    assert found[:5] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert isinstance(found[5], Invalid)
    assert found[6:] == [0.0, 0.0]


def test_a_value_that_is_equal_to_anything_is_told_from_one_that_is_equal_by_right() -> None:
    anything = type("E", (), {"__eq__": lambda self, other: True})()
    numbers = type("N", (int,), {"__eq__": lambda self, other: isinstance(other, int), "__hash__": int.__hash__})(3)
    pair = namedtuple("pair", "a b")(1, 2)
    for wanted in (3, 2.5, True, None, "x", b"x", [1], (1, 2), {"a": 1}, {1}, object()):
        assert equals_anything(anything, wanted)
        assert not equals_anything(wanted, wanted)
    assert equals_anything(numbers, 4)
    assert not equals_anything(mock.ANY, 3)
    assert not equals_anything(pair, (1, 2))
    assert not equals_anything(Fraction(4, 2), 2)
    assert not equals_anything(OrderedDict(a=1), {"a": 1})


def test_a_bundle_is_read_at_its_commit(shop: Path) -> None:
    def git(*words: str) -> str:
        config = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(shop / "shop"), *config, *words], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "base")
    commit = git("rev-parse", "HEAD")
    (shop / "shop" / "shop" / "total.py").write_text("later = 1\n")
    git("commit", "-q", "-a", "-m", "later")
    git("bundle", "create", "-q", str(shop / "shop.bundle"), "main")
    row = {**SWE, "repo": "shop.bundle", "base_commit": commit}
    environment = make(f"swe:{jsonl(shop / 'own.jsonl', row)}")
    assert files_from(environment.oracle(environment.source.get("heldout", 0)))
    with pytest.raises(ConfigError, match="line 1: git"):
        make(f"swe:{jsonl(shop / 'bad.jsonl', {**row, 'base_commit': '0' * 40})}")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"FAIL_TO_PASS": []}, "names no test"),
        ({"PASS_TO_PASS": {"a": 1}}, "must be a list of names"),
        ({"repo": "elsewhere"}, "neither a folder nor a git bundle"),
        ({"patch": PATCH.replace("prices[1:]", "prizes")}, "line 1: git"),
    ],
)
def test_a_repository_that_does_not_fit_its_row_is_named(shop: Path, change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make(f"swe:{jsonl(shop / 'bad.jsonl', {**SWE, **change})}")


def test_patches_make_and_remove_files() -> None:
    new = "diff --git a/n.txt b/n.txt\nnew file mode 100644\n--- /dev/null\n+++ b/n.txt\n@@ -0,0 +1 @@\n+hi\n"
    gone = "diff --git a/n.txt b/n.txt\ndeleted file mode 100644\n--- a/n.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-hi\n"
    assert touched(new) == touched(gone) == {"n.txt"}
    assert patched({"a": "\udcff"}, new) == {"a": "\udcff", "n.txt": "hi\n"}
    assert patched({"a": "1", "n.txt": "hi\n"}, gone) == {"a": "1"}


# ---------------------------------------------------------------------------------------------------------- harbor

FILES = {
    "task.toml": '[task]\nname = "own/greet"\n[metadata]\ncategory = "files"\n[agent]\ntimeout_sec = 60.0\n',
    "instruction.md": "Write `hello` into /app/out.txt; /app/data/in.txt says in which case.\n",
    "environment/Dockerfile": "FROM python:3.11\nWORKDIR /app\nCOPY data /app/data\n",
    "environment/data/in.txt": "upper\n",
    "tests/test.sh": (
        '#!/bin/bash\nif [ "$(cat /app/out.txt)" = "$(cat /tests/wanted)" ]; then r=1; else r=0; fi\n'
        "echo $r > /logs/verifier/reward.txt\n"
    ),
    "tests/wanted": "HELLO\n",
    "solution/solve.sh": "tr a-z A-Z <<< hello > /app/out.txt\n",
}


def directory(root: Path, **changes: str | None) -> Path:
    for name, text in {**FILES, **{key.replace("__", "/"): value for key, value in changes.items()}}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


def test_the_tests_judge_what_was_changed_and_their_numbers_count(tmp_path: Path) -> None:
    half = 'echo \'{"reward": 0.5, "why": "so"}\' > /logs/verifier/reward.json\n'
    directory(tmp_path / "a")
    directory(tmp_path / "b", **{"tests__test.sh": half, "task.toml": '[task]\nname = "own/b"\n'})
    environment = make(f"harbor:{tmp_path}", heldout=1.0)
    by_name = {environment.source.get("heldout", n).id: n for n in range(2)}
    task = environment.source.get("heldout", by_name["own/greet"])
    assert task.messages[0].content == "Write `hello` into /box/out.txt; /box/data/in.txt says in which case."
    assert "HELLO" not in repr(task.public())
    other = environment.source.get("heldout", by_name["own/b"])
    assert environment.hacks is not None
    hacks = [(task, hack.submission) for hack in environment.hacks(task).values()]  # type: ignore[union-attr]
    honest = [environment.oracle(task), answer_from({}), answer_from({"out.txt": "HELLO"})]
    with closing(environment.grader()) as rubric:
        found = rubric.score_batch([*((task, answer) for answer in honest), (other, answer_from({})), *hacks])
    rewards = [score.reward if isinstance(score, Scored) else score for score in found]
    assert rewards == [1.0, 0.0, 1.0, 0.5, *[0.0] * 3]


CASES: list[tuple[dict[str, str | None], str]] = [
    ({"environment__Dockerfile": "FROM x\nRUN apt-get install -y gcc\n"}, "which needs an image"),
    ({"environment__Dockerfile": "FROM x\nWORKDIR /app\nCOPY ../.. /app\n"}, "not in environment"),
    ({"environment__Dockerfile": "FROM x\nWORKDIR /app\nCOPY data /etc\n"}, "outside of its working folder"),
    ({"instruction.md": None}, "it has no instruction.md"),
    ({"task.toml": "[broken"}, "is not TOML"),
    ({"task.toml": '[agent]\ntimeout_sec = "long"\n'}, "must be seconds"),
]


@pytest.mark.parametrize(("changes", "why"), CASES)
def test_a_directory_that_cannot_be_run_here_is_named_or_left_out(
    tmp_path: Path, changes: dict[str, str | None], why: str
) -> None:
    directory(tmp_path / "bad", **changes)
    directory(tmp_path / "good")
    with pytest.raises(ConfigError, match=why) as error:
        make(f"harbor:{tmp_path}")
    assert f"{tmp_path}/bad" in str(error.value)
    assert make(f"harbor:{tmp_path}", skip=True).source.length("heldout") == 1


def test_a_test_script_that_gives_no_number_is_failed(tmp_path: Path) -> None:
    scripts = {
        "silent": ("exit 0\n", "wrote no reward"),
        "nan": ("echo nan > /logs/verifier/reward.txt\n", "gave nan"),
        "seven": ("echo 7 > /logs/verifier/reward.txt\n", "outside its range"),
    }
    for name, (script, _) in scripts.items():
        directory(tmp_path / name, **{"tests__test.sh": script, "task.toml": f'[task]\nname = "{name}"\n'})
    environment = make(f"harbor:{tmp_path}", heldout=1.0)
    tasks = [environment.source.get("heldout", number) for number in range(3)]
    with closing(environment.grader()) as rubric:
        for task, score in zip(tasks, rubric.score_batch([(task, answer_from({})) for task in tasks]), strict=True):
            assert isinstance(score, Failed)
            assert scripts[task.id][1] in score.reason
