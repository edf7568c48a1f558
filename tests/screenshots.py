"""The documents' pictures of the report: ``python tests/screenshots.py docs/report`` runs the demo and takes them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from leaveout.demo import run_demo

SHOTS = {
    # name: (width, height, dark, the heading at the top)
    "summary": (1280, 900, False, None),
    "examples": (1280, 860, False, "examples"),
    "query": (1280, 820, False, "queries"),
    "trust": (1280, 760, True, "trust"),
    "phone": (390, 844, True, "examples"),
}


def take(page: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, dark, section) in SHOTS.items():
            size, scheme = {"width": width, "height": height}, "dark" if dark else "light"
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            tab = context.new_page()
            tab.goto(page.as_uri() + (f"#{section}" if section else ""))
            tab.wait_for_timeout(300)
            tab.screenshot(path=out / f"{name}.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        take(run_demo(Path(folder) / "digits").page, Path(sys.argv[1]))
