"""The dashboard in a browser, as a process over a live daemon and a live local market."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.harness import Lab, host, lab
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
TOKEN = "a-token-that-only-this-test-knows"
TRAIN = """python3 -c "
import json, os, time
at = os.environ['SPOTD_CHECKPOINT_DIR']
print('<img src=x onerror=alert(1)>', flush=True)
print(json.dumps({'step': 0, 'loss': float('nan'), 'big': 1e308, '<b>k</b>': 1}), flush=True)
for step in range(21 if os.environ['SPOTD_RESUME'] else 1, 4000):
    time.sleep(0.05)
    print(json.dumps({'step': step, 'loss': 2 / step}), flush=True)
    if step == 20:
        os.makedirs(at + '/step-20.tmp')
        open(at + '/step-20.tmp/step', 'w').write('20')
        open(at + '/step-20.tmp/DONE', 'w').close()
        os.rename(at + '/step-20.tmp', at + '/step-20')
"
"""
JOB = """name = "from-the-browser"
run = '''{run}'''
image = "none"
[resources]
gpu = ["RTX_4090:1"]
disk = "10GB"
[price]
max_price = 1.0
[checkpoint]
every = "10m"
settle = "10s"
"""
WAITS: dict[str, Any] = {"resources": {"gpu": ["H100_SXM:1"], "disk": "10GB"}, "price": {"max_price": 1.0}}
SLOW_MS = 45_000


class Dashboard:
    """The process of `spotctl web`, and the address that it printed."""

    def __init__(self, found: Lab, folder: Path, *arguments: str) -> None:
        environment = {**os.environ, "SPOTD_SOCKET": str(found.folder / "run" / "spotd.sock")}
        with (folder / "web.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spotd.cli.client", "web", "--port", "0", *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.log = folder / "web.log"
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        assert self.url, self.log.read_text()
        until(self.answers, what="the dashboard to answer")

    def answers(self) -> bool:
        try:
            return self.get("/login" if "token" in self.log.read_text() else "/style.css")[0] > 0
        except OSError:
            return False

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        """Status and body of a request with these headers."""
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine")
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@pytest.fixture
def market(tmp_path: Path) -> Iterator[Lab]:
    hosts = host("h1", 0.30) + host("h2", 0.40) + host("h3", 2.0, gpu="H100_SXM", on_demand=3.5)
    with lab(tmp_path / "lab", hosts=hosts, scale=60.0) as found:
        found.start()
        yield found


def opened(browser: Any, url: str, seen: list[str], **options: Any) -> Any:
    """A tab that notes every address that it asks for, and every dialog and error."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(SLOW_MS)
    page.on("request", lambda request: seen.append(request.url))
    page.on("dialog", lambda dialog: seen.append(f"dialog: {dialog.message}"))
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.goto(url)
    return page


def test_a_job_is_queued_watched_through_a_preemption_changed_and_cancelled(
    browser: Any, market: Lab, tmp_path: Path
) -> None:
    seen: list[str] = []
    dashboard = Dashboard(market, tmp_path)
    try:
        page = opened(browser, dashboard.url + "submit", seen)
        page.get_by_label("Job file").fill(JOB.format(run=TRAIN))
        page.get_by_role("button", name="Show the plan").click()
        page.get_by_text(re.compile("the best that fits now")).first.wait_for()
        page.get_by_role("button", name="Queue the job").click()
        page.get_by_role("heading", name="from-the-browser").wait_for()
        page.locator(".state.good", has_text="running").first.wait_for()
        page.get_by_text("<img src=x onerror=alert(1)>").first.wait_for()
        page.get_by_role("heading", name="Logged: loss").wait_for()
        until(lambda: market.job("from-the-browser")["checkpoint"] is not None, what="a checkpoint")
        market.control("preempt", {"host": market.job("from-the-browser")["host"], "notice": False, "lasting": "2h"})
        page.get_by_text("somebody bid more for the machine").first.wait_for()
        page.locator("tr", has_text="step-20").filter(has_text="running").wait_for()

        page.get_by_role("button", name="Change ceiling").click()
        page.get_by_label("New ceiling").fill("nonsense")
        page.get_by_role("dialog").get_by_role("button", name="Change").click()
        page.get_by_role("dialog").get_by_text("the ceiling").first.wait_for()
        page.get_by_label("New ceiling").fill("0.77")
        page.get_by_role("dialog").get_by_role("button", name="Change").click()
        page.get_by_role("dialog").wait_for(state="detached")
        until(lambda: market.api.job("from-the-browser")["ceiling_usd_gpu_h"] == 0.77, what="the new ceiling")
        page.get_by_role("button", name="Change budget").click()
        page.get_by_label("New budget").fill("12")
        page.get_by_role("dialog").get_by_role("button", name="Change").click()
        until(lambda: market.api.job("from-the-browser")["budget_usd"] == 12.0, what="the new budget")
        page.get_by_role("dialog").wait_for(state="detached")

        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
        page.get_by_role("dialog").wait_for(state="detached")
        assert market.state("from-the-browser") == "RUNNING"
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
        market.wait_final("from-the-browser")
        page.locator(".heading .state", has_text="cancelled").wait_for()
        until(lambda: page.get_by_role("button", name="Retry").is_enabled(), what="the way to retry")
    finally:
        dashboard.close()
    assert {urlsplit(url).netloc for url in seen if url.startswith(("http", "ws"))} == {urlsplit(dashboard.url).netloc}
    assert [line for line in seen if line.startswith(("dialog", "error"))] == []
    assert "Traceback" not in dashboard.log.read_text()


