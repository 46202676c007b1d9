"""Progress of a run: one live panel on a terminal, one plain line per step anywhere else.

Everything goes to standard error, so that standard output holds results only, and as plain lines to a log file. Workers
draw nothing: they send their counts to the driver, which calls `StageProgress.step`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from k3rl.run.redact import redact
from k3rl.run.terminal import visible

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The last `width` values as bars between their own minimum and maximum."""
    recent = list(values)[-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in recent)


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h10m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """The stages of one run. Use as a context manager, so that the terminal is given back on any exit."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._stages: list[StageProgress] = []
        self._log: TextIO | None = None
        self._live = Live(console=self.console, refresh_per_second=2, get_renderable=self._render)

    def stage(self, name: str, total: int | None = None, *, left_s: float | None = None) -> StageProgress:
        """Begin a stage of `total` steps; None when their number is not known. left_s: seconds that it has at most."""
        self._stages.append(StageProgress(self, name, total, left_s))
        return self._stages[-1]

    def note(self, text: str) -> None:
        """Say what start-up or a long wait is doing: "waiting for 2 CPUs: 1 free"."""
        self.console.print(Text(visible(text)), soft_wrap=True)
        self._keep(text)

    def log_to(self, path: Path) -> None:
        """From now on every note, every step's line and the error that ends the run go there too, with their times."""
        self._close_log()
        self._log = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (as long as the run)

    def say_step(self, text: str) -> None:
        """A step's line: to the log, and where there is no live panel to see it in."""
        if self.console.is_terminal:
            self._keep(text)
        else:
            self.note(text)

    def _keep(self, text: str) -> None:
        if self._log is None:
            return
        try:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {visible(redact(text))}\n")
            self._log.flush()
        except OSError as error:  # a full disk must not end a run that only wanted to say something
            self._log = None
            self.note(f"the log ends here: {error}")

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for stage in self._stages:
            bar = ProgressBar(total=stage.total, completed=stage.done, width=24, pulse=stage.total is None)
            table.add_row(Text(stage.name), bar, *(Text(part) for part in stage.columns()))
        return Group(table)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if error is not None:
            self._keep("".join(traceback.format_exception(error)).rstrip())
        self._close_log()


class StageProgress:
    """The progress of one stage: `step` after each of its steps, then `end`."""

    def __init__(self, progress: Progress, name: str, total: int | None, left_s: float | None = None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.tokens = 0
        self._progress = progress
        self._shown: dict[str, float] = {}
        self._rewards: list[float] = []
        self._started = time.monotonic()
        self._left_s = float("inf") if left_s is None else left_s
        self._first = 0
        self._ended: float | None = None

    def resume_at(self, step: int) -> None:
        """Steps before this one were done by an earlier attempt; they count as done and not for the speed."""
        self.done = self._first = step

    def step(self, done: int, *, tokens: int = 0, reward: float | None = None, **values: float) -> None:
        """`done` steps are finished; `tokens` were processed by the last one; `values` are shown by name."""
        self.done = done
        self.tokens += tokens
        if reward is not None:
            self._rewards.append(reward)
            values = {"reward": reward, **values}
        self._shown = values
        self._progress.say_step("  ".join([self.name, *(part for part in self.columns(spark=False) if part)]))

    def end(self) -> None:
        """The stage is over, whether or not all its steps were needed."""
        self._ended = time.monotonic()

    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    def columns(self, spark: bool = True) -> list[str]:
        """Step, values, sparkline, speed and time, as shown."""
        seconds = self.seconds()
        values = "  ".join(f"{name} {value:.4g}" for name, value in self._shown.items())
        speed = f"{self.tokens / seconds:,.0f} tokens/s" if self.tokens and seconds > 0 else ""
        steps = f"{self.done}/{self.total}" if self.total is not None else f"{self.done}"
        bars = [sparkline(self._rewards)] if spark else []
        return [steps, values, *bars, speed, self._time(seconds)]

    def _time(self, seconds: float) -> str:
        fresh = self.done - self._first
        if self._ended is not None or self.total is None or fresh <= 0 or self.done >= self.total:
            return duration(seconds)
        return f"eta {duration(min(seconds / fresh * (self.total - self.done), self._left_s - seconds))}"
