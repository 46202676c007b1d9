"""A run on disk and on the terminal: directory, metrics, recorded rollouts, progress, summary. No torch.

directory.py   the run directory, its attempts       options.py   what a command asks for besides the configuration
metrics.py     sums and counts, metrics.jsonl        sinks.py     TensorBoard and Weights & Biases beside it
recorder.py    rollouts turn by turn                 tail.py      the same as text
progress.py    the live panel and the log            summary.py   the table at the end, the reward curve
signalled.py   what SIGINT and SIGTERM raise
files.py  terminal.py  redact.py    lines and whole files, text that is safe to show, secrets taken out
Every producer appends lines to files; every viewer only reads them, so a finished or crashed run opens like a live
one. Nothing here knows models, actors or environments beyond the dataclasses of `k3rl.types`.
"""

from k3rl.run.directory import RunDirectory, RunInfo, RunStopped, package_versions
from k3rl.run.files import read_lines, read_object, to_line, write_atomic
from k3rl.run.metrics import Accumulator, MetricsWriter, read_metrics, series
from k3rl.run.options import RunOptions
from k3rl.run.progress import Progress
from k3rl.run.recorder import Recorder, RecorderStats, score_row
from k3rl.run.signalled import Signalled
from k3rl.run.sinks import MetricsConfig, check_sinks, open_sinks
from k3rl.run.summary import StageSummary, plot_rewards, print_summary
from k3rl.run.tail import follow_run
from k3rl.run.terminal import framed, visible

__all__ = [
    "Accumulator",
    "MetricsConfig",
    "MetricsWriter",
    "Progress",
    "Recorder",
    "RecorderStats",
    "RunDirectory",
    "RunInfo",
    "RunOptions",
    "RunStopped",
    "Signalled",
    "StageSummary",
    "check_sinks",
    "follow_run",
    "framed",
    "open_sinks",
    "package_versions",
    "plot_rewards",
    "print_summary",
    "read_lines",
    "read_metrics",
    "read_object",
    "score_row",
    "series",
    "to_line",
    "visible",
    "write_atomic",
]
