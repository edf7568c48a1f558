"""The documents' pictures of the report: ``python tests/screenshots.py docs/report`` takes them.

They show the report that the README's code writes, and for what it has not, queries and a check, that of the demo.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from leaveout.demo import run_demo
from test_docs import run

SHOTS = {
    # name: (width, height, dark, the section at the top)
    "summary": (1280, 900, False, None),
    "labels": (1280, 1000, False, "labels"),
    "examples": (1280, 900, False, "examples"),
    "retraining": (1280, 760, False, "cleansing"),
    "trust": (1280, 900, True, "trust"),
    "query": (1280, 820, False, "queries"),
    "phone": (390, 844, True, None),
}


DEMO = ("retraining", "trust", "query")
README = Path(__file__).parent.parent / "README.md"


def take(pages: dict[str, Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, dark, section) in SHOTS.items():
            size, scheme = {"width": width, "height": height}, "dark" if dark else "light"
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            tab = context.new_page()
            page = pages["demo" if name in DEMO else "readme"]
            tab.goto(page.as_uri() + (f"#{section}" if section else ""))
            tab.wait_for_timeout(300)
            tab.screenshot(path=out / f"{name}.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(README, "__main__")
        take(
            {"readme": Path("runs/first/report.html").resolve(), "demo": run_demo(Path("digits").resolve()).page},
            target,
        )
