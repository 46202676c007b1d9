"""`k3rl {sft,rl,distill}`, `k3rl submit` and `k3rl tail`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from k3rl.cli.common import PIPELINES, Launch, Parser, parse_launch, print_json
from k3rl.cli.config import show
from k3rl.cli.main import unknown
from k3rl.config import ConfigError, config_hash, to_tree

USAGE = """\
usage: k3rl {pipeline} [PRESET] [@ FILE.toml ...] [--dotted.key VALUE ...] [options]

  PRESET          a named configuration (default: default), or package.module:function of your own
  @ FILE.toml     values laid over the preset, files from left to right
  --a.b-c VALUE   one value, over everything else; booleans also as --a.b and --no-a.b, list entries as --a.0.b
  --out DIR       the run directory (default outputs/<name>)
  --seed N        seeds every draw
  --resume        continue the run in that directory
  --clean         delete the run in that directory and start again
  --json          print the result as one JSON object on the last line of standard output
  --dry-run       print the configuration that would run, and stop

`k3rl config show {pipeline} [PRESET]` prints every key with its value and meaning."""

SUBMIT_USAGE = """\
usage: k3rl submit {sft,rl,distill} ... --address URL

Runs the same words as a Ray job on the cluster at URL (http://host:8265) and follows its log. The cluster's token is
read from RAY_AUTH_TOKEN or Ray's token file. The configuration is checked here first."""


def sft(words: Sequence[str]) -> int:
    return _run("sft", words)


def rl(words: Sequence[str]) -> int:
    return _run("rl", words)


def distill(words: Sequence[str]) -> int:
    return _run("distill", words)


def _run(pipeline: str, words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        print(USAGE.format(pipeline=pipeline))
        return 0
    launch = parse_launch(pipeline, words, pipeline)
    if launch.dry_run:
        _describe(launch)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    from k3rl import pipelines

    result = pipelines.run(pipeline, launch.config, launch.options)
    if launch.options.json:
        print_json(result)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A scheduler's SIGTERM ends a run the way Ctrl-C does: last whole step saved, status written, Ray gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _describe(launch: Launch) -> None:
    if launch.options.json:
        about = {"pipeline": launch.pipeline, "preset": launch.options.preset, "config": to_tree(launch.config)}
        print_json(about | {"config_hash": config_hash(launch.config)})
    else:
        show(launch.config, as_json=False)


def submit(words: Sequence[str]) -> int:
    """The `k3rl submit` command."""
    if not words or "--help" in words or "-h" in words:
        print(SUBMIT_USAGE)
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
    from k3rl.run.tail import tail as follow

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    follow(arguments.run, write, follow=not arguments.no_follow, last=arguments.last)
    return 0
