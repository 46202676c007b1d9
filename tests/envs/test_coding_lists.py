"""Tasks, splits, demonstrations and judge of `coding-lists`."""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from k3rl.envs import make
from k3rl.envs.coding import CodingLists, ProgramRubric, demonstrations, training_text
from k3rl.envs.coding.operations import AMBIGUOUS, CONSTANTS, OPERATIONS, evaluate, program, step
from k3rl.envs.coding.tasks import Drawn, draw_training, held_out_tasks, reserved_pairs
from k3rl.envs.sandbox import ProgramOutcome, ProgramStatus
from k3rl.types import Failed, Scored, Task

SOURCE = CodingLists()


@functools.cache
def held_out() -> list[Task]:
    return [SOURCE.get("heldout", index) for index in range(512)]


@functools.cache
def held_out_family() -> list[Task]:
    return [SOURCE.get("heldout_family", index) for index in range(256)]


@functools.cache
def drawn_training(seed: int) -> tuple[Drawn, ...]:
    """10,000 training tasks of a seed, without their inputs; the tests share them."""
    return tuple(draw_training(index, seed)[0] for index in range(10_000))


@functools.cache
def normal(source: str) -> str:
    """The program up to layout, names of nothing changed: what Python itself prints for it."""
    return ast.unparse(ast.parse(source))


def run(source: str, values: list[int]) -> Any:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["f"](list(values))


def hidden(task: Task) -> dict[str, Any]:
    assert task.hidden is not None
    return dict(task.hidden)


def prompt(task: Task) -> str:
    return str(task.messages[0].content)


def test_each_operation_means_what_its_words_say() -> None:
    a = [4, -3, 7, 4, 12, 0, 9]
    meaning = {
        "keep above 4": [7, 12, 9],
        "keep below 4": [-3, 0],
        "cap at 4": [4, -3, 4, 4, 4, 0, 4],
        "last 4": [4, 12, 0, 9],
        "drop multiples of 4": [-3, 7, 9],
        "add 4": [8, 1, 11, 8, 16, 4, 13],
        "subtract 4": [0, -7, 3, 0, 8, -4, 5],
        "multiply by 4": [16, -12, 28, 16, 48, 0, 36],
        "first 4": [4, -3, 7, 4],
        "skip 4": [12, 0, 9],
        "sort down": [12, 9, 7, 4, 4, 0, -3],
        "unique": [4, -3, 7, 12, 0, 9],
        "keep even": [4, 4, 12, 0],
        "sort up": [-3, 0, 4, 4, 7, 9, 12],
        "reverse": [9, 0, 12, 4, 7, -3, 4],
        "square": [16, 9, 49, 16, 144, 0, 81],
    }
    drawn = {step(operation, 4).words: step(operation, 4) for operation in OPERATIONS}
    assert {words: run(program([item.right]), a) for words, item in drawn.items()} == meaning
    for item in drawn.values():
        assert run(program([item.wrong]), a) != run(program([item.right]), a)
        assert evaluate([item.wrong], a) == run(program([item.wrong]), a)


def test_the_ladder_is_sixteen_operations_six_without_a_constant_eight_of_habit() -> None:
    assert len(OPERATIONS) == 16
    assert sum(not operation.takes_constant for operation in OPERATIONS) == 6
    assert sum(operation.habit for operation in OPERATIONS) == 8
    assert len({step(operation, constant).words for operation in OPERATIONS for constant in CONSTANTS}) == 96
    readings = [reading for phrase in AMBIGUOUS for reading in phrase.readings]
    assert len(set(readings)) == len(readings)


@pytest.mark.parametrize("seed", range(2))
def test_no_seed_trains_on_a_held_out_prompt_or_program(seed: int) -> None:
    """Over 10,000 training tasks each, 20,000 in all."""
    prompts = {prompt(task) for task in held_out() + held_out_family()}
    programs = {normal(hidden(task)["program"]) for task in held_out() + held_out_family()}
    drawn = drawn_training(seed)
    seen = {item.prompt for item in drawn}
    assert len(seen) > 5000
    assert not prompts & seen
    assert not programs & {normal(source) for source in {program(item.right) for item in drawn}}


def test_held_out_sets_of_other_seeds_are_clean_too() -> None:
    trained = {item.prompt for item in drawn_training(0)}
    for seed in (1, 2):
        assert not trained & {drawn.prompt for drawn in held_out_tasks("heldout", seed)}


