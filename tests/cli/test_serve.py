"""`k3rl serve` answers the OpenAI dialect over loopback, to who has the token."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from k3rl.checkpoint import save_checkpoint
from k3rl.cli import main
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.tokens import Tokenizer


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a running `k3rl serve` over an untrained k3-nano; its token is `secret`."""
    folder = tmp_path_factory.mktemp("serve") / "nano"
    model = K3ForCausalLM(K3Config.named("k3-nano"))
    model.init_weights(0)
    save_checkpoint(model, folder, tokenizer=Tokenizer.builtin())
    files = folder.parent / "files"
    tiers = ["--prefix-cache-mb", "1", "--prefix-disk-mb", "1", "--prefix-directory", str(files)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "k3rl", "serve", str(folder), "--port", str(port), *tiers],
        env={**os.environ, "K3RL_SERVE_TOKEN": "secret", "OMP_NUM_THREADS": "1"},
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180  # a busy machine takes a minute to import what is needed
        while not _ready(address):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield address
        assert len(list(files.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        assert not list(files.iterdir())  # they go with the process
    finally:
        process.kill()  # what did not start, or did not stop, is no load for others


def _ready(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/ready", timeout=2).status == 200
    except OSError:
        return False


def _chat(address: str, token: str) -> dict:
    body = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request, timeout=20).read())


def test_a_chat_is_answered(served):
    answer = _chat(served, "secret")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] <= 4


def test_a_wrong_token_is_refused(served):
    with pytest.raises(urllib.error.HTTPError) as error:
        _chat(served, "wrong")
    assert error.value.code == 401


def test_a_folder_without_a_checkpoint_and_an_open_host_without_a_token_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("K3RL_SERVE_TOKEN", raising=False)
    assert main(["serve", str(tmp_path)]) == 3
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "K3RL_SERVE_TOKEN" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--max-running", "0"]) == 2
    assert "got 0, wants a whole number from 1" in capsys.readouterr().err
