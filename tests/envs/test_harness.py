"""The agent loop around a workspace: tools in real sandboxes, budgets, short contexts, pauses, what is handed in."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from k3rl.config import ConfigError
from k3rl.envs import Action, Env, EpisodeContext, make
from k3rl.envs.coding.repair import coding_repair
from k3rl.envs.episode_state import BrokenState, EpisodeState
from k3rl.envs.harness import (
    TOOLS,
    Agentic,
    Discard,
    HarnessConfig,
    HarnessEnv,
    KeepLast,
    Spending,
    Summarize,
    Validation,
    Workspace,
    WorkspaceSpec,
    answer_from,
    files_from,
)
from k3rl.envs.harness.budget import span
from k3rl.envs.harness.context import REMOVED
from k3rl.envs.harness.tools import shortened
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import run_episode
from k3rl.envs.sandbox import provider_named
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Budgets, Completion, Episode, Message, SamplingParams, Scored, StopReason, Task, ToolCall

TOKENIZER = Tokenizer.builtin()
SPEC = WorkspaceSpec({"notes/a.txt": "one\ntwo\nthree\n", "b.bin": "b"}, ("notes/*",))
TASK = Task(id="t/0", env="t", messages=(Message("user", "work"),), family="f", budgets=Budgets(turns=20))
PLAIN = HarnessConfig(declare_tools=False)

Turn = Message | Callable[[str], Message]


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments),))


def bash(command: str) -> Message:
    return call("bash", command=command)


SUBMIT = call("submit")


class Script:
    """A policy that says these turns; a function is given the text of its prompt. Logprobs tell turns apart."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = list(turns)
        self.prompts: list[str] = []

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.prompts.append(TOKENIZER.decode(list(prompt_ids)))
        turn = self.turns[len(self.prompts) - 1]
        message = turn(self.prompts[-1]) if callable(turn) else turn
        rendered = xtml.render_trained([Message("user", "-"), message], thinking=False, add_generation_prompt=False)
        own = [segment for segment, sampled in zip(*rendered, strict=True) if sampled]
        ids = tuple(TOKENIZER.encode_segments(own))[: params.max_tokens]
        stop = StopReason.STOP if len(ids) < params.max_tokens else StopReason.LENGTH
        drawn = tuple(np.array([token, token + 1], np.int32) for token in ids)
        logprobs = (-float(len(self.prompts)),) * len(ids)
        return Completion(ids, logprobs, stop, weight_version=1, first_version=1, sampling_mask=drawn)


def harness(config: HarnessConfig = PLAIN, spec: WorkspaceSpec = SPEC, **options: Any) -> HarnessEnv:
    return HarnessEnv(Agentic(lambda task: spec, **options), config)


def play(env: Env, policy: Script, task: Task = TASK, budgets: Budgets | None = None, **options: Any) -> Episode:
    context = EpisodeContext(budgets=budgets or Budgets(), sandboxes=provider_named("bwrap"))
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=4000))
    return asyncio.run(run_episode(env, task, policy, settings, episode_id="e", context=context, **options))


def said(episode: Episode) -> list[str]:
    """What the tools said."""
    return [message.content for message in episode.messages if message.role == "tool"]


# ------------------------------------------------------------------------------------------------ a whole task


@pytest.mark.parametrize("index", [0, 3])
def test_a_scripted_agent_repairs_a_repository_through_its_tools(index: int) -> None:
    environment = make("coding-repair")
    task = environment.source.get("train", index, level=2)
    assert task.hidden is not None
    package = task.family
    turns: list[Turn] = [bash(f"git log --oneline | wc -l; python3 -m unittest tests/test_{package}.py")]
    for path, right in task.hidden["files"].items():
        wrong = task.data["files"][path]
        turns.append(call("read_file", path=path))
        for old, new in zip(wrong.splitlines(), right.splitlines(), strict=True):
            if old != new:
                turns.append(call("edit", path=path, old=old, new=new))
    module, function = task.hidden["examples"][0][0][0].rsplit(".", 1)
    (_, arguments), wanted = task.hidden["examples"][0]
    turns.append(
        call("write_file", path="try.py", content=f"import {module} as m\nprint(m.{function}(*{arguments!r}))\n")
    )
    turns += [bash("python3 try.py"), SUBMIT]
    episode = play(environment.make_env(), Script(*turns), task)
    assert episode.stop_reason is StopReason.COMPLETED
    assert said(episode)[0].startswith("exit status 0\n1\n")
    assert f"exit status 0\n{wanted}" in said(episode)[-1]
    assert set(files_from(episode.answer) or {}) == {path for path in task.data["files"] if path.startswith(package)}
    rubric = environment.grader()
    scores = rubric.score_batch([(task, episode.answer), (task, answer_from({})), (task, environment.oracle(task))])
    rubric.close()
    assert [score.reward for score in scores if isinstance(score, Scored)] == [1.0, 0.0, 1.0]
    assert task.id not in "".join(message.content for message in episode.messages)


