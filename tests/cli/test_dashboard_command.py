"""`k3rl dashboard`, and `--dashboard` of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from k3rl.cli.dashboard import TOKEN_VARIABLE, beside_run, dashboard
from k3rl.cli.launch import parse_launch
from k3rl.config import ConfigError, MissingResource


def answer(url: str, token: str):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as found:
        return json.load(found)


def test_the_demo_is_served_at_the_address_that_json_names_and_ends_at_ctrl_c():
    command = [sys.executable, "-P", "-m", "k3rl", "dashboard", "--demo", "--json", "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = json.loads(process.stdout.readline())
        base = f"http://{said['host']}:{said['port']}"
        assert said["url"] == f"{base}/?token={said['token']}"
        assert len(said["token"]) >= 32
        (run,) = answer(f"{base}/api/runs", said["token"])["runs"]
        assert (run["status"], run["stages"]) == ("finished", ["sft", "rl", "distill"])
        assert run["episodes"] > 300
        with pytest.raises(urllib.error.HTTPError, match="401"):
            answer(f"{base}/api/runs", "guess")
        stream = urllib.request.Request(f"{base}/api/events", headers={"Authorization": f"Bearer {said['token']}"})
        with urllib.request.urlopen(stream, timeout=10) as opened:  # an open stream does not hold it up
            assert opened.readline() == b"retry: 1000\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(8) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ([], ConfigError, "name a folder of runs, or give --demo"),
        (["x", "--demo"], ConfigError, "and not both"),
        (["x", "--port", "99999"], ConfigError, "from 0 to 65535"),
        (["nowhere"], MissingResource, "nowhere is no folder"),
        ([".", "--host", "0.0.0.0"], ConfigError, f"set {TOKEN_VARIABLE} to a secret"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(words, error, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(error, match=said):
        dashboard([*words, "--no-browser"])


def test_a_port_that_is_taken_is_named(tmp_path):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
            dashboard([str(tmp_path), "--port", str(port), "--no-browser"])


def test_the_flag_of_a_run_asks_for_a_dashboard_and_changes_no_configuration():
    plain, watched = (parse_launch("rl", words, "rl") for words in ([], ["--dashboard"]))
    assert (plain.options.dashboard, watched.options.dashboard) == (False, True)
    assert plain.config == watched.config


def test_beside_a_run_a_dashboard_of_its_folder_is_up_and_goes_with_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with beside_run(tmp_path / "outputs" / "one"):
        text = ""
        while "token=secret" not in text:
            text += capfd.readouterr().err
        base = text.partition("dashboard: ")[2].partition("/?token")[0]
        assert answer(f"{base}/api/runs", "secret")["root"] == os.path.realpath(tmp_path / "outputs")
    with pytest.raises(OSError, match="refused"):
        answer(f"{base}/api/runs", "secret")
