"""Ranks of any layout take the step that one process takes, hold a share of the state, and end together.

This file run as a script forks the ranks of several worlds, which do their jobs and leave what came out in FOLDER.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from k3rl.checkpoint import load_checkpoint, save_checkpoint
from k3rl.config import ConfigError
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM, LoraConfig
from k3rl.parallel import Mesh, RankFailed, Trainer, TrainerConfig, World, balanced_shares, find_lost
from k3rl.parallel.zero import gather_tensors
from k3rl.planner import expert_bytes
from tests.parallel.unsteady import Unsteady

pytestmark = pytest.mark.timeout(300)  # ten ranks start in one fixture: minutes on a busy machine
NANO = K3Config.named("k3-nano")
# A layer of each kind: KDA over a dense MLP, KDA and MLA over experts.
LAYERS = replace(NANO.linear_attn_config, kda_layers=(1, 2), full_attn_layers=(3,))
TINY = NANO.replace(num_experts=4, num_hidden_layers=3, linear_attn_config=LAYERS)
SIX = K3Config.named("kimi-linear-nano").replace(num_experts=6)
ROUTED, STEPS = len(TINY.moe_layers), 3
FLOAT64, FLOAT32 = torch.float64, torch.float32
BOTH = ("attention", "mlp")
# name -> (ranks, expert degree, dtype, more of the trainer's configuration)
LAYOUTS: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "dp2": (2, 1, FLOAT64, {}),
    "ep2": (2, 2, FLOAT64, {}),
    "ep2-recomputed": (2, 2, FLOAT64, {"recompute": BOTH}),
    "ep2-float32": (2, 2, FLOAT32, {}),
    "dp2-captured": (2, 1, FLOAT64, {"capture": "on"}),
    "dp4": (4, 1, FLOAT64, {"offload_optimizer": True}),
    "ep4": (4, 4, FLOAT64, {}),
    "ep4-recomputed": (4, 4, FLOAT64, {"recompute": ("mlp",)}),
    "dp2xep2": (4, 2, FLOAT64, {}),
    "dp2xep2-whole-optimizer": (4, 2, FLOAT64, {"shard_optimizer": False, "offload_optimizer": True}),
    "dp2xep2-recomputed": (4, 2, FLOAT64, {"recompute": BOTH}),
    "dp2xep2-float32": (4, 2, FLOAT32, {}),
}
# name -> (degrees, more of the trainer's configuration)
LORA_LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "lora-dp2": ({}, {}),
    "lora-ep2": ({"expert": 2}, {}),
    "lora-ep2-recomputed": ({"expert": 2}, {"recompute": BOTH, "offload_optimizer": True}),
    "lora-cp2": ({"context": 2}, {"recompute": BOTH}),
}
NUMBERS = ("state bytes", "behind the backward")  # of a rank, beside its tensors
WORLDS = {"two": (2, 100.0), "four": (4, 100.0), "hanging": (2, 8.0), "stopped": (2, 8.0)}  # ranks, timeout


# ------------------------------------------------------------------------------------------------ what is trained


def batch(step: int, lengths: tuple[int, ...] = (7, 19, 33, 12, 26), routes: bool = False) -> TrainBatch:
    """Five sequences; one only in the last step, so that other ranks have none."""
    lengths = lengths if step < STEPS - 1 else lengths[:1]
    rng = np.random.default_rng(step)
    sequences = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= length // 2
        nothing = np.zeros(length, np.float32)
        chosen = rng.permuted(np.tile(np.arange(4), (length, 4, 1)), axis=2)[:, :ROUTED, :2].astype(np.int16)
        ids = rng.integers(0, 400, length)
        sequences.append(
            TrainSequence(f"s{number}", ids, mask, nothing, mask.astype("f4"), routes=chosen if routes else None)
        )
    return TrainBatch.pack(sequences)


def trainer(
    mesh: Mesh, dtype: torch.dtype = FLOAT64, *, seed: int = 3, model: K3Config = TINY, **config: Any
) -> Trainer:
    made = K3ForCausalLM(model, dtype=dtype, experts=mesh.experts(model.num_experts))
    made.init_weights(seed)
    # Small enough that clipping scales every gradient and QK-clip touches heads.
    degrees = {"expert_parallel": mesh.expert.size, "context_parallel": mesh.context.size}
    return Trainer(made, TrainerConfig(**({"qk_clip": 0.02, "grad_clip": 0.5} | degrees | config)), mesh)


def share(whole: TrainBatch, mesh: Mesh) -> TrainBatch | None:
    members = balanced_shares(whole.lengths.tolist(), mesh.batch_size)[mesh.batch_rank]
    return whole.select(members) if members else None


def gradients(of: Trainer, whole: TrainBatch) -> dict[str, torch.Tensor]:
    """Those this rank is the one to give, by official name; and the loss, on rank 0 that of all."""
    metrics, _ = of.gradients(share(whole, of.mesh), CrossEntropy())
    of.balancer.clear()
    total = torch.tensor([metrics.pairs().get("loss/mean", (0.0, 0.0))[0]], dtype=torch.float64)
    of.mesh.world.sum(total)
    own = {
        n: p.grad.clone()
        for n, p in of.native.shards.params.items()
        if p.grad is not None and n in of.native.shards.counted
    }
    return own | ({"loss": total} if of.mesh.world.rank == 0 else {})


def run(of: Trainer) -> dict[str, torch.Tensor]:
    """Gradients of the first batch, then, in float64, the state after three steps: this rank's part of both."""
    found = {f"gradient {name}": value for name, value in gradients(of, batch(0)).items()}
    if of.model.dtype is FLOAT32:
        return found
    for step in range(STEPS):
        metrics = of.train(share(batch(step), of.mesh), CrossEntropy()).values()
    assert metrics["optim/qk_clipped_heads"] > 0
    return found | of.owned_state()


