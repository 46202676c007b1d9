"""`VLLMEngine` where only a server across HTTP can fail: handshakes, lost servers, broken answers, sleep."""

from __future__ import annotations

import builtins
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3rl.checkpoint import digest as engine_digest
from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.config import MissingResource
from k3rl.engine import Engine, EngineError, EngineLost, IncompatibleServer, InvalidRequest, VLLMEngine
from k3rl.engine.vllm.client import Deadlines, Unreachable
from k3rl.engine.vllm.vllm_worker import StagedUpdate, UpdateInfo, check_names, digest
from k3rl.engine.vllm.weights import BACKEND
from k3rl.types import Completion, Constraint, SamplingParams, StopReason

HERE = Path(__file__).parent
PROMPT = [3, 1, 4, 1, 5]
QUICK = Deadlines(connect=2.0, busy=0.3, call=10.0, update=20.0, drain=20.0, stall=20.0)


def load_fake() -> Any:
    if "fake_vllm" not in sys.modules:
        spec = importlib.util.spec_from_file_location("fake_vllm", HERE / "fake_vllm.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["fake_vllm"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["fake_vllm"])
    return sys.modules["fake_vllm"]


fake_vllm = load_fake()


@pytest.fixture
def server(model):
    """(url, FakeVLLM)."""
    with fake_vllm.serving(lambda: Engine(model, max_running=8)) as (url, fake):
        yield url, fake


@pytest.fixture
def engine(server, model):
    with VLLMEngine.for_config(server[0], model.config, deadlines=QUICK) as engine:
        yield engine


def started(engine: VLLMEngine, tokens: int = 2, **options: Any) -> int:
    """A request that has sampled some tokens."""
    number = engine.submit(PROMPT, SamplingParams(**{"max_tokens": 200, **options}))
    deadline = time.monotonic() + 20
    while len(engine.sampled(number)[0]) < tokens:
        assert time.monotonic() < deadline
        engine.step()
    return number


# ---- the handshake


def test_a_handshake_names_everything_that_is_missing(server, model) -> None:
    url, fake = server
    fake.version = "0.30.2"
    fake.config["model_config"] = {"logprobs_mode": "raw_logprobs", "skip_tokenizer_init": True}
    fake.config["aux_output_config"] = {}
    fake.config["weight_transfer_config"] = {"backend": "nccl"}
    with pytest.raises(IncompatibleServer) as caught:
        VLLMEngine.for_config(url, model.config, require=("sampling_masks", "routes", "weights"))
    flags = (
        "0.30.2",
        "--logprobs-mode",
        "--skip-tokenizer-init",
        "--return-sampling-mask",
        "--enable-return-routed-experts",
        "'nccl'",
    )
    assert len(caught.value.missing) == len(flags)
    for flag, item in zip(flags, caught.value.missing, strict=True):
        assert flag in item
        assert item in str(caught.value)


def test_a_server_that_is_paused_or_serves_another_model_is_refused(server, model) -> None:
    url, fake = server
    fake.paused = "keep"
    with pytest.raises(IncompatibleServer, match="is_paused at /is_paused"):
        VLLMEngine.for_config(url, model.config, model="other")
    with pytest.raises(IncompatibleServer, match="the model 'other'"):
        VLLMEngine.for_config(url, model.config, model="other")


def test_an_answer_that_breaks_the_promises_of_the_config_fails_the_handshake(server, model) -> None:
    url, fake = server
    fake.scale_out = False
    with pytest.raises(IncompatibleServer, match="403: Scale-out endpoints are disabled"):
        VLLMEngine.for_config(url, model.config)
    fake.scale_out, fake.raw = True, True  # says processed logprobs, and sends others
    with pytest.raises(IncompatibleServer, match="not the logprobs of the sampling distribution"):
        VLLMEngine.for_config(url, model.config)
    fake.raw = False
    with pytest.raises(IncompatibleServer, match="outside the vocabulary"):
        VLLMEngine(url, vocab_size=model.config.vocab_size + 1)


def test_no_server_is_an_error_after_the_deadline() -> None:
    with pytest.raises(Unreachable, match=r"not taken for 0\.3 s"):
        VLLMEngine("http://127.0.0.1:9", vocab_size=4, deadlines=QUICK)


def test_httpx_is_asked_for_by_its_extra(monkeypatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "httpx":
            raise ImportError("no module named httpx")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingResource, match=r"k3rl\[vllm-client\]"):
        VLLMEngine("http://127.0.0.1:9", vocab_size=4)


# ---- requests


def test_what_vllm_would_change_without_a_word_is_refused(server, model) -> None:
    url, fake = server
    fake.config["model_config"]["return_sampling_mask"] = False
    fake.config["aux_output_config"]["enable_return_routed_experts"] = False
    refused = [
        (dict(temperature=0.005), "temperature"),
        (dict(temperature=2.5), "temperature"),
        (dict(top_p=0.9), "--return-sampling-mask"),
        (dict(top_k=2), "--return-sampling-mask"),
        (dict(min_p=0.1), "--return-sampling-mask"),
        (dict(logit_bias=((1, float("-inf")),)), "logit_bias"),
        (dict(logit_bias=((1, 101.0),)), "logit_bias"),
        (dict(return_routes=True), "--enable-return-routed-experts"),
        (dict(constraint=Constraint("regex", "a+"), stop_ids=(0,)), "schemas or grammars"),
    ]
    with VLLMEngine.for_config(url, model.config, require=()) as engine:
        for options, message in refused:
            with pytest.raises(InvalidRequest, match=message):
                engine.submit(PROMPT, SamplingParams(max_tokens=2, **options))
        (greedy,) = engine.generate([PROMPT], SamplingParams(temperature=0, top_p=0.5, top_k=2, max_tokens=2))
        assert greedy.sampling_mask is None


@pytest.mark.parametrize("masks", [False, True])
def test_a_server_is_asked_only_for_what_it_takes(server, model, masks) -> None:
    """One that returns sampling masks takes no temperature of 0 and no request without top_k."""
    url, fake = server
    fake.config["model_config"]["return_sampling_mask"] = masks
    asked = [SamplingParams(max_tokens=3, seed=1), SamplingParams(temperature=0, max_tokens=3)]
    if masks:
        asked.append(SamplingParams(top_p=0.7, max_tokens=3, seed=1))
    with VLLMEngine.for_config(url, model.config) as engine:
        plain, greedy, *trimmed = engine.generate([PROMPT] * len(asked), asked)
        engine.sleep(1)
        engine.wake()
    wanted = Engine(model).generate([PROMPT], SamplingParams(temperature=0, max_tokens=3))[0]
    assert greedy.token_ids == wanted.token_ids
    assert plain.sampling_mask is None
    assert greedy.logprobs == ((0.0,) * 3 if masks else pytest.approx(wanted.logprobs, abs=1e-9))
    for done in trimmed:
        for token, value, ids in zip(done.token_ids, done.logprobs, done.sampling_mask, strict=True):
            assert token in ids
            assert len(ids) < model.config.vocab_size
            assert value < 0 or len(ids) == 1
    sizes = {body["sampling_params"]["top_k"] for body in fake.seen}
    assert sizes == ({1, model.config.vocab_size} if masks else {0, 1})  # 1 of the handshake


def test_a_request_says_all_that_was_asked_for(server, engine) -> None:
    params = SamplingParams(0.8, 0.9, 5, 4, (7, 8), 11, False, 0.05, (), ((2, -1.5),), "tenant")
    engine.generate([PROMPT], params)
    body = server[1].seen[-1]
    sampling = body["sampling_params"]
    assert body["token_ids"] == PROMPT
    assert {key: sampling[key] for key in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")} == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "max_tokens": 4,
        "seed": 11,
    }
    assert (sampling["stop_token_ids"], sampling["logit_bias"], sampling["ignore_eos"]) == ([7, 8], {"2": -1.5}, True)


def test_prefix_cache_entries_are_shared_within_one_version_and_one_salt_alone(server, engine, build_model) -> None:
    def salt(own: str) -> str:
        engine.generate([PROMPT], SamplingParams(max_tokens=1, cache_salt=own))
        return server[1].seen[-1]["cache_salt"]

    first = [salt(""), salt("a/b@c"), salt("tenant" * 40)]
    assert first == [salt(""), salt("a/b@c"), salt("tenant" * 40)]
    tensors = dict(official_tensors(build_model(7)))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(1)
    assert len({*first, salt(""), salt("a/b@c")}) == 5


def test_a_request_that_the_server_refuses_or_breaks_ends_alone(server, engine) -> None:
    other = started(engine)
    refused = engine.submit(PROMPT, SamplingParams(max_tokens=2, stop=("x",)))  # this server has no tokenizer
    server[1].corrupt = True
    broken = engine.submit(PROMPT, SamplingParams(max_tokens=2))
    outcomes = dict(engine.drain())
    # Either running request may have been the next to send a token, and got the broken logprob.
    assert isinstance(outcomes[refused], InvalidRequest)
    wrong = [outcome for outcome in (outcomes[other], outcomes[broken]) if isinstance(outcome, EngineError)]
    assert len(wrong) == 1
    assert "its logits are broken" in str(wrong[0])


def test_requests_wait_while_somebody_else_pauses_the_server(server, model) -> None:
    url, fake = server
    with VLLMEngine.for_config(url, model.config, deadlines=QUICK) as engine:
        fake.paused = "abort"
        refused = engine.submit(PROMPT, SamplingParams(max_tokens=2))
        ((number, outcome),) = engine.drain()
        assert number == refused
        assert isinstance(outcome, Unreachable)
        waits = engine.submit(PROMPT, SamplingParams(max_tokens=2))
        time.sleep(0.1)
        fake.paused = None
        assert isinstance(dict(engine.drain())[waits], Completion)


def test_a_request_without_tokens_for_the_stall_deadline_fails_and_a_paused_one_does_not(server, model) -> None:
    url, fake = server
    deadlines = Deadlines(connect=2.0, busy=0.3, call=10.0, update=20.0, drain=20.0, stall=0.3)
    with VLLMEngine.for_config(url, model.config, deadlines=deadlines) as engine:
        held = started(engine, max_tokens=40)
        engine.pause("keep")
        time.sleep(0.7)
        engine.resume()
        assert isinstance(dict(engine.drain())[held], Completion)
        stalls = started(engine)
        fake.hold()
        outcome = dict(engine.drain())[stalls]
        fake.release()
        assert isinstance(outcome, EngineError)
        assert "no token for 0.3 s" in str(outcome)


# ---- weights


def test_a_server_that_fails_while_it_switches_is_lost_until_it_is_connected_again(server, engine, build_model) -> None:
    fake, tensors = server[1], dict(official_tensors(build_model(7)))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    fake.fail_next = "/finish_weight_update"
    with pytest.raises(EngineLost, match="switched to version 1"):
        engine.finish_weight_update(1)
    assert engine.version == 0
    with pytest.raises(EngineLost):
        engine.submit(PROMPT, SamplingParams())
    with pytest.raises(EngineLost):
        engine.start_weight_update(2, {})
    fake.paused, fake.staged = None, None  # started again
    fake.driver.engine.resume()
    engine.reconnect(3)
    (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=2))
    assert done.weight_version == 3


