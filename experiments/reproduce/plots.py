"""Plots, described once and drawn twice: as PNG by matplotlib and interactively by plotly."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

COLOURS = ("#1f77b4", "#d62728", "#ff7f0e", "#9467bd", "#2ca02c", "#8c564b", "#7f7f7f", "#17becf")
Numbers: TypeAlias = Sequence[float | int]


@dataclass(frozen=True)
class Series:
    """A line with an interval around it, or with ``points`` a scatter plot; the same ``colour`` is the same method."""

    name: str
    x: Numbers
    y: Numbers
    colour: int
    low: Numbers = ()
    high: Numbers = ()
    points: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``diagonal`` draws y = x."""

    title: str
    series: Sequence[Series]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    diagonal: bool = False


@dataclass(frozen=True)
class Plot:
    """Some panels in rows of ``columns``."""

    name: str
    title: str
    panels: Sequence[Panel] = field(default_factory=tuple)
    columns: int = 3

    @property
    def rows(self) -> int:
        """The number of rows that the panels fill."""
        return -(-len(self.panels) // self.columns)


def png(plot: Plot) -> bytes:
    """Draw the plot as a PNG file."""
    from matplotlib.figure import Figure  # an extra: only the experiments draw PNGs

    columns = min(plot.columns, len(plot.panels))
    figure = Figure(figsize=(4.2 * columns, 3.4 * plot.rows + 0.8), layout="constrained")
    axes = figure.subplots(plot.rows, columns, squeeze=False).flatten()
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, plot.panels, strict=False):
        for series in panel.series:
            handles.setdefault(series.name, _draw(axis, series))
        if panel.diagonal:
            low, high = _range(panel)
            axis.plot([low, high], [low, high], color="black", linewidth=0.8)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axis.set_xscale("log" if panel.log_x else "linear")
        axis.set_yscale("log" if panel.log_y else "linear")
        if not panel.log_x:
            axis.locator_params(axis="x", nbins=5)
        axis.grid(alpha=0.3)
    for axis in axes[len(plot.panels) :]:
        axis.set_visible(False)
    figure.suptitle(plot.title)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 4))
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()


def _draw(axis: Any, series: Series) -> Any:
    colour = COLOURS[series.colour % len(COLOURS)]
    if series.points:
        return axis.scatter(series.x, series.y, s=7, color=colour, alpha=0.6, label=series.name, linewidths=0)
    if len(series.low):
        axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    style = "--" if series.dashed else "-"
    return axis.plot(series.x, series.y, style, color=colour, marker="o", markersize=3, label=series.name)[0]


def interactive(plot: Plot) -> Any:
    """Draw the plot for a page, as a plotly figure."""
    from plotly.subplots import make_subplots  # an extra, as above

    columns = min(plot.columns, len(plot.panels))
    figure = make_subplots(plot.rows, columns, subplot_titles=[panel.title for panel in plot.panels])
    names: set[str] = set()
    for number, panel in enumerate(plot.panels):
        row, column = number // columns + 1, number % columns + 1
        for series in panel.series:
            for trace in _traces(series, first=series.name not in names):
                figure.add_trace(trace, row=row, col=column)
            names.add(series.name)
        if panel.diagonal:
            low, high = _range(panel)
            line = {"x": [low, high], "y": [low, high], "mode": "lines", "line": {"color": "black", "width": 1}}
            figure.add_trace({**line, "showlegend": False}, row=row, col=column)
        figure.update_xaxes(title=panel.x, type="log" if panel.log_x else "linear", row=row, col=column)
        figure.update_yaxes(title=panel.y, type="log" if panel.log_y else "linear", row=row, col=column)
    figure.update_layout(title=plot.title, height=360 * plot.rows + 120, template="plotly_white")
    return figure


def _traces(series: Series, *, first: bool) -> list[dict[str, Any]]:
    """Return what plotly draws for a series."""
    colour = COLOURS[series.colour % len(COLOURS)]
    labels = {"legendgroup": series.name, "name": series.name}
    shown = {**labels, "x": series.x, "y": series.y, "showlegend": first}
    if series.points:
        return [{**shown, "mode": "markers", "marker": {"color": colour, "size": 4, "opacity": 0.6}}]
    line = {"color": colour, "dash": "dash" if series.dashed else "solid"}
    traces = [{**shown, "mode": "lines+markers", "line": line}]
    if len(series.low):
        around = {
            "x": [*series.x, *reversed(series.x)],
            "y": [*series.high, *reversed(series.low)],
            "fill": "toself",
            "fillcolor": f"rgba({','.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))},0.15)",
        }
        quiet = {"line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "mode": "lines"}
        traces.append({**labels, **around, **quiet})
    return traces


def _range(panel: Panel) -> tuple[float, float]:
    values = [value for series in panel.series for value in series.x]
    return min(values), max(values)
