"""The dashboard over HTTP: who may read it, what it answers, and that what a model wrote stays text."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re

import pytest
from dashboard_runs import TOKEN, Written, an_episode
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from k3rl.dashboard import DashboardOptions, create_app
from k3rl.dashboard.live import Watcher, new_turns
from k3rl.dashboard.queries import Filter, histogram, list_episodes
from k3rl.dashboard.run_reader import RunReader
from k3rl.dashboard.security import _host_name
from k3rl.dashboard.server import STATIC
from k3rl.types import Invalid

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e<script>alert(2)</script>"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def client_over(root) -> TestClient:
    """As a browser on this machine that has the cookie."""
    client = TestClient(create_app(root, DashboardOptions(token=TOKEN)), base_url="http://127.0.0.1:7860")
    assert client.get(f"/?token={TOKEN}").status_code == 200
    return client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Over a run of two steps of two episodes; what the second one of step 1 sampled is hostile."""
    written = Written(tmp_path_factory.mktemp("served") / "one")
    written.step(0, [an_episode("rl-0-0-0", 1.0, task="t/1"), an_episode("rl-0-0-1", 0.0, task="t/1")])
    pieces = lambda ids: [HOSTILE if token == 6 else f" w{token}" for token in ids]  # noqa: E731
    episodes = [an_episode("rl-1-0-0", 0.5, task="t/1"), an_episode("rl-1-0-1", 0.25, sampled=(5, 6, 6), task="t/2")]
    written.step(1, episodes, pieces=pieces)
    return client_over(written.end().parent)


def stranger(client) -> TestClient:
    return TestClient(client.app, base_url="http://127.0.0.1:7860")


def test_nothing_is_shown_without_the_token(client):
    other = stranger(client)
    for path in ("/", "/api/runs", "/static/app.js", "/export/run?run=one", "/api/events", "/nothing"):
        assert other.get(path).status_code == 401, path
    assert other.get("/?token=wrong").status_code == 401
    assert other.get("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
    other.cookies.set("k3rl-dashboard-7860", "wrong")
    assert other.get("/api/runs").status_code == 401
    assert other.get("/api/runs", headers=BEARER).status_code == 200


def test_the_first_visit_leaves_a_cookie_and_takes_the_token_out_of_the_address(client):
    answer = stranger(client).get(f"/?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:7860", "", "[::2]:7860"])
def test_another_name_in_the_host_header_is_refused(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:1", "[::1]:7860", "LOCALHOST"])
def test_names_of_the_loopback_are_taken(client, host):
    assert client.get("/api/runs", headers={"host": host} | BEARER).status_code == 200


@given(st.text(alphabet="[]:.a1", max_size=12))
def test_any_host_header_has_a_name(header):
    assert _host_name(header) == _host_name(header.upper())


def test_other_sites_may_not_ask_though_the_browser_sends_the_cookie(client):
    for site in ("cross-site", "same-site"):
        assert client.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 403
        link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
        assert client.get("/", headers=link).status_code == 200, "a link to the page may come from anywhere"
        assert client.get("/export/run?run=one", headers=link).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(client, method):
    assert client.request(method, "/api/runs").status_code == 405


def test_every_answer_says_what_a_browser_may_do_with_it(client):
    for path in ("/", "/api/runs", "/static/app.js", "/api/run?run=nothing", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/vendor/..%2f..%2fserver.py",
        "/static/vendor/vendored.json",
        "/static//etc/passwd",
        "/api/run?run=../one",
        "/api/run?run=/",
        "/api/sft?run=one&file=../run.json",
        "/api/episode?run=one&episode=../../x",
    ],
)
def test_no_address_leads_out_of_what_is_served(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("episodes?run=one&sort=password", "wanted one of"),
        ("episodes?run=one&step=-1", "whole number"),
        ("episodes?run=one&reward_min=x", "wanted a number"),
        ("episodes?run=one&offset=9999999999999999999", "whole number"),
        ("episode?run=one", "episode is missing"),
        ("search?run=one&q=", "q is empty"),
    ],
)
def test_a_bad_parameter_is_answered_with_what_is_wanted(client, path, said):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_lists_are_filtered_sorted_and_counted(client):
    answer = client.get("/api/episodes?run=one&sort=reward&order=asc").json()
    assert [row["reward"] for row in answer["rows"]] == [0.0, 0.25, 0.5, 1.0]
    answer = client.get("/api/episodes?run=one&reward_min=0.25&reward_max=0.5").json()
    assert sorted(row["id"] for row in answer["rows"]) == ["rl-1-0-0", "rl-1-0-1"]
    assert sum(answer["histogram"]["counts"]) == 4, "bins can still be chosen outside the bounds"
    assert client.get("/api/episodes?run=one&text=T/2").json()["total"] == 1
    answer = client.get("/api/episodes?run=one&sort=advantage&limit=1").json()
    assert answer["rows"][0]["advantage"] == 0.5
    assert answer["facets"]["stage"] == {"rl": 4}


