"""The command line of a pipeline: a preset, files and flags as one configuration, and the options of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from pydantic import ValidationError

from k3rl.cli.parser import unknown
from k3rl.config import Config, ConfigError, Flag, as_config_error, load, split_words
from k3rl.run import RunOptions

PIPELINES = ("sft", "rl", "distill")


@dataclass(frozen=True)
class Launch:
    """A parsed command line of a pipeline."""

    pipeline: str
    config: Config
    options: RunOptions
    dry_run: bool


def parse_launch(pipeline: str, words: Sequence[str], command: str) -> Launch:
    """`[PRESET] [@ FILE ...] [--key VALUE ...]` with the run options among them. Raises ConfigError."""
    rest, options, dry_run = _take_run_options(list(words))
    preset = rest.pop(0) if rest and rest[0] != "@" and not rest[0].startswith("--") else "default"
    files, flags = split_words(rest)
    base = _preset(pipeline, preset)
    if options.seed is not None:
        if "seed" not in type(base).model_fields:
            raise ConfigError(f"{pipeline} {preset} has no seed", key="--seed", got=options.seed)
        flags.append(Flag(("seed",), str(options.seed), "--seed"))
    config = load(base, files=files, flags=flags)
    options = replace(options, argv=("k3rl", command, *words), preset=preset, files=tuple(files))
    return Launch(pipeline, config, options, dry_run)


def _take_run_options(words: list[str]) -> tuple[list[str], RunOptions, bool]:
    rest: list[str] = []
    options, dry_run = RunOptions(), False
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if name in ("--out", "--seed"):
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{name} wants a value after it", key=name)
                text = words.pop(0)
            options = replace(options, out=Path(text)) if name == "--out" else replace(options, seed=_seed(text))
        elif word == "--resume":
            options = replace(options, resume=True)
        elif word == "--clean":
            options = replace(options, clean=True)
        elif word == "--json":
            options = replace(options, json=True)
        elif word == "--dashboard":
            options = replace(options, dashboard=True)
        elif word == "--dry-run":
            dry_run = True
        else:
            rest.append(word)
    return rest, options, dry_run


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"--seed wants a whole number from 0, got {text!r}", key="--seed", got=text)
    return int(text)


def _preset(pipeline: str, name: str) -> Config:
    """What the preset function gives. A name with a colon, `package.module:function`, is a preset of the user's own."""
    try:
        return _preset_function(pipeline, name)()
    except ValidationError as error:
        raise as_config_error(error, Config) from None


def _preset_function(pipeline: str, name: str) -> Callable[[], Config]:
    module, colon, function = name.partition(":")
    if colon:
        try:
            return getattr(import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot import the preset {name!r}: {error}", key="preset", got=name) from None
    from k3rl.pipelines import PRESETS

    if name not in PRESETS[pipeline]:
        raise unknown(f"{pipeline} preset", name, list(PRESETS[pipeline]))
    return PRESETS[pipeline][name]
