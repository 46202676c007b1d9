"""Frozen weights cut over ranks: steps of an adapter are those of whole weights, and a rank holds its share of them.

This file run as a script forks the ranks of two worlds, which leave what came out in FOLDER.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3rl.checkpoint import load_checkpoint, official_tensors, save_checkpoint
from k3rl.config import ConfigError, load, split_words
from k3rl.losses import CrossEntropy
from k3rl.model import K3ForCausalLM, LoraConfig
from k3rl.parallel import LearnerConfig, Mesh, Trainer, TrainerConfig, World, check_backend
from k3rl.pipelines.configs import RLConfig
from k3rl.planner import Cluster, Layout, LiveBytes, Method, Workload, frozen_parts
from k3rl.planner.traffic import traffic
from tests.parallel.on_ranks import TINY, batch, gradients, outcome, share, trainer
from tests.parallel.test_mesh import BOTH, differences
from tests.parallel.unsteady import Unsteady

pytestmark = pytest.mark.timeout(300)  # six ranks start in one fixture: minutes on a busy machine
ROOT = Path(__file__).parents[2]
LORA = LoraConfig(rank=3, alpha=6.0)
# name -> (ranks, ranks that share a frozen weight, degrees, more of the trainer's configuration)
LAYOUTS: dict[str, tuple[int, int, dict[str, int], dict[str, Any]]] = {
    "dp2": (2, 2, {}, {"packed_experts": False}),
    "cp2": (2, 2, {"context": 2}, {"recompute": ("attention",)}),
    "dp4": (4, 4, {}, {"recompute": BOTH}),
    "dp2xep2 in pairs": (4, 2, {"expert": 2}, {"recompute": ("mlp",)}),
}


def lora(mesh: Mesh, **config: Any) -> Trainer:
    return trainer(mesh, lora=LORA, micro_batch_tokens=40, **config)


def compared(mesh: Mesh, ranks: int, **config: Any) -> dict[str, Any]:
    """What a trainer with whole weights and one with slices get for the same steps, on this rank.

    Only one rank, or context axis, has a sequence of the last batch.
    """
    found = []
    for number in (1, ranks):
        made = lora(mesh, shard_frozen=number, **config)
        made.train(share(batch(0), mesh), CrossEntropy())  # so that B is not zero
        before = made.on_mesh.frozen.sent_bytes
        results = gradients(made, batch(2))  # one pass
        sent = made.on_mesh.frozen.sent_bytes - before
        results["logprobs"] = torch.from_numpy(made.logprobs(share(batch(2), mesh)))
        scores = made.evaluate(share(batch(2), mesh), CrossEntropy()).values()
        results["evaluated"] = torch.tensor(list(scores.values()))
        results |= made.owned_state()
        found.append((results, made.memory()["weights"]))
    (whole, held), (cut, held_cut) = found
    worst = max(differences(whole, cut).values())
    return {"difference": worst, "compared": len(whole), "held": [held, held_cut], "sent": sent}


def live(mesh: Mesh, ranks: int) -> int:
    """The most bytes that live at a time in a pass of rank 0, beside parameters and slices."""
    made = lora(mesh, shard_frozen=ranks)
    if mesh.world.rank:
        made.gradients(share(batch(2, (9,) * 5), mesh), CrossEntropy())
        return 0
    with LiveBytes(made.model.parameters()) as seen:  # which makes it many times slower
        made.gradients(share(batch(2, (9,) * 5), mesh), CrossEntropy())
    return seen.peak


def cut(world: World, folder: Path) -> dict[str, Any]:
    """What else a trainer with slices is asked for, on four ranks."""
    mesh, ended = Mesh(world, expert=2), {}
    made = lora(mesh, shard_frozen=4)
    with made.whole() as model:
        fresh = K3ForCausalLM(TINY, dtype=torch.float64, experts=model.experts)
        fresh.init_weights(3)
        wanted = dict(official_tensors(fresh))
        ended["whole"] = {n: torch.equal(t, wanted[n]) for n, t in official_tensors(model)}
        adapter = model.adapter
        adapter.detach(model)
        save_checkpoint(model, folder / "base", mesh=mesh)
        adapter.attach(model)
    made.train(share(batch(0), mesh), CrossEntropy())
    first = made.state_tensors()
    made.train(share(batch(1), mesh), CrossEntropy())
    second = made.state_tensors()
    if world.rank == 0:
        save_file(first, folder / "first.safetensors")
        save_file(second, folder / "second.safetensors")
    ended["read"] = outcome(lambda: list(made.model.official_parameters()))
    ended["twice"] = outcome(lambda: Trainer(made.model, made.config, mesh))
    ended["thirds"] = outcome(lambda: lora(mesh, shard_frozen=3))
    weight = made.model.language_model.lm_head.weight
    ended["between"] = [list(weight.shape), bool(weight.isnan().all()), weight.untyped_storage().nbytes()]
    pure = lora(Mesh(world), shard_frozen=4)
    ended["nan"] = outcome(lambda: pure.train(share(batch(0), pure.mesh), Unsteady(17, value=True)))
    ended["after nan"] = outcome(lambda: pure.train(share(batch(0), pure.mesh), CrossEntropy()))
    return ended


def rank_main(size: int, rank: int, address: str, folder: Path) -> None:
    world = World(rank, size, address, timeout_s=100.0)
    ended: dict[str, Any] = {
        name: compared(Mesh(world, **degrees), parts, **config)
        for name, (ranks, parts, degrees, config) in LAYOUTS.items()
        if ranks == size
    }
    if size == 2:
        ended["live"] = [live(Mesh(world), ranks) for ranks in (1, 2)]
    if size == 4:
        ended |= cut(world, folder)
    world.close()
    (folder / f"{size}-{rank}.json").write_text(json.dumps(ended))


def fork_ranks(folder: Path) -> None:
    """One process imports torch, and its copies are the ranks."""
    torch.set_num_threads(1)
    lora(Mesh.alone(), recompute=BOTH).gradients(batch(2), CrossEntropy())  # what is imported at first use, once
    children = []
    for size in (2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        for rank in range(size):
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                code = 1
                try:
                    rank_main(size, rank, address, folder)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
    for child in children:
        os.waitpid(child, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What all ranks left."""
    path = tmp_path_factory.mktemp("frozen")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, __file__, str(path)], check=True, timeout=300, env=environment)
    return path