def test_texts_are_searched_in_prompts_and_samples(client):
    (row,) = client.get("/api/search?run=one&q=ONERROR&task=t/2").json()["rows"]
    assert row["id"] == "rl-1-0-1"
    assert row["excerpt"][1] == "onerror"
    answer = client.get("/api/search?run=one&q=w1").json()
    assert [len(answer["rows"]), answer["next"]] == [4, None]
    assert client.get("/api/search?run=one&q=w7").json()["rows"] == []


def test_a_step_shows_its_groups_and_its_best_and_worst(client):
    answer = client.get("/api/step?run=one&stage=rl&step=0").json()
    assert [len(group["rows"]) for group in answer["groups"]] == [2]
    assert (answer["best"]["id"], answer["worst"]["id"]) == ("rl-0-0-0", "rl-0-0-1")
    group = client.get("/api/group?run=one&group=rl-0-0").json()
    assert [row["text"] for row in group["rows"]] == [" w5 w6", " w5 w6"]
    assert [row["advantage"] for row in group["rows"]] == [-0.5, 0.5]


def test_a_task_is_lined_up_over_steps_and_compared_word_by_word(client):
    rows = client.get("/api/task?run=one&task=t/1").json()["rows"]
    assert [(row["step"], row["reward"]) for row in rows] == [(0, 1.0), (0, 0.0), (1, 0.5)]
    parts = client.get("/api/diff?run=one&a=rl-0-0-0&b=rl-1-0-1").json()["parts"]
    first = "".join(text for kind, text in parts if kind != "+")
    second = "".join(text for kind, text in parts if kind != "-")
    assert (first, second) == (" w5 w6", f" w5{HOSTILE}{HOSTILE}")


def test_long_episodes_come_in_windows(write):
    long = write("long")
    long.step(0, [an_episode("rl-0-0-0", sampled=tuple(range(9000)))], trained=False)
    client = client_over(long.end().parent)
    place = "/api/tokens?run=long&episode=rl-0-0-0&branch=rl-0-0-0/0"
    windows = [client.get(f"{place}&start={start}&count=999999").json() for start in (0, 4000, 8000, 12000)]
    assert [len(window["ids"]) for window in windows] == [4000, 4000, 1002, 0]
    assert [token for window in windows for token in window["ids"]] == [1, 2, *range(9000)]
    assert client.get("/api/tokens?run=long&episode=rl-0-0-0&branch=other").status_code == 404


def test_numbers_that_are_not_finite_come_as_texts(write):
    odd = write("odd")
    odd.step(0, [an_episode("rl-0-0-0")], loss__mean=float("nan"))
    client = client_over(odd.end().parent)
    assert client.get("/api/metrics?run=odd").json()["stages"]["rl"]["values"]["loss/mean"] == ["NaN"]


@pytest.mark.parametrize("path", ["/export/episode?run=one&episode=rl-1-0-1", "/export/run?run=one"])
def test_an_export_is_a_file_in_which_hostile_text_is_text(client, path):
    answer = client.get(path)
    assert answer.headers["content-disposition"].startswith("attachment; ")
    assert "<script" not in answer.text
    assert "<img" not in answer.text
    assert "&lt;img src=x onerror=alert(1)&gt;\u241b[2J&lt;U+202E&gt;" in answer.text
    assert "rl-1-0-1" in answer.text


def test_a_cheat_is_exported_with_its_evidence(write):
    odd = write("odd")
    odd.step(0, [an_episode("rl-0-0-0", score=Invalid("reads <tests>", "open('t')"))], trained=False)
    client = client_over(odd.end().parent)
    text = client.get("/export/episode?run=odd&episode=rl-0-0-0").text
    assert "invalid: reads &lt;tests&gt;; open(&#x27;t&#x27;)" in text


