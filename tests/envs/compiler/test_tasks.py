"""Tasks: reproducible, hidden parts hidden, held-out families held out."""

from __future__ import annotations

import json

import pytest

from k3rl.envs.base import Action, EpisodeContext
from k3rl.envs.compiler.ladder import MILESTONES, milestone
from k3rl.types import Message, StopReason

CPU_LEVELS = [one.level for one in MILESTONES if not one.needs_gpu]


def test_a_split_climbs_the_ladder_again_and_again(environment):
    levels = [environment.source.get("train", index, 3).level for index in range(24)]
    assert levels == [*CPU_LEVELS, *CPU_LEVELS]
    assert list(range(1, 13)) == CPU_LEVELS


def test_equal_arguments_give_equal_tasks_and_others_do_not(environment):
    task = environment.source.get("train", 6, 1)
    assert task == environment.source.get("train", 6, 1)
    assert task.hidden != environment.source.get("train", 6, 2).hidden
    assert task.hidden != environment.source.get("train", 18, 1).hidden


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_training_never_draws_a_held_out_family(environment, level):
    rung = milestone(level)
    for index in range(6):
        task = environment.source.get("train", index, 0, level=level)
        assert {case["family"] for case in task.hidden["cases"]} <= set(rung.families)
        assert len(task.hidden["cases"]) == rung.hidden
    held_out = environment.source.get("heldout", 0, 0, level=level)
    assert not rung.held_out or {case["family"] for case in held_out.hidden["cases"]} & set(rung.held_out)


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_the_prompt_holds_no_hidden_program(environment, level):
    task = environment.source.get("train", 0, 0, level=level)
    assert task.public().hidden is None
    text = task.messages[0].content
    for case in task.hidden["cases"]:
        assert json.dumps(case["source"]) not in text


def test_splits_have_their_lengths_and_wrong_names_are_refused(environment):
    source = environment.source
    assert source.length("train") is None
    assert source.length("heldout") == 96
    assert source.length("heldout", level=3) == source.length("heldout", family="types") == 8
    with pytest.raises(IndexError, match="there is no number 8"):
        source.get("heldout", 8, 0, level=3)
    with pytest.raises(ValueError, match="no split"):
        source.get("test", 0)
    with pytest.raises(ValueError, match="no level 13"):
        source.get("train", 0, level=13)


async def test_an_episode_is_one_turn(environment):
    task = environment.source.get("train", 0)
    env = environment.make_env()
    observation = await env.reset(task.public(), EpisodeContext())
    assert observation.messages == task.messages
    step = await env.step(Action(Message("assistant", "{}")))
    assert (step.done, step.stop_reason, step.answer) == (True, StopReason.COMPLETED, "{}")
    with pytest.raises(RuntimeError, match="single use"):
        await env.reset(task, EpisodeContext())
