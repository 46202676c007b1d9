"""`python3 -m minitriton COMMAND`: request on standard input, answer on standard output, both JSON."""

from .cli import main

main()