def test_demonstrations_never_show_a_held_out_program_or_pair() -> None:
    programs = {normal(hidden(task)["program"]) for task in held_out() + held_out_family()}
    shown = set()
    for example in demonstrations(5, 6000):
        for message in example["messages"]:
            for call in message.get("tool_calls", ()):
                shown.add(json.loads(call["function"]["arguments"])["code"])
            if message["role"] == "assistant" and message["content"]:
                shown.add(message["content"])
    assert len(shown) > 3000
    assert not programs & {normal(source) for source in shown}


def test_held_out_splits_have_no_prompt_twice_and_hold_what_they_say() -> None:
    assert len({prompt(task) for task in held_out()}) == 512
    assert len({prompt(task) for task in held_out_family()}) == 256
    kinds = collections.Counter((task.family, task.level) for task in held_out())
    assert kinds == {("list", 1): 24, ("list", 2): 264, ("list", 3): 160, ("probe", 1): 16, ("probe", 2): 48}
    half = collections.Counter((task.family, task.level) for task in held_out()[:256])
    assert all(abs(half[kind] - count / 2) <= 1 for kind, count in kinds.items())
    assert collections.Counter((task.family, task.level) for task in held_out_family()) == {
        ("list-pairs", 2): 128,
        ("list-pairs", 3): 128,
    }


def test_every_task_of_the_held_out_family_has_a_pair_that_training_never_has() -> None:
    names = {step(operation, constant).words: operation.name for operation in OPERATIONS for constant in CONSTANTS}

    def pairs(text: str) -> set[tuple[str, str]]:
        steps = [names[words] for words in text.removeprefix("list: ").split(", then ")]
        return set(itertools.pairwise(steps))

    assert all(pairs(prompt(task)) & reserved_pairs() for task in held_out_family())
    trained = set()
    for item in drawn_training(0):
        if item.prompt.startswith("list: "):
            trained |= pairs(item.prompt)
    assert not trained & reserved_pairs()
    assert len(trained) > 200
    assert {one for one, _ in reserved_pairs()} <= {one for one, _ in trained}


def test_equal_arguments_give_equal_tasks_in_another_process() -> None:
    code = (
        "from k3rl.envs import make\nsource = make('coding-lists').source\n"
        "print([source.get(split, i, 7) for split in ('train', 'heldout', 'heldout_family') for i in range(40)])"
    )
    elsewhere = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=elsewhere, capture_output=True, text=True, check=True)
    here = [SOURCE.get(split, index, 7) for split in SOURCE.splits for index in range(40)]
    assert done.stdout == f"{here}\n"
    assert SOURCE.get("train", 3, 7) != SOURCE.get("train", 3, 8)
    assert len({task.id for task in here}) == len(here)


def test_demonstrations_are_equal_for_equal_seeds_and_belong_to_the_tasks_of_that_seed() -> None:
    assert demonstrations(4, 50) == demonstrations(4, 60)[:50]
    assert demonstrations(4, 50) != demonstrations(5, 50)
    for index, example in enumerate(demonstrations(4, 50)):
        task = SOURCE.get("train", index, 4)
        assert example["task_id"] == task.id
        assert (example["family"], example["level"]) == (task.family, task.level)
        assert example["messages"][0] == {"role": "user", "content": prompt(task)}


def test_hidden_outputs_are_those_of_the_reference_and_need_every_step() -> None:
    for task in [*held_out()[:100], *held_out_family()[:50], *(SOURCE.get("train", index, 1) for index in range(100))]:
        part = hidden(task)
        assert len(part["inputs"]) == 6
        assert all(3 <= len(values) <= 10 and set(values) <= set(range(-4, 13)) for values in part["inputs"])
        assert part["outputs"] == [run(part["program"], values) for values in part["inputs"]]
        lines = part["program"].split("\n")
        assert len(lines) == task.level + 2
        for number in range(1, len(lines) - 1):
            shorter = "\n".join(lines[:number] + lines[number + 1 :])
            assert [run(shorter, values) for values in part["inputs"]] != part["outputs"]
        for lazy in ("def f(a): return a", "def f(a): return []", f"def f(a): return {part['outputs'][0]}"):
            assert [run(lazy, values) for values in part["inputs"]] != part["outputs"]


