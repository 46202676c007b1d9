"""What a learner's step computes on a GPU against plainer ways to the same numbers, and what it asks of the host.

    python benchmarks/learner_checks.py [--dry] [--json] [--out FILE]

`gradients` compares a bank's own sums with autograd's gradients by leaf (the same products: equal bits, but for what
a repeated run changes too) and with the path that goes expert by expert (other orders of sums). `kernels` compares the
optimizer's kernels with their references. `step` compares a step with kernels to one without on the same gradients, and
counts the host's operations and the kernels of each phase.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from k3rl.kernels.moe.add_groups import add_groups, add_groups_reference
from k3rl.kernels.optim import muon
from k3rl.losses import CrossEntropy
from k3rl.model.moe import ExpertBank, ExpertByExpert
from k3rl.model.moe_grouped import GroupedExperts
from k3rl.numerics import project
from k3rl.optim.newton_schulz import iterated
from k3rl.parallel import Trainer

_spec = importlib.util.spec_from_file_location("learner_gpu", Path(__file__).with_name("learner_gpu.py"))
assert _spec is not None
assert _spec.loader is not None
learner_gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(learner_gpu)
gpu = learner_gpu.gpu
Found = dict[str, torch.Tensor]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-300))


@contextlib.contextmanager
def expert_by_expert() -> Iterator[None]:
    before = ExpertBank._is_grouped
    ExpertBank._is_grouped = lambda self, z: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExpertBank._is_grouped = before  # type: ignore[method-assign]


def gradients_of(trainer: Trainer, batch: Any) -> Found:
    trainer.gradients(batch, CrossEntropy())
    trainer.balancer.clear()
    return {n: p.grad.clone() for n, p in trainer.native.shards.params.items() if p.grad is not None}


def together(found: Found, wanted: Found, names: list[str]) -> float:
    """The relative error of many gradients as one vector: a single small one says little in bf16."""
    apart = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in names if n in found)
    return float((apart / sum(float(wanted[n].double().square().sum()) for n in names)) ** 0.5)


def routed(trainer: Trainer, batch: Any) -> Any:
    """The batch with the experts that the model chooses. Else rounding moves choices near a tie from layer to layer,
    and gradients of two right ways differ by their own size."""
    ids, ends = (torch.from_numpy(values).to(trainer.model.device) for values in (batch.input_ids, batch.cu_seqlens))
    with torch.no_grad():
        out = trainer.model.hidden(ids[None], cu_seqlens=ends.cpu())
    return dataclasses.replace(batch, routes=out.routes[0].cpu().numpy())


def gradients(report: Any, setting: Any) -> None:
    trainer = learner_gpu.trainer_of(setting, capture="off")
    batch = routed(trainer, learner_gpu.batch_of(setting.small, setting.tokens, setting.length))
    one_bank(report, setting, next(trainer.model.moe_parts()).bank)
    ours, again = gradients_of(trainer, batch), gradients_of(trainer, batch)
    with expert_by_expert():
        apart = gradients_of(trainer, batch)
    for part in trainer.model.moe_parts():
        part.bank.keep_sums(None)
    trainer.native.shards.experts.sums = []
    by_leaf = gradients_of(trainer, batch)
    names = [name for name in ours if ".experts." in name]
    others = [name for name in ours if name not in names]
    for what, other in (("a repeated run", again), ("autograd by leaf", by_leaf), ("expert by expert", apart)):
        report.check(
            f"gradients against {what}", same_leaves=ours.keys() == other.keys(), leaves=len(names),
            unequal=sum(not torch.equal(ours[n], other[n]) for n in names if n in other),
            experts=together(ours, other, names), others=together(ours, other, others),
            worst=max((relative(ours[n], other[n]) for n in names if n in other), default=None),
        )  # fmt: skip


def one_bank(report: Any, setting: Any, bank: ExpertBank) -> None:
    """One bank on equal inputs: grouped products, expert by expert, and expert by expert in float32."""
    torch.manual_seed(0)
    tokens, experts, device = setting.tokens, bank.experts, setting.device
    latent, k = bank.matrices()[0].shape[2], setting.small.num_experts_per_token
    z = torch.randn(tokens, latent, device=device).bfloat16()
    weights, up = torch.rand(tokens, k, device=device), torch.randn(tokens, latent, device=device).bfloat16()
    ids = torch.rand(tokens, experts, device=device).topk(k).indices

    def run(function: Any, kind: torch.dtype) -> list[torch.Tensor]:
        given = [z.to(kind).requires_grad_(), weights.clone().requires_grad_()]
        leaves = [leaf.detach().to(kind).requires_grad_() for leaf in bank.leaves]
        matrices = bank.matrices
        if kind != torch.bfloat16:
            bank.matrices = lambda: tuple(m.to(kind) for m in matrices())  # type: ignore[method-assign]
        try:
            out = function.apply(*given, ids, bank, *leaves)
            grads = torch.autograd.grad(out, [*given, *leaves], up.to(kind), allow_unused=True)
        finally:
            bank.__dict__.pop("matrices", None)
        whole = [torch.cat([g.reshape(-1) for g in grads[2 + n :: 3] if g is not None]) for n in range(3)]
        return [out.detach(), *grads[:2], *whole]  # type: ignore[list-item]

    sums, bank.sums = bank.sums, None
    try:
        exact = run(ExpertByExpert, torch.float32)
        for name, function in (("grouped", GroupedExperts), ("expert by expert", ExpertByExpert)):
            found = run(function, torch.bfloat16)
            errors = [relative(a, b) for a, b in zip(found, exact, strict=True)]
            report.check(f"one bank, {name}, against float32",
                         **dict(zip(("out", "z", "weights", "w1", "w3", "w2"), errors, strict=True)))  # fmt: skip
    finally:
        bank.sums = sums


def kernels(report: Any, setting: Any) -> None:
    """On a CPU the references against themselves, which proves the control flow only."""
    device, on_gpu = setting.device, setting.device.type == "cuda"
    if on_gpu:
        from k3rl.kernels.optim import muon_kernels
    torch.manual_seed(0)
    for shape in ((6, 256, 512), (6, 512, 256), (3, 4096, 1024)):
        gradient, momentum = (torch.randn(shape, device=device) * 1e-3 for _ in range(2))
        wanted, factor = momentum.clone(), torch.full((), 0.7, device=device)
        start, finish = (muon.start, muon.finish) if on_gpu else (muon.start_reference, muon.finish_reference)
        x, x2 = (
            start(gradient, momentum, factor, 0.95, True),
            muon.start_reference(gradient, wanted, factor, 0.95, True),
        )
        master = torch.randn(shape, device=device)
        other, update = master.clone(), iterated(x.clone())
        lr = torch.full((), 1e-3, device=device)
        finish(master, update, lr, 0.1, 20.0)
        muon.finish_reference(other, update, lr, 0.1, 20.0)
        report.check(
            f"muon {shape}", momentum=relative(momentum, wanted), direction=relative(x, x2),
            master=relative(master, other), singular_values_near_1=float(update.float().square().mean() * shape[2])
        )  # fmt: skip
    x = muon.trial(device)
    found, wanted = (muon_kernels.mxfp4(x) if on_gpu else project(x, "mxfp4", "ceil")), project(x, "mxfp4", "ceil")
    wrong = muon.unequal(found, wanted)
    some = [
        (float(a), float(b), float(c))
        for a, b, c in zip(x[wrong][:4], found[wrong][:4], wanted[wrong][:4], strict=True)
    ]
    report.check("mxfp4", used=muon.mxfp4(x) is not None, unequal=int(wrong.sum()), of=x.numel(), examples=some)
    total, part = torch.randn(8, 512, 512, device=device), torch.randn(8, 512, 512, device=device).bfloat16()
    part[3] = float("nan")
    ends = torch.tensor([5, 9, 12, 12, 20, 21, 30, 31], dtype=torch.int32, device=device)
    expected = total.clone()
    add_groups(total, part, ends)
    add_groups_reference(expected, part, ends)
    report.check("add_groups", same_bits=torch.equal(total, expected))


def moved(trainer: Trainer, given: Found) -> Found:
    optimizer = trainer.native.optimizer
    before = optimizer.masters(optimizer.params)
    for name, parameter in trainer.native.shards.params.items():
        parameter.grad = given[name].clone() if name in given else None
    optimizer.clip_grad_norm_(1.0)
    optimizer.step_clipped()
    return {n: value - before[n] for n, value in optimizer.masters(optimizer.params).items()}


def step(report: Any, setting: Any) -> None:
    trainer = learner_gpu.trainer_of(setting)
    batch = learner_gpu.batch_of(setting.small, setting.tokens, setting.length)
    given = gradients_of(trainer, batch)
    ours = moved(trainer, given)
    del trainer
    trainer = learner_gpu.trainer_of(setting)
    with learner_gpu.gpu.without_kernels():
        plain = moved(trainer, given)
    apart = {n: relative(ours[n], plain[n]) for n in ours}
    worst = max(apart, key=lambda n: apart[n])
    report.check(
        "step against plain operations", worst=apart[worst], of=worst, median=sorted(apart.values())[len(apart) // 2]
    )
    del trainer, ours, plain
    replayed(report, setting, given)
    del given
    counted(report, setting, batch)


def replayed(report: Any, setting: Any, given: Found) -> None:
    """Four steps on gradients at fixed addresses, with other learning rates, replayed and not; the time of each."""
    found: list[Found] = []
    for capture in ("auto", "off"):
        trainer = learner_gpu.trainer_of(setting, capture=capture)
        optimizer, held = trainer.native.optimizer, {name: value.clone() for name, value in given.items()}
        for name, parameter in trainer.native.shards.params.items():
            parameter.grad = held.get(name)
        took: dict[str, float] = {}
        for number in range(5):
            for name, value in given.items():
                held[name].copy_(value).mul_(1 + number)
            calls = {
                "norm": functools.partial(optimizer.gradients.clip_in_step, 1.0),
                "step": functools.partial(optimizer.step_clipped, 1 / (1 + number)),
            }
            took = {name: round(1e3 * gpu.wall(call, setting.device, 1, 0), 3) for name, call in calls.items()}
        found.append(optimizer.masters(optimizer.params))
        captured = [one for one in (optimizer.gradients.captured, optimizer.captured_step) if one is not None]
        report.check(
            f"optimizer, capture {capture}", captures=optimizer.captures, last_ms=took,
            refused=[one.refused for one in captured], replayed=[one.is_captured for one in captured],
        )  # fmt: skip
        calls.clear()
        del trainer, optimizer, held
    apart = {n: relative(found[0][n], found[1][n]) for n in found[1]}
    worst = max(apart, key=lambda n: apart[n])
    report.check("replayed steps against plain ones", worst=apart[worst], of=worst)


def counted(report: Any, setting: Any, batch: Any) -> None:
    trainer = learner_gpu.trainer_of(setting)
    for _ in range(2):
        trainer.train(batch, CrossEntropy())
    held: dict[str, Any] = {}
    phases: dict[str, Callable[[], Any]] = {
        "zero": trainer.native.reduction.zero_grad,
        "forward": lambda: held.update(loss=CrossEntropy()(trainer.target_inputs(batch)).loss),
        "backward": lambda: held["loss"].backward(),
        "collect": trainer.native.reduction.collect,
        "norm and clip": trainer.native.clipping.clip,
        "optimizer": trainer.native.optimizer.step_clipped,
    }
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setting.device.type == "cuda")
    for name, call in phases.items():
        gpu.synchronize(setting.device)
        with profile(activities=activities) as seen:
            call()
            gpu.synchronize(setting.device)
        events = seen.events() or []
        on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        top: dict[str, float] = {}
        for event in on_device:
            top[event.name[:60]] = top.get(event.name[:60], 0.0) + event.device_time
        report.check(
            f"calls, {name}", host=sum(event.name.startswith("aten::") for event in events), kernels=len(on_device),
            device_ms=round(sum(top.values()) / 1e3, 3),
            most={key: round(value) for key, value in sorted(top.items(), key=lambda item: -item[1])[:8]},
        )  # fmt: skip
    plain = {name: gpu.wall(call, setting.device, 3, 1) for name, call in phases.items() if name in ("zero", "collect")}
    report.row("calls, zeroing and collecting", f"{len(trainer.native.shards.params)} parameters", sum(plain.values()))


PARTS = {"kernels": kernels, "gradients": gradients, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--budget-s", type=float, default=200.0, help="no part is begun after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --dry runs its control flow on a CPU")
    setting = learner_gpu.Setting(arguments.dry)
    report = gpu.Report(setting.device, arguments.out, arguments.budget_s)
    for part in arguments.parts:
        if not report.time_left(part):
            continue
        try:
            PARTS[part](report, setting)
        except Exception as error:  # a part that failed must not take the others along; it is in the report
            report.failed(part, "the part", error)
            import traceback

            traceback.print_exc(file=sys.stderr)
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    if arguments.json:
        print(json.dumps(report.json()))


if __name__ == "__main__":
    main()
