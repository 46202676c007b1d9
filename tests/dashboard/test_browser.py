"""The page in Debian's Chromium, over the recorded run of the package and over runs that go on.

Every page that is opened here must stay on this machine and report no error. `DASHBOARD_SHOTS` names a folder for
pictures of every view.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from dashboard_runs import TOKEN, Served, an_episode
from playwright.sync_api import sync_playwright

from k3rl.dashboard import DEMO
from k3rl.dashboard.security import CONTENT_POLICY

HOSTILE = '<img src=x onerror="window.hooked=1"><script>window.hooked=1</script>\x1b[31m\u202eevil'
SHOTS = os.environ.get("DASHBOARD_SHOTS")


class Watched:
    """A page whose requests, errors and texts are kept."""

    def __init__(self, page, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def show(self, view: str) -> Watched:
        self.page.goto(f"{self.url}/#{view}")
        return self

    def wait(self, selector: str, count: int | None = None, timeout_s: float = 8.0):
        """The elements once they are there, `count` of them if given."""
        found = self.page.locator(selector)
        ends = time.monotonic() + timeout_s
        while (found.count() if count is None else found.count() == count) in (0, False):
            assert time.monotonic() < ends, f"{selector}: {found.count()} on {self.page.url}; {self.errors}"
            time.sleep(0.02)
        return found

    def picture(self, name: str) -> None:
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=f"{SHOTS}/{name}.png")

    def fine(self) -> None:
        assert not self.errors
        assert all(url.startswith(self.url) for url in self.requests)


@contextmanager
def opened(chromium, served, **context):
    """A page of a fresh browser profile, with the token's cookie."""
    profile = chromium.new_context(viewport={"width": 1360, "height": 860}, **context)
    try:
        watched = Watched(profile.new_page(), served.url)
        watched.page.goto(f"{served.url}/?token={TOKEN}")
        yield watched
        watched.fine()
    finally:
        profile.close()


