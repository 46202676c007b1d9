"""Grading in C: what honest kernels are worth, who is to blame for a failure; and an agent with its tools."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

import pytest

from k3rl.config import MissingResource
from k3rl.envs import EpisodeContext, make
from k3rl.envs.harness import HarnessConfig
from k3rl.envs.kernel import KernelLadder, KernelRubric, driver, operators, toolchain
from k3rl.envs.kernel.source import files_of
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import run_episode
from k3rl.envs.sandbox import provider_named
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Completion, Failed, Invalid, Message, SamplingParams, Scored, StopReason, ToolCall

tricks = import_module("k3rl.envs.kernel.hacks")
FAMILY = "softmax"
OPERATOR = operators.BY_FAMILY[FAMILY]
TOKENIZER = Tokenizer.builtin()
# In float64, and every exponential twice.
SLOW = """
#include <math.h>
#include <stdint.h>
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    for (int64_t t = 0; t < dim[0]; t++) {
        const float *x = (const float *)in[0] + t * dim[1];
        float *y = (float *)out[0] + t * dim[1];
        double sum = 0.0;
        float top = x[0];
        for (int64_t i = 0; i < dim[1]; i++) top = x[i] > top ? x[i] : top;
        for (int64_t i = 0; i < dim[1]; i++) sum += exp((double)x[i] - top);
        for (int64_t i = 0; i < dim[1]; i++) y[i] = exp((double)x[i] - top) / sum;
    }
}
"""
# A shorter exponential: 2^n by the exponent bits, a polynomial of degree 5 for the rest.
FAST = """
#include <math.h>
#include <stdint.h>
static inline float power(float x) {
    x = fmaxf(x * 1.44269504f, -126.0f);
    float n = rintf(x), f = x - n, p = 0.0013333558f;
    p = p * f + 0.0096181291f;
    p = p * f + 0.0555041087f;
    p = p * f + 0.2402265070f;
    p = p * f + 0.6931471806f;
    union { float f; int32_t i; } u = {p * f + 1.0f};
    u.i += (int32_t)n * (1 << 23);
    return u.f;
}
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    int64_t n = dim[1];
    for (int64_t t = 0; t < dim[0]; t++) {
        const float *restrict x = (const float *)in[0] + t * n;
        float *restrict y = (float *)out[0] + t * n, top = x[0], sum = 0.0f;
        for (int64_t i = 0; i < n; i++) top = fmaxf(top, x[i]);
        for (int64_t i = 0; i < n; i++) {
            y[i] = power(x[i] - top);
            sum += y[i];
        }
        float scale = 1.0f / sum;
        for (int64_t i = 0; i < n; i++) y[i] *= scale;
    }
}
"""


def test_honest_kernels_are_worth_what_they_cost_and_the_same_each_time(grader, small_task) -> None:
    task = small_task(FAMILY)
    answers = [
        tricks.oracle(task),
        tricks.null(task),
        *(tricks.answer("kernel.c", text) for text in (SLOW, FAST, FAST)),
    ]
    expert, nothing, slow, fast, again = grader.score_batch([(task, answer) for answer in answers])
    assert expert.reward == 0.5
    assert (expert.parts["right"], expert.parts["cost_ratio"]) == (1.0, 1.0)
    assert nothing == Scored(0.0, {"right": 0.0})
    assert 0.02 < slow.reward < 0.3
    assert 0.5 < fast.reward < 1.0
    assert fast.parts["cost_ratio"] > 1.0 > fast.parts["floor_share"]
    # Counted instructions do not depend on the machine's load; wall time, only reported, does.
    assert (again.reward, again.parts["cost_ratio"]) == (fast.reward, fast.parts["cost_ratio"])


def test_a_count_below_the_floor_or_far_below_the_expert_is_not_paid(grader, small_task, monkeypatch) -> None:
    task = small_task(FAMILY)
    reward = import_module("k3rl.envs.kernel.reward")
    monkeypatch.setattr(reward, "QUARANTINE", 0.5)
    score = grader.score_batch([(task, tricks.oracle(task))])[0]
    assert isinstance(score, Invalid)
    assert score.hack == "quarantined"
    monkeypatch.setattr(type(OPERATOR), "floor", lambda self, dims: 1e9)
    score = grader.score_batch([(task, tricks.oracle(task))])[0]
    assert isinstance(score, Invalid)
    assert score.hack == "below_floor"


def test_where_the_expert_does_not_pass_either_the_machine_is_to_blame(small_task, monkeypatch) -> None:
    task = small_task(FAMILY)
    monkeypatch.setattr(toolchain, "RUN_S", 0.0001)
    judge = KernelRubric("bwrap")
    score = judge.score_batch([(task, tricks.oracle(task))])[0]
    judge.close()
    judge.close()
    assert isinstance(score, Failed)


def test_a_missing_tool_is_named_with_its_package(monkeypatch) -> None:
    with pytest.raises(MissingResource, match="apt-get install -y binutils gcc libc6-dev valgrind"):
        toolchain.check_tools("/nowhere")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(MissingResource, match="this one is riscv64"):
        toolchain.check_tools()


@pytest.mark.parametrize(
    ("answer", "files"),
    [
        ("int x;", {"kernel.c": "int x;"}),
        ("so:\n```c\nint x;\n```\nor\n```c\nint y;\n```", {"kernel.c": "int y;\n"}),
        ('{"files": {"kernel.c": "int x;"}}', {"kernel.c": "int x;"}),
        ('{"files": {"other.c": "int x;"}}', None),
        ('{"files": {"kernel.c": "\\ud800"}}', None),
        ("", None),
        (" " * 500_000, None),
    ],
)
def test_the_files_of_an_answer(answer: str, files: Any) -> None:
    assert files_of(answer, "kernel.c") == files


def test_a_plan_comes_back_as_it_was_sent_or_not_at_all() -> None:
    call = driver.call(OPERATOR, {"T": 2, "D": 33}, [1])
    sent = (0).to_bytes(8, "little") + call.arena
    back = driver.unpack([call], sent)
    assert back is not None
    assert (back[0].strayed, back[0].outputs["out"].shape) == (0, (2, 33))
    assert (back[0].outputs["out"] != back[0].outputs["out"]).all()
    changed = bytearray(sent)
    changed[8 + call.places["x"]] ^= 1
    changed[8] ^= 1
    again = driver.unpack([call], bytes(changed))
    assert again is not None
    assert again[0].strayed == 2
    assert driver.unpack([call], sent[:-1]) is None


# ----------------------------------------------------------------------------------------- an agent with its tools


class Script:
    """A policy that says these turns."""

    def __init__(self, *turns: Message) -> None:
        self.turns = iter(turns)

    async def complete(self, prompt_ids: Any, params: SamplingParams) -> Completion:
        message = next(self.turns)
        rendered = xtml.render_trained([Message("user", "-"), message], thinking=False, add_generation_prompt=False)
        own = [segment for segment, sampled in zip(*rendered, strict=True) if sampled]
        ids = tuple(TOKENIZER.encode_segments(own))
        return Completion(ids, (-1.0,) * len(ids), StopReason.STOP, weight_version=1, first_version=1)


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments),))


def test_a_scripted_agent_makes_a_kernel_faster_through_its_tools(grader) -> None:
    environment = make("kernel", harness=HarnessConfig(declare_tools=False))
    task = KernelLadder().get("train", 0, family=FAMILY)
    broken = FAST.replace("float scale = 1.0f / sum;", "float scale = 1.0f")
    script = Script(
        call("test"),
        call("write_file", path="kernel.c", content=broken),
        call("compile"),
        call("write_file", path="kernel.c", content=SLOW),
        call("submit"),
        call("write_file", path="kernel.c", content=FAST),
        call("test"),
        call("profile"),
        call("submit"),
        call("write_file", path="kernel.c", content=driver.EMPTY),
        call("submit"),
        Message("assistant", "done"),
        Message("assistant", "done"),
    )
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=8000))
    context = EpisodeContext(sandboxes=provider_named("bwrap"))
    work = run_episode(environment.make_env(), task, script, settings, episode_id="e", context=context)
    episode = asyncio.run(work)
    said = [str(message.content) for message in episode.messages if message.role == "tool"]
    assert "WRONG" in said[0]
    assert "error: expected" in said[2]
    assert said[4].startswith("valid, score 0.")
    assert "right" in said[6]
    assert "WRONG" not in said[6]
    assert "kernel.c:" in said[7]
    assert "best so far" in said[8]
    assert said[10].startswith("not valid, score 0; the best so far stays")
    assert episode.stop_reason is StopReason.COMPLETED
    score = grader.score_batch([(task, episode.answer)])[0]
    assert isinstance(score, Scored)
    assert 0.5 < score.reward < 1.0
