"""`k3rl ablate`: each part of K3 against the common choice, on the same data, seeds and starting weights.

One process, no Ray: demonstrations of `coding-lists` through the trainer that the learner uses. The first run is K3;
every other one differs from it in one part. Parameters that both have start equal. The loss is that of held-out
demonstrations under the model as it would be saved and loaded, so that quantization after training counts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.checkpoint import assign_official_tensors, official_tensors
from k3rl.data import TrainBatch, encode_example, sft_sequence
from k3rl.envs import make
from k3rl.losses import CrossEntropy
from k3rl.model import ABLATION_CHOICES, AblationConfig, K3Config, K3ForCausalLM, QuantizationConfig, watch_activations
from k3rl.optim import Schedule
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.run import write_atomic
from k3rl.tokens import Tokenizer

ENVIRONMENT = "coding-lists"
MUON_LR, ADAMW_LR, WARMUP_STEPS = 0.02, 0.005, 10  # those of the sft preset
SETTLED = 0.25  # share of the steps, at the end, over which load and gradient norm are averaged


@dataclass(frozen=True)
class Variant:
    """One way to train: `part` chosen as `choice`, in the model's or in the trainer's configuration."""

    part: str
    choice: str
    model: Callable[[K3Config], K3Config] = field(default=lambda config: config)
    trainer: dict[str, Any] = field(default_factory=dict)


def _switch(part: str, choice: str) -> Variant:
    return Variant(part, choice, lambda config: config.replace(ablation=AblationConfig(**{part: choice})))


def _quantized(choice: str, weights: str, activations: str) -> Variant:
    def changed(config: K3Config) -> K3Config:
        rule = config.quantization.scale_rule
        return config.replace(quantization=QuantizationConfig(weights, rule, activations))

    return Variant("quantization", choice, changed)


BASE = Variant("K3", "as it is")
# part -> what K3 replaced there. K3's own choice is the base run.
PARTS: dict[str, tuple[Variant, ...]] = {
    **{part: tuple(_switch(part, choice) for choice in choices[1:]) for part, choices in ABLATION_CHOICES.items()},
    "balancing": (
        Variant("balancing", "fixed_step", trainer={"balance_by": "fixed_step"}),
        Variant("balancing", "auxiliary_loss", trainer={"balance_by": "auxiliary_loss"}),
        Variant("balancing", "none", trainer={"balance_by": "none"}),
    ),
    "optimizer": (
        Variant("optimizer", "muon_whole", trainer={"optimizer": "muon_whole"}),
        Variant("optimizer", "adamw", trainer={"optimizer": "adamw"}),
    ),
    "quantization": (_quantized("post_hoc", "post_hoc", "mxfp8"), _quantized("none", "none", "none")),
}


@dataclass(frozen=True)
class Measured:
    """One variant, averaged over seeds.

    loss: nats a token, held out, as shipped; loss_spread: standard deviation over seeds, 0 for one. max_vio: busiest
    expert's load over the balanced one, minus 1, mean of layers. max_activation: largest output of any gated unit.
    max_logit: largest attention logit of an MLA layer before clipping (KDA's are bounded by head_dim^-1/2). Both are
    maxima over all of training; max_vio and grad_norm (before clipping) are means over its last quarter.
    """

    part: str
    choice: str
    loss: float
    loss_spread: float
    train_loss: float
    max_vio: float
    max_activation: float
    max_logit: float
    grad_norm: float
    parameters: int
    seconds: float


def ablate(
    parts: Sequence[str],
    *,
    model: str = "k3-nano",
    steps: int = 60,
    batch_size: int = 32,
    seeds: Sequence[int] = (0,),
    heldout: int = 256,
    say: Callable[[str], None] = lambda line: None,
) -> list[Measured]:
    """Trains `model` as K3 and with each choice of these parts; K3 comes first. `say` gets a line for each run.

    Raises KeyError for an unknown part.
    """
    variants = [BASE, *(variant for part in parts for variant in PARTS[part])]
    data = {seed: _batches(seed, steps, batch_size, heldout) for seed in seeds}
    results = []
    for number, variant in enumerate(variants, start=1):
        runs = [_run(variant, K3Config.named(model), seed, *data[seed]) for seed in seeds]
        results.append(_together(variant, runs))
        line = results[-1]
        say(f"[{number}/{len(variants)}] {line.part}: {line.choice}   loss {line.loss:.3f}   {line.seconds:.0f} s")
    return results


def _batches(seed: int, steps: int, batch_size: int, heldout: int) -> tuple[list[TrainBatch], TrainBatch]:
    """The training batches in order, every example once, and the held-out batch, the same for every seed."""
    demonstrations = make(ENVIRONMENT).demonstrations
    assert demonstrations is not None
    tokenizer = Tokenizer.builtin()

    def pack(rows: Sequence[dict[str, Any]]) -> TrainBatch:
        encoded = [encode_example(row["messages"], row.get("tools"), tokenizer, thinking=False) for row in rows]
        return TrainBatch.pack([sft_sequence(str(i), ids, mask) for i, (ids, mask) in enumerate(encoded)])

    rows = demonstrations(seed, steps * batch_size, split="train")
    train = [pack(rows[step * batch_size : (step + 1) * batch_size]) for step in range(steps)]
    return train, pack(demonstrations(0, heldout, split="heldout"))


def build(variant: Variant, base: K3Config, seed: int) -> K3ForCausalLM:
    """Fresh weights of `seed`, equal to those of `base` wherever K3 has a parameter of that name and shape."""
    built = K3ForCausalLM(variant.model(base))
    built.init_weights(seed)
    reference = K3ForCausalLM(base.replace(quantization=built.config.quantization))
    reference.init_weights(seed)
    theirs = dict(reference.official_parameters())
    with torch.no_grad():
        for name, parameter in built.official_parameters():
            if name in theirs and theirs[name].shape == parameter.shape:
                parameter.copy_(theirs[name])
    return built


def _run(variant: Variant, base: K3Config, seed: int, train: list[TrainBatch], heldout: TrainBatch) -> dict[str, Any]:
    """One variant with one seed."""
    began = time.perf_counter()
    trained = build(variant, base, seed)
    trainer = Trainer(trained, TrainerConfig(muon_lr=MUON_LR, adamw_lr=ADAMW_LR, **variant.trainer))
    schedule = Schedule("cosine", min(WARMUP_STEPS, len(train) // 4), len(train))
    rows = []
    with watch_activations(trained) as largest:
        for step, batch in enumerate(train):
            rows.append(trainer.train(batch, CrossEntropy(), lr_scale=schedule.at(step)).values())
    settled = rows[-max(1, round(SETTLED * len(rows))) :]
    return {
        "loss": _shipped_loss(trained, heldout),
        "train_loss": statistics.fmean(row["loss/mean"] for row in settled),
        "max_vio": statistics.fmean(row["moe/max_vio/mean"] for row in settled),
        "max_activation": largest.value,
        "max_logit": max(row["attention/logit/max"] for row in rows),
        "grad_norm": statistics.fmean(row["optim/grad_norm"] for row in settled),
        "parameters": sum(p.numel() for _, p in trained.official_parameters()),
        "seconds": time.perf_counter() - began,
    }


def _shipped_loss(trained: K3ForCausalLM, heldout: TrainBatch) -> float:
    """The held-out loss of the model that a checkpoint of `trained` would hold."""
    shipped = K3ForCausalLM(trained.config.replace(quantization=trained.config.quantization.shipped()))
    assign_official_tensors(shipped, dict(official_tensors(trained, shipped=True)))
    loss: float = Trainer(shipped, TrainerConfig()).evaluate(heldout, CrossEntropy()).values()["loss/mean"]
    return loss


def _together(variant: Variant, runs: list[dict[str, Any]]) -> Measured:
    means: dict[str, Any] = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    for key in ("max_activation", "max_logit"):
        means[key] = max(run[key] for run in runs)
    means["parameters"] = runs[0]["parameters"]
    spread = statistics.stdev(run["loss"] for run in runs) if len(runs) > 1 else 0.0
    return Measured(variant.part, variant.choice, loss_spread=spread, **means)


# ------------------------------------------------------------------------------------------------------ showing

COLUMNS = {
    "loss": "held-out loss",
    "max_vio": "load violation",
    "max_activation": "largest activation",
    "max_logit": "largest MLA logit",
    "grad_norm": "gradient norm",
}


def table(results: Sequence[Measured]) -> str:
    """One line a variant, K3 first."""
    lines = [f"{'part':14}{'choice':16}" + "".join(f"{title:>20}" for title in COLUMNS.values())]
    for line in results:
        loss = f"{line.loss:.4f}" + (f" +- {line.loss_spread:.4f}" if line.loss_spread else "")
        values = [loss, *(f"{getattr(line, key):.4g}" for key in list(COLUMNS)[1:])]
        lines.append(f"{line.part:14}{line.choice:16}" + "".join(f"{value:>20}" for value in values))
    return "\n".join(lines)


def plot(results: Sequence[Measured], path: Path) -> Path:
    """A PNG with one panel of bars for each column; the dashed line is K3."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [line.part if line is results[0] else f"{line.part}: {line.choice}" for line in results]
    figure = Figure(figsize=(3.2 * len(COLUMNS), 1.2 + 0.32 * len(results)), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(COLUMNS), sharey=True)
    places = np.arange(len(results))[::-1]
    for panel, (key, title) in zip(panels, COLUMNS.items(), strict=True):
        values = [getattr(line, key) for line in results]
        panel.barh(places, values, color=["C1", *["C0"] * (len(results) - 1)])
        panel.axvline(values[0], color="C1", linestyle="--", linewidth=1)
        if key == "loss":
            low = min(values)
            panel.set_xlim(low - 0.25 * (max(values) - low) - 0.01, None)
        if min(values) > 0 and max(values) > 30 * min(values):
            panel.set_xscale("log")
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelsize=8)
    panels[0].set_yticks(places, names, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_png(str(temporary))
    temporary.replace(path)
    return path


def save(results: Sequence[Measured], settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Writes ablate.json and ablate.png into `folder`; returns the JSON object."""
    picture = plot(results, folder / "ablate.png")
    report = {**settings, "results": [asdict(line) for line in results], "png": str(picture)}
    write_atomic(folder / "ablate.json", json.dumps(report, indent=1) + "\n")
    return report
