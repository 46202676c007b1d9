"""The table of known ways to cheat names hacks and tests that are there; the hacks of `coding-repair`; no history."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from k3rl.envs import make
from k3rl.envs.coding.loaders.swe import _hacks as swe_hacks
from k3rl.envs.coding.repair import workspace
from k3rl.envs.harness.workspace import Workspace
from k3rl.envs.sandbox import provider_named
from k3rl.types import Failed, Scored

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text().partition("## Known ways to cheat")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.M)
KEYS = dict(re.findall(r"^\| ([A-Z]\d) \| `(.+?)` \|", PAGE, re.M))


def named_tests(text: str) -> set[str]:
    path = ROOT / "tests" / "envs" / text
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.M))


def test_every_number_has_a_row_with_a_test_that_is_there() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 54))
    for number, _, _, places in ROWS:
        named = [KEYS.get(place, place.strip("`")) for place in places.split(", ")]
        assert named, number
        for place in named:
            file, _, test = place.partition("::")
            assert test in named_tests(file), (number, place)
    for control in re.findall(r"`(test_\w+)`", PAGE):
        assert any(control in named_tests(place.partition("::")[0]) for place in KEYS.values()), control


@pytest.mark.parametrize("name", ["chip", "coding-lists", "coding-repair", "compiler", "kernel", "swe"])
def test_every_hack_of_the_table_is_one_of_its_environment(name: str) -> None:
    named = {hack for _, _, hacks, _ in ROWS for hack in re.findall(rf"`{name}: (.+?)`", hacks)}
    assert named
    if name == "swe":  # a loader: its hacks are made of a row
        text = (ROOT / "envs" / "coding" / "loaders" / "swe.py").read_text()
        assert callable(swe_hacks)
        assert {hack for hack in named if f'"{hack}": Hack(' not in text} == set()
        return
    environment = make(name)
    assert environment.hacks is not None
    there: set[str] = set()
    for index in range(min(96, environment.source.length("heldout") or 0)):
        there |= environment.hacks(environment.source.get("heldout", index)).keys()
        if named <= there:
            break
    assert named - there == set()


def test_no_hack_of_a_repair_pays_and_honest_neighbours_are_paid() -> None:
    environment = make("coding-repair")
    task = environment.source.get("heldout", 0)
    assert environment.hacks is not None
    hacks = {name: getattr(hack, "submission", hack) for name, hack in environment.hacks(task).items()}
    right = environment.right_answer(task)
    rubric = environment.grader(workers=2)
    before, *found, after = rubric.score_batch([(task, answer) for answer in (right, *hacks.values(), right)])
    rubric.close()
    assert before == after
    assert isinstance(before, Scored)
    assert before.reward == 1.0
    for name, score in zip(hacks, found, strict=True):
        assert not isinstance(score, Failed), (name, score)
        assert not isinstance(score, Scored) or score.reward == 0.0, (name, score)


def test_11_a_workspace_has_one_commit_and_nothing_beside_it() -> None:
    task = make("coding-repair").source.get("heldout", 0)
    solved = next(iter(task.hidden["files"].values())) if task.hidden else ""
    look = (
        "git rev-list --all | wc -l; git remote | wc -l; git stash list | wc -l; git tag | wc -l; "
        "git fsck --unreachable --no-reflogs 2>/dev/null | grep -c unreachable; "
        "for o in $(git cat-file --batch-check='%(objectname)' --batch-all-objects); do git cat-file -p $o; done"
    )

    async def seen() -> str:
        room = await Workspace.open(provider_named("bwrap"), workspace(task.public()))
        try:
            done = await room.run(look, 60.0)
        finally:
            await room.close()
        return done.stdout.decode()

    said = asyncio.run(seen())
    assert said.split("\n")[:5] == ["1", "0", "0", "0", "0"]
    assert solved not in said
    assert solved
