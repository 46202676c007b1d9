"""The whole loop of RL, by the commands of a user: sampled tokens a second, what a long tail costs, time to start.

    python benchmarks/loop.py [--gpu] [--parts step lists tools modes start drift] [--episodes N] [--steps N]
                              [--sft DIR] [--out FILE] [--plots DIR] [--json]

Every figure is of `k3rl rl` in processes of its own, read from the run's `metrics.jsonl`; `--gpu` puts learner and
engine of `k3-small` on one GPU, otherwise it is `k3-nano` on CPUs. Steps count once the batch before was there, so
compilation is in `start` alone.

`step`: one turn of 24 tokens and a free reward (`loop_env.py`), asynchronous; the peer is TRL's GRPO in a process of
its own afterwards (`loop_peer.py`, when `trl` is installed), of a dense model with half the active parameters; ratios
are of sampled tokens a second. `engine alone` is an engine over the same prompts and nothing else: its rate, and the
share of it that the loop reaches. `lists`: the same for `coding-lists`, whose programs run, from an SFT checkpoint.
`tools`: 64 conversations of 10 turns whose tools take log-normal times (sigma 1.5), against the longest one alone.
`modes`: seconds to an equal reward, asynchronous against synchronous, with a tool's long tail in each episode.
`start`: from the command to the first trained step, with empty and with warm compile caches. `drift`: 100 steps;
reward, and KL between sampler and learner over the steps that trained on fresh and on older tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PARTS = ["step", "lists", "tools", "modes", "start", "drift"]
TOKENS, TURNS, TOOL_S, SIGMA = 24, 10, 0.05, 1.5
Row = dict[str, Any]


def machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cores": os.cpu_count(), "cpu": platform.processor() or platform.machine()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "ray", "numpy", "trl", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


class Bench:
    """Runs commands, keeps rows."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.gpu, self.given, self.folder = given.gpu, given, folder
        self.model = "k3-small" if given.gpu else "k3-nano"
        self.rows: list[Row] = []
        self.runs = 0

    def row(self, name: str, shape: str, ours_s: float | None, peer_s: float | None = None, **more: Any) -> None:
        def ms(value: float | None) -> float | None:
            return None if value is None else round(1e3 * value, 2)

        ratio = round(peer_s / ours_s, 3) if peer_s and ours_s else None
        regime = f"{self.model}, {'one GPU, bf16' if self.gpu else 'cpu, float32'}"
        row = {"name": name, "shape": shape, "regime": regime, "peer": more.pop("peer", "none")}
        self.rows.append(
            row
            | {"ours_ms": ms(ours_s), "peer_ms": ms(peer_s), "ratio": ratio, "floor_ms": None, "share_of_floor": None}
            | more
        )
        print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)
        self.write()

    def write(self) -> dict[str, Any]:
        report = {"machine": machine(), "versions": versions(), "results": self.rows}
        if self.given.out is not None:
            self.given.out.parent.mkdir(parents=True, exist_ok=True)
            self.given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report

    # ------------------------------------------------------------------------------------------------- runs

    def cluster(self) -> list[str]:
        if not self.gpu:
            return []
        both = [f"--cluster.{role}-{key}" for role in ("learner", "rollout") for key in ("actors", "device", "gpus")]
        words = [word for pair in zip(both, 2 * ["1", "cuda", "0.5"], strict=True) for word in pair]
        return [*words, "--env.sandbox", self.given.sandbox]

    def command(self, verb: str, *words: str, variables: dict[str, str] | None = None) -> tuple[Path, float]:
        """(the run's directory, when it was started) of a `k3rl` command that finished, or was cut by `--timeout`."""
        self.runs += 1
        out = self.folder / f"run{self.runs}"
        measured = ["--evaluation.n", "8", "--evaluation.n-family", "0", "--save-every", "100000"]
        line = [sys.executable, "-m", "k3rl", verb, *words, *self.cluster(), *measured, "--out", str(out)]
        began = time.time()
        try:
            ended = subprocess.run(
                line, env=os.environ | (variables or {}), capture_output=True, text=True, timeout=self.given.timeout
            )
        except subprocess.TimeoutExpired:
            print(f"cut after {self.given.timeout:g} s: {' '.join(line)}", file=sys.stderr)
            return out, began
        if ended.returncode:
            raise SystemExit(f"{' '.join(line)}\nended with status {ended.returncode}:\n{ended.stderr[-4000:]}")
        return out, began

    def rl(self, start: Path, *words: str, variables: dict[str, str] | None = None) -> tuple[list[Row], float]:
        """(metrics of the steps, when the command was started) of a run."""
        fixed = ["--model.start", str(start)]
        out, began = self.command("rl", *fixed, *words, variables=variables)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if row["source"] == "rl"], began

    def fresh(self) -> Path:
        """A checkpoint of random weights."""
        out = self.folder / "fresh"
        if not out.exists():
            import torch

            from k3rl.checkpoint import save_checkpoint
            from k3rl.model import K3Config, K3ForCausalLM
            from k3rl.tokens import Tokenizer

            model = K3ForCausalLM(K3Config.named(self.model))
            model.init_weights(0)
            save_checkpoint(model.to(torch.bfloat16), out, tokenizer=Tokenizer.builtin())
        return out

    def warmed(self, env: list[str], steps: int) -> Path:
        """An SFT checkpoint on the demonstrations of an environment."""
        if self.given.sft is not None:
            return Path(self.given.sft)
        batch = ["--batch-size", "256"] if self.gpu else []
        steps_words = ["--max-steps", str(steps), "--demonstrations", "4000", "--heldout-examples", "32"]
        return self.command("sft", "--model.start", self.model, *env, *batch, *steps_words)[0] / "export" / "sft"


