"""Ranks that share the rows of a micro-batch compute what one process computes from all of them.

This file run as a script starts real gloo ranks, 1, 2 and 4 of them, which leave their results in the folder it is
given. They are forked before torch has done anything, so that importing it is paid for once.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.data.images import ImagePatches
from k3rl.losses import CrossEntropy, K3Policy, LossInputs, LossOutput
from k3rl.model import AblationConfig, HiddenOutput, K3Config, K3ForCausalLM, LinearAttnConfig, VisionConfig, flash
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.recompute import PARTS
from k3rl.parallel import Mesh, RankFailed, Trainer, TrainerConfig, World, balanced_shares
from k3rl.run.metrics import Accumulator

SIZES = (2, 4)
TIMEOUT_S = 50.0
LAYERS = LinearAttnConfig(
    num_heads=2, head_dim=16, short_conv_kernel_size=4, gate_lower_bound=-5.0, kda_layers=(1, 2, 4),
    full_attn_layers=(3,),
)  # fmt: skip
TINY = K3Config.named("k3-nano").replace(
    num_hidden_layers=4, num_experts=4, hidden_size=32, linear_attn_config=LAYERS, intermediate_size=64
)  # fmt: skip
LINEAR = K3Config.named("kimi-linear-nano").replace(num_experts=4)
VISION = VisionConfig(
    init_pos_emb_height=4, init_pos_emb_width=4, vt_num_attention_heads=2, vt_num_hidden_layers=1, vt_hidden_size=16,
    vt_intermediate_size=16, qkv_hidden_size=16, mm_hidden_size=16, text_hidden_size=32,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One micro-batch: lengths of its sequences, and token boundaries of the ranks by their number (else balanced)."""

    lengths: tuple[int, ...]
    cuts: dict[int, list[int]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    seed: int = 0
    config: K3Config = TINY
    images: bool = False
    routes: bool = False
    packed: bool = False  # the way that rows take on a GPU, with the definitions in the place of the kernels


def _drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in rng.integers(1, 30, rng.integers(2, 5)))
    total = sum(lengths)
    cuts = {
        size: [0, *sorted(int(cut) for cut in rng.choice(total - 1, size - 1, replace=False) + 1), total]
        for size in SIZES
    }
    return Case(lengths, cuts, seed=seed)


CASES = {
    "balanced": Case((37, 5, 1, 60)),
    "one document": Case((70,)),
    "cut at borders": Case((16, 16, 7, 16), {2: [0, 32, 55], 4: [0, 16, 32, 39, 55]}),
    "short ranges": Case((2, 30, 1, 9), {2: [0, 3, 42], 4: [0, 10, 11, 13, 42]}),
    "shorter ranges": Case((9, 4), {2: [0, 12, 13], 4: [0, 2, 3, 4, 13]}),
    "single tokens": Case((1, 1, 2, 1, 1, 1)),
    "fewer tokens than ranks": Case((2,), {4: [0, 1, 2, 2, 2]}),
    "all on the first rank": Case((5, 9), {2: [0, 14, 14], 4: [0, 14, 14, 14, 14]}),
    "float32": Case((37, 5, 1, 60), dtype=torch.float32),
    "packed": Case((70, 5, 1, 30), packed=True),
    "packed, short ranges": Case((9, 4), {2: [0, 12, 13], 4: [0, 2, 3, 4, 13]}, packed=True),
    "Kimi Linear": Case((37, 5, 1, 60), config=LINEAR),
    "Kimi Linear, packed": Case((70, 5), config=LINEAR, packed=True),
    "rotated": Case((50,), config=TINY.replace(ablation=AblationConfig(attention="mla_rope"))),
    "images and recorded routes": Case((9, 14), config=TINY.replace(vision_config=VISION), images=True, routes=True),
    **{f"drawn {seed}": _drawn(seed) for seed in range(2)},
}


