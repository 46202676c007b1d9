"""The environment worker runs agent programs as it runs environments: in lockstep, each through its own session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from k3rl.actors import AnswerStreams, EnvironmentWorker, EpisodeJob, TaskRef
from k3rl.envs.harness import files_from
from k3rl.pipelines import EnvConfig
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Completion, Failed, FailureKind, SamplingParams, StopReason

MODULE = '''
from k3rl.envs import Environment, Message, Rubric, Task
from k3rl.envs.coding.loaders.rows import OneAnswer
from k3rl.envs.gateway import ProgramHarness
from k3rl.envs.harness import WorkspaceSpec

AGENT = """
import concurrent.futures, json, os, sys, urllib.request
number = json.loads(os.environ["K3RL_TASK"])["data"]["number"]
if number == 2:
    sys.exit("not today")
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body)))
    return reply["choices"][0]["message"]["content"]
with concurrent.futures.ThreadPoolExecutor() as pool:
    heard = list(pool.map(ask, [f"{number}/{n}" for n in range(1 + number)]))
open("heard.txt", "w").write(" ".join(heard))
"""


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        return Task(f"p/{index}", "programs", (Message("user", "go"),), "f", data={"number": index})


def good(answer):
    return 1.0


def environment():
    return Environment(
        name="programs",
        description="agent programs",
        source=Source(),
        make_env=OneAnswer,
        grader=Rubric.of(good),
        oracle=lambda task: "",
        make_harness=lambda: ProgramHarness(
            lambda task: ["python3", "agent.py"], lambda task: WorkspaceSpec({"agent.py": AGENT}, ("heard.txt",))
        ),
    )
'''


class Rollout(AnswerStreams):
    """Stands where a rollout actor stands: echoes the last word of each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Tokenizer.builtin()

    def begin(self, requests: list[Any]) -> list[asyncio.Future[Completion]]:
        futures = [asyncio.get_running_loop().create_future() for _ in requests]
        for future, (ids, _) in zip(futures, requests, strict=True):
            future.set_result(self._complete(ids))
        return futures

    def _complete(self, prompt: list[int]) -> Completion:
        text = self.tokenizer.decode(prompt, skip_special=True).split('role="user"')[1].split("message")[0]
        message = {"role": "assistant", "content": text}
        whole = xtml.render([message], thinking=False, add_generation_prompt=False)
        ids = tuple(self.tokenizer.encode_segments(whole[len(xtml.render([], thinking=False)) :]))
        return Completion(ids, (-0.5,) * len(ids), StopReason.STOP, 1, 1)


def test_programs_wait_for_each_other_and_one_that_fails_has_no_reward(tmp_path: Path, in_process, play) -> None:
    (tmp_path / "programs.py").write_text(MODULE)
    rollout = in_process(Rollout())
    worker = EnvironmentWorker(EnvConfig(name=f"{tmp_path}/programs.py"), rollout)
    jobs = [EpisodeJob(f"e{n}", "g", TaskRef("train", n, 0), n) for n in range(3)]
    zero, one, two = asyncio.run(play(worker, jobs, SamplingParams(max_tokens=64)))
    assert files_from(zero.answer) == {"heard.txt": "0/0"}
    assert files_from(one.answer) == {"heard.txt": "1/0 1/1"}
    assert [len(episode.branches) for episode in (zero, one)] == [1, 2]
    assert sum(rollout.batches) == 3
    assert isinstance(two.score, Failed)
    assert two.score.kind is FailureKind.RAISED
    assert "not today" in two.score.reason
