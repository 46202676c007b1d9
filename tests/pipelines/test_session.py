"""What a session is open with follows from its configuration."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext
from typing import get_args

import pytest

from k3rl.actors import ClusterConfig, EnvironmentWorker
from k3rl.config import ConfigError
from k3rl.envs import make
from k3rl.envs.config import Sandbox
from k3rl.envs.sandbox import SandboxUnavailable
from k3rl.envs.sandbox.providers import NAMES
from k3rl.model import K3Config
from k3rl.pipelines import ModelConfig, RLConfig, session
from k3rl.pipelines.configs import EnvConfig
from k3rl.run import RunOptions
from k3rl.tokens import Tokenizer, xtml


@pytest.fixture
def checkpoint(tmp_path):
    """What of a checkpoint a session reads: one whose tokens are all bytes."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    ranks = b"\n".join(b"%s %d" % (base64.b64encode(bytes([value])), value) for value in range(256))
    (folder / "tiktoken.model").write_bytes(ranks)
    tokenizer = Tokenizer.load(folder)
    ends = {"bos_token_id": tokenizer.special("bos"), "eos_token_id": tokenizer.special("eos")}
    (folder / "config.json").write_text(json.dumps(K3Config.named("k3-nano").replace(**ends).to_dict()))
    return folder


def test_a_run_names_any_sandbox_with_its_options_and_one_that_is_missing_is_said_before_anything_starts(
    tmp_path, monkeypatch
):
    assert set(get_args(Sandbox)) == set(NAMES)
    monkeypatch.setattr(session, "start_ray", lambda cluster: pytest.fail("Ray was started"))
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = EnvConfig(sandbox="podman", sandbox_args={"image": "python:3.13"})
    with (
        pytest.raises(SandboxUnavailable, match="podman"),
        session.open_session("rl", RLConfig(env=missing), RunOptions(out=tmp_path / "run")),
    ):
        pass
    unknown = EnvConfig(sandbox="docker", sandbox_args={"picture": "x"})
    with (
        pytest.raises(ConfigError, match="picture"),
        session.open_session("rl", RLConfig(env=unknown), RunOptions(out=tmp_path / "other")),
    ):
        pass


@pytest.mark.parametrize(("sandbox", "local"), [("docker", "bwrap"), ("subprocess", "subprocess")])
@pytest.mark.filterwarnings("ignore:the `subprocess` sandbox")
def test_episodes_get_the_sandbox_of_the_run_and_graders_one_of_their_machine(sandbox, local):
    env = EnvConfig(sandbox=sandbox, sandbox_args={"image": "mine"} if sandbox == "docker" else {})
    assert env.local_sandbox == local
    assert EnvironmentWorker(env)._sandboxes.name == sandbox


def test_tokens_of_a_run_are_those_of_the_checkpoint_that_it_starts_from(tmp_path, checkpoint, monkeypatch):
    started = []
    monkeypatch.setattr(session, "start_ray", lambda cluster: nullcontext())
    monkeypatch.setattr(session, "start_fleet", lambda fleet: started.append(fleet) or nullcontext())
    config = RLConfig(model=ModelConfig(start=str(checkpoint)), cluster=ClusterConfig(canary_tolerance=0.3))
    with session.open_session("rl", config, RunOptions(out=tmp_path / "run")) as job:
        own = Tokenizer.load(checkpoint)
        assert own.hash != Tokenizer.builtin().hash
        assert job.tokenizer.hash == Tokenizer.load(job.run.tokenizer_dir).hash == own.hash
        place = job.recording.place
    [fleet] = started
    messages = make("coding-lists").source.get("train", 0, 0).messages
    assert fleet.canary.prompt == own.encode_segments(xtml.render(list(messages), thinking=False))
    assert fleet.canary.tolerance == 0.3
    assert Tokenizer.load(place.tokenizer).hash == own.hash
