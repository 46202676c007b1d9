"""verifiers (its v1 interface) for the bridge: its own loop runs here, and asks this process for completions.

`Env.run_episode` plays one task with a harness of verifiers; the model endpoint that it is given is a small HTTP
server of this process, whose requests go over the bridge as turns of the policy. A request that extends the
conversation so far sends only what is new; any other begins a conversation of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bridge_server import number, package, seeded, version

MODEL = "policy"


class Serve:
    """A taskset, and one episode of one of its tasks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._vf = package("verifiers.v1", "verifiers")
        self._options = options
        self._env: Any = None
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._reply: queue.Queue[dict[str, Any]] | None = None
        self._said: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []

    def about(self) -> dict[str, str]:
        return {"package": "verifiers", "version": version("verifiers")}

    def length(self) -> int | None:
        taskset = self._environment().taskset
        return sum(1 for _ in taskset) if taskset.bounded else None

    def open(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        seeded(seed)
        environment = self._environment()
        task = next(itertools.islice(iter(environment.taskset), row["index"], None))
        server = endpoint(self._events)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        work = self._play(environment, task, f"http://127.0.0.1:{server.server_address[1]}/v1")
        threading.Thread(target=self._run, args=(work,), daemon=True).start()
        turn = self._next()
        if turn["done"]:
            raise ValueError("the episode was over before it asked the policy for anything")
        return turn

    def act(self, text: str, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        if self._reply is None:
            raise ValueError("nobody waits for a turn of the policy")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if tool_calls:
            message["tool_calls"] = tool_calls
        self._said.append(message)
        reply, self._reply = self._reply, None
        reply.put(message)
        return self._next()

    def close(self) -> None:
        """The process ends, and with it the episode."""

    def _environment(self) -> Any:
        if self._env is None:
            loaders = package("verifiers.v1.utils.loaders", "verifiers")
            taskset = {**self._options["taskset"], "id": self._options["id"]}
            kind = loaders.environment_class(self._options["id"], self._options["env"])
            generic = package("verifiers.v1.utils.generic", "verifiers")
            config = generic.concrete_type(kind, self._vf.EnvConfig, origin=self._vf.Env) or self._vf.EnvConfig
            values: dict[str, Any] = {"taskset": taskset, **self._options["config"]}
            if "agent" in config.model_fields and "agent" not in values:
                values["agent"] = {"harness": {"id": self._options["harness"]}, "runtime": {"type": "subprocess"}}
            if self._options["env"]:
                values["id"] = self._options["env"]
            self._env = kind(config.model_validate(values))
        return self._env

    def _run(self, work: Any) -> None:
        try:
            self._events.put(("over", asyncio.run(work)))
        except BaseException as error:
            self._events.put(("broken", error))

    async def _play(self, environment: Any, task: Any, url: str) -> Any:
        client = self._vf.EvalClientConfig(base_url=url, api_key_var="K3RL_NO_KEY")
        async with environment.serving():
            return await environment.run_episode(task, self._vf.ModelContext(model=MODEL, client=client))

    def _next(self) -> dict[str, Any]:
        """The next request for the policy, or the end with its reward."""
        kind, value = self._events.get()
        if kind == "broken":
            raise value
        if kind == "over":
            return result(value)
        body, self._reply = value
        messages = [plain_message(message) for message in body["messages"]]
        tools = body.get("tools") or []
        if tools == self._tools and messages[: len(self._said)] == [plain_message(one) for one in self._said]:
            fresh, branch = messages[len(self._said) :], "same"
        else:
            fresh, branch = messages, "new"
        self._said, self._tools = messages, tools
        return {"messages": fresh, "tools": tools, "branch": branch, "reward": None, "done": False, "metrics": {}}


def result(episode: Any) -> dict[str, Any]:
    """What an episode was worth. Raises what went wrong in it, so that no failure becomes a reward."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in getattr(trace, "errors", []))]
    if not episode.ok:
        last = errors[-1] if errors else None
        raise RuntimeError("the episode is not ok" if last is None else f"{last.type}: {last.message}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise ValueError(f"the episode has {len(traces)} trainable agents; one policy plays exactly one")
    rewards = traces[0].rewards
    judged = bool(rewards) and all(reward is not None for reward in rewards.values())
    parts = {name: number(reward.value) for name, reward in rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in traces[0].metrics.items() if isinstance(value, (int, float))}
    reward = number(traces[0].reward) if judged else None
    return {"messages": [], "reward": reward, "done": True, "metrics": metrics, "parts": parts}


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request in one form, so that what was sent and what comes back can be compared."""
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    plain: dict[str, Any] = {"role": message["role"], "content": "" if content is None else content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": dict(call["function"])} for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        plain["tool_call_id"] = message["tool_call_id"]
    return plain


def endpoint(events: queue.Queue[tuple[str, Any]]) -> ThreadingHTTPServer:
    """An OpenAI-style server on a free port of this machine: each chat request waits for the policy."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            if not self.path.endswith("/chat/completions"):
                self._send(404, "application/json", json.dumps({"error": {"message": f"no {self.path} here"}}))
                return
            reply: queue.Queue[dict[str, Any]] = queue.Queue()
            events.put(("turn", (body, reply)))
            message = reply.get()
            if body.get("stream"):
                self._send(200, "text/event-stream", streamed(message))
            else:
                self._send(200, "application/json", json.dumps(completion(message)))

        def log_message(self, format: str, *args: Any) -> None:
            """Not worth a line."""

        def _send(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-k3rl", "object": kind, "created": int(time.time()), "model": MODEL}


def usage() -> dict[str, int]:
    """Tokens are counted where they are sampled, not here."""
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def ending(message: dict[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def completion(message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": ending(message)}
    return {**head("chat.completion"), "choices": [choice], "usage": usage()}


def streamed(message: dict[str, Any]) -> str:
    """The whole message as one piece, then the end, as server-sent events."""
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    chunks = [
        {**head("chat.completion.chunk"), "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head("chat.completion.chunk"), "choices": [{"index": 0, "delta": {}, "finish_reason": ending(message)}]},
        {**head("chat.completion.chunk"), "choices": [], "usage": usage()},
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
