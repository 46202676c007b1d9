"""`k3rl config {show,diff,schema}`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from k3rl.cli.launch import PIPELINES, parse_launch
from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser, unknown
from k3rl.config import ConfigError, config_hash, diff, flatten, to_tree
from k3rl.run import RunDirectory

USAGE = """\
usage: k3rl config show {sft,rl,distill} [PRESET] [@ FILE.toml ...] [--dotted.key VALUE ...] [--json]
       k3rl config show RUN [--json]        what the last attempt of a run was started with
       k3rl config diff A B [--json]        each a run directory, a resolved.json, or PIPELINE[:PRESET]
       k3rl config schema {sft,rl,distill} [PRESET]        JSON Schema, for editors"""


def config(words: Sequence[str]) -> int:
    """The `k3rl config` command."""
    if not words or "--help" in words or "-h" in words:
        print(USAGE)
        return 0
    actions = {"show": _show, "diff": _diff, "schema": _schema}
    if words[0] not in actions:
        raise unknown("config command", words[0], list(actions))
    return actions[words[0]](list(words[1:]))


def _show(words: list[str]) -> int:
    if not words:
        raise ConfigError(f"name a pipeline or a run\n{USAGE}")
    if words[0] not in PIPELINES and (Path(words[0]) / "run.json").exists():
        tree = RunDirectory.open(Path(words[0])).resolved()
        if "--json" in words:
            print_json(tree)
        else:
            print("\n".join(f"{name} = {json.dumps(value)}" for name, value in flatten(tree).items()))
        return 0
    launch = parse_launch(_pipeline(words[0]), words[1:], "config show")
    show(launch.config, launch.options.json)
    return 0


def show(config: BaseModel, as_json: bool) -> None:
    """Print a configuration: every key, its value, its meaning; or one JSON object."""
    if as_json:
        print_json({"config": to_tree(config), "config_hash": config_hash(config)})
        return
    meanings = meanings_of(config)
    lines = [
        (f"{name} = {json.dumps(value)}", meanings.get(name, "")) for name, value in flatten(to_tree(config)).items()
    ]
    width = min(60, max(len(line) for line, _ in lines))
    print("\n".join(f"{line:<{width}}  # {meaning}" if meaning else line for line, meaning in lines))
    print(f"# config_hash {config_hash(config)}")


def meanings_of(value: Any, prefix: str = "") -> dict[str, str]:
    """Dotted name -> the field's docstring on one line, for the variants that are set."""
    found: dict[str, str] = {}
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            found |= meanings_of(item, f"{prefix}{index}.")
    elif isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            if info.description:
                found[f"{prefix}{name}"] = " ".join(info.description.split())
            found |= meanings_of(getattr(value, name), f"{prefix}{name}.")
    return found


def _diff(words: list[str]) -> int:
    parser = Parser("config diff", "What differs between two configurations.")
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    changes = diff(_tree(arguments.a), _tree(arguments.b))
    if arguments.json:
        print_json({"changed": {name: {"a": a, "b": b} for name, (a, b) in changes.items()}})
    else:
        print("\n".join(f"{name}: {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in changes.items()) or "equal")
    return 0


def _tree(place: str) -> dict[str, Any]:
    path = Path(place)
    if path.is_dir():
        return RunDirectory.open(path).resolved()
    if path.is_file():
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}", key=place) from None
    pipeline, _, preset = place.partition(":")
    if pipeline not in PIPELINES:
        raise ConfigError(f"{place} is neither a run directory, nor a resolved.json, nor PIPELINE[:PRESET]", key=place)
    return to_tree(parse_launch(pipeline, [preset] if preset else [], "config diff").config)


def _schema(words: list[str]) -> int:
    if not words:
        raise ConfigError(f"name a pipeline\n{USAGE}")
    print_json(type(parse_launch(_pipeline(words[0]), words[1:], "config schema").config).model_json_schema())
    return 0


def _pipeline(name: str) -> str:
    if name not in PIPELINES:
        raise unknown("pipeline", name, PIPELINES)
    return name