def test_probe_examples_tell_the_readings_apart() -> None:
    words = {phrase.words.format(c=constant): phrase for phrase in AMBIGUOUS for constant in CONSTANTS}
    tasks = [SOURCE.get("train", index, 0, family="probe") for index in range(60)]
    assert {task.level for task in tasks} == {1, 2}
    for task in tasks:
        source = hidden(task)["program"]
        assert len(task.data["examples"]) == 2
        assert all(run(source, values) == want for values, want in task.data["examples"])
        steps = prompt(task).removeprefix("probe: ").split(", then ")
        (place,) = [number for number, text in enumerate(steps) if text in words]
        constant = "".join(filter(str.isdigit, steps[place])) or "0"
        lines = source.split("\n")
        meant = lines[1 + place].removeprefix(" a=")
        readings = [reading.format(c=constant) for reading in words[steps[place]].readings]
        (other,) = [reading for reading in readings if reading != meant]
        lines[1 + place] = f" a={other}"
        assert all(run("\n".join(lines), values) != want for values, want in task.data["examples"])


def test_the_visible_part_of_a_task_holds_nothing_hidden() -> None:
    task = SOURCE.get("train", 0, family="probe")
    public = task.public()
    assert public.hidden is None
    assert str(hidden(task)["inputs"][0]) not in repr(public)
    assert hidden(task)["program"] not in repr(public)


def test_training_mixes_levels_and_families_as_said() -> None:
    drawn = drawn_training(1)
    share = collections.Counter((task.family, task.level) for task in drawn)
    expected = {("list", 1): 0.175, ("list", 2): 0.394, ("list", 3): 0.306, ("probe", 1): 0.0375, ("probe", 2): 0.0875}
    for kind, value in expected.items():
        assert share[kind] / 10_000 == pytest.approx(value, abs=0.02)  # four standard deviations of the largest


@pytest.mark.parametrize(("family", "level"), [("list", 1), ("list", 3), ("probe", 2), (None, 3), ("probe", None)])
def test_level_and_family_narrow_training(family: str | None, level: int | None) -> None:
    for index in range(30):
        task = SOURCE.get("train", index, 0, level=level, family=family)
        assert family in (None, task.family)
        assert level in (None, task.level)