def test_every_mistake_is_seen_by_the_hidden_calls_and_by_none_of_the_visible_tests() -> None:
    source = make("coding-repair").source
    for index in range(6):
        task = source.get("heldout", index)
        assert task.hidden is not None
        assert len(task.hidden["calls"]) == 24
        assert task.public().hidden is None
        assert not any(str(path) in task.messages[0].content for path in task.hidden["files"])
        assert source.get("heldout", index) == task
    families = {source.get("train", index).family for index in range(6)}
    assert families == {"ledger", "calc", "rooms"}
    with pytest.raises(ValueError, match="no family 'words'"):
        source.get("train", 0, family="words")


# ------------------------------------------------------------------------------------------------------- tools


@pytest.fixture
def tool() -> Iterator[Callable[..., str]]:
    """Calls one tool after the other in one workspace."""
    with asyncio.Runner() as runner:
        workspace = runner.run(Workspace.open(provider_named("bwrap"), SPEC))

        def run(name: str, arguments: Any = None, **others: Any) -> str:
            made = TOOLS[name](timeout_s=5.0, output_chars=300)
            return runner.run(made.call(others if arguments is None else arguments, workspace))

        run.workspace, run.runner = workspace, runner  # type: ignore[attr-defined]
        yield run
        runner.run(workspace.close())


def test_files_are_read_written_and_edited(tool: Callable[..., str]) -> None:
    assert tool("read_file", path="notes/a.txt", first=2) == "    2  two\n    3  three"
    assert tool("read_file", path="/box/notes/a.txt", last=1) == "    1  one"
    assert tool("edit", path="notes/a.txt", old="two\n", new="2\n") == "done"
    assert tool("write_file", path="deep/er/c.py", content="print(6 * 7)") == "wrote 12 characters"
    assert tool("bash", command="cat notes/a.txt; python3 deep/er/c.py") == "exit status 0\none\n2\nthree\n42"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("read_file", {"path": "nowhere"}, "error: nowhere: No such file or directory"),
        ("read_file", {"path": "../../etc/passwd"}, "error: ../../etc/passwd: cannot be used"),
        ("read_file", {"path": "/etc/passwd"}, "error: /etc/passwd: No such file or directory"),
        ("read_file", {"path": "notes"}, "error: notes: "),
        ("read_file", {}, "error: path is missing; read_file takes path, first, last"),
        ("read_file", {"path": 3}, "error: path must be of type string"),
        ("read_file", {"path": "x", "first": True}, "error: first must be of type integer"),
        ("write_file", {"path": "x", "content": "y", "mode": "w"}, "error: there is no argument 'mode'"),
        ("write_file", "not json", "error: the arguments of write_file are not a JSON object"),
        ("edit", {"path": "notes/a.txt", "old": "absent", "new": ""}, "error: `old` occurs 0 times"),
        ("edit", {"path": "notes/a.txt", "old": "t", "new": ""}, "error: `old` occurs 2 times"),
        ("edit", {"path": "notes/a.txt", "old": "", "new": "x"}, "error: `old` occurs 0 times"),
        ("bash", {"command": "false | true"}, "exit status 1"),
        ("bash", {"command": "sleep 9", "timeout_s": 0.2}, "killed after 0.2 s"),
        ("bash", {"command": "a\0b"}, "error: a command has"),
        ("bash", {"command": "yes"}, "killed for printing too much (output cut)\ny\n"),
    ],
)
def test_a_mistake_is_told_and_not_raised(tool: Callable[..., str], name: str, arguments: Any, text: str) -> None:
    assert tool(name, arguments).startswith(text)


