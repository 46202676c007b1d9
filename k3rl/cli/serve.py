"""`k3rl serve`: an engine behind the OpenAI dialects."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from k3rl.cli.parser import Parser
from k3rl.config import NO_CHECKPOINT, ConfigError, MissingResource

TOKEN_VARIABLE = "K3RL_SERVE_TOKEN"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(words: Sequence[str]) -> int:
    """The `k3rl serve` command."""
    parser = Parser(
        "serve",
        "Serves a checkpoint over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /metrics. Requests carry "
        f"the bearer token in ${TOKEN_VARIABLE}; a fresh one is made and printed where the variable is not set.",
    )
    parser.add_argument("checkpoint", type=Path, help="a folder in the official layout, or an adapter")
    parser.add_argument("--host", default="127.0.0.1", help="loopback by default")
    parser.add_argument("--port", type=_number(0, 65535), default=8000)
    parser.add_argument(
        "--model-name", help="what clients call the model; by default the folder's or repository's name"
    )
    parser.add_argument("--max-running", type=_number(1), default=64, help="sequences decoded at a time")
    parser.add_argument("--max-context", type=_number(2), help="tokens of one request; by default the model's")
    parser.add_argument("--max-samples", type=_number(1), default=256, help="completions in flight, then status 429")
    parser.add_argument("--max-body-mb", type=_number(1), default=4, help="size of one request")
    parser.add_argument("--threads", type=_number(1), default=1, help="torch threads")
    parser.add_argument("--prefix-cache-mb", type=_number(0), default=0, help="memory for prefixes of conversations")
    parser.add_argument("--prefix-host-mb", type=_number(0), default=0, help="host memory for what leaves that")
    parser.add_argument("--prefix-disk-mb", type=_number(0), default=0, help="room in files for what leaves memory")
    parser.add_argument("--prefix-directory", type=Path, help="where those files go")
    parser.add_argument("--memory-mb", type=_number(1), help="memory of states; by default a share of what is free")
    parser.add_argument("--exact", action="store_true", help="bits that depend on the request alone; slow")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda computes in bf16")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    if (arguments.prefix_host_mb or arguments.prefix_disk_mb) and not arguments.prefix_cache_mb:
        raise ConfigError("the other tiers take what leaves --prefix-cache-mb; give it, too", key="--prefix-cache-mb")
    if arguments.prefix_disk_mb and arguments.prefix_directory is None:
        raise ConfigError("--prefix-disk-mb needs --prefix-directory", key="--prefix-directory")
    if not any((arguments.checkpoint / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise MissingResource(f"{arguments.checkpoint} {NO_CHECKPOINT}")
    try:
        from k3rl.engine import PrefixCache
        from k3rl.serve import EngineOptions, ServerLimits, serve_checkpoint
    except ModuleNotFoundError as error:
        raise MissingResource(f"serving needs the package {error.name}; install k3rl[serve]") from error
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None and arguments.host not in LOOPBACK:
        raise ConfigError(
            f"--host {arguments.host} can be reached by others; set {TOKEN_VARIABLE} to a secret first", key="--host"
        )
    if token is None:
        token = secrets.token_hex(16)
        print(f"bearer token: {token}", file=sys.stderr)
    # Uvicorn stops the server and then raises the signal again: Python must end by itself, so that files go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"serving {arguments.checkpoint} at http://{arguments.host}:{arguments.port}/v1", file=sys.stderr)
    options = EngineOptions(
        max_running=arguments.max_running,
        context=arguments.max_context,
        memory_bytes="auto" if arguments.memory_mb is None else arguments.memory_mb << 20,
        exact=arguments.exact,
        device=arguments.device,
        threads=arguments.threads,
        prefix_cache=lambda: (
            PrefixCache.of_bytes(
                arguments.prefix_cache_mb << 20,
                arguments.prefix_host_mb << 20,
                disk_bytes=arguments.prefix_disk_mb << 20,
                directory=arguments.prefix_directory,
            )
            if arguments.prefix_cache_mb
            else None
        ),
    )
    serve_checkpoint(
        arguments.checkpoint,
        host=arguments.host,
        port=arguments.port,
        token=token,
        model_name=arguments.model_name,
        options=options,
        limits=ServerLimits(body_bytes=arguments.max_body_mb << 20, samples=arguments.max_samples),
    )
    return 0


def _number(least: int, most: int = 2**40) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`."""

    def number(word: str) -> int:
        if not word.isdecimal() or not least <= int(word) <= most:
            raise ArgumentTypeError(f"got {word}, wants a whole number from {least} to {most}")
        return int(word)

    return number
