"""The `k3rl` command: finds the command, calls it, and turns errors into messages and exit codes.

Exit codes: 0 fine, 1 crash, 2 bad configuration or command line, 3 something missing, 4 stopped at a limit of its own,
130 interrupted, 143 ended by SIGTERM. Commands live in this folder and are imported only when called, so that `--help`
stays quick. Each takes its words and returns an exit code.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from k3rl.cli.parser import unknown
from k3rl.config import K3Error

# Of what a person is after: command -> (module:function, what it does)
GROUPS = {
    "before a run": {
        "doctor": ("k3rl.cli.doctor:doctor", "check that this machine has what a run needs"),
        "env": ("k3rl.cli.env:env", "environments: list, check, grade, play, new"),
        "config": ("k3rl.cli.config:config", "configurations: show, diff, schema"),
        "data": ("k3rl.cli.data:data", "chat data: check every row, and show what carries loss"),
        "plan": ("k3rl.cli.plan:plan", "memory, traffic and time of post-training a model on a cluster"),
    },
    "train": {
        "sft": ("k3rl.cli.pipeline:sft", "supervised fine-tuning"),
        "rl": ("k3rl.cli.pipeline:rl", "reinforcement learning; `k3rl rl quickstart` is the whole main job"),
        "distill": ("k3rl.cli.pipeline:distill", "on-policy distillation"),
        "submit": ("k3rl.cli.submit:submit", "run one of the above as a Ray job on a cluster that is up"),
        "ablate": ("k3rl.cli.ablate:ablate", "each part of K3 against the common choice, on a tiny model"),
    },
    "look at a run": {
        "dashboard": ("k3rl.cli.dashboard:dashboard", "runs in a browser: curves, rollouts, tokens, live or later"),
        "tail": ("k3rl.cli.tail:tail", "follow the rollouts of a run as text"),
        "replay": ("k3rl.cli.replay:replay", "a stored rollout token by token, scored again by a checkpoint"),
    },
    "use what was trained": {
        "eval": ("k3rl.cli.evaluate:evaluate", "held-out pass rate of a checkpoint on an environment"),
        "export": ("k3rl.cli.export:export", "write a checkpoint of a run in the official layout"),
        "inspect": ("k3rl.cli.inspect:inspect", "parameters and bytes of a checkpoint or a named size"),
        "serve": ("k3rl.cli.serve:serve", "serve a checkpoint over HTTP in the OpenAI dialects"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

# What the system refuses: a full disk, a folder that may not be written to. No fault of k3rl, so no traceback.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)

USAGE = """\
usage: k3rl COMMAND ...

{commands}

k3rl {{sft,rl,distill}} [PRESET] [@ FILE.toml ...] [--dotted.key VALUE ...]
    --out DIR    the run directory (default outputs/<name>)    --seed N    seeds every draw
    --resume     continue the run in it                        --clean     delete it and start again
    --json       print the result as one JSON object           --dry-run   print the configuration and stop
    --dashboard  show the run in a browser while it goes on

`k3rl COMMAND --help` says more; `k3rl config show rl quickstart` prints every key with its value and meaning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except K3Error as error:
        kind = {2: "configuration error", 3: "missing", 4: "stopped"}.get(error.exit_code, "error")
        # What an actor raised arrives wrapped by Ray, with a remote traceback in its text; the cause has the message.
        cause = getattr(error, "cause", error)
        _say(f"k3rl: {kind}\n{cause if isinstance(cause, K3Error) else error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        said = str(error) or "continue a run with the same command and --resume"
        _say(f"k3rl: interrupted; {said}")
        return 128 + int(getattr(error, "number", signal.SIGINT))
    except BrokenPipeError:
        # The reader of our output, such as `head`, has gone: not an error of ours. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if (refusal := _refusal(error)) is None:
            _say(traceback.format_exc().rstrip("\n"))
            return 1
        _say(f"k3rl: missing\n{refusal}")
        return 3


def _say(text: str) -> None:
    """On standard error, with everything visible: errors quote what files, models and code of others say."""
    from k3rl.run.terminal import visible

    print(visible(text), file=sys.stderr)


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
        print(USAGE.format(commands="\n\n".join(map(_listed, GROUPS))))
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


def _listed(group: str) -> str:
    """The commands of a group, a line each, under its name."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, (_, meaning) in GROUPS[group].items()]
    return "\n".join([f"{group}:", *lines])
