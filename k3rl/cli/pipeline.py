"""`k3rl {sft,rl,distill}`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from k3rl.cli.config import show
from k3rl.cli.launch import Launch, parse_launch
from k3rl.cli.output import print_json
from k3rl.config import config_hash, to_tree
from k3rl.run import Signalled

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
  --dashboard     serve the runs beside it to a browser while it goes on; prints the address

`k3rl config show {pipeline} [PRESET]` prints every key with its value and meaning."""


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

    with _watched(launch):
        result = pipelines.run(pipeline, launch.config, launch.options)
    if launch.options.json:
        print_json(result)
    return 0


def _watched(launch: Launch) -> AbstractContextManager[None]:
    if not launch.options.dashboard:
        return nullcontext()
    from k3rl.cli.dashboard import beside_run

    preset = launch.options.preset
    return beside_run(launch.options.directory(preset if preset != "default" else launch.pipeline))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A scheduler's SIGTERM ends a run the way Ctrl-C does: last whole step saved, status written, Ray gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Signalled(number)


def _describe(launch: Launch) -> None:
    if launch.options.json:
        about = {"pipeline": launch.pipeline, "preset": launch.options.preset, "config": to_tree(launch.config)}
        print_json(about | {"config_hash": config_hash(launch.config)})
    else:
        show(launch.config, as_json=False)
