"""`k3rl ablate`: what each part of K3 is worth, measured on a tiny model."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser, unknown
from k3rl.config import ConfigError

# Spelled out so that `--help` needs no torch; a test compares them with `pipelines.ablate.PARTS`.
PARTS = ("attention", "experts", "residual", "activation", "balancing", "optimizer", "quantization")


def ablate(words: Sequence[str]) -> int:
    """The `k3rl ablate` command."""
    parser = Parser(
        "ablate",
        "Trains a tiny K3 as it is and with one part at a time replaced by the common choice, on the same data, seeds "
        "and starting weights, and prints one table. The defaults are 14 runs of 60 steps: a few minutes on two cores.",
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"which parts, with commas between: {', '.join(PARTS)}"
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (60)")
    parser.add_argument("--batch-size", type=int, default=32, help="examples of one step (32)")
    parser.add_argument("--model", default="k3-nano", help="k3-nano, k3-mini or k3-small")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to average over, from --seed on")
    parser.add_argument("--out", type=Path, default=Path("outputs/ablate"), help="where ablate.json and ablate.png go")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    parts = [part for part in arguments.parts.split(",") if part]
    for part in parts:
        if part not in PARTS:
            raise unknown("part", part, PARTS)
    for name in ("steps", "batch_size", "seeds"):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {getattr(arguments, name)}; it must be at least 1", key=flag)
    if arguments.model not in ("k3-nano", "k3-mini", "k3-small"):
        raise unknown("model", arguments.model, ("k3-nano", "k3-mini", "k3-small"))

    from k3rl.pipelines import ablate as study

    began = time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    settings = {
        "model": arguments.model,
        "environment": study.ENVIRONMENT,
        "steps": arguments.steps,
        "batch_size": arguments.batch_size,
        "seeds": list(seeds),
        "parts": parts,
    }
    results = study.ablate(
        parts,
        model=arguments.model,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        seeds=seeds,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    settings["seconds"] = time.monotonic() - began
    report = study.save(results, settings, arguments.out)
    if arguments.json:
        print_json(report)
    else:
        print(study.table(results))
        if arguments.seeds == 1:
            print("\none seed: K3's own loss varies by 0.04 with the seed at the defaults; repeat with --seeds 4")
        print(f"\n{report['png']}")
    return 0