# ------------------------------------------------------------------------------------------------ what ranks do


def outcome(job: Callable[[], Any]) -> dict[str, Any]:
    """How a job ended, as JSON."""
    begun = time.monotonic()
    try:
        job()
        return {"error": None}
    except Exception as error:
        about = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begun}
        return about | {key: getattr(error, key) for key in ("rank", "what", "name") if hasattr(error, key)}


def counting(of: Any, method: str) -> list[None]:
    """Grows by one with each call of a method."""
    calls, inner = [], getattr(of, method)
    setattr(of, method, lambda: (calls.append(None), inner()))
    return calls


def nan_behind_the_backward(world: World) -> dict[str, Any]:
    """One rank's loss is not a number in a step whose gradients are summed before anybody has seen it."""
    mesh = Mesh(world)
    made = trainer(mesh, capture="on")
    launches = counting(made.native.reduction, "launch")
    mine = share(batch(0), mesh)
    made.train(mine, CrossEntropy())
    head = made.model.language_model.lm_head.weight
    kept, before = head.detach().clone(), {name: value.clone() for name, value in made.owned_state().items()}
    if world.rank == 1:
        head.data.fill_(float("nan"))
    ended = {"failed": outcome(lambda: made.train(mine, CrossEntropy()))}
    head.data.copy_(kept)
    ended["unchanged"] = all(torch.equal(before[name], value) for name, value in made.owned_state().items())
    ended["after"] = outcome(lambda: made.train(mine, CrossEntropy()))
    return ended | {"early": len(launches)}


def do_layouts(world: World, folder: Path) -> None:
    for name, (ranks, expert, dtype, config) in LAYOUTS.items():
        if ranks == world.size:
            mesh = Mesh(world, expert=expert)
            made = trainer(mesh, dtype, micro_batch_tokens=40, **config)
            launches = counting(made.native.reduction, "launch")
            found = run(made)
            whole = made.native.optimizer.state_tensors()
            about = {"state bytes": sum(value.nbytes for value in whole.values()), "behind the backward": len(launches)}
            numbers = {key: torch.tensor(value) for key, value in about.items()}
            save_file(found | numbers, folder / f"{name}-{world.rank}.safetensors")


