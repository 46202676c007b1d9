"""Environments of other systems: what a policy sees, what it is paid, and that nothing is paid by mistake."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.config import ConfigError, MissingResource
from k3rl.envs import UnknownEnvironment, make
from k3rl.envs.adapters.foreign import ForeignConfig, Record, RecordRubric
from k3rl.envs.base import NoOracle
from k3rl.envs.check import check
from k3rl.types import Failed, Message, Scored, StopReason, ToolCall

FAKES = Path(__file__).with_name("fakes")
TASK = make("gymnasium:X", paths=(str(FAKES),)).source.get("train", 0)
MISBEHAVING = "gymnasium:Misbehaving-v0"


def users_said(episode):
    return [message.content for message in episode.messages if message.role == "user"]


# ------------------------------------------------------------------------------------------------- gymnasium


def test_a_gymnasium_episode_is_worth_the_sum_of_its_rewards(fake, play):
    environment = fake("gymnasium:Corridor-v0")
    episode, score = play(environment, "go left: 0", *["I go right, 1"] * 8)
    cells = [json.loads(text.splitlines()[-1])[0] for text in users_said(episode)]
    assert cells == [cells[0], *range(cells[0] - 1, 5)]  # one to the left, then right until cell 5, which is not told
    assert score == Scored(
        pytest.approx(1.0 - 0.1 * len(cells[1:])),
        {
            "finished": 1.0,
            "rewards": float(len(cells)),
        },
    )
    assert episode.stop_reason is StopReason.ENV_DONE
    assert "one whole number from 0 to 1" in users_said(episode)[0]


def test_the_same_task_begins_the_same_way_and_other_tasks_differ(fake, play):
    environment, again = fake("gymnasium:Corridor-v0"), fake("gymnasium:Corridor-v0")
    seen = []
    for index in range(6):
        task = environment.source.get("train", index, seed=3)
        assert task == again.source.get("train", index, seed=3)
        assert task.data["seed"] != environment.source.get("heldout", index, seed=3).data["seed"]
        assert task.data["seed"] != environment.source.get("train", index, seed=4).data["seed"]
        if index < 2:
            first = users_said(play(environment, "1", "1", "1", "1", task=task)[0])[0]
            assert first == users_said(play(again, "1", "1", "1", "1", task=task)[0])[0]
        seen.append(task.data["seed"])
    assert len(set(seen)) == 6
    assert environment.source.length("train") is None
    assert environment.source.length("heldout") == 256


def test_users_functions_show_observations_and_read_actions(fake, play, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def show(observation, env):\n    return f'cell {observation[0]} of {env.longest}'\n"
        "def read(text):\n    if text not in ('left', 'right'):\n        raise ValueError('say left or right')\n"
        "    return int(text == 'right')\n"
    )
    options = {"observe": f"{own}:show", "act": f"{own}:read", "instructions": "Walk.", "kwargs": {"longest": 2}}
    episode, score = play(fake("gymnasium:Corridor-v0", **options), "up", "left", "left")
    said = users_said(episode)
    assert said[0].startswith("Walk.\ncell ")
    assert "say left or right" in said[1]
    assert isinstance(score, Scored)
    assert score.reward == pytest.approx(-0.2)  # truncated after two steps
    assert episode.metrics["truncated"] == 1.0
    assert episode.metrics["invalid_turns"] == 1.0


def test_text_actions_are_the_reply_itself(fake, play):
    _, score = play(fake("gymnasium:Words-v0"), "far too long", "yes")
    assert score == Scored(1.0, {"finished": 1.0, "rewards": 1.0})


# ------------------------------------------------------------------------------ what goes wrong, and how it ends


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ForeignRaised: gymnasium: act raised RuntimeError: the wheels came off"),
        ("die", "ForeignDied: gymnasium: the process ended (7) during act; it printed last: last words"),
        ("exit", "ForeignRaised: gymnasium: act raised SystemExit: 3"),
        ("flood", "ForeignLied: gymnasium: act answered more than"),
        ("nan", "the reward is nan, not a finite number"),
        ("inf", "the reward is inf, not a finite number"),
    ],
)
def test_an_environment_that_breaks_or_lies_fails_the_episode_and_is_never_worth_zero(fake, play, how, said):
    episode, score = play(fake(MISBEHAVING, kwargs={"how": how}), "1")
    assert episode.stop_reason is StopReason.INFRA_ERROR
    assert isinstance(score, Failed)
    assert said in score.reason


def test_an_environment_that_hangs_is_killed_at_its_deadline(fake, play):
    episode, score = play(fake(MISBEHAVING, kwargs={"how": "hang"}, call_s=0.5), "1")
    assert episode.stop_reason is StopReason.INFRA_ERROR
    assert isinstance(score, Failed)
    assert "ForeignHung: gymnasium: act took more than 0.5 s" in score.reason


def test_what_foreign_code_prints_is_no_answer(fake, play):
    _, score = play(fake(MISBEHAVING, kwargs={"how": "print"}), "1")
    assert score == Scored(0.5, {"finished": 1.0, "rewards": 1.0})


def test_a_reward_that_never_came_is_missing_whatever_unfinished_says(fake, play):
    episode, score = play(fake(MISBEHAVING, kwargs={"how": "none"}, unfinished=0.0), "1")
    assert episode.stop_reason is StopReason.ENV_DONE
    assert score == Failed("the environment ended the episode and gave no reward")


@pytest.mark.parametrize("how", ["large", "small"])
def test_a_reward_outside_of_its_declared_range_is_none(fake, play, how):
    environment = fake(MISBEHAVING, kwargs={"how": how}, reward_range=(0.0, 1.0))
    assert environment.reward_limits == (0.0, 1.0)
    _, score = play(environment, "1")
    assert isinstance(score, Failed)
    assert "outside of its declared range [0, 1]" in score.reason
    assert isinstance(play(fake(MISBEHAVING, kwargs={"how": how}), "1")[1], Scored)


def test_turns_that_are_no_action_end_the_episode_and_are_worth_what_the_user_says(fake, play):
    episode, score = play(fake("gymnasium:Corridor-v0"), "up", "9", "left")
    assert episode.stop_reason is StopReason.COMPLETED
    assert isinstance(score, Failed)
    assert "set `unfinished`" in score.reason
    _, score = play(fake("gymnasium:Corridor-v0", unfinished=-1.0), "up", "9", "left")
    assert score == Scored(-1.0, {"finished": 0.0, "rewards": 0.0})


def test_an_episode_that_a_budget_ends_keeps_its_rewards(fake, play):
    episode, score = play(fake("gymnasium:Corridor-v0", turns=2), "0", "0")
    assert episode.stop_reason is StopReason.MAX_TURNS
    assert score == Scored(pytest.approx(-0.2), {"finished": 0.0, "rewards": 2.0})


def test_a_task_s_wall_time_ends_a_call_and_its_process(fake, play):
    episode, score = play(fake(MISBEHAVING, kwargs={"how": "hang"}, unfinished=0.25), "1", wall_s=2.0)
    assert episode.stop_reason is StopReason.WALL_TIMEOUT
    assert score == Scored(0.25, {"finished": 0.0, "rewards": 0.0})


# ----------------------------------------------------------------------------------------------- the others


def test_a_textarena_player_reads_only_what_is_new(fake, play):
    environment = fake("textarena:Guess-v0", kwargs={"highest": 1000})
    episode, score = play(environment, "0", "0", "0")
    assert users_said(episode) == ["Guess from 1 to 1000.", "\n[0] is wrong.", "\n[0] is wrong."]
    assert score == Scored(0.25, {"finished": 1.0, "rewards": 1.0})
    assert episode.metrics["turns"] == 3.0


def test_an_opponent_plays_the_other_player_of_a_textarena_game(fake, play, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def one_more(observation, player):\n    return str(int(observation.split()[-1]) + 1)\n")
    options = {"players": 2, "opponent": f"{own}:one_more"}
    assert play(fake("textarena:Count-v0", **options), "1", "4")[1].reward == 1.0
    assert play(fake("textarena:Count-v0", **options), "2", "3")[1].reward == -1.0  # and the other one says 4
    episode, score = play(fake("textarena:Count-v0", players=2), "1")
    assert episode.stop_reason is StopReason.INFRA_ERROR
    assert isinstance(score, Failed)
    assert "needs opponent" in score.reason


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    prompts = [[{"role": "user", "content": "1 + 1?"}], "2 + 2?"]
    truths = ["two", "four"]
    file.write_text(
        "".join(
            json.dumps({"prompt": prompt, "reward_spec": {"ground_truth": truth}}) + "\n"
            for prompt, truth in zip(prompts, truths, strict=True)
        )
    )
    return str(file)


def test_skyrl_rows_keep_their_truth_from_the_policy(fake, play, rows):
    environment = fake("skyrl-gym:sum", data={"train": rows}, env_config={"max_tries": 2})
    assert environment.source.length("train") == 2
    task = environment.source.get("train", 1)
    assert "four" not in str(task)
    episode, score = play(environment, "five", "four", task=task)
    assert users_said(episode) == ["2 + 2?", "Try again."]
    assert score == Scored(1.0, {"finished": 1.0, "rewards": 2.0})
    assert episode.metrics["tries"] == 2.0
    with pytest.raises(IndexError):
        environment.source.get("train", 2)


def test_skyrl_rows_may_be_parquet_and_must_have_a_prompt(fake, tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "x": [1, 2]}), tmp_path / "rows.parquet")
    assert fake("skyrl-gym:sum", data={"heldout": str(tmp_path / "rows.parquet")}).source.length("heldout") == 2
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(ConfigError, match=r"row 0 of .* has no `prompt`"):
        fake("skyrl-gym:sum", data={"train": str(tmp_path / "bad.jsonl")}).source.length("train")
    with pytest.raises(MissingResource, match="is not there"):
        fake("skyrl-gym:sum", data={"train": str(tmp_path / "none.jsonl")}).source.length("train")


def double(number):
    return Message("assistant", "", tool_calls=(ToolCall("double", {"number": number}),))


def test_verifiers_own_loop_asks_the_policy_and_runs_its_tools(fake, play):
    environment = fake("verifiers:doubling")
    assert environment.source.length("train") == 3
    task = environment.source.get("train", 2)
    episode, score = play(environment, double(1), double(2), "4", task=task)
    assert [message.content for message in episode.messages if message.role == "tool"] == ["2", "4"]
    assert score == Scored(2.0, {"finished": 1.0, "rewards": 1.0, "right": 2.0})  # the reward's weight is 2
    assert len(episode.branches) == 1
    assert episode.metrics["turns"] == 6.0


def test_a_conversation_that_verifiers_cuts_short_is_a_branch_of_its_own(fake, play):
    episode, score = play(fake("verifiers:doubling", taskset={"mode": "compact"}), double(5), "0")
    assert [len(branch.turns) for branch in episode.branches] == [1, 1]
    assert users_said(episode)[-1].startswith("Short: 10.")
    assert score.reward == 2.0


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("raise", "open raised RuntimeError: the loop broke"),
        ("error", "TaskError: scoring failed"),
        ("unscored", "the environment ended the episode and gave no reward"),
    ],
)
def test_an_episode_that_verifiers_did_not_score_has_no_reward(fake, play, mode, said):
    _, score = play(fake("verifiers:doubling", taskset={"mode": mode}), "0")
    assert isinstance(score, Failed)
    assert said in score.reason


def test_reasoning_gym_judges_with_its_own_dataset(fake):
    environment = fake("reasoning-gym:sums", size=4, kwargs={"greatest": 20})
    tasks = [environment.source.get("train", index, seed=1) for index in range(6)]
    assert len({task.messages[-1].content for task in tasks}) > 4  # past `size` another dataset begins
    again = fake("reasoning-gym:sums", size=4, kwargs={"greatest": 20}).source
    assert tasks == [again.get("train", index, seed=1) for index in range(6)]
    answers = [environment.oracle(task) for task in tasks[:4]] + ["<answer>none</answer>", "no tags"]
    rubric = environment.grader()
    scores = rubric.score_batch(list(zip(tasks, answers, strict=True)))
    assert [score.reward for score in scores] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    broken = [f"<answer>{word}</answer>" for word in ("raise", "nan", "nothing")]
    failed = rubric.score_batch([(tasks[0], answer) for answer in broken])
    assert all(isinstance(score, Failed) for score in failed)
    assert all(word in score.reason for word, score in zip(("cannot read", "nan", "no reward"), failed, strict=True))
    assert rubric.score_batch([(tasks[0], answers[0])])[0].reward == 1.0  # and it goes on
    rubric.close()
    shown = environment.demonstrations(0, 2)
    assert shown[0]["messages"][1]["content"] == environment.oracle(environment.source.get("train", 0))


def test_a_judge_that_hangs_is_killed_and_the_next_answer_is_judged(fake):
    environment = fake("reasoning-gym:sums", call_s=0.5)
    task = environment.source.get("heldout", 0)
    rubric = environment.grader()
    hung, right = rubric.score_batch([(task, "<answer>hang</answer>"), (task, environment.oracle(task))])
    rubric.close()
    assert isinstance(hung, Failed)
    assert "took more than 0.5 s" in hung.reason
    assert right.reward == 1.0


def test_the_check_of_environments_passes_for_reasoning_gym(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=":")
    monkeypatch.syspath_prepend(str(FAKES))
    report = check("reasoning-gym:sums")
    assert report.problems == []
    assert report.oracle == 1.0
    assert set(report.hacks) == {"empty_tag", "the_question", "none"}


def test_the_check_plays_an_environment_that_is_judged_while_it_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr("k3rl.envs.leaks.SETTLE_S", 1.0)
    own = tmp_path / "own.py"
    own.write_text("def right(messages, row):\n    return 'yes'\n\ndef wrong(messages, row):\n    return 'no'\n")
    options = {"paths": (str(FAKES),), "unfinished": 0.0, "oracle": f"{own}:right"}
    report = check("gymnasium:Words-v0", options=options)
    assert (report.problems, report.absent) == ([], {})
    assert (report.oracle, report.oracle_expected, report.null) == (1.0, 1.0, 0.0)
    assert [(row["who"], row["reward"]) for row in report.episodes] == [("oracle", 1.0), ("oracle", 1.0), ("null", 0.0)]
    assert all(tried.refused for tried in report.hacks.values())
    assert len(report.hacks) == 3
    report = check("gymnasium:Words-v0", options=options | {"oracle": f"{own}:wrong"})
    assert "the right answer, acted out, got 0" in report.problems[0]


def test_the_check_says_what_there_is_not_and_why(monkeypatch):
    monkeypatch.setattr("k3rl.envs.leaks.SETTLE_S", 1.0)
    report = check("gymnasium:Words-v0", options={"paths": (str(FAKES),)})
    assert (report.oracle, report.null) == (None, None)
    assert "judged while it is played" in report.absent["oracle"]
    assert "set `unfinished`" in report.absent["null"]
    assert {row["status"] for row in report.episodes} == {"failed"}
    assert [tried.status for tried in report.hacks.values()] == ["failed"] * 3
    assert len(report.problems) == 3  # what nobody judged is no refusal


# ------------------------------------------------------------------------------------------ names, options, records


def test_names_say_what_is_missing(fake):
    with pytest.raises(ConfigError, match="write gymnasium:ID"):
        make("gymnasium")
    with pytest.raises(ConfigError, match="write openenv:http://HOST:PORT"):
        make("openenv:somewhere")
    with pytest.raises(ConfigError, match="observe"):
        fake("gymnasium:Corridor-v0", obsrve="x")
    with pytest.raises(ConfigError, match="reward_range"):
        fake("gymnasium:Corridor-v0", reward_range=(1.0, 0.0))
    with pytest.raises(UnknownEnvironment, match="`textarena:NAME`"):
        make("no-such-environment")
    with pytest.raises(ConfigError, match="skyrl-gym needs rows"):
        make("skyrl-gym:gsm8k")
    environment = fake("gymnasium:Corridor-v0")
    task = environment.source.get("train", 0)
    with pytest.raises(NoOracle, match="judged while it is played"):
        environment.right_answer(task)
    with pytest.raises(ConfigError, match="there is no such file"):
        fake("gymnasium:Corridor-v0", oracle="nowhere.py:f")


@settings(max_examples=50)
@given(
    st.lists(st.floats(-1e6, 1e6), max_size=5),
    st.sampled_from(["environment", "max_turns", "invalid"]),
    st.none() | st.floats(-1, 1),
)
def test_a_record_scores_as_its_rewards_say(rewards, ended, unfinished):
    record = Record(TASK.id, tuple(rewards), ended)
    assert Record.of(record.text()) == record
    (score,) = RecordRubric(ForeignConfig(unfinished=unfinished)).score_batch([(TASK, record.text())])
    worth = math.fsum(rewards) if rewards else None if ended == "environment" else unfinished
    if worth is None:
        assert isinstance(score, Failed)
    else:
        assert isinstance(score, Scored)
        assert score.reward == pytest.approx(worth, abs=1e-9)  # sums of five numbers up to 1e6 in another order


@settings(max_examples=50)
@given(st.text(max_size=40) | st.sampled_from(["{}", "[]", "null", '{"kind": "k3rl-adapter-record"}', "[" * 3000]))
def test_a_text_that_is_no_record_is_no_score(text):
    (score,) = RecordRubric(ForeignConfig()).score_batch([(TASK, text)])
    assert isinstance(score, Failed)


def test_a_record_of_another_task_is_no_score():
    source = make("gymnasium:X", paths=(str(FAKES),)).source
    text = Record(source.get("train", 1).id, (1.0,), "environment").text()
    (score,) = RecordRubric(ForeignConfig()).score_batch([(source.get("train", 0), text)])
    assert isinstance(score, Failed)
    assert "not of 'gymnasium:X/train/0/0'" in score.reason
