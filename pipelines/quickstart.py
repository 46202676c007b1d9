"""The main job: SFT warm start, RL, distillation into one model, export, measured on the same held-out tasks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console

from k3rl.checkpoint import add_to_card
from k3rl.envs import make
from k3rl.pipelines import policy, sft
from k3rl.pipelines.chat_data import check_data
from k3rl.pipelines.configs import QuickstartConfig, StageConfig
from k3rl.pipelines.evaluation import Evaluation, evaluate, held_out
from k3rl.pipelines.session import Session, open_session, with_restarts
from k3rl.pipelines.stage import StageResult, cut_notes
from k3rl.pipelines.start import check_experts, check_layout
from k3rl.run import (
    RunOptions,
    StageSummary,
    plot_rewards,
    print_summary,
    read_metrics,
    read_object,
    series,
    write_atomic,
)


def run(config: QuickstartConfig, options: RunOptions) -> dict[str, Any]:
    """The whole job. Returns what `--json` prints (design: reward_before, reward_rl, reward_after, paths, figures)."""
    check_layout(config.cluster, config.sft, config.rl, config.distill)
    check_experts(config.sft, config.rl, config.distill)
    check_data(config.sft)
    started = time.monotonic()
    with open_session("rl", config, options) as job:
        stages, measured = _stages(job, config)
        report = _report(job, config, stages, measured)
    report["seconds"] = round(time.monotonic() - started, 1)
    report["peak_rss_mb"] = round(job.memory.peak_mb)
    write_atomic(job.run.root / "report.json", json.dumps(report, indent=1) + "\n")
    _print(job, config, stages, measured, report)
    return report


def _stages(job: Session, config: QuickstartConfig) -> tuple[dict[str, StageResult], dict[str, Evaluation]]:
    stages: dict[str, StageResult] = {}
    measured: dict[str, Evaluation] = {}
    tasks = held_out(config.rl.env, config.evaluation)

    def keep(result: StageResult) -> str:
        stages[result.name] = result
        measured[result.name] = with_restarts(job, lambda session: _measured(session, config, result, tasks))
        return result.checkpoint

    warm = keep(with_restarts(job, lambda session: sft.train(session, _seeded(config.sft, config))))
    teacher = keep(with_restarts(job, lambda session: policy.train(session, _starting(config.rl, config, warm))))
    if config.more_sft:
        more, compute = _starting(config.sft, config, warm), stages["rl"].compute
        keep(with_restarts(job, lambda session: sft.train(session, more, name="more_sft", compute=compute)))
    student = _starting(config.distill, config, warm).replace(teachers={"*": teacher})
    keep(with_restarts(job, lambda session: policy.train(session, student)))
    return stages, measured


def _measured(job: Session, config: QuickstartConfig, result: StageResult, tasks: dict[str, int]) -> Evaluation:
    """The stage's figures on the held-out tasks: those an earlier attempt took of this very result, else new ones."""
    path = job.run.root / "evaluations" / f"{result.name}.json"
    of = {key: value for key, value in asdict(result).items() if key not in ("checkpoint", "notes")}  # a run may move
    asked = {"result": of, "env": config.rl.env.model_dump(), "evaluation": config.evaluation.model_dump()}
    asked |= {"tasks": tasks}
    asked = json.loads(json.dumps(asked, default=str))
    if path.is_file() and (kept := read_object(path, "delete it, and it is measured again")).get("of") == asked:
        return Evaluation.from_json(kept["found"])
    job.progress.note(f"{result.name}: measuring on {tasks['heldout']} held-out tasks")
    found = evaluate(job.fleet.rollouts, result.checkpoint, config.evaluation, tasks)
    add_to_card(result.checkpoint, found.facts(config.rl.env.name))
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps({"of": asked, "found": found.to_json()}, indent=1) + "\n")
    return found


def _seeded(stage: Any, config: QuickstartConfig) -> Any:
    return stage.replace(seed=config.seed)


def _starting(stage: StageConfig, config: QuickstartConfig, checkpoint: str) -> Any:
    return stage.replace(seed=config.seed, model=stage.model.replace(start=checkpoint))


def _report(
    job: Session, config: QuickstartConfig, stages: dict[str, StageResult], measured: dict[str, Evaluation]
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "env": config.rl.env.name,
        "n": measured["sft"].n,
        "seed": config.seed,
        "run": str(job.run.root),
        "sft_checkpoint": stages["sft"].checkpoint,
        "rl_checkpoint": stages["rl"].checkpoint,
        "export": stages["distill"].checkpoint,
        "shuffled_rewards": config.rl.shuffle_rewards,
        "evaluations": {name: evaluation.to_json() for name, evaluation in measured.items()},
        "stages": {
            name: {"steps": s.steps, "seconds": round(s.seconds, 1), "compute_tokens": s.compute}
            for name, s in stages.items()
        },
    }
    for key, stage in (("before", "sft"), ("rl", "rl"), ("after", "distill"), ("more_sft", "more_sft")):
        if stage in measured:
            report[f"reward_{key}"] = measured[stage].pass_at_1
            report[f"greedy_{key}"] = measured[stage].greedy
    report["parsed_before"] = measured["sft"].parsed
    return report


def _print(
    job: Session,
    config: QuickstartConfig,
    stages: dict[str, StageResult],
    measured: dict[str, Evaluation],
    report: dict[str, Any],
) -> None:
    """The table, the picture and the paths, on standard error: standard output is for results."""
    before = measured["sft"]
    rows = [
        StageSummary(
            stage=name,
            steps=result.steps,
            tokens=int(result.trained_tokens + result.sampled_tokens),
            reward_before=None if name == "sft" else before.pass_at_1,
            reward_after=measured[name].pass_at_1,
            seconds=result.seconds,
            note=f"greedy {measured[name].greedy:.3f}",
        )
        for name, result in stages.items()
    ]
    name = make(config.rl.env.name, **config.rl.env.args).name
    points = series(read_metrics(job.run.metrics_path), f"reward/{name}/mean", "rl")
    curve = plot_rewards(
        {"RL, sampled on training tasks": points},
        job.run.root / "reward.png",
        levels={f"{name}, held out": evaluation.pass_at_1 for name, evaluation in measured.items()},
        title=f"{config.rl.env.name}: reward by RL step (seed {config.seed})",
    )
    report["curve"] = str(curve)
    notes = [
        f"held-out pass rate at temperature 1 over {before.n} tasks, never trained on by text or program; "
        "95 % interval " + ", ".join(f"{name} {_interval(measured[name])}" for name in ("sft", "rl", "distill")),
        "by family: " + "; ".join(f"{name} {_families(e)}" for name, e in measured.items()),
        "demonstrations are of mixed quality on purpose; RL with executed rewards repairs them",
        f"{report['seconds']:.0f} s in all, at most {report['peak_rss_mb']:.0f} MB of memory",
        *cut_notes(stages.values()),
    ]
    paths = {"run": job.run.root, "reward curve": curve, "exported checkpoint": report["export"]}
    print_summary(rows, Console(stderr=True), paths=paths, notes=notes)


def _interval(evaluation: Evaluation) -> str:
    low, high = evaluation.ci95
    return f"{low:.3f}-{high:.3f}"


def _families(evaluation: Evaluation) -> str:
    return ", ".join(f"{family} {rate:.2f}" for family, rate in evaluation.by_family.items())
