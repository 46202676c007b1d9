"""`k3rl eval`, `k3rl export` and `k3rl inspect`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3rl.cli.common import Parser, print_json
from k3rl.config import ConfigError, MissingResource, load, split_words

EVAL_USAGE = """\
usage: k3rl eval CHECKPOINT ENV [@ FILE.toml ...] [--key VALUE ...] [--json]

Held-out pass rate of a checkpoint (a folder in the official layout) on an environment (see `k3rl env list`). The same
words give the same figures.

  --n N              held-out tasks
  --seed N           draws tasks and samples
  --env-args.KEY V   arguments of the environment
  --cluster.KEY V    where the actors run

The other keys are those under `evaluation` in `k3rl config show rl`."""


def evaluate(words: Sequence[str]) -> int:
    """The `k3rl eval` command."""
    if not words or "--help" in words or "-h" in words:
        print(EVAL_USAGE)
        return 0
    as_json = "--json" in words
    checkpoint, env, *rest = [*(word for word in words if word != "--json"), "", ""]
    if not checkpoint or not env or env == "@" or env.startswith("--"):
        raise ConfigError(f"eval wants a checkpoint and an environment\n{EVAL_USAGE}", key="eval")
    files, flags = split_words([word for word in rest if word])
    from k3rl import pipelines
    from k3rl.actors.cluster import ClusterConfig
    from k3rl.pipelines.configs import EvalConfig

    class EvalWords(EvalConfig):
        env_args: dict[str, Any] = {}
        cluster: ClusterConfig = ClusterConfig()

    chosen = load(EvalWords(), files=files, flags=flags)
    evaluation = EvalConfig(**{name: getattr(chosen, name) for name in EvalConfig.model_fields})
    result = pipelines.evaluate(
        checkpoint, env, evaluation=evaluation, cluster_config=chosen.cluster, env_args=chosen.env_args
    )
    if as_json:
        print_json(result)
        return 0
    low, high = result["ci95"]
    print(f"pass@1 {result['pass_at_1']:.4f}   95% interval {low:.4f} to {high:.4f}   {result['n']} tasks")
    print(f"greedy {result['greedy']:.4f}")
    for family, value in result["by_family"].items():
        print(f"  {family}: {_plain(value)}")
    return 0


def export(words: Sequence[str]) -> int:
    """The `k3rl export` command: the checkpoint is loaded, written anew, read back and compared byte for byte."""
    parser = Parser(
        "export",
        "Writes a checkpoint in the official layout, or an adapter in PEFT's format, into a new folder, and reads it "
        "back.",
    )
    parser.add_argument("source", type=Path, help="a checkpoint, an adapter, a run directory, or a training state")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--stage", help="which stage of the run, where there are several")
    parser.add_argument("--step", help="of a run: from the training state after that many steps, or `latest`")
    parser.add_argument("--merge", action="store_true", help="of an adapter and its weights, write one checkpoint")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    if (state := find_state(arguments.source, arguments.stage, arguments.step)) is not None:
        return _export_state(state, arguments)
    source = find_checkpoint(arguments.source, arguments.stage)
    if arguments.target.resolve() == source.resolve():
        raise ConfigError(f"{arguments.target} is the checkpoint itself; name another folder", key="target")
    from k3rl.checkpoint import is_adapter
    from k3rl.cli.export import copy_adapter, copy_checkpoint, merge_adapter

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
        return 0
    print(f"{arguments.target}: {tensors} tensors, {size:,} bytes, read back equal")
    for form, about in merged.items():
        error = f"{about['error']:.1%} of the adapter's change"
        print(f"  {about['matrices']} matrices stored as {form}: rounding moves them by {error}")
    return 0


def _export_state(state: Path, arguments: Namespace) -> int:
    from k3rl.checkpoint.train_state import TrainState
    from k3rl.cli.export import export_state

    tensors, size = export_state(TrainState(state), arguments.target, merged=arguments.merge)
    if arguments.json:
        print_json({"source": str(state), "export": str(arguments.target), "tensors": tensors, "bytes": size})
        return 0
    print(f"{arguments.target}: {tensors} tensors, {size:,} bytes, of {state}")
    return 0


def find_state(place: Path, stage: str | None, step: str | None) -> Path | None:
    """The training state that is meant: `place` itself, or that of a run's stage after `step` steps; None for neither.

    Raises ConfigError or MissingResource.
    """
    if (place / "manifest.sha256").is_file():
        return place
    if step is None:
        return None
    from k3rl.checkpoint.train_state import chosen_train_state

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


def inspect(words: Sequence[str]) -> int:
    """The `k3rl inspect` command."""
    parser = Parser("inspect", "Parameters and stored bytes of a checkpoint or of a named size, part by part.")
    parser.add_argument("model", help="a folder in the official layout, or k3-nano, k3-mini, k3-small, k3")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    from k3rl.checkpoint.inspect import inspect as look

    result = look(arguments.model)
    if arguments.json:
        print_json(result)
        return 0
    for name in ("parameters", "active_parameters", "bytes"):
        print(f"{name.replace('_', ' ')}: {result[name]:,}")
    for name, value in result["parts"].items():
        print(f"  {name}: {_plain(value)}")
    print(f"quantized: {', '.join(result['quantized']) or 'nothing'}")
    print(f"like {result['model']}" + (", except" if result["differences"] else ""))
    for key, (here, there) in result["differences"].items():
        print(f"  {key}: {here} instead of {there}")
    return 0


def _plain(value: Any) -> str:
    """A value of a result for a reader."""
    if isinstance(value, dict):
        return "  ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