def test_the_timeline_is_the_steps_and_their_parts(client):
    answer = client.get("/api/times?run=one").json()["rl"]
    assert answer["parts"] == {"wait_for_batch": [0.5, 0.5], "other": [1.5, 1.5]}
    events = json.loads(client.get("/export/perfetto?run=one").text)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans[:3]] == ["step 0", "wait_for_batch", "other"]
    assert [event["dur"] for event in spans[:3]] == [2_000_000, 500_000, 1_500_000]
    assert spans[2]["ts"] == spans[1]["ts"] + spans[1]["dur"]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60))
def test_every_reward_is_in_one_bin(rewards):
    made = histogram(rewards)
    assert sum(made["counts"]) == len(rewards)
    assert made["edges"] == sorted(made["edges"])
    assert (made["edges"][0], made["edges"][-1]) == (min(rewards), max(rewards))


def test_rows_without_a_reward_come_last_in_either_order(write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0", 0.5), an_episode("rl-0-0-1", score=Invalid("x", "y"))], trained=False)
    one = RunReader("one", run.end())
    for descending in (True, False):
        rows = list_episodes(one, Filter(), sort="reward", descending=descending)["rows"]
        assert [row["status"] for row in rows] == ["scored", "invalid"]


# -------------------------------------------------------------------------------------------------------- live


def test_a_viewer_gets_every_turn_once_and_in_order(write):
    run, seen, after = write(), [], None
    one = RunReader("one", run.root)
    assert new_turns(one, None) == {"rows": [], "next": 0, "skipped": 0}
    after = 0
    for step in range(4):
        run.step(step, [an_episode(f"rl-{step}-0-{i}", turns=2) for i in range(3)], trained=False)
        while run.recorder.stats().written < 3 * (step + 1):
            pass
        answer = new_turns(one, after, limit=4)
        while answer["rows"]:
            seen += [(row["episode"], row.get("turn")) for row in answer["rows"]]
            answer = new_turns(one, answer["next"], limit=4)
        after = answer["next"]
    run.end()
    wanted = [(f"rl-{s}-0-{i}", turn) for s in range(4) for i in range(3) for turn in (0, 1, None)]
    assert seen == wanted


def test_a_viewer_that_is_far_behind_is_brought_up_and_told(write):
    run = write()
    run.step(0, [an_episode(f"rl-0-0-{i}") for i in range(230)], trained=False)
    one = RunReader("one", run.end())
    assert new_turns(one, 0)["skipped"] == 30
    assert new_turns(one, None)["skipped"] == 0


def test_notices_name_the_runs_that_grew_and_end_with_the_server(write, tmp_path):
    run = write()
    run.step(0, [an_episode("rl-0-0-0")])

    async def follow() -> list[str]:
        from k3rl.dashboard import Catalogue

        watcher, heard = Watcher(Catalogue(tmp_path / "runs")), []
        async for text in watcher.notices():
            heard.append(text)
            if len(heard) == 1:
                await asyncio.sleep(0.4)
                run.metrics.write(5, "rl", {"loss/mean": 1.0})
            else:
                watcher.close()
        assert watcher.viewers == 0
        return heard

    hello, changed = asyncio.run(asyncio.wait_for(follow(), 10))
    run.end()
    assert "event: hello" in hello
    assert 'event: changed\ndata: {"runs": ["one"]}' in changed


# ------------------------------------------------------------------------------------------------------ assets


def test_vendored_files_are_those_that_were_declared():
    for package in json.loads((STATIC / "vendor" / "vendored.json").read_text()):
        assert package["licence"] == "MIT"
        for name, digest in package["sha256"].items():
            assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest, name
    names = {file.name for file in (STATIC / "vendor").iterdir()} - {"vendored.json"}
    assert names == set(package["sha256"])


def test_the_page_has_no_inline_code_and_makes_no_html_of_texts():
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.style|https?://(?!www\.w3)"
    for file in STATIC.iterdir():
        if file.name.endswith((".js", ".html", ".svg", ".css")):
            text = file.read_text()
            assert not re.search(ways, text), file.name
            assert not re.search(r"<script(?![^>]*src=)|\sstyle=|\son\w+=\"", text) or file.name.endswith(".js"), (
                file.name
            )


def test_every_module_that_is_imported_is_there():
    for file in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([\w.]+)"', file.read_text()):
            assert (STATIC / name).is_file(), f"{file.name} imports {name}"
