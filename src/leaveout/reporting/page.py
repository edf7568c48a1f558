"""One HTML file from the content of a report: no network, no other file, everything from the data escaped.

Text goes through jinja2, which escapes it; the data for the page's script is JSON in a data block, where no ``<``
remains, and the script inserts it as text, never as markup.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import PosixPath

from jinja2 import Environment, StrictUndefined

from leaveout.reporting.content import Content

SCRIPTS = ("dom.js", "charts.js", "plots.js", "marks.js", "examples.js", "issues.js", "page.js")


_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


class Page(PosixPath):
    """The path of a page that was written; a notebook shows the page itself."""

    @property
    def headlines(self) -> list[str]:
        """The top of the page: labels that look wrong, what removing examples changes, how far to trust it."""
        block = _DATA.search(self.read_text(encoding="utf-8"))
        return [answer["headline"] for answer in json.loads(block[1])["answers"]] if block else []

    def _repr_html_(self) -> str:
        style = "width:100%;height:46rem;border:1px solid #8888;border-radius:8px"
        text = escape(self.read_text(encoding="utf-8"))
        # Scripts of a page that was sent along must not reach the notebook; its decisions are kept while it is open.
        allowed = "allow-scripts allow-downloads"
        return f'<iframe sandbox="{allowed}" srcdoc="{text}" style="{style}" title="{escape(self.name)}"></iframe>'


def page(content: Content) -> str:
    """Write the whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_asset("page.html"))
    text = template.render(
        content=content,
        data=as_json(asdict(content)),
        style=_asset("style.css"),
        script="\n".join(_asset(name) for name in SCRIPTS),
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates that a user's text may contain


def as_json(value: object) -> str:
    r"""Write JSON that cannot end the element that contains it.

    >>> print(as_json({"a": "</script>"}))
    {"a":"\u003c/script>"}
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return files("leaveout.reporting").joinpath("assets", name).read_text(encoding="utf-8")
