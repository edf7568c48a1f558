"""From finished cells to files: one parquet file, a Markdown table, PNGs; and one page with all interactive plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import partial
from html import escape
from pathlib import Path

from experiments.reproduce.plots import Plot, interactive, png
from experiments.reproduce.runner import finished, folder_of
from experiments.reproduce.spec import Spec
from leaveout._util.files import check_writable, write_text, write_whole
from leaveout.errors import RunError, UnsupportedError

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>leaveout: results</title>
<style>body{{font-family:sans-serif;max-width:1400px;margin:2em auto;padding:0 1em}}</style></head>
<body><h1>leaveout: results</h1>
<p>Click on a method in a legend to hide it, double-click to see it alone; drag to zoom.</p>
{body}
</body></html>
"""


def check_extras() -> None:
    """Refuse missing packages before hours of work, not after them."""
    missing = [name for name in ("matplotlib", "plotly", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"{' and '.join(missing)} cannot be imported: pip install -r experiments/requirements.txt.",
            code="packages-missing",
        )


def write(spec: Spec, out: Path, seeds: int | None = None, *, quick: bool = False) -> Path:
    """Write ``results.parquet``, ``table.md`` and a PNG for each plot; return the directory."""
    frame = finished(spec, out, seeds, quick=quick)
    folder = folder_of(spec, out, quick=quick)
    check_writable(folder / "table.md")
    write_whole(folder / "results.parquet", frame.to_parquet)
    plots = spec.plots(frame)
    command = f"python -m experiments reproduce {spec.name}{' --quick' if quick else ''}"
    head = f"# {spec.title}\n\nBy `{command}`; rows and settings of every cell are in `results.parquet`.\n\n"
    if quick:
        head += "**The quick version: fewer examples, epochs and seeds than the text below says.**\n\n"
    pictures = "".join(f"\n![{plot.title}]({plot.name}.png)\n" for plot in plots)
    for plot in plots:
        write_whole(folder / f"{plot.name}.png", partial(_draw, plot))
    write_text(folder / "table.md", head + spec.tables(frame).strip() + "\n" + pictures)
    return folder


def _draw(plot: Plot, aside: Path) -> None:
    aside.write_bytes(png(plot))


def page(specs: Iterable[Spec], out: Path, seeds: int | None = None, *, quick: bool = False) -> Path:
    """Write ``plots.html``: the plots of every experiment that has results, in one self-contained file."""
    parts: list[str] = []
    for spec in specs:
        try:
            plots = spec.plots(finished(spec, out, seeds, quick=quick))
        except RunError:
            continue  # not run yet
        parts.append(f"<h2>{escape(spec.title)}</h2>")
        for plot in plots:
            script = not any("plotly" in part for part in parts)
            parts.append(interactive(plot).to_html(full_html=False, include_plotlyjs=script))
    file = out / ("plots-quick.html" if quick else "plots.html")
    write_text(file, PAGE.format(body="\n".join(parts)))
    return file
