"""The dashboard in a real browser: seconds to list, open and hear of episodes, and what a run pays for it.

    python benchmarks/dashboard.py [--episodes N] [--tokens N] [--chromium PATH] [--out FILE]

`list`: from the address to the first rows of 5,000 episodes. `open`: from the address to the coloured tokens of an
episode of 100,000. `live`: from `Recorder.episode` to the turn on the screen, in one page and in the slowest of ten.
`viewer`: share of a core that the server takes while ten pages follow a run that records two episodes a second, and
while nobody looks. `annotate`: seconds to write what a learner adds to a step of 256 episodes of 512 tokens, which is
done beside the loop. Needs the packages of the tests (playwright) and Debian's chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from k3rl.config import Config
from k3rl.data import AnnotationWriter, SequenceScores, TrainBatch, TrainSequence
from k3rl.run import MetricsWriter, Recorder, RunDirectory
from k3rl.types import Branch, Episode, Scored, StopReason, Turn

TOKEN, PAGES = "benchmark", 10


class Nothing(Config):
    """A configuration of nothing."""


def episode(name: str, tokens: int, reward: float) -> Episode:
    """One turn of `tokens` sampled tokens."""
    logprobs = -np.abs(np.random.default_rng(len(name)).normal(size=tokens)).astype(np.float32)
    turn = Turn(range(40), [i % 997 for i in range(tokens)], logprobs, StopReason.STOP, 1, 1)
    return Episode(
        name, f"task/{name[-2:]}", "env", "f", 1, (Branch(f"{name}/0", (turn,)),), StopReason.COMPLETED, Scored(reward)
    )


def pieces(ids: Any) -> list[str]:
    return [f" w{token}" for token in ids]


def batch_of(episodes: list[Episode]) -> TrainBatch:
    sequences = []
    for one in episodes:
        ids, mask, logprobs = one.branches[0].tokens()
        sequences.append(TrainSequence(f"{one.id}/{one.branches[0].id}", ids, mask, logprobs, mask.astype(np.float32)))
    return TrainBatch.pack(sequences)


def scores_of(batch: TrainBatch) -> dict[str, SequenceScores]:
    return {
        name: SequenceScores(np.full(n, -0.5, np.float32), np.full(n, 0.5, np.float32))
        for name, n in zip(batch.sequence_ids, batch.lengths.tolist(), strict=True)
    }


def until(condition: Any, limit_s: float = 30.0) -> float:
    """Seconds until it holds."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > limit_s:
            raise TimeoutError("the page does not show what it should")
        time.sleep(0.004)
    return time.perf_counter() - began


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All rows, over a run that this process writes and a server in a process of its own."""
    from playwright.sync_api import sync_playwright

    rows: list[dict[str, Any]] = []

    def row(name: str, shape: str, seconds: float, limit: float, unit: str = "s") -> None:
        rows.append({"name": name, "shape": shape, "value": round(seconds, 4), "unit": unit, "limit": limit})
        print(f"{name:10} {shape:44} {seconds:8.4f} {unit}  (limit {limit:g})", flush=True)

    run = RunDirectory.create(folder / "run", Nothing(), "rl")
    recorder = Recorder(run.traces_dir, capacity=1 << 20)
    metrics = MetricsWriter(run.metrics_path)
    for number in range(arguments.episodes):
        recorder.episode(
            episode(f"rl-{number // 64}-{number // 8 % 8}-{number % 8}", 200, number % 5 / 4), number // 64, pieces
        )
    recorder.episode(long := episode("rl-999-0-0", arguments.tokens, 1.0), 999, pieces)
    until(lambda: recorder.stats().written == arguments.episodes + 1, 300)
    writer = AnnotationWriter(run.traces_dir / "annotations", attempt=1)
    batch = batch_of([long])
    writer.write("rl", 999, [batch], scores_of(batch))
    batch = batch_of([episode(f"rl-0-{i // 8}-{i % 8}", 512, 1.0) for i in range(256)])
    times = []
    for _ in range(3):
        began = time.perf_counter()
        writer.write("rl", 0, [batch], scores_of(batch))
        times.append(time.perf_counter() - began)
    row("annotate", "256 episodes of 512 tokens, in a thread", statistics.median(times), 1.0)
    command = [sys.executable, "-P", "-m", "k3rl", "dashboard", str(folder), "--port", "0", "--json", "--no-browser"]
    environment = os.environ | {"K3RL_DASHBOARD_TOKEN": TOKEN}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
            context = browser.new_context(viewport={"width": 1360, "height": 860})
            page = context.new_page()
            page.goto(f"{url}/?token={TOKEN}")
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{url}/#run=run&view=rollouts")
            until(lambda: page.locator(".virtual .row").count() > 5)
            row("list", f"{arguments.episodes} episodes, to the first rows", time.perf_counter() - began, 1.0)
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{url}/#run=run&view=episode&episode=rl-999-0-0&colour=difference")
            until(lambda: page.locator(".tokens .s").count() > 100)
            row("open", f"{arguments.tokens} tokens, to coloured ones", time.perf_counter() - began, 1.0)
            live(row, context, url, recorder, metrics)
            viewer(row, server.pid, recorder)
            for open_page in context.pages:
                open_page.close()
            time.sleep(1.0)
            before, began = cpu_s(server.pid), time.perf_counter()
            time.sleep(4.0)
            idle = (cpu_s(server.pid) - before) / (time.perf_counter() - began)
            row("viewer", "nobody looks", idle, 0.01, "cores")
            browser.close()
    finally:
        server.terminate()
        server.wait(10)
        recorder.close()
        run.finish("finished")
    return rows


def live(row: Any, context: Any, url: str, recorder: Recorder, metrics: MetricsWriter) -> None:
    """From the recorder to the screen: one page, then the slowest of ten."""
    pages = list(context.pages) + [context.new_page() for _ in range(PAGES - len(context.pages))]
    for page in pages:
        page.goto(f"{url}/#run=run&view=live")
        until(lambda page=page: page.locator(".liveturn").count() > 0)
    until(lambda: pages[0].locator(".connection:not(.off)").count() == 1)
    one, all_of_them = [], []
    for number in range(8):
        name = f"rl-{2000 + number}-0-0"
        began = time.perf_counter()
        recorder.episode(episode(name, 60, 1.0), 2000 + number, pieces)
        for place, page in enumerate(pages):
            until(lambda page=page, name=name: page.locator(f".liveend:has-text('{name}')").count() == 1)
            if place == 0:
                one.append(time.perf_counter() - began)
        all_of_them.append(time.perf_counter() - began)
    row("live", "one page, median of 8", statistics.median(one), 0.5)
    row("live", f"the slowest of {PAGES} pages, median of 8", statistics.median(all_of_them), 0.5)
    metrics.write(0, "rl", {"time/step": 1.0})


def viewer(row: Any, server: int, recorder: Recorder) -> None:
    before, began = cpu_s(server), time.perf_counter()
    for number in range(12):
        recorder.episode(episode(f"rl-{3000 + number}-0-0", 200, 1.0), 3000 + number, pieces)
        time.sleep(0.5)
    share = (cpu_s(server) - before) / (time.perf_counter() - began)
    row("viewer", f"{PAGES} pages follow 2 episodes a second", share, 1.0, "cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    about = {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine(), "load": os.getloadavg()[0]}
    versions = {name: version(name) for name in ("k3rl", "starlette", "uvicorn", "playwright", "pyarrow")}
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": about, "versions": versions, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
