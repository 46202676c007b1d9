"""What every `RolloutEngine` keeps, tried on `Engine` and on `VLLMEngine` over a fake vLLM server.

The same tests run on a real server instead of the fake when K3RL_VLLM_URL names one that serves the checkpoint folder
K3RL_VLLM_CHECKPOINT: K3's official layout, or any causal language model that transformers reads. K3RL_VLLM_TOLERANCE is
the largest difference of a logprob in nats (default 1e-3, for a server in float32).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3rl.checkpoint import load_checkpoint, manifest_of, official_tensors
from k3rl.engine import (
    ContextExceeded,
    Engine,
    EngineError,
    InvalidRequest,
    RolloutEngine,
    UnknownRequest,
    VLLMEngine,
    WeightUpdateError,
)
from k3rl.types import Completion, SamplingParams, StopReason

URL = os.environ.get("K3RL_VLLM_URL")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@dataclass
class Subject:
    """An engine and what is known about it from elsewhere. logits(ids, updated) -> [T, V] of one pass over ids, by the
    first weights or by those of `update`, which are the stored tensors of a later version."""

    engine: Any
    logits: Callable[[list[int], bool], torch.Tensor]
    update: dict[str, torch.Tensor]
    tolerance: float
    routes: Callable[[list[int]], np.ndarray] | None
    sampling_mask: bool


def load_fake() -> Any:
    if "fake_vllm" not in sys.modules:
        spec = importlib.util.spec_from_file_location("fake_vllm", Path(__file__).with_name("fake_vllm.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules["fake_vllm"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["fake_vllm"])
    return sys.modules["fake_vllm"]


@pytest.fixture(scope="module")
def tiny(build_model) -> tuple[Any, Any]:
    """Two versions of a tiny model in float64."""
    return build_model(0), build_model(7)


def tiny_subject(engine: Any, tiny: tuple[Any, Any], run_teacher_forced: Callable) -> Subject:
    def logits(ids: list[int], updated: bool) -> torch.Tensor:
        return run_teacher_forced(tiny[updated], ids)[0]

    return Subject(
        engine, logits, dict(official_tensors(tiny[1])), 1e-9, lambda ids: run_teacher_forced(tiny[0], ids)[1], True
    )


def real_subject(url: str) -> Subject:
    """The server's own checkpoint, read here."""
    from safetensors.torch import load_file

    folder = Path(os.environ["K3RL_VLLM_CHECKPOINT"])
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    head = next(name for name in stored if name.endswith("lm_head.weight"))
    changed = {**stored, head: stored[head].flip(-1).contiguous()}
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        model = load_checkpoint(folder, dtype=torch.float32)
        one_pass: Callable[[list[int]], torch.Tensor] = lambda ids: model(torch.tensor([ids])).logits[0]  # noqa: E731
        vocabulary, output = model.config.vocab_size, model.lm_head
    else:
        from transformers import AutoModelForCausalLM

        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        one_pass = lambda ids: other(torch.tensor([ids])).logits[0]  # noqa: E731
        vocabulary, output = config["vocab_size"], other.lm_head

    def logits(ids: list[int], updated: bool) -> torch.Tensor:
        with torch.no_grad():
            output.weight.copy_(changed[head] if updated else stored[head])
            return one_pass(ids)

    engine = VLLMEngine(url, vocab_size=vocabulary, require=("weights",))
    engine.load_weights(stored)
    tolerance = float(os.environ.get("K3RL_VLLM_TOLERANCE", "1e-3"))
    return Subject(engine, logits, changed, tolerance, None, engine.server.sampling_mask)


