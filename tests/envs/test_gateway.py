"""The gateway: the same branches as the episode loop, exact tokens, budgets as HTTP errors, programs in sandboxes."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from k3rl.envs import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.envs.faults import EngineFailed
from k3rl.envs.gateway import Answer, GatewaySession, ProgramHarness, answer, run_program
from k3rl.envs.harness import WorkspaceSpec, files_from
from k3rl.envs.recording import NOT_GRADED, ContextOutgrown, TurnSettings
from k3rl.envs.rollout import gradable, run_episode
from k3rl.envs.sandbox import provider_named
from k3rl.serve import Gateway, GatewayServer
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Budgets, Completion, Episode, Failed, Message, SamplingParams, StopReason, Task, ToolCall

TOKENIZER = Tokenizer.builtin()
TASK = Task("t/0", "t", (Message("system", "be brief"), Message("user", "work")), "f", hidden={"answer": "secret"})
SETTINGS = TurnSettings(TOKENIZER, SamplingParams(max_tokens=4000, seed=5))
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}


def ids_of(message: Message) -> tuple[int, ...]:
    """What a policy samples for a turn, in a split of tokens that no tokenizer would choose: one byte at a time."""
    rendered = xtml.render_trained([Message("user", "-"), message], thinking=False, add_generation_prompt=False)
    ids: list[int] = []
    for segment, sampled in zip(*rendered, strict=True):
        if sampled:
            text = getattr(segment, "text", None)
            own = [segment] if text is None else [dataclasses.replace(segment, text=letter) for letter in text]
            ids += TOKENIZER.encode_segments(own)
    return tuple(ids)


class Script:
    """Says these turns, and remembers what it was asked. Logprobs and versions tell turns apart."""

    def __init__(self, *turns: Message, delay_s: float = 0.0) -> None:
        self.turns = turns
        self.delay_s = delay_s
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        number = len(self.asked)
        self.asked.append((tuple(prompt_ids), params))
        await asyncio.sleep(self.delay_s)
        whole = ids_of(self.turns[number % len(self.turns)])
        ids = whole[: params.max_tokens]
        stop = StopReason.STOP if ids == whole else StopReason.LENGTH
        return Completion(ids, (-1.0 - number,) * len(ids), stop, weight_version=number, first_version=number)


def session(policy: Any, budgets: Budgets | None = None) -> GatewaySession:
    return GatewaySession(TASK, policy, SETTINGS, budgets=budgets or Budgets())


async def ask(recording: GatewaySession, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    return await answer(recording, json.dumps({"model": "x", "messages": messages, **fields}).encode())


def said(given: Answer) -> dict[str, Any]:
    assert given.status == 200, given.body
    message: dict[str, Any] = given.body["choices"][0]["message"]
    return message


# ---------------------------------------------------------------------------------- the same branches as the loop's

WORDS = st.sampled_from(["yes", "no", "  two\nlines ", "naïve ☃", ""])
CALLS = st.lists(st.tuples(st.sampled_from(["run", "look"]), st.dictionaries(st.sampled_from("ab"), WORDS)), max_size=2)
TURNS = st.lists(
    st.tuples(WORDS, CALLS, st.sampled_from(["same", "same", "new", "child", "parent"]), WORDS), min_size=1, max_size=6
)


def message_of(words: str, calls: list[tuple[str, dict[str, str]]]) -> Message:
    return Message("assistant", words, tool_calls=tuple(ToolCall(name, given) for name, given in calls))


class Scripted(Env):
    """Answers as the script says; a child that has no parent to go back to goes on."""

    def __init__(self, turns: list[Any]) -> None:
        self.turns = iter(turns)
        self.depth = 1

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        return Observation(task.messages, (TOOL,))

    async def step(self, action: Action) -> StepResult:
        turn = next(self.turns, None)
        if turn is None:
            return StepResult(done=True, stop_reason=StopReason.COMPLETED, answer="done")
        _, _, branch, reply = turn
        branch = "same" if branch == "parent" and self.depth == 1 else branch
        self.depth += {"child": 1, "parent": -1}.get(branch, 0)
        return StepResult(Observation(told(branch, action.message, reply), (TOOL,), branch=branch))


def told(branch: str, message: Message, reply: str) -> tuple[Message, ...]:
    """What follows a turn: a conversation that begins (its own words), or results of the calls and a word."""
    if branch in ("new", "child"):
        return (Message("user", f"begin {reply}"),)
    if branch == "parent":
        return (Message("user", f"the sub-agent says {reply}"),)
    results = tuple(Message("tool", f"{call.name}: {reply}", name=call.name) for call in message.tool_calls)
    return results or (Message("user", reply),)


async def as_program(recording: GatewaySession, turns: list[Any]) -> None:
    """The same episode as a program would do it: whole conversations, in OpenAI form, sent again and again."""
    stack = [[{"role": one.role, "content": one.content} for one in TASK.messages]]
    for turn in [*turns, None]:
        heard = said(await ask(recording, stack[-1], tools=[TOOL], temperature=0.3))
        stack[-1].append(heard)
        if turn is None:
            return
        _, _, branch, reply = turn
        branch = "same" if branch == "parent" and len(stack) == 1 else branch
        calls = heard.get("tool_calls", [])
        parsed = Message("assistant", "", tool_calls=tuple(ToolCall(c["function"]["name"], {}) for c in calls))
        new = [{"role": one.role, "content": one.content} for one in told(branch, parsed, reply)]
        for row, call in zip(new, calls if branch == "same" else [], strict=False):
            row["tool_call_id"] = call["id"]
        if branch == "parent":
            stack.pop()
        elif branch == "child":
            stack.append([])
        elif branch == "new":
            stack[-1] = []
        stack[-1] += new


def timeless(episode: Episode) -> Any:
    branches = [
        (branch.id, branch.parent, [dataclasses.replace(turn, model_s=0.0, env_s=0.0) for turn in branch.turns])
        for branch in episode.branches
    ]
    return branches, episode.budgets_used["tokens"], episode.budgets_used["turns"], episode.stop_reason


@settings(max_examples=30)
@given(TURNS, WORDS)
def test_loop_and_gateway_give_the_same_branches(turns: list[Any], last: str) -> None:
    messages = [message_of(words, calls) for words, calls, _, _ in turns] + [message_of(last, [])]

    async def both() -> tuple[Episode, Episode]:
        task = dataclasses.replace(TASK, tools=(TOOL,))
        loop = await run_episode(Scripted(turns), task, Script(*messages), SETTINGS, episode_id="e")
        recording = session(Script(*messages))
        await as_program(recording, turns)
        return loop, recording.episode("e", StopReason.COMPLETED)

    loop, gateway = asyncio.run(both())
    assert timeless(gateway) == timeless(loop)
    for branch in gateway.branches:
        assert branch.tokens()[1].sum() == sum(len(turn.sampled_ids) for turn in branch.turns)


# ----------------------------------------------------------------------------------------------- what programs do

USER = [{"role": "user", "content": "hello"}]


def test_an_echo_that_was_changed_begins_a_branch_and_sampled_words_keep_their_ids() -> None:
    async def play() -> Episode:
        recording = session(Script(*(Message("assistant", word) for word in ("return", "two", "three"))))
        first = said(await ask(recording, USER))
        changed = [*USER, {"role": "assistant", "content": "I never said this"}, {"role": "user", "content": "go on"}]
        second = said(await ask(recording, changed))
        shortened = [{"role": "user", "content": "in short"}, first, {"role": "user", "content": "then"}, second]
        await ask(recording, [*shortened, {"role": "user", "content": "now"}])
        return recording.episode("e", StopReason.COMPLETED)

    episode = asyncio.run(play())
    assert [branch.parent for branch in episode.branches] == [None, "e/0", "e/1"]
    prompt = episode.branches[2].turns[0].prompt_ids
    assert contains(prompt, ids_of(Message("assistant", "return")))
    assert contains(prompt, ids_of(Message("assistant", "two")))
    assert not contains(prompt, tuple(TOKENIZER.encode("return")))


def contains(ids: Sequence[int], piece: tuple[int, ...]) -> bool:
    return any(tuple(ids[n : n + len(piece)]) == piece for n in range(len(ids) - len(piece) + 1))


def test_parallel_calls_from_one_point_are_branches_that_share_its_tokens() -> None:
    async def play() -> Episode:
        recording = session(Script(*(Message("assistant", word) for word in "abcd"), delay_s=0.01))
        first = said(await ask(recording, USER))
        asks = [[*USER, first, {"role": "user", "content": word}] for word in ("left", "right", "up")]
        await asyncio.gather(*(ask(recording, one) for one in asks))
        return recording.episode("e", StopReason.COMPLETED)

    episode = asyncio.run(play())
    assert [branch.parent for branch in episode.branches] == [None, "e/0", "e/0"]
    root = episode.branches[0].turns[0]
    shared = (*root.prompt_ids, *root.sampled_ids)
    for turn in (episode.branches[0].turns[1], episode.branches[1].turns[0], episode.branches[2].turns[0]):
        assert turn.prompt_ids[: len(shared)] == shared
    sampled = sum(int(branch.tokens()[1].sum()) for branch in episode.branches)
    assert sampled == episode.budgets_used["tokens"]  # nothing is trained twice


@pytest.mark.parametrize(
    ("budgets", "reason"),
    [
        (Budgets(turns=1), StopReason.MAX_TURNS),
        (Budgets(tokens=12), StopReason.MAX_TOKENS),
        (Budgets(tool_calls=0), StopReason.MAX_TOOL_CALLS),
        (Budgets(wall_s=0.0), StopReason.WALL_TIMEOUT),
    ],
)
def test_a_budget_that_is_used_up_refuses_with_403(budgets: Budgets, reason: StopReason) -> None:
    async def play() -> tuple[Answer, GatewaySession]:
        recording = session(Script(message_of("x" * 40, [("run", {})])), budgets)
        await ask(recording, USER)
        return await ask(recording, USER), recording

    given, recording = asyncio.run(play())
    assert (given.status, given.body["error"]["code"]) == (403, "budget_exhausted")
    assert recording.stop_reason is reason
    assert recording.episode("e", reason).budgets_used["tokens"] <= (budgets.tokens or 10_000)


def test_parallel_requests_never_overrun_the_token_budget() -> None:
    async def play() -> Episode:
        recording = session(Script(Message("assistant", "x" * 40), delay_s=0.01), Budgets(tokens=150))
        await asyncio.gather(*(ask(recording, [{"role": "user", "content": str(n)}]) for n in range(6)))
        return recording.episode("e", StopReason.MAX_TOKENS)

    assert asyncio.run(play()).budgets_used["tokens"] == 150


def test_what_follows_a_cut_turn_is_refused_and_not_tokenized_again() -> None:
    async def play() -> tuple[Answer, Answer, Answer]:
        recording = session(Script(Message("assistant", "word " * 20)))
        cut = await ask(recording, USER, max_tokens=7)
        heard = [said(cut), {"role": "user", "content": "go on"}]
        return cut, await ask(recording, [*USER, *heard]), await ask(recording, [*USER, *USER, *heard])

    cut, extended, elsewhere = asyncio.run(play())
    assert cut.body["choices"][0]["finish_reason"] == "length"
    assert [one.body["error"]["code"] for one in (extended, elsewhere)] == ["turn_cut", "turn_cut"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": ["a"]}',
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
        b'{"messages": [{"role": "system", "content": "x", "tools": [{}]}]}',
    ],
)
def test_what_a_record_has_no_room_for_is_a_400(body: bytes) -> None:
    assert asyncio.run(answer(session(Script(Message("assistant", "x"))), body)).status == 400


def test_an_image_is_one_placeholder_and_goes_along_with_every_later_prompt() -> None:
    picture = io.BytesIO()
    Image.new("RGB", (28, 28), (200, 30, 30)).save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    look = {"role": "user", "content": parts}

    class Sees(Script):
        shown: list[int] = []

        async def complete(self, prompt_ids: Any, params: Any, images: Any = ()) -> Completion:
            self.shown.append(len(images))
            return await super().complete(prompt_ids, params)

    async def play() -> tuple[Episode, Answer]:
        recording = session(Sees(Message("assistant", "red")))
        first = said(await ask(recording, [look]))
        await ask(recording, [look, first, look])
        elsewhere = {"type": "image_url", "image_url": {"url": "http://example.invalid/a.png"}}
        return recording.episode("e", StopReason.COMPLETED), await ask(
            recording, [{"role": "user", "content": [elsewhere]}]
        )

    episode, refused = asyncio.run(play())
    [branch] = episode.branches
    assert Sees.shown == [1, 2]
    assert [image.data for image in branch.images] == [picture.getvalue()] * 2
    pad = TOKENIZER.special("media_pad")
    assert [turn.prompt_ids.count(pad) for turn in branch.turns] == [1, 2]
    assert refused.status == 400


# ------------------------------------------------------------------------------------------------------- over HTTP


async def test_an_openai_client_talks_to_a_session_and_a_closed_one_is_gone() -> None:
    import openai

    gateway = Gateway()
    recording = session(Script(message_of("", [("run", {"code": "1"})]), Message("assistant", "done")))
    token = gateway.open(recording)
    async with (
        GatewayServer(gateway) as server,
        openai.AsyncOpenAI(base_url=server.url(token), api_key="any", max_retries=0) as client,
    ):
        assert (await client.models.list()).data[0].id == "policy"
        first = (await client.chat.completions.create(model="m", messages=USER)).choices[0]  # type: ignore[arg-type]
        assert first.finish_reason == "tool_calls"
        assert first.message.tool_calls
        result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "ok"}
        history: Any = [*USER, first.message.model_dump(exclude_none=True), result]
        stream = await client.chat.completions.create(model="m", messages=history, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "done"
        gateway.close(token)
        with pytest.raises(openai.APIStatusError) as closed:
            await client.chat.completions.create(model="m", messages=history)
        assert closed.value.status_code == 410
        gateway.forget(token)
        with pytest.raises(openai.NotFoundError):
            await client.models.list()
    [branch] = recording.episode("e", StopReason.COMPLETED).branches
    assert len(branch.turns) == 2


# ------------------------------------------------------------------------------------------------- whole programs

AGENT = """
import json, os, sys, urllib.error, urllib.request
task = json.loads(os.environ["K3RL_TASK"])
assert "secret" not in json.dumps(task)
messages = [{"role": one["role"], "content": one["content"]} for one in task["messages"]]
def ask():
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
for _ in range(TURNS):
    messages.append(ask())
    open("said.txt", "a").write(messages[-1]["content"] + "\\n")
    messages.append({"role": "user", "content": "more"})
