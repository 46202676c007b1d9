"""`k3rl inspect`: parameters and stored bytes of a model."""

from __future__ import annotations

from collections.abc import Sequence

from k3rl.cli.output import print_json, readable
from k3rl.cli.parser import Parser


def inspect(words: Sequence[str]) -> int:
    """The `k3rl inspect` command."""
    parser = Parser("inspect", "Parameters and stored bytes of a checkpoint or of a named size, part by part.")
    parser.add_argument(
        "model",
        help="a checkpoint folder, or a named size: k3-nano, k3-mini, k3-small, k3, kimi-linear-{nano,small,48b}",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    from k3rl.checkpoint import inspect_model

    result = inspect_model(arguments.model)
    if arguments.json:
        print_json(result)
        return 0
    for name in ("parameters", "active_parameters", "bytes"):
        print(f"{name.replace('_', ' ')}: {result[name]:,}")
    for name, value in result["parts"].items():
        print(f"  {name}: {readable(value)}")
    print(f"quantized: {', '.join(result['quantized']) or 'nothing'}")
    print(f"like {result['model']}" + (", except" if result["differences"] else ""))
    for key, (here, there) in result["differences"].items():
        print(f"  {key}: {here} instead of {there}")
    return 0
