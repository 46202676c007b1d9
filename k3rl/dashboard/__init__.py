"""Runs in a browser: curves, rollouts down to single tokens, while they happen and afterwards. Reads run directories.

catalogue.py   the runs below a folder            run_reader.py  one run as its files grow; rows.py what they hold
episodes.py    one episode's turns and tokens     queries.py     lists, groups, tasks, searches
live.py        notices of what changed            timeline.py    where each second went, Perfetto's file
sft_data.py    conversations with their mask      export.py      an episode or a run as one HTML file
server.py      HTTP                               security.py    who may read it
static/        the page: plain modules, no build; static/vendor has uPlot with its licence and hash
demo/          a small recorded run
Nothing here trains, samples, or writes to a run. No torch, no Ray.
"""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from k3rl.dashboard.catalogue import Catalogue
from k3rl.dashboard.episodes import Bodies
from k3rl.dashboard.export import episode_html, run_html
from k3rl.dashboard.run_reader import RunReader, UnknownRun

if TYPE_CHECKING:  # an extra's packages, imported by whoever serves
    from k3rl.dashboard.server import DashboardOptions, create_app, serve_dashboard

DEMO = Path(str(files("k3rl.dashboard"))) / "demo"

__all__ = [
    "DEMO",
    "Bodies",
    "Catalogue",
    "DashboardOptions",
    "RunReader",
    "UnknownRun",
    "create_app",
    "episode_html",
    "run_html",
    "serve_dashboard",
]


def __getattr__(name: str) -> object:
    """The names of server.py, whose packages are an extra. Raises ModuleNotFoundError where they are missing."""
    if name in ("DashboardOptions", "create_app", "serve_dashboard"):
        from k3rl.dashboard import server

        return getattr(server, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
