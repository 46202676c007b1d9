"""Known ways to cheat are refused or worth nothing; beside each, something honest that looks like it and is paid."""

from __future__ import annotations

import asyncio
import dataclasses
from importlib import import_module

import pytest

from k3rl.envs.compiler.toolchain import Refused, lint_c
from k3rl.envs.kernel import driver, operators, toolchain
from k3rl.envs.sandbox import provider_named
from k3rl.types import Invalid, Scored

tricks = import_module("k3rl.envs.kernel.hacks")
FAMILY = "softmax"
OPERATOR = operators.BY_FAMILY[FAMILY]
TASK = import_module("k3rl.envs.kernel.tasks").KernelLadder().get("train", 0, family=FAMILY)
PAIRS = tricks.pairs(OPERATOR, TASK)
# Judged by what comes out of them; all others are refused before they run.
RUN = {
    *("35 zeros", "41 nan for a wildcard", "33 leaves what is in the buffer", "36 only the visible shapes"),
    "39 adds to what it takes for zeros",
    *("35 off by a thousandth", "37 low precision", "34 changes its inputs", "34 writes beyond its output"),
    *(
        "44 reaches into the counter",
        "25 a huge array",
        "26 runs for ever",
        "20 reads the stack",
        "29 another output pointer",
        "20 changes the sizes",
    ),
}
WRONG_TEXT = {"24 empty", "25 a macro bomb"}
FOUND_OUT = {"34 changes its inputs", "34 writes beyond its output", "44 reaches into the counter"}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "RUN_S", 3.0)
    monkeypatch.setattr(toolchain, "_BUILD", dataclasses.replace(toolchain._BUILD, memory_bytes=256 * 2**20, cpu_s=5))


def refused_by_its_text(text: str) -> Refused | None:
    try:
        lint_c(text)
    except Refused as refused:
        return refused
    return None


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_trick_is_refused_or_worth_nothing(grader, small_task, name) -> None:
    score = grader.score_batch([(small_task(FAMILY), tricks.answer("kernel.c", PAIRS[name][0]))])[0]
    if name in FOUND_OUT or name not in RUN | WRONG_TEXT:
        assert isinstance(score, Invalid), score
    else:
        assert score == Scored(0.0, {"right": 0.0})


@pytest.mark.parametrize("name", sorted(RUN))
def test_its_honest_control_is_paid(grader, small_task, name) -> None:
    score = grader.score_batch([(small_task(FAMILY), tricks.answer("kernel.c", PAIRS[name][1]))])[0]
    assert isinstance(score, Scored)
    assert 0.1 < score.reward <= 0.51, score


def test_honest_controls_of_tricks_that_never_run_are_accepted() -> None:
    """The text of all of them, and the machine code of those whose trick is found there only."""

    async def all_of_them() -> None:
        builder = toolchain.Builder(provider_named("bwrap"))
        for name in sorted(PAIRS.keys() - RUN):
            cheat, control = PAIRS[name]
            lint_c(control)
            if refused_by_its_text(cheat) is None:
                assert isinstance(await builder.compile(control), bytes), name

    asyncio.run(all_of_them())


def test_every_family_has_every_trick() -> None:
    for operator in operators.LADDER:
        task = import_module("k3rl.envs.kernel.tasks").KernelLadder().get("train", 0, family=operator.family)
        found = tricks.hacks(task)
        assert found.keys() == PAIRS.keys()
        assert len(found) == 41


@pytest.mark.parametrize(
    "trick",
    [
        "extern int fork(void); fork();",
        "extern int execve(const char *, char **, char **); "
        'char *words[] = {"true", 0}; execve("/usr/bin/true", words, words + 1);',
    ],
)
def test_what_gets_past_the_filter_of_words_makes_no_process_and_becomes_none(trick) -> None:
    async def run() -> toolchain.Ran:
        provider = provider_named("bwrap")
        builder = toolchain.Builder(provider)
        async with await provider.create(toolchain._BUILD) as sandbox:
            await sandbox.write("kernel.c", tricks.inside(OPERATOR, trick).encode())
            done = await sandbox.exec(["/usr/bin/gcc", *toolchain.FLAGS, "-mavx2", "-mfma", "-c", "kernel.c"])
            assert done.returncode == 0, done.stderr
            program = await builder._linked(await sandbox.read("kernel.o"))
        assert isinstance(program, bytes)
        return await toolchain.count(provider, program, [driver.call(OPERATOR, {"T": 1, "D": 33}, [1])])

    ran = asyncio.run(run())
    assert ran.returned is None
    assert ran.complaint.startswith("exit status 159"), ran.complaint  # 128 + SIGSYS
