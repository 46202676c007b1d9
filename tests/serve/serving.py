"""Servers over loopback for the tests of this folder, and an engine that says what a test wants."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch
import uvicorn

from k3rl.engine import Engine
from k3rl.serve import create_app
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Message, ToolCall

TOKENIZER = Tokenizer.builtin()
TOKEN = "a-token"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
CALLS = (ToolCall("add", {"a": 1, "b": "x\u00e9"}), ToolCall("now", {}))
TURN = Message("assistant", "It is \u00e9 and done.", reasoning="Let me think.", tool_calls=CALLS)
MESSAGES = [{"role": "user", "content": "What is it?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Scripted(Engine):
    """An engine whose every request samples `script` (then end_of_msg): the logits are replaced, nothing else."""

    script: list[int] = []

    def _sample(self, parts, drawn):
        super()._sample([(rows, self._forced(rows, logits)) for rows, logits in parts], drawn)

    def _forced(self, rows, logits):
        counts = self.batch.table.count[rows]
        wanted = [self.script[count] if count < len(self.script) else 502 for count in counts.tolist()]
        forced = torch.zeros_like(logits)
        forced[range(len(rows)), wanted] = 100.0
        return forced


def turn_ids(message: Message) -> list[int]:
    """What a policy samples for this turn."""
    whole = TOKENIZER.encode_segments(xtml.render([message], add_generation_prompt=False))
    prefix = TOKENIZER.encode_segments(xtml.render([]))
    assert whole[: len(prefix)] == prefix
    return whole[len(prefix) :]


@contextmanager
def listening(app):
    """The base URL of an application that serves on a free port, on a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=3))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def running(load, **options):
    """The base URL and the `Server` of an application over the engine that `load` makes."""
    app = create_app(load, TOKENIZER, model_name="tiny", token=TOKEN, **options)
    with listening(app) as url:
        yield url, app.state.server


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