def test_no_link_is_followed_and_only_declared_text_files_are_taken(tool: Callable[..., str]) -> None:
    tool(
        "bash",
        command="ln -s /etc/hostname notes/link; ln -s /usr notes/usr; mkfifo notes/pipe; printf '\\377' > notes/bytes;"
        "echo x > elsewhere; mkdir -p notes/deep; echo y > notes/deep/d; ln notes/a.txt notes/hard",
    )
    assert tool("read_file", path="notes/link").startswith("error")
    assert tool("write_file", path="notes/link", content="x").startswith("error")
    assert tool("read_file", path="notes/usr/bin/env").startswith("error")
    files = tool.runner.run(tool.workspace.artifacts())  # type: ignore[attr-defined]
    assert files == {
        "notes/a.txt": "one\ntwo\nthree\n",
        "notes/deep/d": "y\n",
        "notes/hard": "one\ntwo\nthree\n",
    }


def test_long_output_keeps_its_two_ends() -> None:
    text = shortened("a" * 500 + "b" * 500, 300)
    assert text.startswith("a" * 200)
    assert text.endswith("b" * 100)
    assert "700 characters left out" in text
    assert shortened("a" * 300, 300) == "a" * 300


# ----------------------------------------------------------------------------------------------------- budgets


def test_what_is_left_is_shown_and_a_spent_budget_hands_in_the_files_as_they_are() -> None:
    policy = Script(bash("echo 1"), bash("echo new > notes/n"), bash("true"))
    episode = play(harness(), policy, budgets=Budgets(turns=2, tool_calls=9, virtual_s=1000.0))
    assert "[left: 1 turns, 8 tool calls, " in said(episode)[0]
    assert (episode.stop_reason, episode.budgets_used["turns"]) == (StopReason.MAX_TURNS, 2)
    assert files_from(episode.answer) == {"notes/a.txt": "one\ntwo\nthree\n", "notes/n": "new\n"}
    hidden = play(harness(PLAIN.model_copy(update={"show_budget": False})), Script(bash("echo 1"), SUBMIT))
    assert said(hidden) == ["exit status 0\n1"]


@pytest.mark.parametrize(
    ("budgets", "reason"),
    [
        (Budgets(virtual_s=0.2), StopReason.VIRTUAL_TIMEOUT),
        (Budgets(tool_calls=1), StopReason.MAX_TOOL_CALLS),
        (Budgets(tokens=30), StopReason.MAX_TOKENS),
        (Budgets(wall_s=1.0), StopReason.WALL_TIMEOUT),
    ],
)
def test_each_budget_ends_an_episode_by_its_own_name_and_work_counts(budgets: Budgets, reason: StopReason) -> None:
    config = PLAIN.model_copy(update={"token_s": 0.001})
    policy = Script(*[bash("echo w > notes/w; sleep 0.4")] * 9)
    episode = play(harness(config), policy, budgets=budgets)
    assert episode.stop_reason is reason
    assert "notes/a.txt" in (files_from(episode.answer) or {})


def test_what_is_left_is_said_from_the_first_message_on_both_clocks_and_of_sub_agents() -> None:
    budgets = Budgets(turns=4, sub_agents=1, wall_s=24 * 3600.0, virtual_s=300.0)
    config = PLAIN.model_copy(update={"show_budget": True, "sub_agents": 2})
    episode = play(harness(config), Script(bash("true"), SUBMIT), budgets=budgets)
    first, second = str(episode.messages[1].content), said(episode)[0]
    assert "4 turns, 1 sub-agents, 300 s of task time, 23 h 59 min of real time]" in first
    assert "[left: 3 turns, 1 sub-agents, " in second
    assert "23 h 59 min of real time]" in second
    assert [span(one) for one in (-3, 42.4, 599, 600, 3599, 3600, 172800)] == [
        "0 s", "42 s", "599 s", "10 min", "59 min", "1 h 0 min", "48 h 0 min",
    ]  # fmt: skip