@pytest.fixture(scope="module")
def chromium():
    """Debian's Chromium, once for all tests, without its own sandbox, which root cannot have.

    It ends with this file: as long as it lives no other test of the process can run an event loop of its own.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    shutil.copytree(DEMO, root / "runs")
    with Served(root / "runs") as served:
        yield served


VIEWS = {
    "curves": ("view=curves&stage=rl", ".chart canvas"),
    "curves-by-name": ("view=curves&stage=rl&metric=moe", ".chart canvas"),
    "step": ("view=step&stage=rl&step=5", ".cell"),
    "rollouts": ("view=rollouts&stage=rl&reward_min=0.5&reward_max=1&sort=advantage", ".virtual .row"),
    "search": ("view=rollouts&q=sorted", ".hit mark"),
    "group": ("view=group&stage=rl&step=5&group=rl-5-0", ".column pre"),
    "episode": ("view=episode&stage=rl&step=5&group=rl-5-0&episode=rl-5-0-1&colour=logprob&tok=30", ".tokens .marked"),
    "live": ("view=live", ".liveturn"),
    "time": ("view=time&stage=rl", ".chart canvas"),
    "experts": ("view=experts&stage=rl", ".heatmaps canvas"),
    "data": ("view=data&file=sft.jsonl", ".conversation .q3"),
    "about": ("view=about", ".config tr"),
}


def test_every_view_of_the_recorded_run_draws_in_light_and_dark(chromium, demo):
    with opened(chromium, demo, color_scheme="dark") as page:
        for name, (view, selector) in VIEWS.items():
            page.show(f"run=lists&{view}").wait(selector)
            page.picture(f"{name}-dark")
        dark = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.page.keyboard.press("d")  # as the system -> dark
        page.page.keyboard.press("d")  # -> light
        assert page.page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        for name, (view, selector) in VIEWS.items() if SHOTS else ():
            page.show(f"run=lists&{view}").wait(selector)
            page.picture(name)
        page.show("run=lists&view=rollouts").wait(".virtual .row")
        assert page.page.locator(".virtual .row").count() < 60, "only rows on the screen exist"


def test_from_curve_to_token_by_clicks_and_keys_and_back_by_the_address(chromium, demo):
    with opened(chromium, demo) as page:
        page.show("run=lists&view=curves&stage=rl").wait(".chart canvas")
        page.page.locator(".chart .u-over").first.click(position={"x": 120, "y": 50})
        page.wait(".groups .cell")
        page.page.locator(".groups a.mono").first.click()
        page.wait(".column")
        page.page.keyboard.press("j")
        page.page.keyboard.press("Enter")
        page.wait(".tokens .s").last.click()
        page.wait(".detail .facts")
        detail, address = page.page.locator(".detail").inner_text(), page.page.url
        assert "sampler logprob" in detail
        assert "end_of_msg" in detail
        assert "special" in detail
        before = page.page.locator(".tools select").input_value()
        page.page.keyboard.press("c")
        page.wait(f'.tools select option:checked:not([value="{before}"])')
        page.page.keyboard.press("u")
        page.wait(".column")
        page.page.goto("about:blank")
        page.page.goto(address)
        page.wait(".tokens .marked")
        assert page.page.locator(".detail").inner_text() == detail


def test_the_histogram_selects(chromium, demo):
    with opened(chromium, demo) as page:
        page.show("run=lists&view=rollouts&stage=rl").wait(".bin")
        page.page.locator(".bin").last.click()
        page.wait(".chip")
        page.wait(".virtual .row")
        rewards = set(page.page.locator(".virtual .row .reward").all_inner_texts())
        assert rewards == {"1"}


def test_hostile_text_is_text_and_the_hook_would_have_fired(chromium, write):
    run = write()
    pieces = lambda ids: [HOSTILE for _ in ids]  # noqa: E731
    run.step(0, [an_episode("rl-0-0-0", task=HOSTILE, answer=HOSTILE)], pieces=pieces)
    root = run.end("failed")
    with Served(root.parent) as served, opened(chromium, served) as page:
        views = ("rollouts", "group&group=rl-0-0", "episode&episode=rl-0-0-0", "live", "step&stage=rl&step=0", "about")
        shown = {"rollouts": ".row", "group": ".column", "episode": ".tokens .s", "live": ".liveturn", "step": ".cell"}
        for view in views:
            page.show(f"run=one&view={view}").wait(shown.get(view.partition("&")[0], ".config"))
        page.show("run=one&view=episode&episode=rl-0-0-0").wait(".tokens .s")
        assert page.page.locator(".tokens img, .tokens script").count() == 0
        text = page.page.locator(".tokens .s").first.inner_text()
        assert '<img src=x onerror="window.hooked=1">' in text
        assert "\u241b[31m<U+202E>evil" in text
        assert page.page.evaluate("window.hooked") is None
        # Even a mistake of ours could not make HTML of it: the policy refuses.
        refused = (
            "(text) => { try { document.body.innerHTML = text; return 'made'; } catch (error) { return error.name; } }"
        )
        assert page.page.evaluate(refused, HOSTILE) == "TypeError"
        page.errors.clear()  # the refusal is reported


def test_without_the_policy_the_same_text_would_run(chromium, demo):
    """The positive control of the test above: its hook works."""
    assert "require-trusted-types-for" in CONTENT_POLICY
    profile = chromium.new_context(bypass_csp=True)
    try:
        page = profile.new_page()
        page.goto(f"{demo.url}/?token={TOKEN}")
        page.evaluate("(text) => { document.body.innerHTML = text; }", HOSTILE)
        ends = time.monotonic() + 5
        while page.evaluate("window.hooked") is None:
            assert time.monotonic() < ends
            time.sleep(0.02)
    finally:
        profile.close()


def test_what_a_live_run_records_is_on_eight_pages_at_once_and_survives_the_loss_of_the_first(chromium, write):
    run = write()
    run.step(0, [an_episode("rl-0-0-0")])
    with Served(run.root.parent) as served, opened(chromium, served) as first:
        pages = [
            first,
            *(Watched(first.page.context.new_page(), served.url) for _ in range(7)),
        ]  # a browser has six connections
        for page in pages:
            page.show("run=one&view=live").wait(".liveturn", 1)
        first.wait(".connection:not(.off)")
        run.step(1, [an_episode("rl-1-0-0")])
        for page in pages:
            page.wait(".liveturn", 2)
        pages[1].picture("one-of-eight-pages")
        first.page.close()  # it held the stream
        ends = time.monotonic() + 5
        while served.app.dashboard.watcher.viewers != 1:
            assert time.monotonic() < ends
            time.sleep(0.02)
        run.step(2, [an_episode("rl-2-0-0")])
        for page in pages[1:]:
            page.wait(".liveturn", 3)
            names = page.page.locator(".liveturn header a").all_inner_texts()
            assert names == ["rl-0-0-0", "rl-1-0-0", "rl-2-0-0"]
            page.fine()
    run.end()
