"""A stand-in with the v1 interface of verifiers, as far as a run of one episode needs it.

Its agent is a chat loop over HTTP that streams, with one tool, as the harness of verifiers does.
"""

import asyncio
import contextlib
import json
import urllib.request
from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str = ""


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


class EnvConfig:
    model_fields = {"taskset": None, "agent": None}

    @classmethod
    def model_validate(cls, values):
        if values["agent"]["harness"]["id"] != "null":
            raise ValueError("unknown harness")
        return SimpleNamespace(**values)


class Env:
    pass


@dataclass
class Task:
    prompt: str
    answer: str


@dataclass
class Reward:
    score: float
    weight: float = 1.0

    @property
    def value(self):
        return self.score * self.weight


@dataclass
class Trace:
    rewards: dict
    metrics: dict = field(default_factory=dict)
    errors: tuple = ()
    agent: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(trainable=True))

    @property
    def reward(self):
        return sum(one.value for one in self.rewards.values() if one is not None)


class Taskset:
    bounded = True

    def __iter__(self):
        return iter([Task(f"What is 2 * {number}? Use `double`.", str(2 * number)) for number in range(3)])


DOUBLE = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "twice a number",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


def asked(url, messages):
    """The next message, from a stream of events."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [DOUBLE], "stream": True}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    said = {"role": "assistant", "content": ""}
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            said["content"] += delta.get("content") or ""
            if "tool_calls" in delta:
                said["tool_calls"] = [
                    {key: one[key] for key in ("id", "type", "function")} for one in delta["tool_calls"]
                ]
    return said


class SingleAgentEnv(Env):
    def __init__(self, config):
        self.config = config
        self.taskset = Taskset()

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        mode = self.config.taskset.get("mode", "")
        if mode == "raise":
            raise RuntimeError("the loop broke")
        messages = [{"role": "user", "content": task.prompt}]
        while True:
            said = await asyncio.to_thread(asked, context.client.base_url, list(messages))
            messages.append(said)
            if not said.get("tool_calls"):
                break
            for call in said["tool_calls"]:
                number = json.loads(call["function"]["arguments"])["number"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(2 * number)})
            if mode == "compact":
                messages = [{"role": "user", "content": f"Short: {messages[-1]['content']}. {task.prompt}"}]
        right = None if mode == "unscored" else Reward(float(said["content"] == task.answer), 2.0)
        errors = [SimpleNamespace(type="TaskError", message="scoring failed")] if mode == "error" else []
        return SimpleNamespace(ok=not errors, errors=errors, traces=[Trace({"right": right}, {"turns": len(messages)})])