def test_real_time_goes_on_where_it_stood_when_an_episode_is_resumed() -> None:
    context = EpisodeContext(budgets=Budgets(wall_s=7200.0), sandboxes=provider_named("bwrap"))
    first, second = harness(), harness()

    async def paused() -> str:
        try:
            await first.reset(TASK, context)
            first._began -= 5000.0
            snapshot = await first.snapshot()
            await second.restore(TASK, context, snapshot)
            result = await second.step(Action(bash("true")))
        finally:
            await first.close()
            await second.close()
        assert result.observation is not None
        return str(result.observation.messages[0].content)

    assert asyncio.run(paused()).endswith("36 min of real time]")


def test_virtual_time_counts_tokens_at_a_nominal_rate_and_tools_but_no_engine() -> None:
    spent = Spending().turn(100, 0.5).call(3.0).call(1.0)
    assert (spent.turns, spent.tokens, spent.tool_calls, spent.wall_s, spent.virtual_s) == (1, 100, 2, 4.0, 54.0)
    assert not spent.time_is_over(Budgets(virtual_s=54.1))
    assert spent.time_is_over(Budgets(virtual_s=54.0))
    assert Spending().left(Budgets()) == ""


def test_turns_without_a_call_are_answered_once_and_then_end_the_episode() -> None:
    episode = play(harness(), Script(Message("assistant", "thinking"), bash("true"), *[Message("assistant", "x")] * 2))
    assert episode.stop_reason is StopReason.COMPLETED
    assert "Nothing was called" in episode.messages[3].content
    assert files_from(episode.answer) == {"notes/a.txt": "one\ntwo\nthree\n"}


def test_an_unknown_tool_is_named_among_those_there_are() -> None:
    config = PLAIN.model_copy(update={"tools": ("bash", "submit")})
    episode = play(harness(config), Script(call("read_file", path="a"), SUBMIT))
    assert said(episode)[0].startswith("error: there is no tool 'read_file' here; there are bash, submit")


def test_a_harness_is_a_checked_config() -> None:
    environment = coding_repair(harness={"context": {"type": "keep_last", "n": 1}, "tools": ["bash"]})
    assert environment.make_env()._config.context == KeepLast(n=1)  # type: ignore[attr-defined]
    with pytest.raises((ConfigError, ValueError), match="bassh"):
        coding_repair(harness={"tools": ["bassh"]})


def test_the_best_validated_submission_counts() -> None:
    async def validate(task: Task, answer: str) -> Validation:
        value = int((files_from(answer) or {}).get("notes/n", "-1"))
        return Validation(value >= 0, float(value), "digits only")

    turns = [message for text in ("3", "7", "5", "-9") for message in (bash(f"printf %s {text} > notes/n"), SUBMIT)]
    episode = play(harness(validate=validate), Script(*turns), budgets=Budgets(turns=8))
    answers = said(episode)[1::2]
    assert "valid, score 3; this is the best so far. digits only" in answers[0]
    assert "score 5; the best so far stays" in answers[2]
    assert answers[3].startswith("not valid")
    assert (files_from(episode.answer) or {})["notes/n"] == "7"
    assert (episode.stop_reason, episode.metrics["submissions"]) == (StopReason.MAX_TURNS, 4)


# ------------------------------------------------------------------------------------------------ short contexts


def conversation() -> list[Message]:
    results = [
        [Message("assistant", "", tool_calls=(ToolCall("bash", {}),)), Message("tool", f"r{n}")] for n in range(4)
    ]
    return [Message("system", "s"), Message("user", "u"), *[message for pair in results for message in pair]]


def test_contexts_are_cut_as_they_say() -> None:
    whole = conversation()
    assert HarnessConfig().context.cut(whole, 10**9) is None
    assert KeepLast(n=1, at_tokens=10).cut(whole, 9) is None
    kept = KeepLast(n=1, at_tokens=10).cut(whole, 10)
    assert kept is not None
    assert [message.content for message in kept if message.role == "tool"] == [REMOVED] * 3 + ["r3"]
    assert KeepLast(n=1, at_tokens=10).cut(kept, 10) is None
    assert [m.content for m in KeepLast(n=0, at_tokens=1).cut(whole, 1) or () if m.role == "tool"] == [REMOVED] * 4
    discarded = Discard(at_tokens=10).cut(whole, 10)
    assert discarded is not None
    assert [message.role for message in discarded] == ["system", "user", "user"]
    assert Summarize(at_tokens=10).cut(whole, 10) == tuple(whole[:2])