def test_every_page_fits_a_phone_shows_a_daemon_that_is_down_and_goes_on_when_it_is_back(
    browser: Any, market: Lab, tmp_path: Path
) -> None:
    market.submit("waits", "true", **WAITS)
    seen: list[str] = []
    dashboard = Dashboard(market, tmp_path)
    try:
        page = opened(browser, dashboard.url, seen, viewport={"width": 390, "height": 844})
        for name in ("Jobs", "Market", "Providers", "Events", "Submit", "Overview"):
            page.get_by_role("link", name=name, exact=True).click()
            page.get_by_role("heading", name=name, level=1).wait_for()
            page.wait_for_function("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert page.title() == f"{name} - spotd"
        page.locator(".reasons", has_text="above the ceiling of").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        market.kill()
        page.get_by_text(re.compile(r"Showing what was last known at \d\d:\d\d")).wait_for()
        page.get_by_text("spotd run").wait_for()
        page.locator(".reasons", has_text="above the ceiling of").wait_for()
        market.start()
        page.get_by_text("spotd run").wait_for(state="detached")
        page.locator(".link-state .good", has_text="lab").wait_for()
    finally:
        dashboard.close()
    assert [line for line in seen if line.startswith(("dialog", "error"))] == []


def test_other_names_and_other_pages_are_refused_and_a_token_is_asked_for_once(
    browser: Any, market: Lab, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    seen: list[str] = []
    dashboard = Dashboard(market, tmp_path, "--token-file", str(token))
    try:
        own = urlsplit(dashboard.url).netloc
        assert dashboard.get("/login", Host="evil.example")[0] == 403
        assert dashboard.get("/login", "POST", Origin="http://evil.example")[0] == 403
        assert dashboard.get("/jobs", Sec_Fetch_Mode="cors")[0] == 403
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13"}
        path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        key = {"Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
        for origin in ("http://evil.example", f"http://{own}"):  # another page, and ours without a session
            assert dashboard.get(path, Origin=origin, **upgrade, **key)[0] == 403
        assert dashboard.get("/jobs", Authorization=f"Bearer {TOKEN}")[0] == 200
        page = opened(browser, dashboard.url, seen)
        page.get_by_label("Token").fill("a wrong one")
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("That is not the token.").wait_for()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.locator(".link-state .good", has_text="lab").wait_for()
        (cookie,) = [one for one in page.context.cookies() if one["name"] == "spotd_session"]
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert TOKEN not in cookie["value"]
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("Token").wait_for()
    finally:
        dashboard.close()
    assert not any(TOKEN in url for url in seen)
    assert TOKEN not in dashboard.log.read_text()


def test_several_jobs_are_cancelled_at_once_and_each_has_its_answer(browser: Any, market: Lab, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        market.submit(name, "true", **WAITS)
    draft = {"data": {"name": "sweep", "run": "true", "image": "none", **WAITS}, "flags": {}}
    market.api.submit(draft, array="0-3")
    dashboard = Dashboard(market, tmp_path)
    seen: list[str] = []
    try:
        page = opened(browser, dashboard.url + "jobs", seen)
        page.get_by_label("Select sweep").wait_for()
        assert page.get_by_label(re.compile("^Select ")).count() == 4
        market.api.cancel("three")
        for name in ("one", "three", "sweep"):
            page.get_by_label(f"Select {name}").check()
        page.get_by_text("3 selected").wait_for()
        page.get_by_role("button", name="Change ceiling").click()
        page.get_by_label("New ceiling").fill("0.77")
        page.get_by_role("dialog").get_by_role("button", name="Change ceiling").click()
        page.get_by_text("3 jobs changed").wait_for()
        page.get_by_role("button", name="Close").click()
        assert market.api.job("one")["ceiling_usd_gpu_h"] == market.api.job("sweep-2")["ceiling_usd_gpu_h"] == 0.77
        assert market.api.job("two")["ceiling_usd_gpu_h"] == 1.0
        for name in ("one", "three"):
            page.get_by_label(f"Select {name}").check()
        page.get_by_role("button", name="Retry").click()
        page.get_by_role("dialog").get_by_role("button", name="Retry").click()
        page.get_by_text("1 job queued again; 1 refused").wait_for()
        page.get_by_role("dialog").get_by_text("one is WAITING_PRICE and needs no retry").wait_for()
        page.get_by_role("button", name="Close").click()
        page.get_by_label("Select one").uncheck()
        page.get_by_role("link", name="sweep").click()
        page.get_by_role("heading", name="Array sweep").wait_for()
        for index in (1, 3):
            page.get_by_label(f"Select sweep-{index}").check()
        page.get_by_role("button", name="Cancel", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel", exact=True).click()
        page.get_by_text("2 jobs cancelled").wait_for()
        states = [market.state(f"sweep-{index}") for index in range(4)]
        assert [state == "CANCELLED" for state in states] == [False, True, False, True]
    finally:
        dashboard.close()
    assert [line for line in seen if line.startswith(("dialog", "error"))] == []


def test_a_folder_is_sent_as_the_code_of_a_job_and_its_keys_are_refused(
    browser: Any, market: Lab, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('sent from a', 'browser', flush=True)\nimport time\ntime.sleep(600)\n")
    (project / "id_rsa").write_text("a key")
    refused = shutil.make_archive(str(tmp_path / "refused"), "zip", project)
    (project / "id_rsa").unlink()
    code = shutil.make_archive(str(tmp_path / "code"), "gztar", project)
    dashboard = Dashboard(market, tmp_path)
    seen: list[str] = []
    try:
        page = opened(browser, dashboard.url + "submit", seen)
        job = JOB.format(run="python3 train.py").replace("[resources]", 'workdir = "."\n[resources]', 1)
        page.get_by_label("Job file").fill(job)
        for archive, shown in ((refused, "looks like keys"), (code, "the best that fits now")):
            with page.expect_file_chooser() as chooser:
                page.get_by_role("button", name="Choose an archive").click()
            chooser.value.set_files(archive)
            page.get_by_text(f"Archive: {Path(archive).name}").wait_for()
            page.get_by_role("button", name="Show the plan").click()
            page.get_by_text(re.compile(shown)).first.wait_for()
        page.get_by_role("button", name="Queue the job").click()
        page.get_by_role("heading", name="from-the-browser").wait_for()
        page.get_by_text("sent from a browser").first.wait_for()
    finally:
        dashboard.close()
    assert [line for line in seen if line.startswith(("dialog", "error"))] == []
    assert "Traceback" not in dashboard.log.read_text()


CLIPPED = """() => [...document.querySelectorAll("a, button, input, textarea, summary, [tabindex='0']")]
  .filter(one => one.offsetParent !== null && one.getClientRects().length)
  .filter(one => {
    one.focus();
    const box = one.getBoundingClientRect();
    return document.activeElement === one && (box.right > innerWidth + 1 || box.left < -1 || box.height < 1);
  })
  .map(one => one.outerHTML.slice(0, 120))"""
"""What can have the focus, and is cut off by the window when it has it."""


def violations(axe: Any, page: Any) -> list[str]:
    """Return each element of the page that breaks a rule, with the rule."""
    # The framework's bar of a request that is under way has no name, and is gone with its answer.
    page.wait_for_function("[...document.querySelectorAll('.q-loading-bar')].every(bar => +bar.style.opacity === 0)")
    found = axe.run(page).response["violations"]
    return [f"{rule['id']}: {node['html'][:160]}" for rule in found for node in rule["nodes"]]


PAGES = ("", "jobs", "market", "providers", "events", "submit", "nowhere")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_breaks_a_rule_of_accessibility(browser: Any, market: Lab, tmp_path: Path, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    market.submit("waits", "true", **WAITS)
    market.api.submit({"data": {"name": "sweep", "run": "true", "image": "none", **WAITS}, "flags": {}}, array="0-3")
    dashboard = Dashboard(market, tmp_path)
    broken: dict[str, list[str]] = {}
    try:
        page = opened(browser, dashboard.url, [], color_scheme=theme)
        for path in (*PAGES, f"job/{market.job('waits')['id']}"):
            page.goto(dashboard.url + path)
            page.locator(".link-state .good", has_text="lab").wait_for()
            page.get_by_role("heading", level=1).wait_for()
            broken[path] = violations(axe, page)
        page.goto(dashboard.url + "jobs")
        page.get_by_label("Select sweep").check()
        page.get_by_text("1 selected").wait_for()
        broken["the bar of a selection"] = violations(axe, page)
        page.get_by_role("link", name="sweep").click()
        page.get_by_role("heading", name="Array sweep").wait_for()
        page.get_by_label("Select sweep-1").check()
        page.get_by_text("1 selected").wait_for()
        broken["an array"] = violations(axe, page)
        page.goto(dashboard.url + "submit")
        page.get_by_label("Job file").fill('secrets = ["TOKEN"]\n' + JOB.format(run="true"))
        page.get_by_role("button", name="Show the plan").click()
        page.get_by_label("Secret TOKEN").wait_for()
        broken["a plan with a secret"] = violations(axe, page)
        clipped = page.evaluate(CLIPPED)
        assert clipped == []
    finally:
        dashboard.close()
    assert {path: rows for path, rows in broken.items() if rows} == {}


PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_neither_a_phone_nor_a_job_that_failed_or_runs_breaks_a_rule_of_accessibility(
    browser: Any, market: Lab, tmp_path: Path, theme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    machine: dict[str, Any] = {"resources": {"gpu": ["RTX_4090:1"], "disk": "10GB"}, "price": {"max_price": 1.0}}
    market.submit("typo", "echo one; pyhton3 train.py", **machine, retry={"errors": 0})
    market.submit("runs", TRAIN, **machine)
    market.wait_final("typo")
    until(lambda: market.state("runs") == "RUNNING", what="a job that runs")
    jobs = {name: f"job/{market.job(name)['id']}" for name in ("typo", "runs")}
    dashboard = Dashboard(market, tmp_path)
    broken: dict[str, list[str]] = {}
    try:
        for size, options in (("desk", {}), ("phone", PHONE)):
            page = opened(browser, dashboard.url, [], color_scheme=theme, **options)
            for path in (*(PAGES if options else ("",)), *jobs.values()):
                page.goto(dashboard.url + path)
                page.locator(".link-state .good", has_text="lab").wait_for()
                page.get_by_role("heading", level=1).wait_for()
                page.wait_for_function("!document.body.innerText.includes('Asking the daemon')")
                broken[f"{size} {path}"] = violations(axe, page)
            page.get_by_role("heading", name="Logged: loss").wait_for()
            page.get_by_text("In words").first.wait_for()
            broken[f"{size}, charts of a job that runs"] = violations(axe, page)
            assert page.evaluate(CLIPPED) == []
            page.get_by_label("Kind of event").click()
            page.get_by_role("option", name="checkpoint").click()
            page.get_by_text("No event of the kind checkpoint").or_(page.get_by_text("is complete")).first.wait_for()
    finally:
        dashboard.close()
    assert {path: rows for path, rows in broken.items() if rows} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_login_breaks_no_rule_of_accessibility(browser: Any, market: Lab, tmp_path: Path, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    dashboard = Dashboard(market, tmp_path, "--token-file", str(token))
    try:
        page = opened(browser, dashboard.url, [], color_scheme=theme, **PHONE)
        page.get_by_label("Token").fill("a wrong one")
        assert violations(axe, page) == []
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("That is not the token.").wait_for()
        assert violations(axe, page) == []
    finally:
        dashboard.close()


def test_a_wrong_address_leads_back_and_both_names_of_a_page_are_taken(
    browser: Any, market: Lab, tmp_path: Path
) -> None:
    market.submit("waits", "true", **WAITS)
    dashboard = Dashboard(market, tmp_path)
    try:
        status, text = dashboard.get("/nowhere/%3Cscript%3Ealert(1)%3C/script%3E")
        assert (status, "<script>alert(1)" in text) == (404, False)
        assert dashboard.get("/_nicegui/nothing") == (404, "not found")
        page = opened(browser, dashboard.url + "nowhere", [])
        page.get_by_text("There is no page /nowhere here.").wait_for()
        page.get_by_role("link", name="All jobs").click()
        page.get_by_role("heading", name="Jobs", level=1).wait_for()
        page.goto(f"{dashboard.url}jobs/waits")
        page.get_by_role("heading", name="waits", level=1).wait_for()
        assert urlsplit(page.url).path == "/job/waits"
    finally:
        dashboard.close()
