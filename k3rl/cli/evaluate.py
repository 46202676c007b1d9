"""`k3rl eval`: the held-out pass rate of a checkpoint on an environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k3rl.cli.output import print_json, readable
from k3rl.config import ConfigError, load, split_words

USAGE = """\
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
        print(USAGE)
        return 0
    as_json = "--json" in words
    checkpoint, env, *rest = [*(word for word in words if word != "--json"), "", ""]
    if not checkpoint or not env or env == "@" or env.startswith("--"):
        raise ConfigError(f"eval wants a checkpoint and an environment\n{USAGE}", key="eval")
    files, flags = split_words([word for word in rest if word])
    from k3rl import pipelines
    from k3rl.actors import ClusterConfig
    from k3rl.pipelines import EvalConfig

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
        print(f"  {family}: {readable(value)}")
    return 0
