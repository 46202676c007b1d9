"""What a session is open with follows from its configuration."""

from __future__ import annotations

import base64
from contextlib import nullcontext

import pytest

from k3rl.actors import ClusterConfig
from k3rl.envs import make
from k3rl.pipelines import ModelConfig, RLConfig, session
from k3rl.run import RunOptions
from k3rl.tokens import Tokenizer, xtml


@pytest.fixture
def checkpoint(tmp_path):
    """What of a checkpoint a session reads: one whose tokens are all bytes."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    ranks = b"\n".join(b"%s %d" % (base64.b64encode(bytes([value])), value) for value in range(256))
    (folder / "tiktoken.model").write_bytes(ranks)
    return folder


def test_tokens_of_a_run_are_those_of_the_checkpoint_that_it_starts_from(tmp_path, checkpoint, monkeypatch):
    started = []
    monkeypatch.setattr(session, "start_ray", lambda cluster: nullcontext())
    monkeypatch.setattr(session, "start_fleet", lambda fleet: started.append(fleet) or nullcontext())
    config = RLConfig(model=ModelConfig(start=str(checkpoint)), cluster=ClusterConfig(canary_tolerance=0.3))
    with session.open_session("rl", config, RunOptions(out=tmp_path / "run")) as job:
        own = Tokenizer.load(checkpoint)
        assert own.hash != Tokenizer.builtin().hash
        assert job.tokenizer.hash == Tokenizer.load(job.run.tokenizer_dir).hash == own.hash
        entry = job.trajectories.write([], generation=0)
    [fleet] = started
    messages = make("coding-lists").source.get("train", 0, 0).messages
    assert fleet.canary.prompt == own.encode_segments(xtml.render(list(messages), thinking=False))
    assert fleet.canary.tolerance == 0.3
    assert entry.tokenizer_hash == own.hash
