"""What a command was asked for besides the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`out` is the run directory, None for outputs/<name>; `seed` None leaves the configuration's.

    json: the command prints its result as one JSON object on the last line of standard output. dashboard: a dashboard
    of the run is served in a process of its own while the command runs.
    argv: the command line as typed. preset: the preset's name. files: the TOML files that were read.
    """

    out: Path | None = None
    seed: int | None = None
    resume: bool = False
    clean: bool = False
    json: bool = False
    dashboard: bool = False
    argv: tuple[str, ...] = ()
    preset: str = "default"
    files: tuple[Path, ...] = ()

    def directory(self, name: str) -> Path:
        """`out`, or outputs/`name` below the working directory."""
        return self.out if self.out is not None else Path("outputs") / name