def test_an_update_that_a_dead_client_left_open_is_ended_by_the_next(server, engine, model, build_model) -> None:
    tensors = dict(official_tensors(build_model(7)))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    with VLLMEngine.for_config(server[0], model.config, deadlines=QUICK) as following:
        following.start_weight_update(1, manifest_of(tensors.items()))
        following.update_weights(tensors.items())
        following.finish_weight_update(1)
        (done,) = following.generate([PROMPT], SamplingParams(max_tokens=2))
        assert done.weight_version == 1


def test_a_server_that_came_back_with_other_weights_is_not_believed(server, engine) -> None:
    fake = server[1]
    fake.label = "default"
    fake.labels.clear()
    with pytest.raises(EngineError, match="'default', which this engine never set"):
        engine.generate([PROMPT], SamplingParams(max_tokens=2))


def test_weights_go_through_a_shared_folder_in_parts(server, model, build_model, tmp_path) -> None:
    tensors = dict(official_tensors(build_model(7)))
    with VLLMEngine.for_config(server[0], model.config, transfer_dir=tmp_path, chunk_bytes=4096) as engine:
        engine.start_weight_update(1, manifest_of(tensors.items()))
        engine.update_weights(tensors.items())
        files = list(tmp_path.iterdir())
        assert len(files) > 1
        engine.finish_weight_update(1)
        assert not list(tmp_path.iterdir())
        served = dict(official_tensors(server[1].driver.engine.model))
        assert all(torch.equal(served[name], tensor) for name, tensor in tensors.items())
        assert server[1].resets == 1  # running requests read their tokens again


