"""A run on disk and on the terminal: directory, metrics, recorded rollouts, progress, summary.

Every producer appends lines to files; every viewer only reads them, so a finished or crashed run opens like a live
one. Nothing here knows models, actors or environments beyond the dataclasses of `k3rl.types`.
"""

from k3rl.run.directory import RunDirectory, RunInfo
from k3rl.run.metrics import Accumulator, MetricsWriter, read_metrics, series
from k3rl.run.options import RunOptions
from k3rl.run.recorder import Recorder, RecorderStats

__all__ = [
    "Accumulator",
    "MetricsWriter",
    "Recorder",
    "RecorderStats",
    "RunDirectory",
    "RunInfo",
    "RunOptions",
    "read_metrics",
    "series",
]
