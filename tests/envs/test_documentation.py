"""The environment of docs/environments.md is a whole one, as a newcomer would save and check it."""

from __future__ import annotations

import re
from pathlib import Path

from k3rl.cli import main
from k3rl.envs import make
from k3rl.envs.check import check

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_environment_of_the_page_passes_its_check_and_is_graded(tmp_path: Path, capsys) -> None:
    (text,) = re.findall(r"```python\n(\"\"\"`clock`.*?)```", PAGE.read_text(), re.S)
    (more,) = re.findall(r"```python\n(def demonstrations.*?)```", PAGE.read_text(), re.S)
    file = tmp_path / "clock.py"
    file.write_text(text.replace('name="clock",', 'name="clock",\n        demonstrations=demonstrations,') + more)
    report = check(str(file))
    assert (report.problems, report.oracle, report.null) == ([], 1.0, 0.0)
    assert [row["reward"] for row in report.episodes] == [1.0, 1.0, 0.0]
    source = make(str(file)).source
    starts = [{source.get(split, n).messages[0].content[6:11] for n in range(64)} for split in source.splits]
    assert not starts[0] & starts[1]
    (row,) = make(str(file)).demonstrations(0, 1)
    assert row["messages"][1]["content"] == source.get("train", 0).hidden["answer"]
    answer = tmp_path / "answer"
    answer.write_text(source.get("heldout", 0).hidden["answer"])
    assert main(["env", "grade", str(file), str(answer), "--task", "0"]) == 0
    assert "scored, reward 1" in capsys.readouterr().out
