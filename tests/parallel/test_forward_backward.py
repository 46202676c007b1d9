"""A micro-batch as a captured step of fixed shapes: its sums equal the eager path's, and the host reads nothing."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import k3rl.model.kda as kda_layer
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import GRPO, CrossEntropy, K3Policy, LossInputs, LossOutput, OnPolicyDistill
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.parallel.captured import CapturedForwardBackward, LearnerOutOfMemory, ShapeBucket
from tests.optim.test_captured import Recorded

TINY = K3Config.named("k3-nano").replace(num_experts=8)
BUDGET = 128


@pytest.fixture(scope="module")
def trainers():
    """Two trainers of one model: eager, and by captured steps."""
    return [trainer_with("off"), trainer_with("on")]


def trainer_with(capture: str) -> Trainer:
    model = K3ForCausalLM(TINY, dtype=torch.float64)
    model.init_weights(5)
    return Trainer(model, TrainerConfig(micro_batch_tokens=BUDGET, capture=capture, balance="fresh"))


def batch(seed: int, lengths: list[int], *, routes: bool = False, teacher: bool = False) -> TrainBatch:
    rng = np.random.default_rng(seed)
    sequences = []
    for number, length in enumerate(lengths):
        mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        draws = rng.normal(size=(3, length)).astype(np.float32)
        sequences.append(
            TrainSequence(
                f"s{number}",
                rng.integers(0, 400, length),
                mask,
                np.where(mask, -np.abs(draws[0]) - 4, 0).astype(np.float32),
                np.where(mask, draws[1], 0).astype(np.float32),
                routes=rng.integers(0, 5, (length, len(TINY.moe_layers), 2)).astype(np.int16) if routes else None,
                teacher_logprobs=np.where(mask, -np.abs(draws[2]) - 4, 0).astype(np.float32) if teacher else None,
                fresh=rng.random(length) < 0.8,
            )
        )
    return TrainBatch.pack(sequences)


def captured(trainers: list[Trainer]) -> CapturedForwardBackward:
    found = trainers[1].native.forward_backward
    assert isinstance(found, CapturedForwardBackward)
    return found


@pytest.mark.parametrize("teacher", [False, True])
def test_a_warm_up_runs_a_step_and_leaves_nothing_of_it(teacher):
    """Steps afterwards are those of a trainer without one, to the bit, router biases too."""
    cold, warm = trainer_with("on"), trainer_with("on")
    loss = OnPolicyDistill() if teacher else K3Policy()
    steps = captured([cold, warm])
    ran: list[ShapeBucket] = []
    inner = steps.compute
    steps.compute = lambda inputs: (ran.append(inputs.bucket), inner(inputs))[1]
    warm.warm_up(loss, temperature=0.7, routes=True, teacher=teacher)
    assert [(one.tokens, one.routes, one.teacher) for one in ran] == [(BUDGET, True, teacher)]
    assert not steps.steps
    for number in range(2):
        given = batch(number, [40, 9], routes=True, teacher=teacher)
        found = [one.train(given, loss, temperature=0.7).pairs() for one in (cold, warm)]
        assert {k: v for k, v in found[0].items() if "time" not in k} == {
            k: v for k, v in found[1].items() if "time" not in k
        }
    states = [one.state_tensors() for one in (cold, warm)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def sums(trainer: Trainer, whole: TrainBatch, loss) -> tuple[dict, dict, dict, list]:
    """(gradients, metrics, largest logits, [loads, histograms]) of one step's forwards and backwards."""
    metrics, largest = trainer.gradients(whole, loss)
    gradients = {n: p.grad.clone() for n, p in trainer.native.optimizer.params.items() if p.grad is not None}
    counted = [tensor.clone() for tensor in trainer.balancer.tensors()]
    trainer.balancer.clear()
    return gradients, metrics.values(), largest, counted


def check_equal(one: tuple, other: tuple) -> None:
    """float64 sums in another order: 1e-12 of each tensor's largest value; counts are integers and equal."""
    assert one[0].keys() == other[0].keys()
    scale = max(float(g.abs().max()) for g in one[0].values())
    for name, gradient in one[0].items():
        assert (gradient - other[0][name]).abs().max() <= 1e-12 * max(scale, float(gradient.abs().max())), name
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert value == pytest.approx(other[1][name], rel=1e-12, abs=1e-12), name
    assert one[2].keys() == other[2].keys()
    assert all(torch.allclose(one[2][n], other[2][n], rtol=1e-12, atol=0) for n in one[2])
    assert all(torch.equal(a, b) for a, b in zip(one[3], other[3], strict=True))