END
"""


def program(turns: int, end: str = "") -> ProgramHarness:
    text = AGENT.replace("TURNS", str(turns)).replace("END", end)
    return ProgramHarness(
        lambda task: ["python3", "agent.py"], lambda task: WorkspaceSpec({"agent.py": text}, ("said.txt",))
    )


def run(harness: ProgramHarness, policy: Any, budgets: Budgets | None = None, provider: str = "bwrap") -> Episode:
    context = EpisodeContext(budgets=budgets or Budgets(), sandboxes=provider_named(provider))
    return asyncio.run(run_program(harness, TASK, policy, SETTINGS, episode_id="e", context=context))


@pytest.mark.filterwarnings("ignore:the `subprocess` sandbox")
@pytest.mark.parametrize("provider", ["bwrap", "subprocess"])
def test_a_program_in_a_sandbox_without_a_network_is_an_episode(provider: str) -> None:
    episode = run(program(3), Script(*(Message("assistant", word) for word in ("a", "b", "c"))), provider=provider)
    assert episode.score == NOT_GRADED
    assert episode.stop_reason is StopReason.COMPLETED
    [branch] = episode.branches
    assert [turn.sampled_ids for turn in branch.turns] == [ids_of(Message("assistant", word)) for word in "abc"]
    assert files_from(episode.answer) == {"said.txt": "a\nb\nc\n"}


def test_how_a_program_ends_is_typed() -> None:
    word = Script(Message("assistant", "a"))
    assert run(program(3), word, Budgets(turns=2)).stop_reason is StopReason.MAX_TURNS
    late = run(program(1, "import time; time.sleep(60)"), word, Budgets(wall_s=8.0))
    assert (late.stop_reason, files_from(late.answer)) == (StopReason.WALL_TIMEOUT, {"said.txt": "a\n"})
    crashed = run(program(1, "raise SystemExit('no idea')"), word)
    assert (crashed.stop_reason, crashed.score) == (StopReason.PROGRAM_FAILED, NOT_GRADED)
    assert (gradable(crashed), files_from(crashed.answer)) == (True, {"said.txt": "a\n"})
    broken = run(program(0, "raise SystemExit('no idea')"), word)
    assert broken.stop_reason is StopReason.INFRA_ERROR, "the policy had no part in it"
    assert isinstance(broken.score, Failed)
    assert "status 1: no idea" in broken.score.reason

    class Gone(Script):
        async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            raise ConnectionError("engine gone")

    with pytest.raises(EngineFailed, match="engine gone"):
        run(program(1), Gone())


class Outgrown(Script):
    """Has no room after so many turns."""

    room = 0

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if not self.room:
            raise ContextOutgrown("no room")
        self.room -= 1
        return await super().complete(prompt_ids, params)


def test_a_program_whose_conversation_outgrows_the_policy_is_told_and_keeps_what_it_did() -> None:
    policy = Outgrown(Message("assistant", "a"))
    policy.room = 1
    episode = run(program(2), policy)
    assert (episode.stop_reason, episode.score) == (StopReason.CONTEXT_OVERFLOW, NOT_GRADED)
    assert files_from(episode.answer) == {"said.txt": "a\n"}
    with pytest.raises(EngineFailed, match="no room"):
        run(program(2), policy)
