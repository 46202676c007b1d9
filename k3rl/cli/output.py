"""What commands print: results as one JSON object for programs, and values for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from k3rl.run import to_line


def print_json(result: Mapping[str, Any]) -> None:
    """The one JSON object on the last line of standard output."""
    sys.stdout.write(to_line(dict(result)).decode("utf-8", "replace"))
    sys.stdout.flush()


def readable(value: Any) -> str:
    """A value of a result for a reader."""
    if isinstance(value, dict):
        return "  ".join(f"{name} {readable(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
