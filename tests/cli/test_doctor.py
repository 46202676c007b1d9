"""`k3rl doctor`: each check says what it found and, where something is missing, the fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from k3rl.cli import doctor, main
from k3rl.cli.doctor import Check, run_checks
from k3rl.cli.ports import ray_ports


def by_name() -> dict[str, Check]:
    return {check.name: check for check in run_checks()}


def test_the_checks_cover_what_a_run_needs():
    checks = by_name()
    assert {"python", "torch", "ray", "ray authentication", "sandbox", "cpus", "memory", "disk"} <= checks.keys()
    assert checks["torch"].ok
    assert checks["sandbox"].ok, "the test machine has bubblewrap"
    assert all(bool(check.fix) is not check.ok for check in checks.values() if not check.ok)


def test_json_has_name_ok_found_and_fix(capsys):
    code = main(["doctor", "--json"])
    checks = json.loads(capsys.readouterr().out.splitlines()[-1])["checks"]
    assert all(check.keys() == {"name", "ok", "found", "fix"} for check in checks)
    assert code == (0 if all(check["ok"] for check in checks) else 3)


def test_a_missing_sandbox_is_named_with_its_package_and_exits_3(monkeypatch, capsys):
    monkeypatch.setattr("k3rl.envs.sandbox.bwrap.shutil.which", lambda *_, **__: None)
    check = by_name()["sandbox"]
    assert not check.ok
    assert "bubblewrap" in check.fix
    assert main(["doctor"]) == 3
    assert check.fix in capsys.readouterr().out


@pytest.fixture
def open_folder():
    """A folder that every user may enter: the sandbox is started by another one. `tmp_path` is closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_sandbox_that_does_not_start_is_no_sandbox(monkeypatch, open_folder):
    fake = open_folder / "bwrap"
    fake.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{open_folder}:/usr/bin:/bin")
    check = by_name()["sandbox"]
    assert not check.ok
    assert "Permission denied" in check.found
    assert check.fix


@pytest.mark.parametrize(("mode", "ok"), [(None, True), ("token", True), ("disabled", False)])
def test_ray_without_authentication_is_said(monkeypatch, mode, ok):
    if mode is None:
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    else:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert by_name()["ray authentication"].ok is ok


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "memory_gib", lambda: 1.5)
    check = by_name()["memory"]
    assert not check.ok
    assert check.found == "1.5 GiB (a run wants 6)"


def test_a_package_of_another_version_is_said(monkeypatch):
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.0" if name == "torch" else real(name))
    check = by_name()["torch"]
    assert (check.ok, check.found) == (False, "1.0")
    assert "torch" in check.fix


LISTENER = """
import http.server, socket, sys
sockets = [socket.create_server((host, 0)) for host in ("0.0.0.0", "127.0.0.1")]
class Open(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[1])); self.send_header("content-length", "0"); self.end_headers()
server = http.server.HTTPServer(("0.0.0.0", 0), Open)
print(*[one.getsockname()[1] for one in sockets], server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(("status", "asks"), [("200", False), ("401", True)])
def test_every_port_of_a_ray_that_others_can_reach_is_listed_with_whether_it_asks_for_a_token(status, asks):
    line = ["raylet-of-a-test", "-c", LISTENER, status]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    process = subprocess.Popen(line, executable=sys.executable, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        silent, inside, spoken = map(int, process.stdout.readline().split())
        found = {one.port: one for one in ray_ports()}
        assert (found[silent].token, found[silent].loopback) == (True, False)  # by its mode: it does not speak HTTP
        assert found[inside].loopback
        assert (found[spoken].token, found[spoken].address) == (asks, "0.0.0.0")
        named = [check for check in run_checks() if check.name == "ray port" and f":{spoken} " in check.found]
        assert ["firewall" in check.found for check in named] == [not asks]
    finally:
        process.kill()
        process.wait()