def do_four(world: World, folder: Path) -> dict[str, Any]:
    ended = {"degrees": outcome(lambda: Mesh(world, expert=3))}
    mesh = Mesh(world, expert=4)
    for name, again in (("sent", ()), ("sent, recomputed", BOTH)):
        replaying = trainer(mesh, recompute=again)
        replayed = gradients(replaying, batch(0, routes=True))
        sent = torch.tensor([replaying.on_mesh.sent_bytes])
        world.sum(sent)
        ended[name] = {"bytes": int(sent)}
    six = trainer(mesh, model=SIX)
    uneven = gradients(six, batch(0))
    save_file(replayed, folder / f"routes-{world.rank}.safetensors")
    save_file(uneven, folder / f"uneven-{world.rank}.safetensors")
    del six

    pairs = Mesh(world, expert=2)
    made = trainer(pairs, FLOAT32)
    made.train(share(batch(0), pairs), CrossEntropy())
    save_checkpoint(made.model, folder / "export", mesh=pairs)
    back = load_checkpoint(folder / "export", dtype=FLOAT32, mesh=pairs)
    same = all(torch.equal(p, q) for p, q in zip(made.model.parameters(), back.parameters(), strict=True))
    ended["loads its own experts"] = {"same": same, "experts": list(back.experts)}
    scored = made.logprobs(share(batch(0), pairs) if world.rank == 2 else None)
    np.save(folder / f"logprobs-{world.rank}.npy", scored)
    save_file(made.state_tensors(), folder / f"whole-{world.rank}.safetensors")

    odd = world.rank == 2
    ended["config"] = outcome(lambda: trainer(pairs, muon_lr=0.01 if odd else 0.02))
    ended["weights"] = outcome(lambda: trainer(pairs, seed=4 if odd else 3))
    ended["weights beside experts of its own"] = outcome(lambda: trainer(mesh, seed=4 if odd else 3))
    mine = share(batch(1), pairs)
    ended["settings"] = outcome(lambda: made.train(mine, CrossEntropy(), lr_scale=0.5 if odd else 1.0))
    ended["batch"] = outcome(lambda: made.train(batch(1) if odd else mine, CrossEntropy()))
    for kind in ("loss", "gradient"):  # the sequence of 33 tokens is a micro-batch of its own, with 17 targets
        loss = Unsteady(17, value=kind == "loss")
        micro = trainer(pairs, micro_batch_tokens=33)
        before = {name: value.clone() for name, value in micro.owned_state().items()}
        ended[f"nan {kind}"] = outcome(lambda micro=micro, loss=loss: micro.train(share(batch(0), pairs), loss))
        after = micro.owned_state()
        ended[f"nan {kind}"]["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
        ended[f"after nan {kind}"] = outcome(lambda micro=micro: micro.train(share(batch(0), pairs), CrossEntropy()))

    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    ended["killed"] = outcome(lambda: made.train(mine, CrossEntropy()))
    return ended


def lora_run(mesh: Mesh, **config: Any) -> dict[str, torch.Tensor]:
    """Adapters after a few steps: one of all experts and of MLA, one of MLA alone.

    With the second the first layers have nothing to train, and their ranks must meet in the backward all the same.
    """
    found: dict[str, torch.Tensor] = {}
    for targets, steps in ((("kv_b_proj", "w2"), STEPS), (("kv_b_proj",), 1)):
        made = trainer(mesh, lora=LoraConfig(rank=3, alpha=6.0, targets=targets), micro_batch_tokens=40, **config)
        for step in range(steps):
            made.train(share(batch(step), mesh), CrossEntropy())
        assert made.adapter_tensors().keys() == set(made.native.shards.names)
        found |= {f"{len(targets)} {key}": value for key, value in made.owned_state().items() if key != "steps"}
    return found


def lora_moved(world: World) -> dict[str, torch.Tensor]:
    """Adapters after a step on one process, one on two ranks that share experts, and one on one process again."""
    lora, pairs = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj", "w1", "w2")), Mesh(world, expert=2)
    state: dict[str, torch.Tensor] = {}
    for step, mesh in enumerate((Mesh.alone(), pairs, Mesh.alone())):
        made = trainer(mesh, lora=lora)
        if state:
            made.load_state_tensors(state)
        made.train(share(batch(step), mesh), CrossEntropy())
        state = made.state_tensors()
    return state


def scoring_jobs(mesh: Mesh) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Forward passes (of a row that is too long on the last rank, of rows that fit), by name."""
    made, mine = trainer(mesh, micro_batch_tokens=40), share(batch(0), mesh)
    last = mesh.world.rank == mesh.world.size - 1
    given = batch(0, (41,)) if last else mine
    return {
        "evaluate": (lambda: made.evaluate(given, CrossEntropy()), lambda: made.evaluate(mine, CrossEntropy())),
        "logprobs": (lambda: made.logprobs(given), lambda: made.logprobs(mine)),
    }


def starving_run(mesh: Mesh) -> dict[str, torch.Tensor]:
    """The state after steps in which some of five experts have rows, then others, then the first again.

    Two ranks hold two and three of them. The optimizer's step is that of a GPU: it reads from counts, not from `.grad`,
    who has a gradient.
    """
    made = trainer(mesh, model=TINY.replace(num_experts=5))
    made.native.optimizer.capture_with(lambda run: run)
    for step, chosen in enumerate(([0, 3, 4], [0, 1, 2], [0, 3, 2], [1, 4, 3])):
        whole = batch(0, routes=True)
        assert whole.routes is not None
        first = np.random.default_rng(step).integers(0, 3, whole.routes.shape[:2])
        whole.routes[...] = np.array(chosen, np.int16)[np.stack([first, (first + 1) % 3], axis=2)]
        made.train(share(whole, mesh), CrossEntropy())
    return made.owned_state()


def do_two(world: World, folder: Path) -> dict[str, Any]:
    """Adapters; then rank 1 fails inside a forward, where rank 0 waits for its rows."""
    for name, (degrees, config) in LORA_LAYOUTS.items():
        save_file(lora_run(Mesh(world, **degrees), **config), folder / f"{name}-{world.rank}.safetensors")
    moved = lora_moved(world)
    if world.rank == 0:
        save_file(moved, folder / "lora-moved-0.safetensors")
    save_file(starving_run(Mesh(world, expert=2)), folder / f"starving-{world.rank}.safetensors")
    long = {
        name: outcome(job) | {"then": outcome(short)}
        for name, (job, short) in scoring_jobs(Mesh(world, expert=2)).items()
    }
    early = nan_behind_the_backward(world)
    lonely = gather_tensors(world, {"of rank 1": torch.arange(3)} if world.rank == 1 else {})
    mesh = Mesh(world, expert=2)
    mine = share(batch(0, routes=True), mesh)
    assert mine is not None
    if world.rank == 1:
        object.__setattr__(mine, "routes", mine.routes[:, :, :1])
    made = trainer(mesh)
    left = outcome(lambda: made.train(mine, CrossEntropy()))
    return {
        "left": left,
        "early": early,
        "long": long,
        "gathered": {name: value.tolist() for name, value in lonely.items()},
    }


def do_hanging(world: World, folder: Path) -> dict[str, Any]:
    if world.rank == 1:
        time.sleep(12)
    return {"hanging": outcome(lambda: world.sum(torch.ones(3)))}


def do_stopped(world: World, folder: Path) -> dict[str, Any]:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return {"stopped": outcome(lambda: world.sum(torch.ones(3)))}


def rank_main(name: str, rank: int, address: str, folder: Path) -> None:
    size, timeout_s = WORLDS[name]
    world = World(rank, size, address, timeout_s=timeout_s)
    if name in ("two", "four"):
        do_layouts(world, folder)
    jobs = {"two": do_two, "four": do_four, "hanging": do_hanging, "stopped": do_stopped}
    ended = jobs[name](world, folder)
    world.close()
    (folder / f"{name}-{rank}.json").write_text(json.dumps(ended))


def ask_from_outside(address: str, size: int, timeout_s: float, file: Path) -> None:
    """Leaves who is lost by what a process says that is none of the ranks, once they are there and somebody waits."""
    deadline, found = time.monotonic() + 2 * timeout_s, None
    while time.monotonic() < deadline and (found is None or found.rank == 0):  # the lost one before rank 0 is there
        found = find_lost(address, size, timeout_s)
    file.write_text(json.dumps(None if found is None else [found.rank, str(found)]))


def ask_a_stopped_store(folder: Path) -> None:
    """Leaves what is said of ranks whose store takes connections and never answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if (child := os.fork()) == 0:
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        os.kill(os.getpid(), signal.SIGSTOP)
        store.set("never", "")
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    ask_from_outside(f"127.0.0.1:{port}", 2, 1.0, folder / "outside-store.json")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def fork_ranks(folder: Path) -> None:
    """One process imports torch, and its copies are the ranks; a rank that a job stops is killed at the end."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # recomputation would import it in each rank
    children: dict[str, list[int]] = {}
    addresses: dict[str, str] = {}
    for name, (size, _) in WORLDS.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = addresses[name] = f"127.0.0.1:{probe.getsockname()[1]}"
        for rank in range(size):
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                code = 1
                try:
                    rank_main(name, rank, address, folder)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.setdefault(name, []).append(child)
    with ThreadPoolExecutor() as pool:
        for name in ("hanging", "stopped"):
            pool.submit(ask_from_outside, addresses[name], *WORLDS[name], folder / f"outside-{name}.json")
    ask_a_stopped_store(folder)
    for name, ranks in children.items():
        for rank, child in enumerate(ranks):
            if (name, rank) == ("stopped", 1):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# ------------------------------------------------------------------------------------------------ what must be true


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What all worlds left."""
    path = tmp_path_factory.mktemp("ranks")
    ours = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, __file__, str(path)], env=os.environ | ours, check=True, timeout=300)
    return path