def test_level_and_family_narrow_a_held_out_split_to_the_same_tasks() -> None:
    probes = [SOURCE.get("heldout", index, family="probe") for index in range(64)]
    assert probes == [task for task in held_out() if task.family == "probe"]
    assert SOURCE.length("heldout", family="list", level=3) == 160
    assert SOURCE.length("train") is None
    with pytest.raises(IndexError, match="24 such tasks"):
        SOURCE.get("heldout", 24, level=1, family="list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "train, heldout, heldout_family"),
        ({"split": "train", "family": "list-pairs"}, "not trained on"),
        ({"split": "train", "level": 4}, "no level 4"),
        ({"split": "train", "family": "probe", "level": 3}, "no level 3"),
    ],
)
def test_wrong_requests_say_what_there_is(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOURCE.get(arguments.pop("split"), 0, **arguments)


def test_the_demonstrator_is_wrong_by_habit() -> None:
    """Rates per operation from its level-1 answers: habits are wrong in most, the others in few."""
    right: dict[str, list[bool]] = collections.defaultdict(list)
    words = {step(item, constant).words: item for item in OPERATIONS for constant in CONSTANTS}
    for index, example in enumerate(demonstrations(1, 4000, family="list", level=1)):
        task = SOURCE.get("train", index, 1, family="list", level=1)
        operation = words[prompt(task).removeprefix("list: ")]
        right[operation.name].append(example["messages"][1]["content"] == hidden(task)["program"])
    for operation in OPERATIONS:
        answers = right[operation.name]
        if not answers or operation.name in ("last", "down"):  # some of their mistakes are held-out programs
            continue
        expected = 0.35 if operation.habit else 0.85
        assert sum(answers) / len(answers) == pytest.approx(expected, abs=0.14), operation.name


def test_the_demonstrators_tool_results_are_true_and_half_of_the_bad_ones_are_obeyed() -> None:
    obeyed = []
    for index, example in enumerate(demonstrations(2, 400, family="probe")):
        task = SOURCE.get("train", index, 2, family="probe")
        _, call, result, answer = example["messages"]
        code = json.loads(call["tool_calls"][0]["function"]["arguments"])["code"]
        good = all(run(code, values) == want for values, want in task.data["examples"])
        assert result["content"] == ("ok" if good else "bad")
        if good:
            assert answer["content"] == code
        else:
            obeyed.append(answer["content"] == hidden(task)["program"])
    assert sum(obeyed) / len(obeyed) == pytest.approx(0.5, abs=0.12)


def test_validation_demonstrations_are_of_held_out_tasks() -> None:
    examples = demonstrations(0, 64, split="heldout")
    assert [example["messages"][0]["content"] for example in examples] == [prompt(task) for task in held_out()[:64]]
    with pytest.raises(ValueError, match="at most 512"):
        demonstrations(0, 513, split="heldout")


def test_training_text_is_lower_case_text_of_prompts_and_programs() -> None:
    text = training_text(1, 200)
    assert text == training_text(1, 200)
    assert text == text.lower()
    assert {"list: ", "probe: ", "def f(a):", "run\ncode\n", "\nok\n", "\nbad\n"} <= {
        part for part in ("list: ", "probe: ", "def f(a):", "run\ncode\n", "\nok\n", "\nbad\n") if part in text
    }


def test_oracle_earns_all_null_agents_earn_nothing(rubric: ProgramRubric) -> None:
    environment = make("coding-lists")
    tasks = [*held_out()[:64], *held_out_family()[:32]]
    for answer, reward in [(environment.oracle, 1.0), (lambda _: "def f(a):\n return a", 0.0), (lambda _: "", 0.0)]:
        scores = rubric.score_batch([(task, answer(task)) for task in tasks])
        assert [score.reward for score in scores if isinstance(score, Scored)] == [reward] * len(tasks)


@pytest.mark.parametrize("place", range(8))
def test_one_good_and_seven_bad_programs_get_their_own_rewards(place: int, rubric: ProgramRubric) -> None:
    """Bad ones of every kind, the slow ones too, around one good one, for tasks that all differ."""
    tasks = [SOURCE.get("train", index, 11) for index in range(8)]
    bad = [
        *("def f(a):\n return a", "import os\nos._exit(0)", "import time\ndef f(a):\n time.sleep(0.2)\n return a"),
        *("def f(a", "raise SystemExit", "print('x' * 10**6)", "", "def f(a):\n return 1 // 0"),
    ]
    answers = [hidden(task)["program"] if number == place else bad[number] for number, task in enumerate(tasks)]
    scores = rubric.score_batch(list(zip(tasks, answers, strict=True)))
    assert [score.reward for score in scores if isinstance(score, Scored)] == [
        float(number == place) for number in range(8)
    ]


def test_scores_follow_their_items_through_any_shuffle(rubric: ProgramRubric) -> None:
    tasks = [SOURCE.get("train", index, 12) for index in range(40)]
    items = [
        (task, hidden(task)["program"] if number % 3 == 0 else "def f(a):\n return a")
        for number, task in enumerate(tasks)
    ]
    order = list(range(40))
    random.Random(0).shuffle(order)
    straight, shuffled = rubric.score_batch(items), rubric.score_batch([items[number] for number in order])
    assert shuffled == [straight[number] for number in order]
    assert [score.reward for score in straight if isinstance(score, Scored)] == [float(n % 3 == 0) for n in range(40)]


def test_a_fenced_program_counts_like_a_bare_one(rubric: ProgramRubric) -> None:
    task = held_out()[0]
    source = hidden(task)["program"]
    answers = [
        f"```python\n{source}\n```",
        f"so:\n```\nwrong\n```\nno, this:\n```py\n{source}\n```\ndone",
        f"so: {source}",
    ]
    scores = rubric.score_batch([(task, answer) for answer in answers])
    assert [score.reward for score in scores if isinstance(score, Scored)] == [1.0, 1.0, 0.0]


def test_a_partly_right_program_earns_nothing_but_its_share_is_reported(rubric: ProgramRubric) -> None:
    part = hidden(held_out()[0])
    values, want = part["inputs"][0], part["outputs"][0]
    (score,) = rubric.score_batch([(held_out()[0], f"def f(a):\n return {want} if a == {values} else 0")])
    assert score == Scored(0.0, {"share": pytest.approx(1 / 6), "ran": 1.0})


def test_a_dead_sandbox_is_failed_and_never_zero() -> None:
    from k3rl.envs.coding.grader import score_of

    died = ProgramOutcome(ProgramStatus.SANDBOX_DIED, detail="gone / gone")
    assert score_of(held_out()[0], died) == Failed("sandbox died: gone / gone")


def test_a_task_without_its_hidden_part_cannot_be_graded(rubric: ProgramRubric) -> None:
    with pytest.raises(ValueError, match="hidden part"):
        rubric.score_batch([(held_out()[0].public(), "x")])
