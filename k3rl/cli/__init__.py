"""The `k3rl` command: a file a verb. Importing it loads neither torch nor ray."""

from k3rl.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
