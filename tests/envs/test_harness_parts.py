"""Memory, skills, and harnesses that vary from group to group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from k3rl.config import ConfigError, load
from k3rl.envs import Environment, EpisodeContext, make
from k3rl.envs.coding.repair import coding_repair
from k3rl.envs.episode_state import EpisodeState
from k3rl.envs.harness import (
    Agentic,
    Discard,
    HarnessConfig,
    HarnessEnv,
    HarnessMixture,
    HarnessVariant,
    WorkspaceSpec,
    harness_of,
    read_skills,
)
from k3rl.envs.recording import TurnSettings
from k3rl.envs.rollout import run_episode
from k3rl.envs.sandbox import provider_named
from k3rl.pipelines.configs import RLConfig
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Budgets, Completion, Episode, Message, SamplingParams, StopReason, Task, ToolCall

TOKENIZER = Tokenizer.builtin()
TASK = Task("t/0", "t", (Message("user", "work"),), "f", budgets=Budgets(turns=20))
SPEC = WorkspaceSpec({"a.txt": "one\n"}, ("*.txt",))


def call(tool: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(tool, arguments),))


class Script:
    def __init__(self, *turns: Message) -> None:
        self.turns = list(turns)
        self.prompts: list[str] = []

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.prompts.append(TOKENIZER.decode(list(prompt_ids)))
        message = self.turns[len(self.prompts) - 1]
        rendered = xtml.render_trained([Message("user", "-"), message], thinking=False, add_generation_prompt=False)
        ids = tuple(TOKENIZER.encode_segments([one for one, own in zip(*rendered, strict=True) if own]))
        return Completion(ids, (-1.0,) * len(ids), StopReason.STOP, weight_version=1, first_version=1)


def play(config: Any, policy: Script, group: str = "", **options: Any) -> Episode:
    context = EpisodeContext(sandboxes=provider_named("bwrap"), group=group)
    env = HarnessEnv(Agentic(lambda task: SPEC), config)
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=4000))
    return asyncio.run(run_episode(env, TASK, policy, settings, episode_id="e", context=context, **options))


def told(episode: Episode) -> list[str]:
    return [message.content for message in episode.messages if message.role == "tool"]


def test_a_memory_outlives_the_conversation_and_a_pause() -> None:
    config = HarnessConfig(declare_tools=False, show_budget=False, memory=2, context=Discard(at_tokens=1))
    first = Script(call("memory_write", key="plan", text="do it twice"))
    states: list[bytes] = []
    play(config, first, before_turn=lambda state: states.append(state.to_bytes()) or True)
    second = Script(
        call("memory_read"),
        call("memory_read", key="plan"),
        call("memory_write", key="b", text="x"),
        call("memory_write", key="c", text="x"),
        call("memory_write", key="b", text=""),
        call("memory_read", key="b"),
        call("submit"),
    )
    keeping = HarnessConfig(declare_tools=False, show_budget=False, memory=2)  # so that what the tools say is seen
    episode = play(keeping, second, resume=EpisodeState.from_bytes(states[0]))
    assert "Your memory holds: plan." in second.prompts[0]
    assert told(episode) == [
        "plan",
        "do it twice",
        "kept",
        "error: the memory is full (2 notes); write empty text to one to forget it",
        "forgotten",
        "error: nothing is kept as 'b'; there is plan",
    ]
    assert episode.stop_reason is StopReason.COMPLETED


@pytest.fixture
def skills(tmp_path: Path) -> Path:
    (tmp_path / "profiling").mkdir()
    (tmp_path / "profiling" / "SKILL.md").write_text(
        '---\nname: profile\ndescription: "find what is slow"\n---\n# Steps\nUse a clock.\n'
    )
    (tmp_path / "git.md").write_text("# Commit often\nSmall steps.\n")
    return tmp_path


def test_skills_are_listed_first_and_shown_on_demand(skills: Path) -> None:
    config = HarnessConfig(show_budget=False, skills=str(skills))
    policy = Script(call("load_skill", name="profile"), call("load_skill", name="knitting"), call("submit"))
    episode = play(config, policy)
    assert "- git: Commit often\n- profile: find what is slow" in policy.prompts[0]
    assert "Use a clock" not in policy.prompts[0]
    assert '"load_skill"' in policy.prompts[0]
    assert told(episode) == ["# Steps\nUse a clock.", "error: there is no skill 'knitting'; there are git, profile"]


def test_a_folder_without_skills_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for folder, why in ((tmp_path / "absent", "is no folder of skills"), (tmp_path, "holds no skill")):
        with pytest.raises(ConfigError, match=why):
            coding_repair(harness={"skills": str(folder)})
    (tmp_path / "a.md").write_text("---\nname: same\n---\nx")
    (tmp_path / "b.md").write_text("---\nname: same\n---\ny")
    with pytest.raises(ConfigError, match="another skill named 'same'"):
        read_skills(tmp_path)


def test_a_group_shares_its_harness_and_groups_differ_by_share() -> None:
    mixture = HarnessMixture(
        variants=(
            HarnessVariant(share=3, harness=HarnessConfig(system="Harness A.", declare_tools=False)),
            HarnessVariant(share=1, harness=HarnessConfig(system="Harness B.", declare_tools=False, tools=("submit",))),
        )
    )
    picks = Counter(mixture.pick(f"rl-{step}-0") for step in range(2000))
    assert abs(picks[1] / 2000 - 0.25) < 0.03
    assert mixture.pick("rl-7-0") == HarnessMixture(variants=mixture.variants).pick("rl-7-0")
    assert any(mixture.pick(f"g{n}") != mixture.replace(seed=1).pick(f"g{n}") for n in range(50))
    group = next(f"g{n}" for n in range(50) if mixture.pick(f"g{n}") == 1)
    for _ in range(2):
        policy = Script(call("bash", command="ls"), call("submit"))
        episode = play(mixture, policy, group)
        assert "Harness B." in policy.prompts[0]
        assert told(episode)[0].startswith("error: there is no tool 'bash'")
        assert episode.metrics["harness_variant"] == 1.0


def test_a_mixture_is_written_in_a_config_file_as_its_variants() -> None:
    made = harness_of({"variants": [{"share": 2, "harness": {"memory": 8}}, {"harness": {"sub_agents": 1}}]})
    assert isinstance(made, HarnessMixture)
    assert [one.share for one in made.variants] == [2, 1]
    with pytest.raises(ConfigError, match="variants"):
        harness_of({"variants": []})
    with pytest.raises(ConfigError, match="memroy"):
        harness_of({"memroy": 3})


RUN = """
[env]
name = "coding-repair"