def _batch(case: Case) -> TrainBatch:
    rng = np.random.default_rng(case.seed)
    sequences = []
    for number, length in enumerate(case.lengths):
        mask = np.arange(length) >= max(1, length // 4)
        draws = rng.normal(size=(2, length))
        ids, images = rng.integers(0, 400, length), ()
        if case.images:
            ids[2:5:2] = case.config.media_placeholder_token_id
            mask[:5] = False
            images = tuple(
                ImagePatches(rng.normal(size=(h * w, 3, 14, 14)).astype("f4"), (1, h, w), 14 * w, 14 * h, h * w // 4)
                for h, w in ((2, 4), (2, 2))
            )
        rows = length + sum(image.rows - 1 for image in images)
        routes = rng.permuted(np.tile(np.arange(4, dtype=np.int16), (rows, 3, 1)), axis=-1)[..., :2]
        sequences.append(
            TrainSequence(
                f"s{number}",
                ids,
                mask,
                np.where(mask, -np.abs(draws[0]) - 5, 0).astype(np.float32),
                np.where(mask, draws[1], 0).astype(np.float32),
                routes=routes if case.routes else None,
                fresh=rng.random(length) < 0.7,
                images=images,
            )
        )
    return TrainBatch.pack(sequences)


class _Model(K3ForCausalLM):
    """Keeps the routes of its last forward."""

    def hidden(self, *args: Any, **options: Any) -> HiddenOutput:
        out = super().hidden(*args, **options)
        self.routes = out.routes[0]
        return out


def _trainer(case: Case, mesh: Mesh, recompute: tuple[str, ...] = ()) -> Trainer:
    model = _Model(case.config, dtype=case.dtype, experts=mesh.experts(case.config.num_experts))
    model.init_weights(1)
    _, expert, context = mesh.shape
    config = TrainerConfig(
        micro_batch_tokens=64, balance="fresh", expert_parallel=expert, context_parallel=context, recompute=recompute
    )
    return Trainer(model, config, mesh)


@contextmanager
def _packed() -> Iterator[None]:
    """Within the block layers compute as on a GPU."""
    kept = KimiDeltaAttention.takes_kernels, flash.takes
    KimiDeltaAttention.takes_kernels, flash.takes = lambda self, x: True, lambda q: True
    try:
        yield
    finally:
        KimiDeltaAttention.takes_kernels, flash.takes = kept


class _Seen:
    """What the model reports (a `ForwardObserver`), by name."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def router(self, layer: int, scores: torch.Tensor, cutoff: torch.Tensor) -> None:
        self.found[f"scores.{layer}"], self.found[f"cutoff.{layer}"] = scores, cutoff

    def attention_logits(self, layer: int, maximum: torch.Tensor) -> None:
        self.found[f"logits.{layer}"] = maximum


def _measure(case: Case, trainer: Trainer) -> dict[str, torch.Tensor]:
    """Loss and gradients, summed over the ranks, and what this rank's rows said."""
    batch, seen, context, world = _batch(case), _Seen(), trainer.on_mesh.context, trainer.mesh.world
    cuts = np.array(case.cuts[context.size]) if context.size in case.cuts else None
    share = context.split(batch, case.config.media_placeholder_token_id, cuts)
    parameters = dict(trainer.model.official_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    trainer.model.observer = seen
    loss = K3Policy(0.5, 2.0, 0.02)(trainer.target_inputs(batch, share=share)).loss
    loss.backward()
    sums = {"loss": loss.detach().reshape(1)}
    sums |= {f"grad.{n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    flat = torch.cat([value.to(torch.float64).reshape(-1) for value in sums.values()])
    world.sum(flat)
    parts = flat.split([value.numel() for value in sums.values()])
    sums = {name: part.view_as(value) for (name, value), part in zip(sums.items(), parts, strict=True)}
    found = {"counted": torch.tensor([share.counted]), "routes": trainer.model.routes, **seen.found}
    return {name: value.contiguous() for name, value in (found | (sums if world.rank == 0 else {})).items()}


# ------------------------------------------------------------------------------------------------ whole steps

MESHES = {
    1: {"one process": (1, 1, ())},
    2: {"context": (1, 2, ()), "context, recomputed": (1, 2, PARTS)},
    4: {"expert x context": (2, 2, PARTS), "data x context": (1, 2, ())},
}  # (expert, context) degrees by the number of ranks, and what is recomputed
STEPS = [Case((9, 30, 17), seed=11), Case((4, 1), seed=12)]  # the second has one token for the last two of four ranks


@dataclass(frozen=True)
class _FailsOnRank0:
    rank: int

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(inputs.logprobs.sum() * (float("nan") if self.rank == 0 else 1.0), {})


def _own(case: Case, mesh: Mesh) -> TrainBatch | None:
    """The sequences of this rank and of those that share them."""
    whole = _batch(case)
    members = balanced_shares(whole.lengths.tolist(), mesh.batch_size)[mesh.batch_rank]
    return whole.select(members) if members else None


def _steps(mesh: Mesh, recompute: tuple[str, ...]) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Training steps on this rank's sequences; -> trainer, and its state with metrics as (sum, count)."""
    trainer, metrics = _trainer(STEPS[0], mesh, recompute), Accumulator()
    for case in STEPS:
        metrics.merge(trainer.train(_own(case, mesh), CrossEntropy()))
    found = trainer.state_tensors()
    found["logprobs"] = torch.from_numpy(trainer.logprobs(_batch(CASES["balanced"])))
    evaluated = trainer.evaluate(_batch(CASES["balanced"]), CrossEntropy()).pairs()["loss/mean"]
    found["metric.evaluated"] = torch.tensor(evaluated, dtype=torch.float64) / mesh.batch_size  # all have it
    for name in ("loss/mean", "perf/train_tokens", "moe/fresh_tokens"):
        found[f"metric.{name}"] = torch.tensor(metrics.pairs()[name], dtype=torch.float64)
    found["metric.perf/train_tokens"][1] = 0  # a count of steps
    return trainer, found


def _rank(rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    world = World(rank, size, f"127.0.0.1:{port}", timeout_s=TIMEOUT_S)
    mesh = Mesh(world, context=size)
    trainers: dict[tuple[int, torch.dtype], Trainer] = {}
    for name, case in CASES.items():
        key = id(case.config), case.dtype
        if key not in trainers:
            trainers[key] = _trainer(case, mesh)
        with _packed() if case.packed else nullcontext():
            save_file(_measure(case, trainers[key]), folder / f"{size}.{name}.{rank}")
    for name, (expert, context, recompute) in MESHES[size].items():
        trainer, found = _steps(Mesh(world, expert=expert, context=context), recompute)
        save_file(found, folder / f"{size}.{name}.{rank}")
    if size > 1:
        outcomes, began = [], time.monotonic()
        try:
            trainer.train(_own(STEPS[0], trainer.mesh), _FailsOnRank0(rank))
        except Exception as error:
            outcomes.append(f"{type(error).__name__} {error}")
        outcomes.append(str(time.monotonic() - began < TIMEOUT_S / 2))
        outcomes.append(_without_rank_1(trainer))
        (folder / f"{size}.failed.{rank}").write_text("\n".join(outcomes))
        if outcomes[-1] == "left":
            os._exit(0)
    world.close()


def _without_rank_1(trainer: Trainer) -> str:
    """Rank 1 of two ends without a word; what rank 0 says about it."""
    world = trainer.mesh.world
    if world.size > 2:
        return ""
    if world.rank == 1:
        return "left"
    try:
        trainer.target_inputs(_batch(CASES["one document"]))
    except RankFailed as error:
        return str(error)
    return "nothing"


def _launch(folder: Path) -> None:
    importlib.import_module("torch._dynamo")  # recomputation would import it in each rank
    for size in (1, *SIZES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    _rank(rank, size, port, folder)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)


# ------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of every size left."""
    made = tmp_path_factory.mktemp("context")
    subprocess.run([sys.executable, __file__, str(made)], check=True, timeout=110)
    return made


def _near(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return float((one - other).norm()) <= tolerance * max(float(one.norm()), float(other.norm()))


def _tolerance(name: str) -> float:
    """float64 with quantized activations: only the order of sums differs. float32: what sums in it may differ by."""
    return 1e-8 if CASES[name].dtype == torch.float64 else 1e-3


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_loss_and_every_gradient_equal_those_of_one_process(folder: Path, size: int, name: str) -> None:
    alone, shared = (load_file(folder / f"{n}.{name}.0") for n in (1, size))
    gradients = {key for key in alone if key.startswith("grad.")}
    assert len(gradients) > 40
    assert gradients == {key for key in shared if key.startswith("grad.")}
    # the gate of a sequence of one token has gradients of 0 that come out as differences of equals
    nothing = 1e-14 * max(float(alone[key].norm()) for key in gradients)
    for key in sorted(gradients | {"loss"}):
        difference = float((alone[key] - shared[key]).norm())
        same = _near(alone[key], shared[key], _tolerance(name)) or difference < nothing
        assert same, (key, difference, float(alone[key].norm()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_routes_router_scores_and_largest_logits_equal_those_of_one_process(folder: Path, size: int, name: str) -> None:
    alone = load_file(folder / f"1.{name}.0")
    every = [load_file(folder / f"{size}.{name}.{rank}") for rank in range(size)]
    own = [found for found in every if bool(found["counted"])]  # the others ran a copy of the first token
    for key in (key for key in alone if key.split(".")[0] in ("scores", "cutoff")):
        assert _near(alone[key], torch.cat([found[key] for found in own]), _tolerance(name)), key
    assert torch.equal(alone["routes"].sort(-1).values, torch.cat([found["routes"] for found in own]).sort(-1).values)
    logits = [key for key in alone if key.startswith("logits.")]
    assert logits
    for key in logits:
        assert _near(alone[key], torch.stack([found[key] for found in every]).amax(0), _tolerance(name)), key


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in MESHES[size]])
def test_a_mesh_with_a_context_axis_reaches_the_state_of_one_process(folder: Path, size: int, name: str) -> None:
    alone = load_file(folder / "1.one process.0")
    states = [load_file(folder / f"{size}.{name}.{rank}") for rank in range(size)]
    for key, value in alone.items():
        if key.startswith("metric."):  # sums over the tokens that a rank has
            torch.testing.assert_close(sum(state[key] for state in states), value, rtol=1e-6, atol=0)
            continue
        for state in states:
            assert torch.equal(state[key], states[0][key]), key  # ranks never drift apart
        if value.is_floating_point():
            # float64 sums in another order, amplified by Newton-Schulz on small gradients
            torch.testing.assert_close(states[0][key], value, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(states[0][key], value), key


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_that_fails_on_one_rank_fails_the_step_on_all_before_any_of_them_waits(folder: Path, size: int) -> None:
    outcomes = [(folder / f"{size}.failed.{rank}").read_text().split("\n") for rank in range(size)]
    assert all(lines[0].startswith("NonFiniteLoss") for lines in outcomes)
    assert len({lines[0] for lines in outcomes}) == 1
    assert all(lines[1] == "True" for lines in outcomes)  # within half of the timeout


def test_a_rank_that_is_gone_is_named(folder: Path) -> None:
    said = (folder / "2.failed.0").read_text().split("\n")[2]
    assert said.startswith("rank 1 died")
    assert "context neighbours" in said


if __name__ == "__main__":
    _launch(Path(sys.argv[1]))