def test_a_new_start_numbers_versions_anew(engine, build_model) -> None:
    tensors = dict(official_tensors(build_model(7)))
    for _ in range(2):
        engine.start_weight_update(4, manifest_of(tensors.items()))
        engine.update_weights(tensors.items())
        engine.finish_weight_update(4)
        engine.load_weights(dict(official_tensors(build_model(0))))
        (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=2))
        assert (engine.version, done.weight_version) == (0, 0)


def test_a_sleeping_engine_holds_requests_and_dropped_weights_must_come_again(engine, build_model) -> None:
    (before,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
    engine.pause("keep")
    with pytest.raises(EngineError, match="resume before sleep"):
        engine.sleep()
    engine.resume()
    engine.sleep(1)
    waits = engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(EngineError, match="sleeps"):
        engine.drain()
    engine.wake()
    assert dict(engine.drain())[waits].token_ids == before.token_ids
    engine.sleep(2)
    engine.wake(["weights"])
    engine.wake(["kv_cache"])
    with pytest.raises(EngineError, match="dropped by sleep"):
        engine.generate([PROMPT], SamplingParams(max_tokens=2))
    tensors = dict(official_tensors(build_model(7)))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(1)
    assert {outcome.weight_version for _, outcome in engine.drain()} == {1}


def test_an_engine_that_wakes_with_other_weights_is_lost(server, engine, build_model) -> None:
    engine.sleep(1)
    server[1].driver.engine.weights.model = build_model(7)
    with pytest.raises(EngineLost, match="woke with other weights"):
        engine.wake()


def test_the_worker_stages_until_an_update_is_proved_whole(tmp_path) -> None:
    import base64

    from safetensors.torch import save, save_file

    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.uint8)}
    assert {name: digest(t) for name, t in tensors.items()} == {name: engine_digest(t) for name, t in tensors.items()}
    save_file({"b": tensors["b"]}, tmp_path / "b.safetensors")
    staged = StagedUpdate()
    staged.receive(UpdateInfo(data=base64.b64encode(save({"a": tensors["a"]})).decode()))
    manifest = manifest_of(tensors.items())
    with pytest.raises(ValueError, match="b among them"):
        staged.receive(UpdateInfo(manifest=manifest))
    staged.receive(UpdateInfo(file=str(tmp_path / "b.safetensors")))
    with pytest.raises(ValueError, match="proved whole"):
        list(staged.tensors())
    staged.receive(UpdateInfo(manifest=manifest))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in staged.tensors())
    with pytest.raises(ValueError, match="has digest"):
        staged.receive(UpdateInfo(manifest=manifest | {"a": "0"}))
    for message in (UpdateInfo(cancel=True), UpdateInfo(), UpdateInfo(file=str(tmp_path / "b.safetensors"))):
        with pytest.raises(ValueError, match=r"cancelled|neither|twice"):
            staged.receive(message)
    check_names(str(tmp_path), ["b"])
    with pytest.raises(ValueError, match="not in the checkpoint: \\['a'\\]"):
        check_names(str(tmp_path), ["a", "b"])
    with pytest.raises(ValueError, match="no local folder"):
        check_names(str(tmp_path / "none"), ["b"])
    assert BACKEND == "k3rl"


