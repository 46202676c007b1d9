"""Episodes of several turns on a real engine: each turn computes its own tokens, where the run keeps conversations."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from k3rl.actors import ClusterConfig, EnvironmentWorker, EpisodeJob, RolloutActor, TaskRef
from k3rl.actors.cluster import EngineConfig
from k3rl.checkpoint import save_checkpoint
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.pipelines import EnvConfig
from k3rl.tokens import Tokenizer
from k3rl.types import Constraint, SamplingParams

TURNS = 4
MODULE = f"""
from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        return Task(f"talk/{{index}}", "talk", (Message("system", "be brief, " * 20), Message("user", str(index))), "f")


class Talk(Env):
    async def reset(self, task, context):
        self.turn = 0
        return Observation(task.messages)

    async def step(self, action):
        self.turn += 1
        if self.turn == {TURNS}:
            return StepResult(done=True, answer="done")
        return StepResult(Observation((Message("user", "and then"),)))


def good(answer):
    return 1.0


def environment():
    return Environment("talk", "several turns", Source(), Talk, Rubric.of(good), lambda task: "fine")
"""


class Speaking(RolloutActor):
    """Random weights say nothing that is a message; these are made to."""

    def begin(self, requests):
        said = Constraint("regex", "[a-c]{1,3}", turn="response")
        return super().begin([(ids, replace(params, constraint=said), *rest) for ids, params, *rest in requests])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talk")
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
    model.init_weights(0)
    save_checkpoint(model, folder / "model", tokenizer=Tokenizer.builtin())
    (folder / "talk.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def played(folder, in_process, play):
    """Episodes, the engine's counts and the bytes of requests, by whether conversations are kept."""

    async def run(kept_mb):
        actor = Speaking(ClusterConfig(engine=EngineConfig(prefix_cache_mb=kept_mb)), max_running=8)
        await actor.load(str(folder / "model"))
        handle = in_process(actor)
        worker = EnvironmentWorker(EnvConfig(name=f"{folder}/talk.py"), handle)
        jobs = [EpisodeJob(f"e{n}", f"g{n // 2}", TaskRef("train", n // 2, 0), n) for n in range(4)]
        sampling = SamplingParams(max_tokens=30, return_routes=True)
        episodes = await play(worker, jobs, sampling)
        await actor.cancel("test")  # as when its worker is gone
        await actor._between_steps(lambda engine: None)
        return episodes, await actor.take_counts(), sum(map(len, handle.sent)), actor

    return {kept: asyncio.run(run(kept)) for kept in (64, 0)} | {"again": asyncio.run(run(64))}


def new_tokens(episodes) -> int:
    """Prompt tokens of all turns that no engine had computed before, prompts of a group once."""
    found = 0
    for place, episode in enumerate(episodes):
        (branch,) = episode.branches
        known = 0
        for turn in branch.turns:
            found += len(turn.prompt_ids) - known if known or place % 2 == 0 else 0
            known = len(turn.prompt_ids) + len(turn.sampled_ids) - 1
    return found


def test_turns_compute_their_new_tokens_unless_the_key_says_otherwise(played):
    episodes, counts, _, _ = played[64]
    assert [len(episode.branches[0].turns) for episode in episodes] == [TURNS] * 4
    shared = 128  # one block of the system prompt, which two groups have in common
    assert counts["prompt_tokens_computed"] == new_tokens(episodes) - shared
    plain, computed, _, _ = played[0]
    whole = sum(len(t.prompt_ids) for e in plain[:1] + plain[2:3] for t in e.branches[0].turns)
    assert computed["prompt_tokens_computed"] > whole
    assert computed["prompt_tokens_cached"] == 0
    assert counts["prompt_tokens_cached"] > 2 * counts["prompt_tokens_computed"]


def test_equal_seeds_give_equal_bits_with_sessions(played):
    for one, other in zip(played[64][0], played["again"][0], strict=True):
        for mine, others in zip(one.branches[0].turns, other.branches[0].turns, strict=True):
            assert (mine.sampled_ids, mine.logprobs) == (others.sampled_ids, others.logprobs)
            assert (mine.routes == others.routes).all()


def test_turns_have_the_routes_of_all_their_tokens(played):
    for kept in (64, 0):
        for episode in played[kept][0]:
            turns = episode.branches[0].turns
            routed = len(turns[-1].prompt_ids) + len(turns[-1].sampled_ids) - 1
            assert sum(len(turn.routes) for turn in turns) == routed, "each once"


def test_what_episodes_had_is_let_go_with_their_worker(played):
    actor = played[64][3]
    assert actor.engine.batch.prefix.num_sessions == 0
    cache = actor.engine.prefix_cache.tiers[0]
    cache.clear(keep_owned=True)
    assert (len(cache), cache.bytes) == (0, 0)
    assert actor._tokens._kept == {}
