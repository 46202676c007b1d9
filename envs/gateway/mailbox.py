"""Requests of a program in a sandbox, by files: no network, any sandbox provider. See sandboxed/forward.py."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from k3rl.envs.gateway.dialect import MAX_BODY_BYTES, Answer, answer, models, not_found
from k3rl.envs.gateway.session import GatewaySession
from k3rl.envs.sandbox import ExecResult, Sandbox, SandboxDied

FOLDER = ".k3rl-gateway"
_FORWARD = (Path(__file__).parent / "sandboxed" / "forward.py").read_bytes()
_FASTEST_S, _SLOWEST_S = 0.005, 0.1  # between two looks at the mailbox


async def run_with_endpoint(
    sandbox: Sandbox, session: GatewaySession, command: Sequence[str], *, env: Mapping[str, str], timeout_s: float
) -> ExecResult:
    """Run a program in a sandbox, its requests answered by the session, until it ends or its time is over.

    The session is closed when the program has ended, and with it whatever still waits for tokens.
    """
    token = secrets.token_hex(16)
    await sandbox.write(f"{FOLDER}/forward.py", _FORWARD)
    argv = ["python3", "-I", f"{FOLDER}/forward.py", f"{FOLDER}/mail", token, *command]
    program = asyncio.ensure_future(sandbox.exec(argv, env=env, timeout_s=timeout_s))
    post = asyncio.ensure_future(_serve(sandbox, session, token))
    try:
        await asyncio.wait({program, post}, return_when=asyncio.FIRST_COMPLETED)
        if post.done() and not program.done():
            post.result()
        return await program
    finally:
        session.close()
        for task in (program, post):
            task.cancel()
        await asyncio.gather(program, post, return_exceptions=True)


async def _serve(sandbox: Sandbox, session: GatewaySession, token: str) -> None:
    """Answer requests as they come, several at a time, until cancelled."""
    number, pause = 0, _FASTEST_S
    async with asyncio.TaskGroup() as group:
        while True:
            try:
                asked = await sandbox.read(f"{FOLDER}/mail/{number}.asked", 2 * MAX_BODY_BYTES)
            except FileNotFoundError:
                await asyncio.sleep(pause)
                pause = min(pause * 1.2, _SLOWEST_S)
                continue
            group.create_task(_reply(sandbox, session, token, number, asked))
            number, pause = number + 1, _FASTEST_S


async def _reply(sandbox: Sandbox, session: GatewaySession, token: str, number: int, asked: bytes) -> None:
    given = await _answered(session, token, asked)
    kind, body = given.text()
    text = json.dumps({"status": given.status, "type": kind, "body": body})
    try:
        await sandbox.write(f"{FOLDER}/mail/{number}.answer", text.encode())
        await sandbox.write(f"{FOLDER}/mail/{number}.done", b"")
    except OSError as error:
        raise SandboxDied(f"an answer could not be written into the sandbox: {error}") from error


async def _answered(session: GatewaySession, token: str, asked: bytes) -> Answer:
    try:
        request = json.loads(asked)
        method, path, body = (str(request[key]) for key in ("method", "path", "body"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return not_found("what the program wrote into its mailbox")
    match method, path.partition("?")[0].removeprefix(f"/s/{token}/v1"):
        case "POST", "/chat/completions":
            return await answer(session, body.encode())
        case "GET", "/models":
            return models()
    return not_found(f"{method} {path}"[:200])