# ---- a server that dies


def test_requests_of_a_killed_server_end_with_errors_and_a_new_one_serves_on(server, model, tmp_path) -> None:
    """A server in a process of its own, killed by the system while it answers."""
    url, fake = server
    place = tmp_path / "port"
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    process = subprocess.Popen([sys.executable, str(HERE / "fake_vllm.py"), str(place)], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not place.exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        with VLLMEngine.for_config(place.read_text(), model.config, deadlines=QUICK) as engine:
            running = started(engine)
            more = started(engine)
            process.send_signal(signal.SIGKILL)
            process.wait(20)
            late = engine.submit(PROMPT, SamplingParams(max_tokens=2))
            outcomes = dict(engine.drain())
            assert outcomes.keys() == {running, more, late}
            assert all(isinstance(outcome, EngineError) for outcome in outcomes.values()), outcomes
            assert isinstance(outcomes[late], Unreachable)
            with pytest.raises(EngineLost, match="went away"):
                engine.start_weight_update(1, {})
            with pytest.raises(EngineLost):
                engine.submit(PROMPT, SamplingParams())
    finally:
        process.kill()
        process.wait(20)
    with VLLMEngine.for_config(url, model.config, deadlines=QUICK) as engine:
        (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=2, stop_ids=tuple(range(40))))
        assert done.stop_reason is StopReason.STOP
        assert np.isfinite(done.logprobs).all()
        assert fake.seen