def test_removed_results_begin_a_branch_whose_prompt_does_not_have_them() -> None:
    config = PLAIN.model_copy(update={"context": KeepLast(n=1, at_tokens=1)})
    policy = Script(bash("echo first"), bash("echo second"), bash("echo third"), SUBMIT)
    episode = play(harness(config), policy)
    assert [len(branch.turns) for branch in episode.branches] == [2, 1, 1]
    assert [(branch.id, branch.parent) for branch in episode.branches] == [
        ("e/0", None),
        ("e/1", "e/0"),
        ("e/2", "e/1"),
    ]
    assert "\nsecond\n" in policy.prompts[2]
    assert "\nfirst\n" not in policy.prompts[2]
    assert REMOVED in policy.prompts[2]
    for branch, prompts in zip(episode.branches, ([0, 1], [2], [3]), strict=True):
        ids, mask, logprobs = branch.tokens()
        assert TOKENIZER.decode(ids.tolist()).startswith(policy.prompts[prompts[0]])
        assert set(logprobs[mask].tolist()) == {-1.0 - number for number in prompts}
    assert (episode.budgets_used["turns"], episode.metrics["cuts"]) == (4, 2)
    assert all(turn.env_s > 0 for branch in episode.branches for turn in branch.turns)


def test_a_summary_that_the_policy_writes_opens_the_next_branch() -> None:
    config = PLAIN.model_copy(update={"context": Summarize(at_tokens=1)})
    policy = Script(bash("echo secret > notes/n"), Message("assistant", "I wrote notes/n."), SUBMIT)
    episode = play(harness(config), policy)
    assert [len(branch.turns) for branch in episode.branches] == [2, 1]
    assert "Write down, without calling a tool" in policy.prompts[1]
    assert "I wrote notes/n." in policy.prompts[2]
    assert "echo secret" not in policy.prompts[2]
    assert (files_from(episode.answer) or {})["notes/n"] == "secret\n"


# ------------------------------------------------------------------------------------------------------- pauses


@pytest.mark.parametrize("pause", [1, 2, 3, 4])
@pytest.mark.parametrize("context", [HarnessConfig().context, KeepLast(n=1, at_tokens=1), Summarize(at_tokens=1)])
def test_a_paused_episode_goes_on_as_if_nothing_had_been(pause: int, context: Any) -> None:
    config = PLAIN.model_copy(update={"context": context})
    turns = [bash(f"echo {n} >> notes/n; cat notes/n") for n in range(4)] + [SUBMIT]
    if isinstance(context, Summarize):
        turns = [
            bash("echo 0 >> notes/n"),
            Message("assistant", "s"),
            bash("echo 1 >> notes/n"),
            Message("assistant", "z"),
            SUBMIT,
        ]
    whole = play(harness(config), Script(*turns))
    states: list[EpisodeState] = []

    def pause_here(state: EpisodeState) -> bool:
        states.append(state)
        return len(states) == pause

    first = Script(*turns)
    paused = play(harness(config), first, before_turn=pause_here)
    assert (paused.stop_reason, paused.budgets_used["turns"]) == (StopReason.PAUSED, pause)
    state = EpisodeState.from_bytes(states[-1].to_bytes())
    assert state == states[-1]
    second = Script(*turns)
    second.prompts = list(first.prompts)
    resumed = play(harness(config), second, resume=state)
    assert (resumed.answer, resumed.stop_reason) == (whole.answer, whole.stop_reason)
    assert [branch.tokens()[0].tolist() for branch in resumed.branches] == [
        branch.tokens()[0].tolist() for branch in whole.branches
    ]
    assert resumed.messages == whole.messages
    assert resumed.metrics["cuts"] == whole.metrics["cuts"]