@pytest.fixture(params=["engine", "vllm"])
def subject(request, tiny, run_teacher_forced) -> Iterator[Subject]:
    with ExitStack() as stack:
        if request.param == "engine":
            yield tiny_subject(Engine(tiny[0], max_running=8, seed=3), tiny, run_teacher_forced)
        elif URL:
            made = real_subject(URL)
            stack.enter_context(made.engine)
            yield made
        else:
            url, _ = stack.enter_context(load_fake().serving(lambda: Engine(tiny[0], max_running=8)))
            engine = stack.enter_context(
                VLLMEngine.for_config(
                    url, tiny[0].config, seed=3, max_running=6, require=("sampling_masks", "routes", "weights")
                )
            )
            yield tiny_subject(engine, tiny, run_teacher_forced)


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logprobs [T, V] of the sampling distribution, from its definition."""
    z = logits.double().clone()
    for token, bias in params.logit_bias:
        z[:, token] += bias
    if params.temperature == 0:
        return z.log_softmax(-1)
    z /= params.temperature
    for row in z:
        row[row < row.max() + np.log(params.min_p or 1e-300)] = -torch.inf
        order = row.argsort(descending=True, stable=True)
        if params.top_k:
            row[order[params.top_k :]] = -torch.inf
        before = row[order].softmax(-1).cumsum(-1) - row[order].softmax(-1)
        row[order[before >= params.top_p]] = -torch.inf
    return z.log_softmax(-1)


def check_logprobs(
    subject: Subject, prompt: list[int], done: Completion, params: SamplingParams, updated: bool = False
) -> None:
    ids = [*prompt, *done.token_ids]
    logprobs = distribution(subject.logits(ids, updated)[len(prompt) - 1 : -1], params)
    wanted = logprobs.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(done.logprobs, wanted, rtol=0, atol=subject.tolerance)
    if done.sampling_mask is not None:
        assert [set(ids.tolist()) for ids in done.sampling_mask] == [
            set(row.isfinite().nonzero()[:, 0].tolist()) for row in logprobs
        ]


def run_to(engine: Any, condition: Callable[[], bool]) -> list[tuple[int, Any]]:
    """Steps until the condition holds; the outcomes on the way."""
    outcomes = []
    for _ in range(2000):
        if condition():
            return outcomes
        outcomes += engine.step()
    raise AssertionError("it never became true")


def publish(engine: Any, version: int, tensors: dict[str, torch.Tensor]) -> None:
    engine.start_weight_update(version, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.verify_weight_update()


# Each list of parameters is one test: a fake server costs a fifth of a second.
def test_every_request_ends_once_with_logprobs_of_its_sampling_distribution(subject) -> None:
    engine = subject.engine
    assert isinstance(engine, RolloutEngine)
    plain = [SamplingParams(temperature=t, max_tokens=6, seed=i) for i, t in enumerate((0.0, 0.7, 1.0, 1.5))]
    cut = [
        SamplingParams(top_p=0.6, max_tokens=6, seed=1),
        SamplingParams(temperature=1.3, top_k=3, max_tokens=6, seed=2),
        SamplingParams(min_p=0.2, top_p=0.9, top_k=8, max_tokens=6, seed=3),
        SamplingParams(logit_bias=((5, 3.0), (6, -80.0)), top_k=4, max_tokens=6),
    ]
    asked = [*plain, *(cut if subject.sampling_mask else []), SamplingParams(logit_bias=((5, 2.5),), max_tokens=6)]
    prompts = [PROMPT[: 1 + i % 8] for i in range(len(asked))]
    numbers = [engine.submit(prompt, params) for prompt, params in zip(prompts, asked, strict=True)]
    assert len(set(numbers)) == len(asked)
    outcomes = engine.drain()
    assert sorted(number for number, _ in outcomes) == sorted(numbers)
    assert engine.step() == []
    by_number = dict(outcomes)
    for number, prompt, params in zip(numbers, prompts, asked, strict=True):
        done = by_number[number]
        assert isinstance(done, Completion), done
        assert len(done.token_ids) == 6
        assert done.stop_reason is StopReason.LENGTH
        assert (done.first_version, done.weight_version) == (0, 0)
        if params.temperature == 0 and isinstance(engine, VLLMEngine) and subject.sampling_mask:
            params = replace(params, temperature=1.0, top_k=1)  # what such a server has in its place
            assert [list(ids) for ids in done.sampling_mask] == [[token] for token in done.token_ids]
        else:
            assert (done.sampling_mask is not None) == (params in cut)
        check_logprobs(subject, prompt, done, params)
        if params.temperature == 0:
            assert done.token_ids[0] == int(subject.logits(prompt, False)[-1].argmax())


def test_seeds_repeat_samples_and_stop_ids_end_them(subject) -> None:
    params = SamplingParams(max_tokens=12, seed=5)
    first, again = subject.engine.generate([PROMPT, PROMPT], params)
    assert first.token_ids == again.token_ids
    np.testing.assert_allclose(first.logprobs, again.logprobs, rtol=0, atol=subject.tolerance)
    stop = first.token_ids[4]
    (stopped,) = subject.engine.generate([PROMPT], SamplingParams(max_tokens=12, seed=5, stop_ids=(stop,)))
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]


def test_routes_come_back_in_the_order_of_the_moe_layers(subject) -> None:
    if subject.routes is None:
        with pytest.raises(InvalidRequest, match="routed experts"):
            subject.engine.submit(PROMPT, SamplingParams(return_routes=True))
        return
    (done,) = subject.engine.generate([PROMPT], SamplingParams(max_tokens=5, return_routes=True))
    wanted = subject.routes([*PROMPT, *done.token_ids[:-1]])
    assert done.routes.dtype == np.int16
    np.testing.assert_array_equal(np.sort(done.routes, -1), np.sort(wanted, -1))
    (plain,) = subject.engine.generate([PROMPT], SamplingParams(max_tokens=5))
    assert plain.routes is None


def test_requests_that_cannot_be_kept_are_refused_and_nothing_is_queued(subject) -> None:
    engine = subject.engine
    refused: list[tuple[Any, SamplingParams]] = [
        ([], SamplingParams()),
        ([10**6], SamplingParams()),
        ([-1], SamplingParams()),
        ([0.5], SamplingParams()),
        ([1] * 100_000, SamplingParams()),
        (PROMPT, SamplingParams(max_tokens=100_000)),
        (PROMPT, SamplingParams(logit_bias=((10**6, 1.0),))),
        ([[1], [1, 2]], SamplingParams()),
        (PROMPT, SamplingParams(seed=1.5)),
        (PROMPT, SamplingParams(top_k=2**63)),
    ]
    for prompt, params in refused:
        too_long = len(prompt) + params.max_tokens >= 100_000
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(prompt, params)
        assert isinstance(caught.value, ContextExceeded) is too_long
    assert (engine.num_waiting, engine.num_running, engine.step()) == (0, 0, [])
    with pytest.raises(UnknownRequest):
        engine.abort(99)


def test_an_aborted_request_keeps_its_tokens_and_others_go_on(subject) -> None:
    engine = subject.engine
    long = SamplingParams(max_tokens=200)
    gone, stays = engine.submit(PROMPT, long), engine.submit(PROMPT, SamplingParams(max_tokens=40, seed=1))
    early = run_to(engine, lambda: len(engine.sampled(gone)[0]) >= 2)
    engine.abort(gone)
    outcomes = dict(early + engine.drain())
    assert outcomes.keys() == {gone, stays}
    aborted, whole = outcomes[gone], outcomes[stays]
    assert aborted.stop_reason is StopReason.ABORTED
    assert 2 <= len(aborted.token_ids) < 200
    check_logprobs(subject, PROMPT, aborted, long)
    assert whole.stop_reason is StopReason.LENGTH
    with pytest.raises(UnknownRequest):
        engine.abort(gone)


def test_pauses_hold_new_requests_and_end_or_freeze_running_ones_as_asked(subject) -> None:
    engine = subject.engine
    long = SamplingParams(max_tokens=100, seed=2)

    frozen = engine.submit(PROMPT, long)
    outcomes = run_to(engine, lambda: len(engine.sampled(frozen)[0]) >= 2)
    engine.pause("keep")
    later = engine.submit(PROMPT, SamplingParams(max_tokens=2))
    engine.step()
    had = engine.sampled(frozen)[0]
    for _ in range(5):
        assert engine.step() == []
    assert engine.sampled(frozen)[0] == had
    with pytest.raises(EngineError, match="paused"):
        engine.drain()
    engine.resume()
    outcomes = dict(outcomes + engine.drain())
    assert outcomes[frozen].token_ids[: len(had)] == had
    assert {len(outcomes[frozen].token_ids), len(outcomes[later].token_ids)} == {100, 2}

    running = engine.submit(PROMPT, SamplingParams(max_tokens=20))
    early = run_to(engine, lambda: len(engine.sampled(running)[0]) >= 1)
    engine.pause("wait")
    waiting = engine.submit(PROMPT, SamplingParams(max_tokens=2))
    ended = dict(early + run_to(engine, lambda: engine.num_running == 0) + engine.step())
    assert ended.keys() == {running}
    assert ended[running].stop_reason is StopReason.LENGTH
    engine.resume()
    assert [number for number, _ in engine.drain()] == [waiting]

    cut = engine.submit(PROMPT, long)
    run_to(engine, lambda: len(engine.sampled(cut)[0]) >= 1)
    engine.pause("abort")
    after = engine.submit(PROMPT, SamplingParams(max_tokens=2))
    ended = dict(run_to(engine, lambda: engine.num_running == 0) + engine.step())
    assert ended[cut].stop_reason is StopReason.ABORTED
    assert after not in ended
    engine.resume()
    assert [number for number, _ in engine.drain()] == [after]


def test_an_update_is_served_whole_and_names_the_versions_of_each_sample(subject) -> None:
    engine, long = subject.engine, SamplingParams(max_tokens=60, seed=4)
    engine.init_weight_transfer(subject.update)
    across = engine.submit(PROMPT, long)
    early = run_to(engine, lambda: len(engine.sampled(across)[0]) >= 3)
    publish(engine, 5, subject.update)
    assert engine.version == 0
    engine.finish_weight_update(5)
    assert engine.version == 5
    (fresh,) = engine.generate([PROMPT], SamplingParams(max_tokens=6, seed=1))
    assert (fresh.first_version, fresh.weight_version) == (5, 5)
    check_logprobs(subject, PROMPT, fresh, SamplingParams(), updated=True)
    outcome = dict(early + engine.drain())[across]
    assert (outcome.first_version, outcome.weight_version) == (0, 5)
    assert len(outcome.token_ids) == 60
    ids = [*PROMPT, *outcome.token_ids]
    places = torch.tensor(outcome.token_ids)[:, None]
    by_version = [
        distribution(subject.logits(ids, new)[len(PROMPT) - 1 : -1], long).gather(-1, places) for new in (False, True)
    ]
    old, new = (np.abs(logprobs[:, 0].numpy() - outcome.logprobs) <= subject.tolerance for logprobs in by_version)
    assert any(old[:count].all() and new[count:].all() for count in range(3, 60)), "the rest is of the new weights"


def test_an_update_that_is_not_whole_leaves_the_old_version(subject) -> None:
    engine, tensors = subject.engine, subject.update
    manifest = manifest_of(tensors.items())
    name = min(tensors)
    altered = {**tensors, name: tensors[name].clone()}
    altered[name].view(torch.uint8).reshape(-1)[0] ^= 1
    with pytest.raises(WeightUpdateError):
        engine.init_weight_transfer([*list(tensors)[1:], "another.weight"])
    for sent in (
        altered,
        {key: value for key, value in tensors.items() if key != name},
        {**tensors, "odd": tensors[name]},
    ):
        engine.start_weight_update(1, manifest)
        with pytest.raises(WeightUpdateError):  # noqa: PT012, the two halves of one phase
            engine.update_weights(sent.items())
            engine.verify_weight_update()
    with pytest.raises(WeightUpdateError, match="no weight update"):
        engine.finish_weight_update(1)
    with pytest.raises(WeightUpdateError, match="not later"):
        engine.start_weight_update(0, manifest)
    engine.start_weight_update(1, manifest)
    with pytest.raises(WeightUpdateError, match="another weight update"):
        engine.start_weight_update(2, manifest)
    engine.abort_weight_update()
    params = SamplingParams(max_tokens=6, seed=1)
    (done,) = engine.generate([PROMPT], params)
    assert (engine.version, done.weight_version) == (0, 0)
    check_logprobs(subject, PROMPT, done, params)
    publish(engine, 1, tensors)
    engine.finish_weight_update(1)
    (done,) = engine.generate([PROMPT], params)
    check_logprobs(subject, PROMPT, done, params, updated=True)
