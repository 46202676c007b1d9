"""`k3rl submit`: one of the pipelines as a Ray job."""

from __future__ import annotations

import os
from collections.abc import Sequence

from k3rl.cli.launch import PIPELINES, parse_launch
from k3rl.cli.parser import unknown
from k3rl.config import ConfigError

USAGE = """\
usage: k3rl submit {sft,rl,distill} ... --address URL

Runs the same words as a Ray job on the cluster at URL (http://host:8265) and follows its log. The cluster's token is
read from RAY_AUTH_TOKEN or Ray's token file. The configuration is checked here first."""


def submit(words: Sequence[str]) -> int:
    """The `k3rl submit` command."""
    if not words or "--help" in words or "-h" in words:
        print(USAGE)
        return 0
    rest, address = _take_address(list(words))
    if not rest or rest[0] not in PIPELINES:
        raise unknown("pipeline to submit", rest[0] if rest else "", PIPELINES)
    parse_launch(rest[0], rest[1:], rest[0])
    from k3rl.pipelines.submit import submit as run_as_job

    return run_as_job(rest, address)


def _take_address(words: list[str]) -> tuple[list[str], str]:
    rest: list[str] = []
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "")
    while words:
        name, equals, text = words[0].partition("=")
        word = words.pop(0)
        if name != "--address":
            rest.append(word)
        elif equals:
            address = text
        elif words:
            address = words.pop(0)
        else:
            address = ""
    if not address.startswith(("http://", "https://")):
        raise ConfigError(
            f"submit wants the cluster's jobs address, such as --address http://127.0.0.1:8265; got {address!r}",
            key="--address",
            got=address,
        )
    return rest, address