@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    loss=st.sampled_from([CrossEntropy(), K3Policy(0.5, 2.0, 0.02), GRPO(0.2, 0.28)]),
)
def test_gradients_metrics_and_counts_equal_the_eager_path(trainers, lengths, seed, loss):
    whole = batch(seed, [*lengths, 9])
    check_equal(*(sums(trainer, whole, loss) for trainer in trainers))
    assert trainers[1].notes == [], "nothing took the eager path"


def test_recorded_routes_and_a_teacher_are_inputs_too(trainers):
    whole = batch(1, [40, 17, 30], routes=True, teacher=True)
    found = [sums(trainer, whole, OnPolicyDistill()) for trainer in trainers]
    check_equal(*found)
    assert any(".experts.4." in name for name in found[1][0])
    assert not any(".experts.5." in name for name in found[1][0]), "an expert without rows has no gradient"


def test_micro_batches_of_both_paths_add_up_in_one_step(trainers, monkeypatch):
    whole = batch(10, [100, 90, 80])
    turns = iter([None, "this one does not", None])
    monkeypatch.setattr(captured(trainers), "refusal", lambda micro, loss: next(turns))
    check_equal(*(sums(trainer, whole, CrossEntropy()) for trainer in trainers))
    assert trainers[1].notes == ["this one does not"]
    trainers[1].notes.clear()


def test_a_bucket_serves_later_micro_batches_and_grows_where_it_has_to(trainers):
    replayed = captured(trainers)
    replayed.forget()
    small, many, wide = batch(2, [60, 60]), batch(3, [5] * 24), batch(4, [70, 50])
    for whole in (small, wide, small):
        sums(trainers[1], whole, CrossEntropy())
    (first,) = replayed.steps.values()
    sums(trainers[1], many, CrossEntropy())
    (second,) = replayed.steps.values()
    assert (first.bucket.documents, second.bucket.documents) == (4, 32)
    assert second.bucket.tokens == first.bucket.tokens == 128
    check_equal(*(sums(trainer, small, CrossEntropy()) for trainer in trainers))
    assert list(replayed.steps.values()) == [second], "what fits in runs in what is there"


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 90), max_size=40),
    more=st.lists(st.integers(1, 90), max_size=40),
    budget=st.integers(4000, 9000),
)
def test_a_bucket_holds_its_micro_batch_and_what_it_was_made_larger_for(lengths, more, budget):
    lengths = [*lengths, 9]
    one, other = (ShapeBucket.of(batch(0, found), budget) for found in (lengths, [*more, 9]))
    assert one.tokens >= sum(lengths)
    assert one.tokens - sum(lengths) < budget / 16 + 64
    assert one.documents >= len(lengths) + (one.tokens > sum(lengths))
    assert one.longest >= max(*lengths, one.tokens - sum(lengths))
    both = one.with_room_for(other)
    assert both.holds(one)
    assert both.holds(other)


