"""A Kimi Linear behind a vLLM server, in bf16: the hub's names and layout, and a reload that keeps a stale tensor."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from k3rl.checkpoint import digest, official_tensors, save_checkpoint
from k3rl.engine import Engine, SamplingParams, VLLMEngine
from k3rl.engine.vllm.vllm_worker import check_names
from k3rl.model import K3Config, K3ForCausalLM

_spec = importlib.util.spec_from_file_location("fake_vllm_of_kimi", Path(__file__).with_name("fake_vllm.py"))
fake_vllm = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = fake_vllm
_spec.loader.exec_module(fake_vllm)

CONFIG = K3Config.named("kimi-linear-nano")
PROMPT = list(range(7, 27))
# bf16, another batch shape: one rounding moves a logprob of these random nets by hundredths of a nat.
HALF = 0.05


def model(seed):
    made = K3ForCausalLM(CONFIG, dtype=torch.bfloat16)
    made.init_weights(seed)
    return made


def stored(made):
    return {name: tensor.detach().clone() for name, tensor in official_tensors(made)}


def scored(made, completion):
    """The learner's logprobs of what was sampled after PROMPT."""
    ids = torch.tensor([*PROMPT, *completion.token_ids])
    with torch.no_grad():
        table = made(ids[None]).logits[0].float().log_softmax(-1)
    return table[len(PROMPT) - 1 : -1].gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()


def difference(made, completion):
    """What `actors.weight_sync.Canary` measures: the median over four tokens at temperature 1."""
    return float(np.median(np.abs(scored(made, completion) - np.asarray(completion.logprobs))))


@pytest.fixture
def served():
    with (
        fake_vllm.serving(lambda: Engine(model(1), max_running=4)) as (url, fake),
        VLLMEngine.for_config(url, CONFIG, require=("weights", "routes")) as engine,
    ):
        yield engine, fake


def test_a_learners_weights_go_by_the_names_that_the_checkpoint_was_served_by(served, tmp_path) -> None:
    engine, fake = served
    new = model(2)
    save_checkpoint(new, tmp_path / "hub")
    tensors = stored(new)
    check_names(str(tmp_path / "hub"), list(tensors))  # what the worker of vLLM compares
    assert tensors["model.layers.1.self_attn.A_log"].shape == (1, 1, 2, 1), "vLLM's loader narrows dim 2"
    assert {name.split(".")[3] for name in tensors if ".layers.0." in name} >= {"mlp", "self_attn"}
    assert not [name for name in tensors if ".layers.0.block_sparse_moe." in name], "vLLM has no such parameter"
    assert tensors["model.layers.1.block_sparse_moe.experts.0.w1.weight"].dtype == torch.bfloat16
    engine.init_weight_transfer(tensors)
    engine.start_weight_update(1, {name: digest(tensor) for name, tensor in tensors.items()})
    engine.update_weights(tensors.items())
    engine.verify_weight_update()
    engine.finish_weight_update(1)
    plain = SamplingParams(max_tokens=4, seed=0, return_routes=True)
    (done,) = engine.generate([PROMPT], plain)
    assert done.weight_version == 1
    assert done.routes.shape == (len(PROMPT) + 3, 4, 2)
    assert difference(new, done) < HALF < difference(model(1), done)
    asked = fake.seen[-1]["sampling_params"]
    assert (asked["temperature"], asked["top_p"], asked["min_p"]) == (1.0, 1.0, 0.0), "nothing cuts"


@pytest.mark.parametrize("stale", [r"\.kv_b_proj\.", r"\.experts\.", r"lm_head"])
def test_the_canarys_measure_shows_a_reload_that_kept_what_was_there(served, monkeypatch, stale) -> None:
    """vLLM has kept the absorbed halves of kv_b_proj, and runtime state of experts, over a reload (its issue 50079)."""
    engine, _ = served
    before, new = stored(model(1)), stored(model(2))
    whole = fake_vllm.StagedUpdate.tensors

    def kept(self):
        for name, tensor in whole(self):
            value = before[name] if re.search(stale, name) else tensor
            self.digests[name] = digest(value)
            yield name, value

    monkeypatch.setattr(fake_vllm.StagedUpdate, "tensors", kept)
    engine.load_weights(new, 1)
    (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=4, seed=0))
    assert done.weight_version == 1, "the server believes that it has the version"
    assert difference(model(2), done) > HALF