def test_what_cannot_be_resumed_is_refused() -> None:
    with pytest.raises(BrokenState, match="no episode"):
        EpisodeState.from_bytes(b"nonsense")
    states: list[EpisodeState] = []
    play(harness(), Script(bash("true"), SUBMIT), before_turn=lambda state: bool(states.append(state)))
    other = dataclasses.replace(TASK, id="t/1")
    episode = play(harness(), Script(SUBMIT), other, resume=states[0])
    assert episode.stop_reason is StopReason.INFRA_ERROR
    assert "is of task t/0" in str(episode.score)


def test_an_environment_without_snapshots_says_so() -> None:
    class Talk(HarnessEnv):
        snapshot = Env.snapshot

    with pytest.raises(RuntimeError, match="Talk cannot be paused"):
        play(Talk(Agentic(lambda task: SPEC), PLAIN), Script(bash("true")), before_turn=lambda state: False)


# --------------------------------------------------------------------------------------------------- sub-agents

DELEGATING = PLAIN.model_copy(update={"sub_agents": 1})
WORK = [
    bash("echo before > notes/n"),
    call("delegate", work="count the lines of notes/a.txt"),
    bash("wc -l < notes/a.txt"),
    Message("assistant", "three lines"),
    bash("echo after >> notes/n"),
    SUBMIT,
]


def test_a_sub_agent_has_a_branch_of_its_own_and_its_report_continues_the_branch_that_waited() -> None:
    policy = Script(*WORK)
    episode = play(harness(DELEGATING), policy)
    assert [(branch.id, branch.parent, len(branch.turns)) for branch in episode.branches] == [
        ("e/0", None, 4),
        ("e/1", "e/0", 2),
    ]
    assert "count the lines" in policy.prompts[2]
    assert "echo before" not in policy.prompts[2]
    assert policy.prompts[4].startswith(policy.prompts[1])
    assert "three lines" in policy.prompts[4]
    assert "wc -l" not in policy.prompts[4]
    for branch, turns in zip(episode.branches, ([1, 2, 5, 6], [3, 4]), strict=True):
        _, mask, logprobs = branch.tokens()
        assert set(logprobs[mask].tolist()) == {-float(number) for number in turns}
    assert (files_from(episode.answer) or {})["notes/n"] == "before\nafter\n"
    assert episode.metrics["sub_agents"] == 1


def test_sub_agents_are_few_do_not_hand_in_and_begin_none_of_their_own() -> None:
    delegate = call("delegate", work="x")
    both = Message("assistant", "", tool_calls=(*delegate.tool_calls, *bash("true").tool_calls))
    policy = Script(both, delegate, delegate, SUBMIT, Message("assistant", "done"), delegate, SUBMIT)
    episode = play(harness(DELEGATING), policy)
    answers = said(episode)
    assert "must be the only call of its turn" in answers[0]
    assert answers[2].startswith("error: there is no tool 'delegate' here")
    assert answers[3].startswith("error: there is no tool 'submit' here; there are bash, read_file, write_file, edit")
    assert answers[4] == "done"
    assert "0 sub-agents are left" in answers[5]
    assert episode.stop_reason is StopReason.COMPLETED
    without = play(harness(), Script(delegate, SUBMIT))
    assert said(without)[0].startswith("error: there is no tool 'delegate' here")


@pytest.mark.parametrize("pause", [2, 3, 4])
def test_an_episode_can_be_paused_inside_a_sub_agent(pause: int) -> None:
    whole = play(harness(DELEGATING), Script(*WORK))
    states: list[EpisodeState] = []

    def pause_here(state: EpisodeState) -> bool:
        states.append(state)
        return len(states) == pause

    first, second = Script(*WORK), Script(*WORK)
    play(harness(DELEGATING), first, before_turn=pause_here)
    second.prompts = list(first.prompts)
    resumed = play(harness(DELEGATING), second, resume=EpisodeState.from_bytes(states[-1].to_bytes()))
    assert [branch.tokens()[0].tolist() for branch in resumed.branches] == [
        branch.tokens()[0].tolist() for branch in whole.branches
    ]
    assert (resumed.answer, resumed.messages) == (whole.answer, whole.messages)
