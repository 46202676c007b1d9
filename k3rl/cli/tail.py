"""`k3rl tail`: the rollouts of a run as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from k3rl.cli.parser import Parser
from k3rl.config import ConfigError


def tail(words: Sequence[str]) -> int:
    """The `k3rl tail` command."""
    parser = Parser("tail", "Prints the rollouts of a run turn by turn, until the run ends.")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--no-follow", action="store_true", help="stop at the end of what is there now")
    parser.add_argument("--last", type=int, metavar="N", help="start with the last N episodes (default: all)")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    if arguments.last is not None and arguments.last < 0:
        raise ConfigError(f"--last wants a number from 0, got {arguments.last}", key="--last")
    from k3rl.run import follow_run

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    follow_run(arguments.run, write, follow=not arguments.no_follow, last=arguments.last)
    return 0