[env.args.harness]
seed = 3

[[env.args.harness.variants]]
share = 2
harness = { system = "Harness A.", show_budget = false, context = { type = "keep_last", n = 1 } }

[[env.args.harness.variants]]
harness = { system = "Harness B.", tools = ["bash", "submit"], memory = 4, sub_agents = 1 }
"""


@pytest.mark.parametrize("name", ["coding-repair", "kernel"])
def test_the_file_of_a_run_varies_tools_prompt_context_and_parts_by_group(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.replace("coding-repair", name))
    env = load(RLConfig(), files=[file]).env
    environment = make(env.name, **env.args)
    task = environment.source.get("train", 0)
    seen: dict[str, set[tuple[str, ...]]] = {}
    for group in (f"rl-{step}-0" for step in range(8)):
        begun = [asyncio.run(begin(environment, task, group)) for _ in range(2)]
        assert begun[0] == begun[1], "episodes of one group act in the same harness"
        seen.setdefault(begun[0][0].splitlines()[0], set()).add(begun[0][1])
    (tools_a,), (tools_b,) = seen["Harness A."], seen["Harness B."]
    assert set(tools_a) >= {"bash", "read_file", "write_file", "edit", "submit"}
    assert not {"delegate", "memory_write"} & set(tools_a)
    assert set(tools_b) >= {"bash", "submit", "delegate", "memory_read", "memory_write"}
    assert not {"read_file", "edit"} & set(tools_b)


async def begin(environment: Environment, task: Task, group: str) -> tuple[str, tuple[str, ...]]:
    """(system message, names of tools) of an episode of this group."""
    env = environment.make_env()
    try:
        observation = await env.reset(task.public(), EpisodeContext(group=group, sandboxes=provider_named("bwrap")))
    finally:
        await env.close()
    return str(observation.messages[0].content), tuple(tool["function"]["name"] for tool in observation.tools)
