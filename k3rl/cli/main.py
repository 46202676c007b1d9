"""The `k3rl` command: finds the command, calls it, and turns errors into messages and exit codes.

Exit codes: 0 fine, 1 crash, 2 bad configuration or command line, 3 something missing, 130 interrupted. Commands live
in this folder and are imported only when called, so that `--help` stays quick. Each takes its words and returns
an exit code.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module

from k3rl.config import ConfigError, K3Error

# command -> (module:function, what it does)
COMMANDS = {
    "sft": ("k3rl.cli.run:sft", "supervised fine-tuning"),
    "rl": ("k3rl.cli.run:rl", "reinforcement learning; `k3rl rl quickstart` is the whole main job"),
    "distill": ("k3rl.cli.run:distill", "on-policy distillation"),
    "submit": ("k3rl.cli.run:submit", "run one of the above as a Ray job on a cluster that is up"),
    "serve": ("k3rl.cli.serve:serve", "serve a checkpoint over HTTP in the OpenAI dialects"),
    "eval": ("k3rl.cli.model:evaluate", "held-out pass rate of a checkpoint on an environment"),
    "export": ("k3rl.cli.model:export", "write a checkpoint of a run in the official layout"),
    "ablate": ("k3rl.cli.ablate:ablate", "each part of K3 against the common choice, on a tiny model"),
    "inspect": ("k3rl.cli.model:inspect", "parameters and bytes of a checkpoint or a named size"),
    "plan": ("k3rl.cli.plan:plan", "memory, traffic and time of post-training a model on a cluster"),
    "tail": ("k3rl.cli.run:tail", "follow the rollouts of a run as text"),
    "replay": ("k3rl.cli.replay:replay", "a stored rollout token by token, scored again by a checkpoint"),
    "env": ("k3rl.cli.env:env", "environments: list, check, grade, play, new"),
    "config": ("k3rl.cli.config:config", "configurations: show, diff, schema"),
    "doctor": ("k3rl.cli.doctor:doctor", "check that this machine has what a run needs"),
}

# What the system refuses: a full disk, a folder that may not be written to. No fault of k3rl, so no traceback.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)

USAGE = """\
usage: k3rl COMMAND ...

{commands}

k3rl {{sft,rl,distill}} [PRESET] [@ FILE.toml ...] [--dotted.key VALUE ...]
    --out DIR    the run directory (default outputs/<name>)    --seed N    seeds every draw
    --resume     continue the run in it                        --clean     delete it and start again
    --json       print the result as one JSON object           --dry-run   print the configuration and stop

`k3rl COMMAND --help` says more; `k3rl config show rl quickstart` prints every key with its value and meaning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except K3Error as error:
        kind = {2: "configuration error", 3: "missing"}.get(error.exit_code, "error")
        # What an actor raised arrives wrapped by Ray, with a remote traceback in its text; the cause has the message.
        cause = getattr(error, "cause", error)
        print(f"k3rl: {kind}\n{cause if isinstance(cause, K3Error) else error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        said = str(error) or "continue a run with the same command and --resume"
        print(f"k3rl: interrupted; {said}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output, such as `head`, has gone: not an error of ours. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if (refusal := _refusal(error)) is None:
            traceback.print_exc()
            return 1
        print(f"k3rl: missing\n{refusal}", file=sys.stderr)
        return 3


def _refusal(error: Exception) -> str | None:
    """What the system said no to, in a sentence; None for any other error."""
    if isinstance(error, OSError):
        number, place = error.errno, error.filename
    else:  # libraries in Rust, such as safetensors, tell the number in their text and not the file
        found = re.search(r"\(os error (\d+)\)", str(error))
        number, place = int(found[1]) if found else None, None
    if number not in REFUSALS:
        return None
    full = number in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some room" if full else "name a place that can be written to"
    return f"{f'{place}: ' if place else ''}{os.strerror(number)}; {remedy}, then give the same command again"


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:<{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items())
        print(USAGE.format(commands=commands))
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"k3rl {version('k3rl')}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(import_module(module), function)(rest)


def unknown(what: str, got: str, known: Iterable[str]) -> ConfigError:
    """The error for a word that is not among the known ones."""
    names = list(known)
    nearest = next(iter(difflib.get_close_matches(got, names, n=1)), None)
    wanted = f"one of {', '.join(names)}"
    message = f"there is no {what} {got!r}\n  wants:   {wanted}" + (f"\n  nearest: {nearest}" if nearest else "")
    return ConfigError(message, key=what, got=got, wanted=wanted, nearest=nearest)


if __name__ == "__main__":
    sys.exit(main())
