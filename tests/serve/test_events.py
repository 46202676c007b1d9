"""Streams to clients that stop taking, and counters as text."""

from __future__ import annotations

import asyncio

from k3rl.serve.events import EventStream
from k3rl.serve.metrics import ServerMetrics


async def test_whoever_takes_nothing_of_a_stream_loses_its_request():
    ended = []

    async def events():
        while True:
            yield {}

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await receive()

    await asyncio.wait_for(EventStream(events(), lambda: ended.append(1), 0.05)({}, receive, send), 10)
    assert ended == [1]


def test_counters_are_written_with_all_their_digits():
    text = ServerMetrics().text({"g": ("A gauge.", 0.1)}, {"c_total": ("A counter.", 1234567.0)})
    assert {"c_total 1234567", "g 0.1"} <= set(text.splitlines())
