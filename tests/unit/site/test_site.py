"""The documentation is built as a site without a warning, and its pages load nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parents[3]
CHROMIUM = Path("/usr/bin/chromium")
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?(https?:|//)[^>]*>")

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert LOADED.findall(page.read_text(encoding="utf-8")) == [], page


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs {CHROMIUM}")
def test_a_browser_reads_it_on_a_phone_and_in_the_dark_and_finds_words(address: str) -> None:
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    wrong: list[str] = []
    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        for name in ("index", "concepts", "troubleshooting", "comparison", "reference/api", "recipes/frameworks"):
            page.goto(f"{address}/{name}.html")
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, f"{name} is {width} pixels wide"
        assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        page.goto(f"{address}/index.html")
        page.keyboard.press("/")
        page.keyboard.type("ceiling")
        page.wait_for_selector(":text('Concepts')")
        browser.close()
    assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()
    assert wrong == []