def ended(folder: Path, world: str, job: str) -> dict[int, dict[str, Any]]:
    """rank -> how the job ended, of the ranks that lived."""
    files = {rank: folder / f"{world}-{rank}.json" for rank in range(WORLDS[world][0])}
    return {rank: json.loads(file.read_text())[job] for rank, file in files.items() if file.exists()}


def gathered(folder: Path, name: str, ranks: int) -> dict[str, torch.Tensor]:
    """The parts of all ranks by official name; no name is on two of them."""
    every: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        part = load_file(folder / f"{name}-{rank}.safetensors")
        for number in NUMBERS:
            part.pop(number, None)
        assert not every.keys() & part.keys()
        every |= part
    return every


def differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Relative difference of each tensor."""
    assert one.keys() == other.keys()
    pairs = {name: (value.double(), other[name].double()) for name, value in one.items()}
    return {name: float((a - b).norm() / a.norm().clamp_min(1e-30)) for name, (a, b) in pairs.items()}


@pytest.fixture(scope="module")
def alone() -> dict[torch.dtype, dict[str, torch.Tensor]]:
    """What one process gets, with all sequences packed into one micro-batch."""
    return {dtype: run(trainer(Mesh.alone(), dtype)) for dtype in (FLOAT64, FLOAT32)}


def test_packing_and_micro_batches_change_nothing(alone):
    found = run(trainer(Mesh.alone(), micro_batch_tokens=33))
    assert max(differences(alone[FLOAT64], found).values()) < 1e-8  # float64 sums in another order


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_loss_gradients_and_masters_of_one_process(folder, alone, name):
    ranks, _, dtype, _ = LAYOUTS[name]
    found = differences(alone[dtype], gathered(folder, name, ranks))
    assert sum(key.startswith("gradient ") for key in found) > 90
    # float64 sums in another order, quantization on; in float32 also an activation whose rounding falls differently
    assert max(found.values()) < (1e-8 if dtype is FLOAT64 else 1e-3)


def test_experts_without_rows_rest_where_each_rank_holds_experts_of_its_own(folder):
    """Of uneven numbers, so that flags of different experts could not even be compared."""
    found = differences(starving_run(Mesh.alone()), gathered(folder, "starving", 2))
    assert max(found.values()) < 1e-8  # float64 sums in another order


@pytest.mark.parametrize(("name", "steps"), [("dp2-captured", STEPS), ("dp2", 0)])
def test_captured_steps_have_their_gradients_reduced_behind_the_backward(folder, name, steps):
    """All but the first time, which finds out what a backward reaches; in the last step ranks have no sequence."""
    files = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(LAYOUTS[name][0])]
    assert [int(file["behind the backward"]) for file in files] == [steps] * len(files)


def test_a_loss_that_is_no_number_is_found_behind_the_backward_too(folder):
    for about in ended(folder, "two", "early").values():
        assert about["failed"]["error"] == "NonFiniteLoss"
        assert about["unchanged"]
        assert about["after"]["error"] is None
        assert about["early"] == 2


@pytest.mark.parametrize("name", LORA_LAYOUTS)
def test_an_adapter_is_trained_the_same_on_ranks_that_share_experts_or_sequences(folder, name):
    found = differences(lora_run(Mesh.alone()), gathered(folder, name, 2))
    assert any("experts.3.w2.lora_A" in key for key in found)
    # float64 sums in another order; AdamW divides by the root of a second moment, which magnifies it
    assert max(found.values()) < 1e-6


def test_a_state_of_adapters_goes_on_with_another_number_of_ranks(folder):
    made = trainer(Mesh.alone(), lora=LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj", "w1", "w2")))
    for step in range(STEPS):
        made.train(batch(step), CrossEntropy())
    found = differences(made.state_tensors(), gathered(folder, "lora-moved", 1))
    assert any("experts.3.w1.lora_B" in key for key in found)
    assert max(found.values()) < 1e-6  # as above


@pytest.mark.parametrize(("name", "most"), [("dp4", 0.30), ("ep4", 0.30), ("dp2xep2", 0.30), ("dp2", 0.55)])
def test_a_rank_keeps_its_share_of_masters_and_optimizer_state(folder, alone, name, most):
    ranks = LAYOUTS[name][0]
    bytes_ = [int(load_file(folder / f"{name}-{rank}.safetensors")["state bytes"]) for rank in range(ranks)]
    whole = sum(v.nbytes for key, v in alone[FLOAT64].items() if key.startswith("optimizer."))
    assert sum(bytes_) == whole
    assert max(bytes_) < most * whole


def test_recorded_routes_are_replayed_by_whoever_holds_the_experts(folder):
    expected = gradients(trainer(Mesh.alone()), batch(0, routes=True))
    assert max(differences(expected, gathered(folder, "routes", 4)).values()) < 1e-8
    chosen = gradients(trainer(Mesh.alone()), batch(0))
    assert max(differences(chosen, expected).values()) > 1e-2  # the routes are not the router's own


def test_bytes_sent_are_those_of_the_formula(folder):
    """docs/parallel.md, with the rows and choices that left their rank counted from the routes."""
    whole, latent, width = batch(0, routes=True), TINY.expert_hidden_size, 8
    shares = [whole.select(members) for members in balanced_shares(whole.lengths.tolist(), 4)]
    forwards = max(len(share.split(6144)) for share in shares)
    counts = 2 * len(TINY.moe_layers) * 4 * 3 * 8 * forwards  # two, to three others
    forward = backward = 0
    for rank, own in enumerate(shares):
        for layer in range(len(TINY.moe_layers)):
            away = own.routes[:, layer] != rank  # expert e is on rank e
            rows, choices = away.any(1), away.sum()
            distinct = sum(len(set(row.tolist()) - {rank}) for row in own.routes[:, layer])
            assert rows.sum() <= distinct <= choices
            forward += distinct * (latent + latent // 32) + choices * (8 + width + latent * width)
            backward += distinct * latent * width + choices * (latent + 1) * width
    assert ended(folder, "four", "sent")[0]["bytes"] == counts + forward + backward
    assert ended(folder, "four", "sent, recomputed")[0]["bytes"] == 2 * (counts + forward) + backward
    # The planner's count for even routes; these were drawn, for 97 tokens.
    tokens = whole.tokens * len(TINY.moe_layers)
    assert expert_bytes(TINY, 4, width) == pytest.approx((forward / tokens, backward / tokens), rel=0.05)


def test_experts_of_kimi_linear_need_not_divide_the_ranks(folder):
    expected = gradients(trainer(Mesh.alone(), model=SIX), batch(0))
    assert max(differences(expected, gathered(folder, "uneven", 4)).values()) < 1e-8


def test_ranks_export_the_files_that_one_process_exports(folder, tmp_path):
    whole = load_file(folder / "whole-0.safetensors")
    single = trainer(Mesh.alone(), FLOAT32)
    single.load_state_tensors(whole)
    save_checkpoint(single.model, tmp_path / "export")
    names = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert names == sorted(path.name for path in (folder / "export").iterdir())
    for name in names:
        assert (tmp_path / "export" / name).read_bytes() == (folder / "export" / name).read_bytes(), name


def test_each_rank_loads_its_own_experts_and_scores_with_those_of_the_others(folder):
    about = ended(folder, "four", "loads its own experts")
    assert {rank: got["experts"] for rank, got in about.items()} == {0: [0, 1], 1: [2, 3], 2: [0, 1]}
    assert all(got["same"] for got in about.values())
    single = trainer(Mesh.alone(), FLOAT32)
    single.load_state_tensors(load_file(folder / "whole-0.safetensors"))
    members = balanced_shares(batch(0).lengths.tolist(), 4)[2]
    expected = single.logprobs(batch(0).select(members))
    scored = np.load(folder / "logprobs-2.npy")
    assert np.load(folder / "logprobs-0.npy").size == 0
    assert np.abs(scored - expected).max() < 1e-4  # float32 in other shapes of products


def test_the_whole_state_is_the_same_on_every_rank(folder):
    states = [load_file(folder / f"whole-{rank}.safetensors") for rank in range(4)]
    for state in states[1:]:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())


def test_a_row_too_long_for_one_rank_ends_a_forward_pass_on_all_at_once_and_nothing_else(folder):
    for rank, jobs in ended(folder, "two", "long").items():
        for got in jobs.values():
            assert got["error"] == ("PeerFailed" if rank == 0 else "SequenceTooLong")
            assert got["seconds"] < WORLDS["two"][1] / 4, "nobody waits for a timeout"
            assert got["then"]["error"] is None


def test_a_rank_that_owns_nothing_takes_part_in_gathering(folder):
    for got in ended(folder, "two", "gathered").values():
        assert got == {"of rank 1": [0, 1, 2]}


# ------------------------------------------------------------------------------------------------------ bad input


def test_degrees_that_do_not_divide_the_ranks_are_one_clear_message(folder):
    for got in ended(folder, "four", "degrees").values():
        assert got["error"] == ConfigError.__name__
        assert "4 learner ranks" in got["message"]
        assert "multiple of 3" in got["message"]


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ("config", "trainer.muon_lr"),
        ("weights", "weights of "),
        ("weights beside experts of its own", "weights of "),
        ("settings", "step.lr_scale"),
        ("batch", "batch"),
    ],
)
def test_ranks_that_disagree_all_name_the_odd_one_and_what_differs(folder, job, what):
    got = ended(folder, "four", job)
    assert len(got) == 3
    for about in got.values():
        assert about["error"] == "RanksDisagree"
        assert about["rank"] == 2
        assert about["what"].startswith(what)


def test_a_loss_that_is_no_number_ends_the_step_on_all_ranks_and_not_the_training(folder):
    got = ended(folder, "four", "nan loss")
    assert {about["error"] for about in got.values()} == {"NonFiniteLoss"}
    assert len({about["message"] for about in got.values()}) == 1
    assert all(about["unchanged"] for about in got.values())
    assert all(about["error"] is None for about in ended(folder, "four", "after nan loss").values())


def test_a_gradient_that_is_no_number_is_named_alike_on_all_ranks(folder):
    got = ended(folder, "four", "nan gradient").values()
    assert {about["error"] for about in got} == {"NonFiniteGradients"}
    assert len({about["message"] for about in got}) == 1
    assert all(about["unchanged"] for about in got)
    assert all(about["error"] is None for about in ended(folder, "four", "after nan gradient").values())


def test_a_killed_rank_is_named_by_all_others(folder):
    got = ended(folder, "four", "killed")
    assert sorted(got) == [0, 1, 2]
    for about in got.values():
        assert (about["error"], about["rank"]) == (RankFailed.__name__, 3), about
        assert about["seconds"] < WORLDS["four"][1]


def test_a_rank_that_fails_inside_a_forward_is_named_with_its_reason(folder):
    got = ended(folder, "two", "left")
    assert got[1]["error"] == "InputError"
    assert (got[0]["error"], got[0]["rank"]) == (RankFailed.__name__, 1)
    assert "InputError: routes must be" in got[0]["message"]


@pytest.mark.parametrize(("job", "says"), [("hanging", "hangs"), ("stopped", "no sign of life")])
def test_a_rank_that_hangs_is_named_within_the_timeout(folder, job, says):
    about = ended(folder, job, job)[0]
    assert (about["error"], about["rank"]) == (RankFailed.__name__, 1), about
    assert says in about["message"]
    assert about["seconds"] < WORLDS[job][1] + 3  # a busy machine may be late
    rank, said = json.loads((folder / f"outside-{job}.json").read_text())  # asked while rank 0 still waited, or after
    assert (rank, says in said) == (1, True), said


def test_ranks_whose_store_gives_no_answer_have_lost_rank_0(folder):
    rank, said = json.loads((folder / "outside-store.json").read_text())
    assert (rank, "gives no answer" in said) == (0, True), said


if __name__ == "__main__":
    fork_ranks(Path(sys.argv[1]))
