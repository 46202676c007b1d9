"""Words of a command line: a parser whose errors are configuration errors, and the error for an unknown word."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from k3rl.config import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are ConfigErrors."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"k3rl {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n  {self.format_usage().strip()}", key=self.prog, wanted=self.format_usage())

    def read(self, words: Sequence[str]) -> argparse.Namespace | None:
        """The arguments, or None after `--help` was printed."""
        if "--help" in words or "-h" in words:
            self.print_help()
            return None
        return self.parse_args(list(words))


def unknown(what: str, got: str, known: Iterable[str]) -> ConfigError:
    """The error for a word that is not among the known ones."""
    names = list(known)
    nearest = next(iter(difflib.get_close_matches(got, names, n=1)), None)
    wanted = f"one of {', '.join(names)}"
    message = f"there is no {what} {got!r}\n  wants:   {wanted}" + (f"\n  nearest: {nearest}" if nearest else "")
    return ConfigError(message, key=what, got=got, wanted=wanted, nearest=nearest)
