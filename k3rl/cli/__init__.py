"""The `k3rl` command: a file a verb. Importing it loads neither torch nor ray.

main.py      finds the command, turns errors into messages and exit codes
pipeline.py  sft, rl, distill                 launch.py   their command line, as one configuration
env.py  play.py    environments, and an episode that a person plays
parser.py  output.py    words that come in, what is printed
Every other file is the command of its name (evaluate.py: `k3rl eval`). Not here: what the commands do.
"""

from k3rl.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
