"""The documents as a site: every link and every name in the reference is found, and no page asks for the network."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import leaveout
from leaveout.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
# What a browser would fetch: not the links that a reader may follow.
FETCHED = re.compile(
    r'<(?:script|img|iframe|source)[^>]*\bsrc="(?:https?:)?//'
    r'|<link[^>]*rel="[^"]*(?:stylesheet|icon|preconnect)[^"]*"[^>]*href="(?:https?:)?//'
)


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*command, "-d", str(tmp_path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.glob("*.html"))
    assert len(pages) >= 10
    for page in pages:
        assert not FETCHED.search(page.read_text()), page.name
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text()), sheet.name
    _search_from_disk(tmp_path)
    reference = (tmp_path / "api.html").read_text()
    for name in ("leaveout.Recorder", "leaveout.verify", "leaveout.evaluate.metrics.kendall"):
        assert f'id="{name}"' in reference, name


def _search_from_disk(site: Path) -> None:
    """The search answers in a browser that has opened the page from disk."""
    assert "Kendall" in (site / "search/search_index.js").read_text()
    browsers = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return
    with browsers.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        # On a busy machine the parts of a page may miss each other's first message; then it is opened again.
        assert any(_answers(page, site / "index.html") for _ in range(5))
        browser.close()


def _answers(page, file: Path) -> bool:
    page.goto(file.as_uri())
    page.wait_for_selector("iframe[hidden]", state="attached")  # the search is there, and listens a moment later
    page.wait_for_timeout(1000)
    page.locator("input.md-search__input").fill("Kendall")
    for _ in range(75):
        if page.locator(".md-search-result__link").count():
            return True
        page.wait_for_timeout(200)
    return False


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs/api.md").read_text()
    for name in set(leaveout.__all__) - {"__version__"}:
        public = getattr(leaveout, name)
        where = public.__name__ if inspect.ismodule(public) else f"leaveout.{name}"
        raised = inspect.isclass(public) and issubclass(public, Exception)  # shown together
        assert raised or f"::: {where}\n" in text, name


def test_every_command_is_on_its_page():
    text = (ROOT / "docs/command-line.md").read_text()
    for name in COMMANDS:
        assert f"leaveout {name}" in text, name
