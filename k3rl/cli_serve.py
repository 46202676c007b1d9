"""`k3rl serve`: an engine behind the OpenAI dialects."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from k3rl.cli_words import Parser
from k3rl.config import ConfigError, MissingResource

TOKEN_VARIABLE = "K3RL_SERVE_TOKEN"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(words: Sequence[str]) -> int:
    """The `k3rl serve` command."""
    parser = Parser(
        "serve",
        "Serves a checkpoint over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /metrics. Requests carry "
        f"the bearer token in ${TOKEN_VARIABLE}; a fresh one is made and printed where the variable is not set.",
    )
    parser.add_argument("checkpoint", type=Path, help="a folder in the official layout")
    parser.add_argument("--host", default="127.0.0.1", help="loopback by default")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-running", type=int, default=64, help="sequences decoded at a time")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--prefix-cache-mb", type=int, default=0, help="memory for prefixes of multi-turn requests")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    if not (arguments.checkpoint / "config.json").is_file():
        raise ConfigError(f"{arguments.checkpoint} holds no checkpoint (no config.json)", key="checkpoint")
    try:
        from k3rl.engine import server
    except ModuleNotFoundError as error:
        raise MissingResource(f"serving needs the package {error.name}; install k3rl[dashboard]") from error
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None and arguments.host not in LOOPBACK:
        raise ConfigError(
            f"--host {arguments.host} can be reached by others; set {TOKEN_VARIABLE} to a secret first", key="--host"
        )
    if token is None:
        token = secrets.token_hex(16)
        print(f"bearer token: {token}", file=sys.stderr)
    print(f"serving {arguments.checkpoint} at http://{arguments.host}:{arguments.port}/v1", file=sys.stderr)
    server.serve_checkpoint(
        arguments.checkpoint,
        host=arguments.host,
        port=arguments.port,
        token=token,
        max_running=arguments.max_running,
        threads=arguments.threads,
        prefix_cache_bytes=arguments.prefix_cache_mb * 2**20,
    )
    return 0