def letters(**options: Any) -> list[str]:
    words = ["--env.name", str(HERE / "loop_env.py")]
    for key, value in options.items():
        words += [f"--env.args.{key}", str(value)]
    return words


ASYNCHRONOUS = ["--rollouts.mode", "asynchronous", "--max-staleness", "0"]


def pace(steps: list[Row]) -> tuple[float, float]:
    """(median seconds, mean sampled tokens) of the steps after the first third, which compile and fill."""
    late = steps[max(2, len(steps) // 3) :]
    seconds = [after["t"] - before["t"] for before, after in itertools.pairwise(late)]
    return statistics.median(seconds), statistics.fmean(step["perf/sampled_tokens"] for step in late)


def times_of(steps: list[Row]) -> dict[str, float]:
    """Medians of where the steps' seconds went, and of the metrics that tell of them."""
    late, found = steps[max(2, len(steps) // 3) :], {}
    for key in sorted({key for step in late for key in step}):
        if key.startswith(("time/", "publish/", "engine/", "perf/")):
            found[key] = round(statistics.median(step[key] for step in late if key in step), 5)
    return found


# ------------------------------------------------------------------------------------------------------ parts


def step(bench: Bench) -> None:
    episodes, start = bench.given.episodes or (4096 if bench.gpu else 64), bench.fresh()
    shape = f"{episodes} episodes a step, {TOKENS} tokens each"
    words = [*letters(tokens=TOKENS), *ASYNCHRONOUS, "--batch-size", str(episodes), *bench.given.words]
    steps, _ = bench.rl(start, *words, "--steps", str(bench.given.steps or (16 if bench.gpu else 12)))
    seconds, tokens = pace(steps)
    peer = peer_seconds(bench, episodes)
    name = "TRL GRPO, dense 76 M, plain generate" if peer else "none"
    peer_rate = episodes * TOKENS / peer if peer else None
    rate = tokens / seconds
    alone = engine_alone(bench, start, episodes)
    bench.row(
        "step", shape, seconds, peer, peer=name, tokens_per_s=round(rate),
        peer_tokens_per_s=peer_rate and round(peer_rate), ratio_tokens=peer_rate and round(rate / peer_rate, 3),
        engine_tokens_per_s=round(alone), share_of_engine=round(rate / alone, 3), parts=times_of(steps),
    )  # fmt: skip


def peer_seconds(bench: Bench, episodes: int) -> float | None:
    """The median step of the peer after its first ones; None where it is not installed or there is no GPU."""
    if not bench.gpu or importlib.util.find_spec("trl") is None:
        return None
    line = [sys.executable, str(HERE / "loop_peer.py"), str(episodes), "12", str(TOKENS)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300)
    found = [float(text.split()[2]) for text in ended.stdout.splitlines() if text.startswith("step ")]
    if len(found) < 4:
        print(f"the peer failed:\n{ended.stderr[-1500:]}", file=sys.stderr)
        return None
    return statistics.median(found[3:])


def engine_alone(bench: Bench, start: Path, episodes: int) -> float:
    """Sampled tokens a second of one engine in a process of its own, on as many prompts of the same kind."""
    line = [sys.executable, __file__, "--alone", str(start), "--episodes", str(episodes), *(["--gpu"] * bench.gpu)]
    ended = subprocess.run(line, capture_output=True, text=True, check=True, timeout=bench.given.timeout)
    return float(ended.stdout.splitlines()[-1])


def alone(given: argparse.Namespace) -> float:
    import torch

    from k3rl.checkpoint import load_checkpoint
    from k3rl.engine import Engine, SamplingParams
    from k3rl.envs import make
    from k3rl.tokens import Tokenizer, chat_format

    tokenizer, source = Tokenizer.load(given.alone), make(str(HERE / "loop_env.py")).source
    prompts = []
    for index in range(given.episodes // 8):
        messages = list(source.get("train", index).messages)
        prompts += 8 * [tokenizer.encode_segments(chat_format(tokenizer).render(messages))]
    device, dtype = ("cuda", torch.bfloat16) if given.gpu else ("cpu", torch.float32)
    model = load_checkpoint(given.alone, dtype, device, packed="served")
    engine = Engine(model, max_running=256, seed=0, tokenizer=tokenizer)
    params, best = SamplingParams(max_tokens=TOKENS, stop_ids=(chat_format(tokenizer).stop_id,)), 0.0
    for _ in range(3):
        began = time.perf_counter()
        done = engine.generate(prompts, params)
        best = max(best, sum(len(each.token_ids) for each in done) / (time.perf_counter() - began))
    return best


def lists(bench: Bench) -> None:
    episodes = bench.given.episodes or (4096 if bench.gpu else 128)
    words = [*ASYNCHRONOUS, "--batch-size", str(episodes), *bench.given.words]
    steps, _ = bench.rl(bench.warmed([], 120), *words, "--steps", str(bench.given.steps or 14))
    seconds, tokens = pace(steps)
    rewards = [round(each["reward/coding-lists/mean"], 3) for each in steps]
    bench.row(
        "lists", f"{episodes} episodes a step of coding-lists", seconds, tokens_per_s=round(tokens / seconds),
        rewards=rewards, parts=times_of(steps),
    )  # fmt: skip


def tools(bench: Bench) -> None:
    options = {"turns": TURNS, "tokens": 16, "tool_s": TOOL_S * (1 if bench.gpu else 20), "sigma": SIGMA}
    start = bench.warmed(letters(turns=TURNS, tokens=16), 60)
    words = [*letters(**options), *ASYNCHRONOUS, "--steps", "1", "--group-size", "2"]
    one, _ = bench.rl(start, *words, "--batch-size", "2")
    many, _ = bench.rl(start, *words, "--batch-size", "64")
    module = runpy.run_path(str(HERE / "loop_env.py"))
    waits = [module["tool_seconds"](f"letters/train/0/{index}", TURNS, options["tool_s"], SIGMA) for index in range(32)]
    model_s = one[0]["time/wait_for_batch"] - waits[0]
    longest = max(waits) + max(0.0, model_s)
    found = many[0]["time/wait_for_batch"]
    bench.row(
        "tools", f"64 conversations of {TURNS} turns, sigma {SIGMA}", found, longest,
        peer="the longest one alone", of_longest=round(found / longest, 3),
    )  # fmt: skip


def modes(bench: Bench) -> None:
    options = {"turns": 2, "tokens": 16, "tool_s": 0.3, "sigma": SIGMA}
    start = bench.warmed(letters(turns=2, tokens=16), 60)
    words = [*letters(**options), "--batch-size", "64", "--steps", str(bench.given.steps or 40)]
    rates = ["--trainer.muon-lr", "0.004", "--trainer.adamw-lr", "0.004"]
    kinds = {"synchronous": ["--max-staleness", "0"], "asynchronous": ASYNCHRONOUS}
    curves: dict[str, list[tuple[float, float]]] = {}
    for kind, chosen in kinds.items():
        steps, _ = bench.rl(start, *words, *rates, *chosen)
        first = steps[0]["t"] - steps[0]["time/step"]
        curves[kind] = [(step["t"] - first, step["reward/letters/mean"]) for step in steps]
    goal = 0.95 * min(max(smooth([reward for _, reward in curve])) for curve in curves.values())
    reached = {kind: seconds_to(curve, goal) for kind, curve in curves.items()}
    ours, peer = reached["asynchronous"], reached["synchronous"]
    bench.row(
        "modes", f"reward {goal:.3f}, tools of 0.3 s, sigma {SIGMA}", ours, peer, peer="synchronous",
        of_synchronous=ours and peer and round(ours / peer, 3), curves=curves,
    )  # fmt: skip
    plot(bench, "loop_modes", {f"{kind}, reward over seconds": curve for kind, curve in curves.items()})


def smooth(values: list[float], over: int = 3) -> list[float]:
    return [statistics.fmean(values[max(0, place - over + 1) : place + 1]) for place in range(len(values))]


def seconds_to(curve: list[tuple[float, float]], goal: float) -> float | None:
    means = smooth([reward for _, reward in curve])
    return next((t for (t, _), mean in zip(curve, means, strict=True) if mean >= goal), None)


def start(bench: Bench) -> None:
    checkpoint = bench.fresh()
    episodes = bench.given.episodes or (1024 if bench.gpu else 64)
    words = [*letters(tokens=TOKENS), *ASYNCHRONOUS, "--batch-size", str(episodes), "--steps", "2"]
    caches = {"TRITON_CACHE_DIR": str(bench.folder / "triton"), "K3RL_CACHE_DIR": str(bench.folder / "cache")}
    found = []
    for _ in ("cold", "warm"):
        steps, began = bench.rl(checkpoint, *words, variables=caches)
        found.append(steps[0]["t"] - began)
    bench.row("start", f"{episodes} episodes, cold and warm compile caches", found[0], cold_s=found[0], warm_s=found[1])


def drift(bench: Bench) -> None:
    steps_wanted = bench.given.steps or 100
    words = [*ASYNCHRONOUS, "--batch-size", str(bench.given.episodes or (1024 if bench.gpu else 128))]
    steps, _ = bench.rl(bench.warmed([], 120), *words, *bench.given.words, "--steps", str(steps_wanted))
    rewards = [each["reward/coding-lists/mean"] for each in steps]
    fresh = [each["mismatch/kl/mean"] for each in steps if each["staleness/mean"] == 0]
    older = [each["mismatch/kl/mean"] for each in steps if each["staleness/mean"] > 0]
    bench.row(
        "drift", f"{len(steps)} steps of coding-lists", pace(steps)[0], rewards=[round(each, 4) for each in rewards],
        last_rewards=round(statistics.fmean(rewards[-10:]), 4), kl_fresh=statistics.fmean(fresh) if fresh else None,
        kl_older=statistics.fmean(older) if older else None, kl_most=max(older, default=None),
    )  # fmt: skip
    curves = {"reward over steps": rewards, "KL(sampler, learner) over steps": [e["mismatch/kl/mean"] for e in steps]}
    plot(bench, "loop_drift", {name: list(enumerate(values)) for name, values in curves.items()})


def plot(bench: Bench, name: str, curves: dict[str, list[tuple[float, float]]]) -> None:
    if bench.given.plots is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(curves), 1, squeeze=False, figsize=(7, 3 * len(curves)), layout="constrained")
    for (title, curve), own in zip(curves.items(), axes[:, 0], strict=True):
        own.plot(*zip(*curve, strict=True))
        own.set_title(title)
    bench.given.plots.mkdir(parents=True, exist_ok=True)
    figure.savefig(bench.given.plots / f"{name}.png", dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["step", "tools"])
    parser.add_argument("--episodes", type=int, help="of one step")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sft", help="a checkpoint to start from where a part needs one, instead of making it")
    parser.add_argument("--sandbox", default="bwrap", help="env.sandbox of the runs on a GPU")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one command")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path, help="a folder for PNG files")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="after --: more words for the runs, such as --trainer.muon-lr 0.002")
    given = parser.parse_args()
    if given.alone is not None:
        print(alone(given))
        return
    kinds = {"step": step, "lists": lists, "tools": tools, "modes": modes, "start": start, "drift": drift}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given, Path(folder))
        for part in given.parts:
            kinds[part](bench)
        report = bench.write()
    if given.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