class _HostReads(TorchDispatchMode):
    """Fails where the host would wait for the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        masks = any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal.", "bincount")
        if masks or any(word in name for word in waits):
            raise AssertionError(f"{name} makes the host wait")
        return function(*args, **(kwargs or {}))


def _shapes_of_kda(q, k, v, gate, beta, A_log, dt_bias, *, gate_lower_bound, initial_state, cu_seqlens, context):
    """In the place of the kernel: its reference cuts rows by numbers that it reads."""
    return q * k * v * gate * beta.unsqueeze(-1), q.new_zeros(1)


@pytest.mark.parametrize("loss", [CrossEntropy(), K3Policy(0.5, 2.0, 0.02), GRPO(0.2, 0.28), OnPolicyDistill()])
def test_the_host_reads_nothing_inside_a_captured_step(trainers, monkeypatch, loss):
    monkeypatch.setattr(kda_layer, "kda", _shapes_of_kda)
    replayed = captured(trainers)
    replayed.forget()
    micro = batch(5, [50, 30], routes=False, teacher=True)
    sums(trainers[1], micro, loss)
    (only,) = replayed.steps.values()
    with _HostReads(), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("tolist makes the host wait"))
        output = only.step()
    assert bool(output.isfinite().all())
    with _HostReads(), pytest.raises(AssertionError, match="makes the host wait"):
        output[output > 0]
    trainers[1].balancer.clear()
    replayed.forget()


def test_a_loss_that_reads_numbers_takes_the_eager_path_and_that_is_said_once(trainers):
    def reads(inputs: LossInputs) -> LossOutput:
        loss = -(inputs.weights * inputs.logprobs).sum()
        return LossOutput(loss, {"loss/mean": (loss.item(), 1.0)})

    found = [sums(trainer, batch(8, [33, 20]), reads) for trainer in trainers]
    assert all(torch.equal(found[0][0][n], found[1][0][n]) for n in found[0][0])
    (note,), trainers[1].notes = trainers[1].notes, []
    assert "reads numbers" in note
    sums(trainers[1], batch(9, [33, 20]), reads)
    assert trainers[1].notes == []


@pytest.mark.parametrize("other", [{"exact": True}, {"balance_by": "auxiliary_loss"}, {"expert_parallel": 2}])
def test_what_no_captured_step_has_is_refused_where_they_are_wanted(other):
    with pytest.raises(ValueError, match=f"no captured step has {next(iter(other))}"):
        TrainerConfig(capture="on", **other)
    assert TrainerConfig(**other).capture == "auto"


class _FakeGraph:
    """What a CUDA graph keeps of a run, and does again."""

    def __init__(self) -> None:
        self.recorded = Recorded()

    @torch.no_grad()
    def replay(self) -> None:
        self.recorded.replay()


@pytest.fixture
def fake_gpu(monkeypatch) -> list[str]:
    """Lets steps be captured on a CPU; what the device was asked for, in order."""
    asked: list[str] = []

    @contextlib.contextmanager
    def graph(made: _FakeGraph, pool: object, capture_error_mode: str):
        assert capture_error_mode == "thread_local"
        asked.append(f"capture into {pool}")
        with made.recorded:
            yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    pools = itertools.count()
    fakes = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda given: contextlib.nullcontext(),
        "CUDAGraph": _FakeGraph,
        "graph": graph,
        "graph_pool_handle": lambda: f"pool {next(pools)}",
        "empty_cache": lambda: asked.append("empty the cache"),
        "is_initialized": lambda: True,
        "memory_reserved": lambda: 100 * len(asked),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("k3rl.parallel.captured.can_capture", lambda model: True)
    return asked


def test_replayed_micro_batches_equal_the_eager_path(fake_gpu):
    """The first step captures, later ones replay on other tokens; a larger bucket takes its place."""
    eager, replayed = (trainer_with(capture) for capture in ("off", "on"))
    steps = captured([eager, replayed])
    for seed in range(3):
        check_equal(*(sums(one, batch(seed, [30, 50]), CrossEntropy()) for one in (eager, replayed)))
        assert steps.captured == 1
    assert fake_gpu == ["empty the cache", "capture into pool 0"]
    assert steps.graph_bytes == replayed.backend.graph_bytes == 100
    assert steps.will_replay([batch(9, [40, 40])], CrossEntropy(), 1.0)
    assert not steps.will_replay([batch(9, [5] * 16)], CrossEntropy(), 1.0)
    for seed in range(2):
        check_equal(*(sums(one, batch(seed, [5] * 16), CrossEntropy()) for one in (eager, replayed)))
    assert fake_gpu[2:] == ["empty the cache", "capture into pool 1"], "the pool's only graph was replaced"
    assert steps.captured == 1
    assert replayed.notes == []
    for one in (eager, replayed):
        one.train(batch(0, [5] * 16), CrossEntropy())
    wanted, found = (one.native.optimizer.masters(one.native.optimizer.params) for one in (eager, replayed))
    # float64 sums in another order, magnified by AdamW's root where a gradient is almost zero
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-6) for name in wanted)


def test_what_cannot_be_captured_takes_the_eager_path_and_says_where(fake_gpu, monkeypatch):
    def refuse(self: _FakeGraph) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Recorded, "__enter__", refuse)
    eager, refused = (trainer_with(capture) for capture in ("off", "on"))
    for seed in range(2):
        check_equal(*(sums(one, batch(seed, [30, 50]), CrossEntropy()) for one in (eager, refused)))
    (note,) = refused.notes
    assert "could not be captured: test_forward_backward.py line" in note
    assert note.endswith("RuntimeError: operation not permitted when stream is capturing")
    assert captured([eager, refused]).graph_bytes == 0


def test_a_step_without_room_beside_other_graphs_takes_their_memory(fake_gpu, monkeypatch):
    eager, replayed = (trainer_with(capture) for capture in ("off", "on"))
    steps, enter, full = captured([eager, replayed]), Recorded.__enter__, [0]

    def scarce(self: Recorded) -> Recorded:
        if full[0]:
            full[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return enter(self)

    monkeypatch.setattr(Recorded, "__enter__", scarce)
    check_equal(*(sums(one, batch(0, [30, 50]), CrossEntropy()) for one in (eager, replayed)))
    full[0] = 1
    check_equal(*(sums(one, batch(1, [120]), CrossEntropy()) for one in (eager, replayed)))
    assert steps.captured == 1, "the first graph gave its memory"
    assert replayed.notes == []
    full[0] = 2
    with pytest.raises(LearnerOutOfMemory, match=r"a micro-batch of 64 tokens .* trainer\.micro_batch_tokens"):
        sums(replayed, batch(2, [40]), CrossEntropy())