def ended(folder: Path, size: int, job: str) -> list[Any]:
    return [json.loads((folder / f"{size}-{rank}.json").read_text())[job] for rank in range(size)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_gradients_and_steps_are_those_of_whole_weights(folder, name):
    for got in ended(folder, LAYOUTS[name][0], name):
        assert got["compared"] > 20
        assert got["difference"] < 1e-12  # the same products and sums in the same order


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_its_slice_of_each_weight(folder, name):
    size, ranks, _, _ = LAYOUTS[name]
    for got in ended(folder, size, name):
        whole, held = got["held"]
        saved = (1 - 1 / ranks) * 8 * sum(frozen_parts(TINY))
        assert whole - held == pytest.approx(saved, rel=0.01)  # slices are whole lines of 256 bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_sent_in_a_pass_are_those_of_the_plan(folder, name):
    size, ranks, degrees, _ = LAYOUTS[name]
    data = size // math.prod(degrees.values())
    layout, workload = Layout(data=data, **degrees), Workload("sft", size, 1, 40, 0, micro_batch_tokens=40)
    planned = traffic(TINY, Cluster(size), workload, Method(LORA.rank, weight_bytes=8, shard_frozen=ranks), layout, 0)
    kept = 8 * frozen_parts(TINY)[-2] * (1 - 1 / ranks)  # the last MLP is still there when its backward begins
    for got in ended(folder, size, name):
        assert got["sent"] + kept == pytest.approx(planned["nvlink"]["frozen weights"], rel=0.02)  # lines of 256 bytes


def test_two_parts_at_a_time_are_gathered_and_autograd_keeps_none(folder):
    before, after = ended(folder, 2, "live")[0]
    parts = [8 * number for number in frozen_parts(TINY)]
    # That of two is at most what one pass takes more; the largest of a pass need not fall where they are largest.
    assert max(parts) / 2 < after - before <= max(a + b for a, b in itertools.pairwise(parts))


def test_inside_whole_the_weights_are_those_that_were_cut_and_can_be_saved(folder):
    for got in ended(folder, 4, "whole"):
        assert len(got) > 50
        assert all(got.values()), [name for name, same in got.items() if not same]
    wanted = K3ForCausalLM(TINY, dtype=torch.float64)
    wanted.init_weights(3)
    written = dict(load_checkpoint(folder / "base", dtype=torch.float64).named_parameters())
    assert all(torch.equal(parameter, written[name]) for name, parameter in wanted.named_parameters())


def test_between_passes_a_weight_takes_no_memory_and_is_no_number(folder):
    for shape, nan, size in ended(folder, 4, "between"):
        assert shape == [TINY.vocab_size, TINY.hidden_size]
        assert nan
        assert size == 8


def test_a_state_goes_on_with_one_process_and_whole_weights(folder):
    made = lora(Mesh.alone())
    made.load_state_tensors(load_file(folder / "first.safetensors"))
    made.train(batch(1), CrossEntropy())
    found = differences(made.state_tensors(), load_file(folder / "second.safetensors"))
    assert len(found) > 20
    assert max(found.values()) < 1e-6  # float64 sums in another order, magnified by AdamW's root


def test_a_loss_that_is_no_number_ends_the_step_on_all_ranks_and_not_the_training(folder):
    assert {got["error"] for got in ended(folder, 4, "nan")} == {"NonFiniteLoss"}
    assert {got["error"] for got in ended(folder, 4, "after nan")} == {None}


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        ("read", "InputError", "inside `Trainer.whole()`"),
        ("twice", "ConfigError", "cut already"),
        ("thirds", "ConfigError", "4 learner ranks cannot be cut into groups of shard_frozen 3"),
    ],
)
def test_what_cannot_be_is_one_clear_message(folder, job, error, words):
    for got in ended(folder, 4, job):
        assert got["error"] == error
        assert words in got["message"]


def test_it_needs_frozen_weights_and_the_native_backend():
    with pytest.raises(ConfigError, match="no weight is frozen"):
        load(RLConfig(), flags=split_words(["--trainer.shard-frozen", "2"])[1])
    config = TrainerConfig(lora=LORA, shard_frozen=2, optimizer="adamw")
    with pytest.raises(ConfigError, match=r"leave learner\.backend native"):
        check_backend(LearnerConfig(backend="deepspeed"), config)


if __name__ == "__main__":
    fork_ranks(Path(sys.argv[1]))
