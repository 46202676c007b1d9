"""`k3rl export`: a checkpoint, an adapter or a training state in the official layout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser
from k3rl.config import ConfigError, MissingResource
from k3rl.run import visible


def export(words: Sequence[str]) -> int:
    """The `k3rl export` command: the checkpoint is loaded, written anew, read back and compared byte for byte."""
    parser = Parser(
        "export",
        "Writes a checkpoint in the official layout, or an adapter in PEFT's format, into a new folder, and reads it "
        "back.",
    )
    parser.add_argument("source", type=Path, help="a checkpoint, an adapter, a run directory, or a training state")
    parser.add_argument("target", type=Path, nargs="?", help="the folder to write; none with --check alone")
    parser.add_argument("--stage", help="which stage of the run, where there are several")
    parser.add_argument("--step", help="of a run: from the training state after that many steps, or `latest`")
    parser.add_argument("--merge", action="store_true", help="of an adapter and its weights, write one checkpoint")
    parser.add_argument("--check", action="store_true", help="open the result, or the source alone, as others will")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    if arguments.target is None:
        if not arguments.check:
            raise ConfigError("name the folder to write, or give --check to look at one", key="target")
        return _check(find_checkpoint(arguments.source, arguments.stage), arguments.json)
    _export(arguments)
    return _check(arguments.target, arguments.json) if arguments.check else 0


def _check(folder: Path, as_json: bool) -> int:
    """What other programs would trip over in a folder. The status is 2 where there is anything."""
    from dataclasses import asdict

    from k3rl.checkpoint import check_export

    found = check_export(folder)
    if as_json:
        print_json({"checked": str(folder), **asdict(found)})
    else:
        for problem in found.problems:
            print(visible(f"problem: {problem}"))
        for note in found.notes:
            print(visible(f"note: {note}"))
        print(f"{folder}: {found.tensors} tensors, {found.bytes:,} bytes, {len(found.problems)} problems")
    return 2 if found.problems else 0


def _export(arguments: Namespace) -> None:
    if (state := find_state(arguments.source, arguments.stage, arguments.step)) is not None:
        _export_state(state, arguments)
        return
    source = find_checkpoint(arguments.source, arguments.stage)
    if arguments.target.resolve() == source.resolve():
        raise ConfigError(f"{arguments.target} is the checkpoint itself; name another folder", key="target")
    from k3rl.checkpoint import copy_adapter, copy_checkpoint, is_adapter, merge_adapter

    merged: dict[str, Any] = {}
    if arguments.merge:
        if not is_adapter(source):
            raise ConfigError(f"{source} is a whole checkpoint; --merge takes an adapter", key="--merge")
        tensors, size, merged = merge_adapter(source, arguments.target)
    else:
        tensors, size = (copy_adapter if is_adapter(source) else copy_checkpoint)(source, arguments.target)
    if arguments.json:
        found = {"source": str(source), "export": str(arguments.target), "tensors": tensors, "bytes": size}
        print_json(found | ({"merged": merged} if merged else {}))
        return
    print(f"{arguments.target}: {tensors} tensors, {size:,} bytes, read back equal")
    for form, about in merged.items():
        error = f"{about['error']:.1%} of the adapter's change"
        print(f"  {about['matrices']} matrices stored as {form}: rounding moves them by {error}")


def _export_state(state: Path, arguments: Namespace) -> None:
    from k3rl.checkpoint import TrainState, export_state

    tensors, size = export_state(TrainState(state), arguments.target, merged=arguments.merge)
    if arguments.json:
        print_json({"source": str(state), "export": str(arguments.target), "tensors": tensors, "bytes": size})
        return
    print(f"{arguments.target}: {tensors} tensors, {size:,} bytes, of {state}")


def find_state(place: Path, stage: str | None, step: str | None) -> Path | None:
    """The training state that is meant: `place` itself, or that of a run's stage after `step` steps; None for neither.

    Raises ConfigError or MissingResource.
    """
    if (place / "manifest.sha256").is_file():
        return place
    if step is None:
        return None
    from k3rl.checkpoint import chosen_train_state

    stages = sorted(path.name for path in (place / "checkpoints").glob("*") if path.is_dir())
    if not stages:
        raise MissingResource(f"{place} is no run that has saved a training state")
    if stage is None and len(stages) > 1:
        raise ConfigError(f"{place} has several stages; choose one with --stage: {', '.join(stages)}", key="--stage")
    if stage is not None and stage not in stages:
        raise ConfigError(f"{place} has no stage {stage!r}; it has {', '.join(stages)}", key="--stage", got=stage)
    if step != "latest" and not step.isdecimal():
        raise ConfigError(f"--step is {step!r}; wanted a number of steps, or latest", key="--step", got=step)
    name = step if step == "latest" else f"step_{int(step)}"
    found = chosen_train_state(place / "checkpoints" / (stage or stages[0]), name)
    if found is None:
        raise MissingResource(f"{place} has saved no training state yet")
    return found


def _has_states(place: Path) -> bool:
    return any((place / "checkpoints").glob("*/step_*"))


def find_checkpoint(place: Path, stage: str | None) -> Path:
    """The checkpoint folder that a path and a stage name mean. Raises ConfigError or MissingResource."""
    names = ("config.json", "adapter_config.json")
    if any((place / name).is_file() for name in names):
        return place
    found = {path.parent.name: path.parent for name in names for path in sorted((place / "export").glob(f"*/{name}"))}
    if not found:
        states = "; it has saved training states: --step latest takes the newest" if _has_states(place) else ""
        raise MissingResource(f"{place} is neither a checkpoint nor a run that has written one{states}")
    if stage is None and len(found) > 1:
        raise ConfigError(
            f"{place} has several checkpoints; choose one with --stage: {', '.join(found)}", key="--stage"
        )
    if stage is not None and stage not in found:
        raise ConfigError(f"{place} has no checkpoint {stage!r}; it has {', '.join(found)}", key="--stage", got=stage)
    return found[stage] if stage is not None else next(iter(found.values()))
